"""Texts and long prompts of the languages, from files and samples."""

from pathlib import Path

import pytest

from stovetop.datasets import load_rows
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.renderers.messages import Message
from stovetop.tasks.languages import PROMPTS, load_prompt, load_texts

# As the published file has them: one sentence a line, in several scripts, with spaces and lines that are empty.
PUBLISHED = "And he said, Mama, I'm home.\n  Y él dijo: Mamá, estoy en casa. \n\nاور اس نے کہا امّی، میں گھر آگیا ہوں۔\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_file_has_a_text_a_line_or_rows_with_text() -> None:
    Path("texts.txt").write_text(PUBLISHED, encoding="utf-8")
    assert sorted(load_texts("texts.txt").train) == [
        "And he said, Mama, I'm home.",
        "Y él dijo: Mamá, estoy en casa.",
        "اور اس نے کہا امّی، میں گھر آگیا ہوں۔",
    ]
    Path("texts.jsonl").write_text('{"text": " one ", "language": "en"}\n{"text": "zwei"}\n{"text": " "}\n')
    loaded = load_texts("texts.jsonl")
    assert sorted(loaded.train) == ["one", "zwei"]
    assert loaded.left_out == {"its text is empty": 1}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"sentence": "one"}', r"rows\.jsonl, line 2 needs 'text'.*\['sentence'\]"),
        ('{"text": ["one"]}', r"rows\.jsonl, line 2 needs 'text'"),
        ("one", "line 2 is not JSON"),
    ],
)
def test_a_malformed_row_is_named(row: str, said: str) -> None:
    Path("rows.jsonl").write_text('{"text": "fine"}\n' + row + "\n")
    with pytest.raises(InvalidRequest, match=said):
        load_texts("rows.jsonl")


def test_files_that_are_not_there_not_text_or_empty_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"no such file.*'multilingual\.txt'"):
        load_texts("multilingual.txt")
    Path("texts.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="not text in UTF-8"):
        load_texts("texts.txt")
    Path("texts.txt").write_text(" \n")
    with pytest.raises(InvalidRequest, match=r"no row in it: 'texts\.txt'"):
        load_texts("texts.txt")


def test_a_prompt_has_a_name_or_is_a_text_or_a_chat_in_a_file() -> None:
    for name, prompt in PROMPTS.items():
        assert load_prompt(name) == list(prompt)
        assert "{text}" in str(prompt[-1]["content"])
    Path("mine.txt").write_text("Which language?\n{text}")
    assert load_prompt("mine.txt") == [Message(role="user", content="Which language?\n{text}")]
    Path("mine.jsonl").write_text(
        '{"messages": [{"role": "system", "content": "Which?"}, {"role": "user", "content": "{text}"}]}'
    )
    assert [message["role"] for message in load_prompt("mine.jsonl")] == ["system", "user"]


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("a.txt", "Which language?", "where the text goes.*it ends in 'Which language"),
        ("a.txt", "\xff", "not text in UTF-8"),
        ("a.jsonl", '{"messages": [{"role": "system", "content": "{text}"}]}\n', "a last message of the user"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "{text}"}]}\n' * 2, "has one chat, and this one has 2"),
    ],
)
def test_a_prompt_that_is_none_is_refused(file: str, content: str, said: str) -> None:
    Path(file).write_bytes(content.encode("latin-1"))
    with pytest.raises(InvalidRequest, match=said):
        load_prompt(file)
    with pytest.raises(InvalidRequest, match="No such file"):
        load_prompt("nothing.txt")
    with pytest.raises(UnknownName, match="did you mean 'rules'"):
        load_prompt("rule")


def test_the_sample_has_as_many_sentences_of_each_language_and_says_which() -> None:
    rows = load_rows("sample:multilingual")
    assert len(set(load_texts("sample:multilingual").train)) == len(rows)
    counts = {label: sum(row["language"] == label for row in rows) for label in {str(row["language"]) for row in rows}}
    assert len(set(counts.values())) == 1
