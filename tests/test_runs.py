import errno
import io
import json
import logging
import subprocess
import sys
from dataclasses import dataclass, field, replace
from enum import Enum
from io import FileIO
from pathlib import Path
from typing import Literal

import pytest

from processes import LIMIT_S
from stovetop import runs
from stovetop.durable import LocalDisk, append_row, read_rows
from stovetop.errors import InvalidRequest, StovetopError, UnknownName, WriteFailed
from stovetop.runs import BehaviorIfExists, Run, open_run
from stovetop.tracking import sinks
from stovetop.tracking.configs import HOW_LONG, MAY_CHANGE
from stovetop.tracking.events import CONFIG, Recorder
from stovetop.tracking.timing import timed


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Adam:
    beta1: float = 0.9


@dataclass(frozen=True, kw_only=True)
class Config:
    log_path: str = field(default="run", metadata=MAY_CHANGE)
    learning_rate: float = 1e-4
    num_epochs: int = field(default=1, metadata=HOW_LONG)
    lr_schedule: Literal["linear", "constant"] = "constant"
    load_checkpoint_path: str | None = None
    adam: Adam = field(default_factory=Adam)
    tags: tuple[str, ...] = ("a", "b")
    clip: float = float("inf")


def quiet_run(path: Path, config: Config | None = None, behavior: BehaviorIfExists = "resume") -> Run:
    return open_run(path, config or Config(), behavior_if_exists=behavior, console=False)


# ---- what a run holds


def test_a_run_leaves_its_config_metrics_events_and_words(tmp_path: Path):
    with quiet_run(tmp_path / "run") as run:
        run.log_metrics({"loss": 0.5}, 0)
        run.emit("training.step", step=0, loss=0.5, dataset="chats")
        logging.getLogger("stovetop.test").info("hello")
    record = runs.load(tmp_path / "run")
    assert record.config_class == f"{__name__}:Config"
    assert record.config["adam"] == {"beta1": 0.9}
    assert record.metrics == [{"step": 0, "loss": 0.5}]
    assert [event.name for event in record.events] == ["run.start", CONFIG, "training.step", "run.stop"]
    assert (tmp_path / "run" / "logs.log").read_text().endswith("INFO stovetop.test: hello\n")


def test_a_config_is_read_back_as_an_equal_value(tmp_path: Path):
    config = Config(learning_rate=3e-4, adam=Adam(beta1=0.8))
    with quiet_run(tmp_path / "run", config):
        pass
    assert runs.load(tmp_path / "run").config_as(Config) == config


def test_a_config_read_back_as_another_class_is_refused(tmp_path: Path):
    with quiet_run(tmp_path / "run"):
        pass
    with pytest.raises(InvalidRequest, match="log_path"):
        runs.load(tmp_path / "run").config_as(Adam)


@dataclass(frozen=True)
class Odd:
    value: object


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (Path("/tmp/x"), "/tmp/x"),
        (Colour.RED, "red"),
        (Config, f"{__name__}:Config"),
        (quiet_run, f"{__name__}:quiet_run"),
        ({"a": [1, None, True]}, {"a": [1, None, True]}),
        (float("nan"), "NaN"),
    ],
)
def test_a_config_may_hold_paths_enumerations_functions_and_classes(tmp_path: Path, value: object, stored: object):
    with open_run(tmp_path / "run", Odd(value), console=False):
        pass
    assert runs.load(tmp_path / "run").config == {"value": stored}


def test_a_config_value_that_has_no_json_is_refused_by_its_field(tmp_path: Path):
    with pytest.raises(InvalidRequest, match=r"value\[0\]"):
        open_run(tmp_path / "run", Odd([object()]), console=False)


def test_numbers_that_are_not_finite_are_read_back(tmp_path: Path):
    with quiet_run(tmp_path / "run") as run:
        run.log_metrics({"loss": float("inf")}, 0)
    assert runs.load(tmp_path / "run").series("loss") == ([0], [float("inf")])


def test_a_series_has_the_steps_that_have_the_metric(tmp_path: Path):
    with quiet_run(tmp_path / "run") as run:
        run.log_metrics({"loss": 3.0, "test/nll": 2.0}, 0)
        run.log_metrics({"loss": 2.0}, 1)
        run.log_metrics({"loss": 1.0, "test/nll": 1.0}, 2)
    assert runs.load(tmp_path / "run").series("test/nll") == ([0, 2], [2.0, 1.0])
    with pytest.raises(UnknownName, match="did you mean 'test/nll'"):
        runs.load(tmp_path / "run").series("test/nil")


def test_a_table_and_a_plot_are_kept(tmp_path: Path):
    # half a second: matplotlib draws
    with quiet_run(tmp_path / "run") as run:
        run.log_metrics({"env/all/reward/total": 0.5}, 0)
        run.table("Accuracy", ["stage", "T=1"], [["base", 0.25]])
        path = run.plot("reward", {"reward": "env/all/reward/total"}, title="Reward", y_label="mean reward")
    assert path == tmp_path / "run" / "reward.png"
    assert path.is_file()
    labels = [dict(event.labels) for event in runs.load(tmp_path / "run").events]
    assert {"title": "Accuracy", "text": "| stage | T=1 |\n| --- | ---: |\n| base | 0.2500 |"} in labels
    assert {"path": str(path)} in labels


def test_every_event_reaches_sinks_of_ones_own(tmp_path: Path):
    recorder = Recorder()
    with open_run(tmp_path / "run", Config(), console=False, sinks=[recorder]) as run:
        run.log_metrics({"loss": 1.0}, 0)
    assert [event.name for event in recorder.events] == ["run.start", CONFIG, "run.metrics", "run.stop"]


def test_the_outcome_says_what_ended_a_run(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), quiet_run(tmp_path / "run"):
        raise KeyboardInterrupt
    stop = runs.load(tmp_path / "run").events[-1]
    assert (stop.name, stop.labels["outcome"]) == ("run.stop", "KeyboardInterrupt")
    assert stop.values["seconds"] > 0


def test_progress_works_where_nothing_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with quiet_run(tmp_path / "run") as run, run.progress("training", total=2) as bar:
        run.log_metrics({"loss": 1.0}, 0)
        bar.advance()
    assert capsys.readouterr().out == ""


def test_the_console_shows_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with open_run(tmp_path / "run", Config(), columns=["loss"]) as run:
        run.log_metrics({"other": 3.0, "loss": 1.5}, 0)
    assert capsys.readouterr().out.splitlines() == ["  step       loss", "     0      1.500"]


def test_the_logger_is_left_as_it_was(tmp_path: Path):
    logger = logging.getLogger("stovetop")
    before = (logger.level, list(logger.handlers), list(logging.getLogger().handlers))
    with quiet_run(tmp_path / "run"):
        assert logger.level == logging.INFO
        assert logging.getLogger().handlers == before[2]
    assert (logger.level, list(logger.handlers), list(logging.getLogger().handlers)) == before


def test_the_difference_from_the_last_commit_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # a tenth of a second: git runs five times
    repository = tmp_path / "code"
    repository.mkdir()
    monkeypatch.chdir(repository)
    (repository / "loop.py").write_text("lr = 1\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], check=True, capture_output=True, timeout=LIMIT_S)
    (repository / "loop.py").write_text("lr = 2\n")
    with quiet_run(tmp_path / "run"):
        pass
    diff = (tmp_path / "run" / "code.diff").read_text()
    assert diff.startswith("# commit ")
    assert "+lr = 2" in diff


def test_outside_a_repository_there_is_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with quiet_run(tmp_path / "run"):
        pass
    assert not (tmp_path / "run" / "code.diff").exists()


# ---- a directory that exists


def test_a_home_directory_may_be_written_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert quiet_run(Path("~/run")).path == tmp_path / "run"


def finished_run(path: Path) -> Path:
    with quiet_run(path) as run:
        run.log_metrics({"loss": 1.0}, 0)
    return path


def test_resume_keeps_what_is_there(tmp_path: Path):
    with quiet_run(finished_run(tmp_path / "run")) as run:
        run.start_at(1)
        run.log_metrics({"loss": 0.5}, 1)
    assert runs.load(tmp_path / "run").series("loss").values == [1.0, 0.5]


def test_delete_begins_afresh(tmp_path: Path):
    with quiet_run(finished_run(tmp_path / "run"), Config(learning_rate=1.0), "delete"):
        pass
    assert runs.load(tmp_path / "run").metrics == []
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_delete_touches_nothing_that_is_not_a_run(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InvalidRequest, match="refused to delete"):
        quiet_run(tmp_path, behavior="delete")
    assert (tmp_path / "thesis.tex").exists()


def test_raise_refuses_a_directory_that_is_not_empty(tmp_path: Path):
    with pytest.raises(InvalidRequest, match="not empty"):
        quiet_run(finished_run(tmp_path / "run"), behavior="raise")


@pytest.mark.parametrize("behavior", ["resume", "delete", "ask", "raise"])
def test_an_empty_directory_is_no_question(tmp_path: Path, behavior: BehaviorIfExists):
    with quiet_run(tmp_path, behavior=behavior) as run:
        run.log_metrics({"loss": 1.0}, 0)
    assert len(runs.load(tmp_path).metrics) == 1


def test_ask_fails_at_once_where_nobody_can_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("resume\n"))
    with pytest.raises(InvalidRequest, match="no terminal to ask on"):
        quiet_run(finished_run(tmp_path / "run"), behavior="ask")


class Typist(io.StringIO):
    """A person at a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "num_rows"), [("resume", 1), ("delete", 0)])
def test_ask_does_what_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, num_rows: int):
    monkeypatch.setattr(sys, "stdin", Typist(answer + "\n"))
    with quiet_run(finished_run(tmp_path / "run"), behavior="ask"):
        pass
    assert len(runs.load(tmp_path / "run").metrics) == num_rows


def test_a_file_in_the_place_of_a_run_is_refused(tmp_path: Path):
    (tmp_path / "run").write_text("")
    with pytest.raises(InvalidRequest, match="there is a file"):
        quiet_run(tmp_path / "run")


def test_an_unknown_behavior_is_refused(tmp_path: Path):
    with pytest.raises(UnknownName, match="did you mean 'resume'"):
        quiet_run(tmp_path, behavior="resum")  # pyright: ignore[reportArgumentType]  that is the test


def test_what_is_not_a_run_cannot_be_loaded(tmp_path: Path):
    with pytest.raises(StovetopError, match="not a run"):
        runs.load(tmp_path)


# ---- files that are damaged


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "null", "3", '{"class": 3, "config": {}}', "\udcff", "[" * 100_000]
)
def test_a_config_that_is_none_is_named_by_its_file(tmp_path: Path, content: str):
    path = finished_run(tmp_path / "run")
    (path / "config.json").write_text(content, errors="surrogateescape")
    for read in (runs.load, quiet_run):
        with pytest.raises(StovetopError, match=r"run/config\.json"):
            read(path)


@pytest.mark.parametrize(
    ("file", "row"),
    [
        ("metrics.jsonl", '{"loss": 1.0}'),
        ("metrics.jsonl", '{"step": "1"}'),
        ("metrics.jsonl", '{"step": true}'),
        ("metrics.jsonl", '{"step": -1}'),
        ("metrics.jsonl", '{"step": 1, "loss": null}'),
        ("metrics.jsonl", '{"step": 1, "loss": "low"}'),
        ("metrics.jsonl", '{"step": 1, "loss": [1]}'),
        ("events.jsonl", '{"name": "a.b"}'),
        ("events.jsonl", '{"time": 1.0}'),
        ("events.jsonl", '{"time": 1.0, "name": "odd"}'),
        ("events.jsonl", '{"time": "now", "name": "a.b"}'),
        ("events.jsonl", '{"time": 1.0, "name": "a.b", "values": {"x": "y"}}'),
        ("events.jsonl", '{"time": 1.0, "name": "a.b", "values": []}'),
        ("events.jsonl", '{"time": 1.0, "name": "a.b", "labels": {"x": 1}}'),
        ("events.jsonl", '{"time": 1.0, "name": "a.b", "step": 1.5}'),
        ("metrics.jsonl", ""),
        ("metrics.jsonl", "{"),
        ("metrics.jsonl", "null"),
        ("events.jsonl", "[1, 2]"),
        ("events.jsonl", "\udcff\udcfe\x00"),
        ("events.jsonl", "[" * 100_000),
    ],
)
def test_a_damaged_row_is_named_by_its_file_and_line(tmp_path: Path, file: str, row: str):
    path = finished_run(tmp_path / "run")
    before = (path / file).read_text()
    (path / file).write_text(before + row + "\n", errors="surrogateescape")
    with pytest.raises(StovetopError, match=rf"run/{file}, line {before.count(chr(10)) + 1}: ") as error:
        runs.load(path)
    assert len(str(error.value)) < 600
    if file == "metrics.jsonl":  # which is read when a run is opened
        with pytest.raises(StovetopError, match=rf"run/{file}, line 2: "):
            quiet_run(path)


def test_a_folder_in_the_place_of_a_file_is_an_error_of_ours(tmp_path: Path):
    path = finished_run(tmp_path / "run")
    for name in ("events.jsonl", "metrics.jsonl", "config.json"):
        (path / name).unlink()
        (path / name).mkdir()
        with pytest.raises(StovetopError, match=name.replace(".", r"\.")):
            runs.load(path)


# ---- a disk that is full


def test_a_row_that_cannot_be_written_stops_the_run_and_costs_no_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(disk: LocalDisk, path: Path, data: bytes) -> None:
        if path.name == "metrics.jsonl":
            raise OSError(errno.ENOSPC, "No space left on device")

    with quiet_run(tmp_path / "run") as run:
        run.log_metrics({"loss": 1.0}, 0)
        monkeypatch.setattr(LocalDisk, "append", full)
        with pytest.raises(WriteFailed, match=r"cannot write .*/metrics\.jsonl: No space left"):
            run.log_metrics({"loss": 0.5}, 1)
    monkeypatch.undo()
    with quiet_run(tmp_path / "run") as run:  # whose lock is free again
        run.start_at(1)
        run.log_metrics({"loss": 0.5}, 1)
    assert runs.load(run.path).series("loss").values == [1.0, 0.5]


def test_what_stops_a_run_is_not_hidden_by_a_record_that_fails_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(file: FileIO, data: bytes) -> None:
        raise OSError(errno.EIO, "Input/output error")

    run = quiet_run(tmp_path / "run")
    run.__enter__()
    monkeypatch.setattr(sinks, "write_all", full)
    run.__exit__(ValueError, ValueError("a bug"), None)  # which is then raised
    assert "nor could its end be recorded" in (tmp_path / "run" / "logs.log").read_text()


def test_a_run_is_locked_from_its_opening_until_it_is_left(tmp_path: Path):
    run = quiet_run(tmp_path / "run")
    with pytest.raises(InvalidRequest, match=r"this process .* writes to this run"):
        quiet_run(tmp_path / "run")
    del run  # never entered
    with quiet_run(tmp_path / "run"):
        assert runs.load(tmp_path / "run").metrics == []  # readers need no lock
        with pytest.raises(InvalidRequest, match="writes to this run"):
            quiet_run(tmp_path / "run", behavior="delete")
    with quiet_run(tmp_path / "run"):
        pass


# ---- resuming with another config


def test_a_changed_config_is_refused_by_the_fields_that_changed(tmp_path: Path):
    finished_run(tmp_path / "run")
    with pytest.raises(InvalidRequest) as refusal:
        quiet_run(tmp_path / "run", Config(learning_rate=1.0, adam=Adam(beta1=0.5), num_epochs=9))
    assert "learning_rate: 0.0001 -> 1.0" in str(refusal.value)
    assert "adam: {'beta1': 0.9} -> {'beta1': 0.5}" in str(refusal.value)
    assert "num_epochs" not in str(refusal.value)
    assert runs.load(tmp_path / "run").config_as(Config) == Config()


def test_a_run_may_be_made_longer(tmp_path: Path):
    with quiet_run(finished_run(tmp_path / "run"), Config(num_epochs=2, log_path="elsewhere")) as run:
        assert runs.load(tmp_path / "run").config["num_epochs"] == 1  # its loop has yet to find that it can be
        run.start_at(1)
    record = runs.load(tmp_path / "run")
    assert record.config["num_epochs"] == 2
    changes = {event.labels["field"]: event.labels["change"] for event in record.events if "field" in event.labels}
    assert changes == {"log_path": "'run' -> 'elsewhere'", "num_epochs": "1 -> 2"}


def test_changes_can_be_allowed(tmp_path: Path):
    finished_run(tmp_path / "run")
    with open_run(tmp_path / "run", Config(learning_rate=1.0), console=False, allow_config_changes=True):
        pass
    assert runs.load(tmp_path / "run").config["learning_rate"] == 1.0


def test_steps_are_added_only_where_no_schedule_stretches_over_them(tmp_path: Path):
    linear = Config(lr_schedule="linear", num_epochs=4)
    with quiet_run(tmp_path / "run", linear) as run:
        run.log_metrics({"loss": 1.0}, 0)
    append_row(run.path / "checkpoints.jsonl", {"name": "000001", "batch": 1, "state_path": "/states/000001"})
    for num_epochs in (2, 8):
        with pytest.raises(InvalidRequest) as refusal:
            quiet_run(run.path, replace(linear, num_epochs=num_epochs))
        assert f"num_epochs: 4 -> {num_epochs} (it may change while lr_schedule=constant only)" in str(refusal.value)
        assert "in a new run: load_checkpoint_path=/states/000001" in str(refusal.value)
    assert runs.load(run.path).config_as(Config) == linear


def test_a_finished_run_that_is_asked_for_less_keeps_its_config_and_is_no_error(tmp_path: Path):
    linear = Config(lr_schedule="linear", num_epochs=4)
    with quiet_run(tmp_path / "run", linear) as run:
        run.log_metrics({"loss": 1.0}, 0)
    append_row(run.path / "checkpoints.jsonl", {"name": "final", "batch": 1, "final": True, "state_path": "/final"})
    with quiet_run(run.path, replace(linear, num_epochs=2)):
        pass
    assert runs.load(run.path).config_as(Config) == linear
    with pytest.raises(
        InvalidRequest, match=r"num_epochs: 4 -> 2.*learning_rate|learning_rate.*\n.*num_epochs: 4 -> 2"
    ):
        quiet_run(run.path, replace(linear, num_epochs=2, learning_rate=1.0))


def test_a_run_in_which_nothing_was_learnt_may_be_begun_with_another_config(tmp_path: Path):
    for behavior in ("resume", "raise", "ask", "delete"):
        with pytest.raises(ZeroDivisionError), quiet_run(tmp_path / behavior, Config(learning_rate=1.0)):
            1 / 0  # noqa: B018
        with quiet_run(tmp_path / behavior, Config(learning_rate=2.0), behavior) as run:
            run.log_metrics({"loss": 1.0}, 0)
        assert runs.load(run.path).config["learning_rate"] == 2.0


def test_a_field_that_is_new_is_a_change(tmp_path: Path):
    finished_run(tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    del stored["config"]["lr_schedule"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(stored))
    with pytest.raises(InvalidRequest, match=r"lr_schedule: '\(absent\)' -> 'constant'"):
        quiet_run(tmp_path / "run")


@dataclass(frozen=True)
class OtherConfig:
    log_path: str = field(default="run", metadata=MAY_CHANGE)
    learning_rate: float = 1.0
    pages: int = 3


def test_a_run_of_another_recipe_is_refused_by_its_class_and_the_fields_of_both(tmp_path: Path):
    finished_run(tmp_path / "run")
    with pytest.raises(InvalidRequest, match=r":Config, not .*:OtherConfig\):\n  learning_rate: 0.0001 -> 1.0\nTake"):
        open_run(tmp_path / "run", OtherConfig(), console=False)


# ---- one row a step


def test_a_step_has_one_row(tmp_path: Path):
    with quiet_run(tmp_path / "run") as run:
        run.log_metrics({"loss": 1.0}, 4)
        for step in (4, 3):
            with pytest.raises(InvalidRequest, match=f"its last is 4.*: {step}"):
                run.log_metrics({"test/nll": 1.0}, step)


def test_rows_of_steps_that_run_again_are_dropped_and_copied(tmp_path: Path):
    path = tmp_path / "run"
    for start, end in ((0, 5), (3, 6), (3, 4), (4, 5)):
        with quiet_run(path, replace(Config(), num_epochs=end)) as run:
            run.start_at(start)
            for step in range(start, end):
                run.log_metrics({"loss": float(10 * end + step)}, step)
    assert [row["step"] for row in runs.load(path).metrics] == [0, 1, 2, 3, 4]
    assert runs.load(path).series("loss").values == [50, 51, 52, 43, 54]
    copies = {copy.name[-1]: len(read_rows(copy)) for copy in path.glob("metrics.jsonl.pre_resume_*")}
    assert copies == {"1": 5, "2": 6}  # the last resume had nothing to drop


@pytest.mark.parametrize("begins", [0, 2])
def test_events_of_steps_that_ran_again_are_read_once(tmp_path: Path, begins: int):
    """The first time to step 3, killed amid step 4; then from `begins` to the end."""
    for start, stop in ((0, 4), (begins, 5)):
        with runs.open_run(tmp_path / "run", Config(), console=False) as run:
            run.start_at(start)
            for step in range(start, stop + 1):
                run.emit("rl.step", step=step)
                if step < stop or stop == 5:
                    run.log_metrics({"loss": 1.0}, step)
            run.emit("words.kept", stop=stop)
    events = runs.load(tmp_path / "run").events
    assert [event.step for event in events if event.name == "rl.step"] == [0, 1, 2, 3, 4, 5]
    assert [event.step for event in events if event.name == "run.resume"] == [begins]
    assert [event.name for event in events if event.name in ("run.start", "words.kept")] == [
        "run.start",
        "words.kept",
    ] * 2


def test_what_a_resumed_run_says_again_of_its_data_is_read_once(tmp_path: Path):
    for num_test in (2, 2, 3):
        with runs.open_run(tmp_path / "run", Config(), console=False) as run:
            for _ in range(2):  # of two data sets of one size: both are kept
                run.emit("dataset.load", dataset="rows", num_test=num_test)
    events = runs.load(tmp_path / "run").events
    assert [event.values["num_test"] for event in events if event.name == "dataset.load"] == [2, 2, 3, 3]
    assert [event.name for event in events].count("run.start") == 3


def test_a_resume_before_an_earlier_resume_leaves_the_steps_out_again(tmp_path: Path):
    for start, stop in ((0, 4), (3, 6), (1, 3)):
        with runs.open_run(tmp_path / "run", Config(), console=False) as run:
            run.start_at(start)
            for step in range(start, stop):
                run.emit("rl.step", step=step)
    events = runs.load(tmp_path / "run").events
    assert [event.step for event in events if event.name == "rl.step"] == [0, 1, 2]
    assert [event.step for event in events if event.name == "run.resume"] == [3, 1]


def test_a_resume_that_forgets_to_say_where_is_refused_before_it_writes_a_second_row(tmp_path: Path):
    with quiet_run(finished_run(tmp_path / "run")) as run, pytest.raises(InvalidRequest, match="start_at"):
        run.log_metrics({"loss": 1.0}, 0)


def test_train_and_evaluation_share_the_row_that_timed_writes_into(tmp_path: Path):
    metrics: dict[str, float] = {}
    with quiet_run(tmp_path / "run") as run:
        with timed("step", metrics):
            metrics["train_mean_nll"] = 0.5
        with timed("evals", metrics):
            metrics["test/nll"] = 0.7
        run.log_metrics(metrics, 0)
    assert list(runs.load(tmp_path / "run").metrics[0]) == [
        "step",
        "train_mean_nll",
        "time/step",
        "test/nll",
        "time/evals",
    ]


def test_the_traceback_of_what_stopped_a_run_is_in_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), open_run(tmp_path / "run", Config()):
        1 / 0  # noqa: B018
    assert "ZeroDivisionError: division by zero" in (tmp_path / "run" / "logs.log").read_text()
    assert "Traceback" not in capsys.readouterr().out
