"""A run keeps what it trains and tests on, and notices data that has changed."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from stovetop.cli import main
from stovetop.data_record import check_data, read_data, revisions_in
from stovetop.errors import InvalidRequest, StovetopError
from stovetop.named_data import Loaded, Source
from stovetop.runs import Run, load, open_run


@dataclass(frozen=True)
class NoConfig:
    pass


FILE = Source("train", "rows.jsonl", 120, digest="ab" * 32)
HUB = Source("test", "owner/name", 500, "test", revision="c0ffee00")


def of(*sources: Source) -> Loaded[int]:
    return Loaded([0], [], [0], [], {}, sources)


def opened(path: Path) -> Run:
    return open_run(path, NoConfig(), console=False)


def begin(path: Path, *sources: Source) -> None:
    with opened(path) as run:
        run.record_data("data", of(*sources))
        run.log_metrics({"loss": 1.0}, 0)


def test_what_was_read_is_in_the_folder_with_digest_revision_and_count(tmp_path: Path) -> None:
    begin(tmp_path / "run", FILE, HUB)
    assert read_data(tmp_path / "run") == {"data": [FILE, HUB]}
    assert revisions_in(tmp_path / "run") == {"owner/name": "c0ffee00"}
    [event] = [event for event in load(tmp_path / "run").events if event.name == "dataset.load"]
    assert (event.labels, event.values) == ({"dataset": "data"}, {"num_train": 1, "num_test": 0, "num_skipped": 0})


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (FILE, replace(FILE, num_rows=121, digest="cd" * 32), r"train rows of rows.jsonl: 120 \(ab.*, 121 \(cd"),
        (FILE, replace(FILE, digest="cd" * 32), r"120 \(abababab\) then, 120 \(cdcdcdcd\) now"),
        (HUB, replace(HUB, revision="decaf000"), r"owner/name: 500 \(c0ffee00\) then, 500 \(decaf000\) now"),
        (HUB, replace(HUB, revision=None, num_rows=499), r"500 \(c0ffee00\) then, 499 now"),
        (HUB, replace(HUB, split="validation"), "test rows of owner/name"),
    ],
)  # fmt: skip
def test_a_run_that_goes_on_with_other_data_is_refused_with_both_counts(
    before: Source, now: Source, said: str, tmp_path: Path
) -> None:
    begin(tmp_path / "run", before)
    with opened(tmp_path / "run") as run, pytest.raises(InvalidRequest, match=said) as refused:
        run.record_data("data", of(now))
    assert "behavior_if_exists=delete" in str(refused.value)
    with pytest.raises(InvalidRequest, match=said):
        check_data(tmp_path / "run", "data", [now])
    check_data(tmp_path / "run", "data", [now], "delete")
    assert read_data(tmp_path / "run") == {"data": [before]}


def test_the_same_data_from_another_place_is_the_same(tmp_path: Path) -> None:
    begin(tmp_path / "run", FILE, HUB)
    check_data(tmp_path / "run", "data", [replace(FILE, source="moved.jsonl"), replace(HUB, revision=None)])
    with pytest.raises(InvalidRequest, match="2 sources then, 1 now"):
        check_data(tmp_path / "run", "data", [FILE])


def test_a_run_that_has_learnt_nothing_yet_takes_other_data(tmp_path: Path) -> None:
    for source in (FILE, replace(FILE, num_rows=3)):
        with opened(tmp_path / "run") as run:
            run.record_data("data", of(source))
    assert read_data(tmp_path / "run")["data"][0].num_rows == 3


def test_a_record_that_is_damaged_is_named(tmp_path: Path) -> None:
    begin(tmp_path / "run", FILE)
    for text in ("{", "[]", '{"data": [{"rows": 3}]}'):
        (tmp_path / "run" / "data.json").write_text(text)
        with pytest.raises(StovetopError, match=r"data\.json cannot be read"):
            read_data(tmp_path / "run")


def write(path: Path, questions: Sequence[str]) -> None:
    chats = [[{"role": "user", "content": question}, {"role": "assistant", "content": "yes"}] for question in questions]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


@pytest.mark.parametrize("recipe", ["sl_basic", "sl_loop"])
def test_recipes_notice_a_file_that_grew(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, run = tmp_path / "rows.jsonl", tmp_path / "run"
    write(rows, "abcdef")
    words = ["run", recipe, "base_url=recording", "model=any/model", f"dataset={rows}", "test_size=2", "batch_size=2",
             f"log_path={run}"]  # fmt: skip
    assert main(words) == 0
    assert "4 chats -> 4 datums -> 2 steps an epoch" in (run / "logs.log").read_text()
    write(rows, "abcdefg")
    capsys.readouterr()
    for more in ([], ["--dry-run"]):
        assert main([*words, *more]) != 0
        said = capsys.readouterr()
        assert "6 (" in said.out + said.err
        assert "7 (" in said.out + said.err
