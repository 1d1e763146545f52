"""The demo on the recording backend: its folder is a run's, and what it reads there is checked."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from stovetop.errors import InvalidRequest, StovetopError
from stovetop.recipes import sort_digits_demo
from stovetop.run_folder import MARK_FILE, claimed
from stovetop.runs import load


@pytest.fixture
def config(tmp_path: Path) -> sort_digits_demo.Config:
    return sort_digits_demo.Config(
        log_path=str(tmp_path / "demo"), base_url="recording", sl_epochs=1, rl_steps=1, num_test_problems=1
    )


def test_the_demo_goes_on_where_it_was_and_is_known_without_its_mark(
    config: sort_digits_demo.Config, caplog: pytest.LogCaptureFixture
) -> None:
    # three seconds: plots are drawn
    folder = Path(config.log_path)
    asyncio.run(sort_digits_demo.main(config))
    results = (folder / "results.jsonl").read_bytes()
    (folder / MARK_FILE).unlink()
    for part in ("supervised", "rl"):
        (folder / part / MARK_FILE).unlink()
    with caplog.at_level("INFO"):
        asyncio.run(sort_digits_demo.main(config))
    assert caplog.text.count("already complete") == 2
    assert (folder / "results.jsonl").read_bytes() == results
    assert (folder / MARK_FILE).is_file()
    assert len(load(folder / "rl").metrics) == 1


def test_checking_a_demo_that_has_no_mark_yet_writes_none(config: sort_digits_demo.Config) -> None:
    folder = Path(config.log_path)
    folder.mkdir(parents=True)
    for name in ("chats", "problems", "test_chats"):
        (folder / f"{name}.jsonl").touch()
    sort_digits_demo.check(config)
    assert not (folder / MARK_FILE).exists()


def test_a_demo_that_is_running_is_not_begun_a_second_time(config: sort_digits_demo.Config) -> None:
    with claimed(config.log_path, "resume"), pytest.raises(InvalidRequest, match="writes to this run"):
        asyncio.run(sort_digits_demo.main(config))


def test_the_demo_writes_into_no_folder_that_is_not_its_own(config: sort_digits_demo.Config, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(InvalidRequest, match=r"it holds thesis\.tex"):
        asyncio.run(sort_digits_demo.main(replace(config, log_path=str(tmp_path / "mine"))))
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "row",
    [
        "",
        "{}",
        "[]",
        "null",
        "{",
        '{"stage": "base model"}',
        '{"stage": "lunch", "at temperature 1": 1, "greedy": 1, "seconds": 1}',
        '{"stage": "base model", "at temperature 1": "high", "greedy": 1, "seconds": 1}',
        '{"stage": ["base model"], "at temperature 1": 1, "greedy": 1, "seconds": 1}',
        "\udcff\x00",
    ],
)
def test_a_damaged_result_is_named_by_file_and_line(config: sort_digits_demo.Config, row: str) -> None:
    folder = Path(config.log_path)
    with claimed(folder, "resume"):
        (folder / "results.jsonl").write_text(row + "\n", errors="surrogateescape")
    with pytest.raises(StovetopError, match=r"demo/results\.jsonl, line 1: "):
        asyncio.run(sort_digits_demo.main(config))
