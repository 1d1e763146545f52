"""`stovetop show`: chats as the model sees them. A model here is a folder with a small tokenizer."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from renderers.languages import chat, chatml, llama, save
from stovetop import hub
from stovetop.cli import main
from stovetop.renderers.base import TrainOnWhat
from stovetop.renderers.messages import Message
from stovetop.renderers.show import describe_chat
from stovetop.renderers.template import ChatTemplateRenderer

GREEN, YELLOW, RESET = "\x1b[32m", "\x1b[33m", "\x1b[0m"


@pytest.fixture
def model(tmp_path: Path) -> str:
    save(chatml(), tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def chats(tmp_path: Path) -> str:
    path = tmp_path / "chats.jsonl"
    rows = [chat("hello", "the end", "b", "c", system="s"), chat("a", "b"), chat("c", "d"), chat("e", "f")]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    return str(path)


def code_of(*words: str) -> int:
    try:
        return main(["show", *words])
    except SystemExit as left:
        return int(left.code or 0)


def test_a_chat_is_shown_with_marks_counts_and_what_each_answer_reads_back_as(
    model: str, chats: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(model, chats, "--limit", "1") == 0
    tokens = chatml().encode(
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nthe end<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n",
        add_special_tokens=False,
    )
    num_trained = len(chatml().encode("the end")) + len(chatml().encode("c")) + 2
    assert capsys.readouterr().out == (
        "---- chat 1 of 4, chat_template, all_assistant_messages\n"
        f"{len(tokens)} tokens, {num_trained} trained\n"
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n¦the end<|im_end|>¦\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n¦c<|im_end|>¦\n\n"
        "message 2 reads back (stop_sequence) and is written again as the same tokens:\n"
        "  text       'the end'\n"
        "message 4 reads back (stop_sequence) and is written again as the same tokens:\n"
        "  text       'c'\n\n"
    )


def test_colours_say_what_is_trained(model: str, chats: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(model, chats, "--color", "always", "--train-on-what", "last_assistant_message") == 0
    shown = capsys.readouterr().out
    assert f"assistant\nthe end<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n{RESET}" in shown
    assert f"{GREEN}c<|im_end|>{RESET}{YELLOW}\n{RESET}" in shown
    assert "¦" not in shown
    assert shown.count("---- chat") == 3


def test_any_renderer_may_be_asked_for_by_name(
    tmp_path: Path, model: str, chats: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(model, chats, "--renderer", "role_colon", "--limit", "1") == 0
    assert "System: s\n\nUser: hello\n\nAssistant:¦ the end\n\nUser:¦ b" in capsys.readouterr().out
    save(llama(), tmp_path / "llama")
    assert code_of("meta-llama/Llama-3.1-8B-Instruct", chats, "--tokenizer", str(tmp_path / "llama")) == 0
    shown = capsys.readouterr().out
    assert "chat 1 of 4, llama3, all_assistant_messages" in shown
    assert "<|start_header_id|>assistant<|end_header_id|>\n\n¦the end<|eot_id|>¦" in shown


def test_a_model_that_is_not_here_needs_a_tokenizer_and_the_error_says_so(
    chats: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_cache(name: str, **_: object) -> None:
        raise OSError("not there")

    monkeypatch.setattr(hub, "why_unreachable", lambda: "no network")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_cache)
    assert code_of("Qwen/Qwen3-8B", chats) == 1
    said = capsys.readouterr().err
    assert "fetch the model first (no network)" in said
    assert "pass --tokenizer with a folder that has the model's tokenizer" in said


@pytest.mark.parametrize(
    ("words", "nearest"),
    [(["--renderer", "role_colno"], "role_colon"), (["--train-on-what", "all_mesages"], "all_messages")],
)
def test_a_misspelt_name_is_a_usage_error_that_names_the_nearest(
    words: list[str], nearest: str, model: str, chats: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(model, chats, *words) == 2
    assert f"did you mean '{nearest}'" in capsys.readouterr().err


def test_a_chat_of_flagged_messages_is_read_back_turn_by_turn() -> None:
    flagged: list[Message] = [{**message, "trainable": index == 1} for index, message in enumerate(chat(*"abcd"))]
    lines = list(describe_chat(ChatTemplateRenderer(chatml()), flagged, TrainOnWhat.CUSTOMIZED, colours=False))
    assert "assistant\n¦b<|im_end|>¦\n" in lines[1]
    assert "assistant\nd<|im_end|>\n" in lines[1]
    assert [line for line in lines if line.startswith("  text")] == ["  text       'b'", "  text       'd'"]


def test_a_missing_file_is_named_before_the_model_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("unknown/model", "nothere.jsonl") == 1
    assert "no such file; give the path of one, or sample:NAME: 'nothere.jsonl'" in capsys.readouterr().err
