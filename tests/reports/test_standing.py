"""How far runs are: each state, with its reason, from what is on the disk."""

import asyncio
import json
import os
import time
from pathlib import Path

import pytest

from processes import run_python
from reports.made_runs import Config, log_steps, make_run
from stovetop.cli import main
from stovetop.errors import StageFailed, StovetopError
from stovetop.reports.listing import as_cells, duration, list_runs
from stovetop.reports.standing import TAIL_BYTES, last_values, standing_of
from stovetop.run_folder import EVENTS_FILE, LOCK_FILE, METRICS_FILE, PLAN_FILE, read_plan, writer_in
from stovetop.runs import open_run


def test_a_complete_run_is_complete_with_all_its_steps_and_its_last_numbers(tmp_path: Path) -> None:
    standing = standing_of(make_run(tmp_path / "run"))
    assert (standing.state, standing.reason, standing.progress) == ("complete", "", "4 of 4")
    assert standing.values == {"loss": 0.5, "test/accuracy": 0.2}  # the last of each, without the rate and times
    assert standing.began_s is not None
    assert standing.last_s is not None
    assert 0 <= standing.last_s - standing.began_s < 60
    assert standing.seconds_left is None


def test_a_complete_run_that_is_opened_again_has_not_taken_longer(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = standing_of(run).last_s
    assert before is not None
    os.utime(run / EVENTS_FILE, (before + 1000, before + 1000))
    assert standing_of(run).last_s == before


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    failure = StageFailed("train_step", "supervised", 2, "card fell off", "stage")
    with pytest.raises(StageFailed):
        make_run(tmp_path / "run", 2, fails=failure)
    standing = standing_of(tmp_path / "run")
    assert (standing.state, standing.progress) == ("failed", "2 of 4")
    assert standing.reason == str(failure)
    assert "card fell off" in as_cells(standing)["state"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), asyncio.CancelledError()])
def test_an_interrupted_run_is_stopped(tmp_path: Path, interruption: BaseException) -> None:
    with pytest.raises(type(interruption)):
        make_run(tmp_path / "run", 1, fails=interruption)
    standing = standing_of(tmp_path / "run")
    assert (standing.state, standing.reason) == ("stopped", "interrupted")


def test_a_run_that_is_open_is_running_and_says_how_long_it_still_takes(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with open_run(path, Config(log_path=str(path)), console=False) as run:
        run.start_at(0, 10)
        log_steps(run, range(4))
        standing = standing_of(path)
        assert standing.state == "running"
        assert f"pid {os.getpid()}" in standing.reason
        assert standing.seconds_left == pytest.approx(6 * 0.5)
        assert as_cells(standing)["state"] == "running"  # who writes to it is for programs
    assert standing_of(path).state == "complete"  # its program came to its end


def test_a_killed_run_is_stopped_and_not_running(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from reports.made_runs import Config, log_steps
from stovetop.runs import open_run
with open_run({str(tmp_path / "run")!r}, Config(log_path="run"), console=False) as run:
    run.start_at(0, 4)
    log_steps(run, range(2))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_python("-c", program, cwd=Path(__file__).parent.parent).returncode == -9
    standing = standing_of(tmp_path / "run")
    assert (standing.state, standing.progress) == ("stopped", "2 of 4")
    assert "killed" in standing.reason


def test_the_number_of_a_process_that_was_given_to_another_one_says_nothing(tmp_path: Path) -> None:
    holder = {"pid": os.getpid(), "host": os.uname().nodename, "since": "2001-01-01 00:00:00"}
    (tmp_path / LOCK_FILE).write_text(json.dumps(holder))
    assert writer_in(tmp_path) is None
    (tmp_path / LOCK_FILE).write_text(json.dumps(holder | {"since": time.strftime("%Y-%m-%d %H:%M:%S")}))
    assert writer_in(tmp_path) is not None
    (tmp_path / LOCK_FILE).write_text(json.dumps(holder | {"host": "another"}))
    assert "another" in str(writer_in(tmp_path))
    (tmp_path / LOCK_FILE).write_text("torn")
    assert writer_in(tmp_path) is None


def test_a_run_that_was_left_before_its_first_step_is_stopped(tmp_path: Path) -> None:
    standing = standing_of(make_run(tmp_path / "run", 0))
    assert (standing.state, standing.progress, standing.values) == ("stopped", "0 of 4", {})
    assert "first step" in standing.reason


@pytest.mark.parametrize("file", [METRICS_FILE, EVENTS_FILE, "checkpoints.jsonl"])
def test_a_damaged_run_names_the_file(tmp_path: Path, file: str) -> None:
    path = make_run(tmp_path / "run")
    (path / file).write_bytes((path / file).read_bytes() + b"words\n")
    standing = standing_of(path)
    assert standing.state == "damaged"
    assert str(path / file) in standing.reason


@pytest.mark.parametrize("file", [METRICS_FILE, EVENTS_FILE])
def test_a_row_that_is_being_written_is_left_out(tmp_path: Path, file: str) -> None:
    path = make_run(tmp_path / "run")
    (path / file).write_bytes((path / file).read_bytes() + b'{"step": 4, "lo')
    assert standing_of(path) == standing_of(path)
    assert standing_of(path).state == "complete"


def test_a_run_that_went_on_and_failed_beyond_its_final_checkpoint_is_failed(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    with pytest.raises(StovetopError):
        go_on(path, range(4, 6), StovetopError("no more data"))
    standing = standing_of(path)
    assert (standing.state, standing.reason, standing.progress) == ("failed", "no more data", "6 of 8")


def go_on(path: Path, steps: range, fails: Exception) -> None:
    with open_run(path, Config(log_path=str(path)), console=False) as run:
        run.start_at(steps.start, 8)
        log_steps(run, steps)
        raise fails


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    for file in (METRICS_FILE, EVENTS_FILE):
        whole = (path / file).read_bytes()
        (path / file).write_bytes(b"damage\n" + whole * (TAIL_BYTES // len(whole) + 2))
    assert standing_of(path).state == "complete"


def test_values_without_columns_are_those_of_the_last_row() -> None:
    rows = [{"step": 0, "loss": 2.0, "rare": 1.0}, {"step": 1, "loss": 1.0, "time/step": 1.0, "progress": 0.5}]
    assert last_values(rows) == {"loss": 1.0}
    assert last_values(rows, ["rare", "loss", "absent"]) == {"rare": 1.0, "loss": 1.0}
    assert last_values([]) == {}


def test_a_plan_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    for damage in ("", "[]", '{"num_steps": "many", "columns": [1]}'):
        (tmp_path / PLAN_FILE).write_text(damage)
        assert read_plan(tmp_path) == (None, ())


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "0 s"), (59.6, "1 min 0 s"), (75, "1 min 15 s"), (7500, "2 h 5 min"), (200_000, "2 d 7 h")],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


# ---- the command -----------------------------------------------------------------------------------------------------


def test_runs_shows_the_states_and_the_last_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a")
    with pytest.raises(StovetopError):
        make_run(tmp_path / "deep" / "b", 2, fails=StovetopError("first line\nsecond [red] line"))
    assert main(["runs", str(tmp_path)]) == 0
    a, b = [line for line in capsys.readouterr().out.splitlines() if "made_runs" in line]
    assert "complete" in a
    assert "loss 0.5000  test/accuracy 0.2000" in a
    assert "failed: first line second [red] line" in b
    assert "2 of 4" in b


def test_watching_goes_on_until_it_is_interrupted_and_says_only_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter([lambda: None, lambda: make_run(tmp_path / "b"), lambda: None])

    def sleep(_: float) -> None:
        look = next(looks, None)
        if look is None:
            raise KeyboardInterrupt
        look()

    make_run(tmp_path / "a")
    monkeypatch.setattr("stovetop.cli.tables.time.sleep", sleep)
    assert main(["runs", str(tmp_path), "--watch"]) == 0
    assert capsys.readouterr().out.count("recipe") == 2
    assert main(["runs", str(tmp_path), "--watch", "--json"]) == 2
    assert [each.run.name for each in list_runs(tmp_path)] == ["a", "b"]


def test_a_folder_that_cannot_be_read_hides_no_run_and_pages_are_not_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run", 1)
    for name in ("another's", "run/iteration_000001"):
        (tmp_path / name).mkdir()
    looked_in: list[str] = []
    scandir = os.scandir

    def refused(folder: Path):
        looked_in.append(folder.name)
        if folder.name == "another's":
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refused)
    assert [standing.run.name for standing in list_runs(tmp_path)] == ["run"]
    assert "another's" in looked_in
    assert "iteration_000001" not in looked_in
