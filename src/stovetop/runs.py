"""A run is a directory. Opening one, writing its record, and reading it again.

    stovetop-run.json   the mark of a run, and .lock: `run_folder.py`
    config.json         the config, and the class it is of
    plan.json           how many steps it is to have, and the metrics that its recipe shows
    metrics.jsonl       one row a step
    events.jsonl        everything else that happened
    checkpoints.jsonl   what was saved: `checkpoints.py`
    deleted.jsonl       what of that was deleted: `retention.py`
    used_by.jsonl       which other runs use its checkpoints, by which they stay: `checkpoint_users.py`
    data.json           what it trains and tests on: `data_record.py`
    workflow.json       the stages of the workflow that ran last, if one did: `kitchen/workflow.py`
    rollouts/           those of reinforcement learning, as rows: `tracking/rollout_rows.py`
    iteration_000012/   the first of them as pages
    evaluations/        what evaluations measured, example by example: `tracking/evaluated.py`
    code.diff           what differed from the last commit when the run was begun, if git was there
    logs.log            the package's words
    trace.json          what ran when, where the run was asked for it, and trace_events.jsonl: `tracking/trace.py`

Which weights a run goes on from is `checkpoints.resume_or_create`'s question.
"""

import hashlib
import json
import logging
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, SupportsFloat

from stovetop.checkpoint_users import note_uses
from stovetop.concurrency import in_thread
from stovetop.data_record import record_data, revisions_in
from stovetop.durable import parse_rows, write_file
from stovetop.errors import InvalidRequest, UnknownName, WriteFailed
from stovetop.retention import Retention, parse_keep
from stovetop.run_folder import (
    CONFIG_FILE,
    EVENTS_FILE,
    LOGS_FILE,
    METRICS_FILE,
    BehaviorIfExists,
    Content,
    Plan,
    claimed,
    content_of,
    run_path,
    settled,
    write_plan,
)
from stovetop.stored_configs import ConfigT, StoredConfig, config_json, is_of_another_length, read_config, takes
from stovetop.tracking.configs import Change, changed_fields, config_to_dict
from stovetop.tracking.console import Bar, ConsoleSink, markdown_table, open_console
from stovetop.tracking.evaluated import drop_evaluations, step_evaluated_here
from stovetop.tracking.events import Event, EventStream, Sink, event_from_row, metrics_from_row, step_of_row
from stovetop.tracking.log_file import logging_to
from stovetop.tracking.plots import Line, plot_lines
from stovetop.tracking.rollout_rows import drop_rollouts
from stovetop.tracking.sending import Sender, TrackerSink
from stovetop.tracking.sinks import EventsFile, MetricsFile
from stovetop.tracking.trace import tracing
from stovetop.tracking.trackers import TrackerChoice, check_trackers
from stovetop.tracking.waiting import STALL_AFTER_S, Watch

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import JsonValue

    from stovetop.client import ServiceClient
    from stovetop.named_data import Loaded

    Settings = Mapping[str, JsonValue]  # a config as JSON

log = logging.getLogger(__name__)
_MAX_REASON = 2000  # characters of what a run stopped with; logs.log has all of it
_RESUME = "run.resume"  # an event: the run goes on from its step
_OF_A_PROCESS = ("run.", "workflow.", "stage.")  # events of these say what a process did; without a step, all are kept


# ---- opening ---------------------------------------------------------------------------------------------------------


def open_run(
    log_path: str | Path,
    config: "DataclassInstance",
    *,
    behavior_if_exists: BehaviorIfExists = "resume",
    allow_config_changes: bool = False,
    console: bool = True,
    columns: Sequence[str] = (),
    sinks: Sequence[Sink] = (),
    stall_after_s: float = STALL_AFTER_S,
    keep_checkpoints: str = "2",
    trackers: str = "",
    enable_trace: bool = False,
) -> "Run":
    """The run in this directory, made or resumed; enter it with `with`. It is locked until it is left.

    A run that has a step or a checkpoint is resumed only with the config that it was begun with, but for the fields
    that say otherwise (`tracking.configs.MAY_CHANGE`), unless changes are allowed. "delete" begins afresh, "raise"
    refuses a directory in which there is a run, "ask" asks on a terminal and is refused where there is none. A
    directory that holds anything but a run is refused in any case. `columns` are the metrics to show on the console;
    `sinks` get every event too. When nothing has gone on for `stall_after_s` seconds, the log says what the run waits
    for, and since when: which stage, which environment of which group, which evaluator. Which checkpoints stay when
    `Run.retain` is called, `keep_checkpoints` says: see `retention.py`. What the config names of other runs'
    checkpoints is noted in their folders, and stays there. `trackers` get a copy of the record: see
    `tracking/trackers`. `enable_trace`: what ran when is in trace.json at the end (`tracking/trace.py`).
    """
    settings = config_to_dict(config)
    parse_keep(keep_checkpoints)
    choices = check_trackers(trackers)
    with ExitStack() as opening:
        path, content = opening.enter_context(claimed(log_path, behavior_if_exists))
        stored = _stored_settings(path, content) or settings
        changes = changed_fields(stored, settings)
        if content is Content.RUN and not allow_config_changes and not takes(path, type(config), stored, settings):
            settings, changes = stored, {}
        to_store = config_json(type(config), settings)
        if not is_of_another_length(type(config), changes):
            write_file(path / CONFIG_FILE, to_store)
        if content is not Content.RUN and (diff := _git_diff()) is not None:
            write_file(path / "code.diff", diff)
        note_uses(path, settings)
        shown = ConsoleSink(open_console(shown=console), columns)
        retention = Retention(path, keep_checkpoints)
        sinks = [*sinks, *(TrackerSink(sender_of(path, choice)) for choice in choices)]
        return Run(
            path,
            settings,
            changes,
            shown,
            sinks,
            opening.pop_all(),
            Watching(stall_after_s, enable_trace),
            to_store,
            retention,
        )


def sender_of(path: Path, choice: TrackerChoice) -> Sender:
    """What brings the record of the run in this folder to a tracker."""
    return Sender(path, choice, metrics=path / METRICS_FILE, events=path / EVENTS_FILE)


def check_opening(
    log_path: str | Path, config: "DataclassInstance", behavior_if_exists: BehaviorIfExists = "resume"
) -> None:
    """Raises what `open_run` would, as far as can be known without writing or asking anything."""
    settings = config_to_dict(config)
    path = run_path(log_path)
    behavior = settled(path, "resume" if behavior_if_exists == "ask" else behavior_if_exists)
    content = content_of(path)
    if behavior == "resume" and content is Content.RUN:
        takes(path, type(config), _stored_settings(path, content) or settings, settings)


def _stored_settings(path: Path, content: Content) -> "Settings | None":
    """What a run was begun with; None where there is none to go on with."""
    match content:
        case Content.RUN:
            return read_config(path).config
        case Content.STARTED if (path / CONFIG_FILE).is_file():
            return read_config(path).config
        case _:
            return None


def _git_diff() -> bytes | None:
    """The commit and what differs from it in the working directory; None outside a repository."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, check=True).stdout
        diff = subprocess.run(["git", "diff", "HEAD"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return b"# commit " + commit + diff


# ---- a run that is open ----------------------------------------------------------------------------------------------


class Watching(NamedTuple):
    """How an open run is watched."""

    stall_after_s: float
    enable_trace: bool


class Run:
    """Made by `open_run`. Use within `with`."""

    def __init__(
        self,
        path: Path,
        settings: "Settings",
        changes: Mapping[str, Change],
        console: ConsoleSink,
        sinks: Sequence[Sink],
        stack: ExitStack,
        watching: Watching,
        config_json: bytes,
        retention: Retention,
    ) -> None:
        self.path = path
        self._config_json = config_json
        self._retention = retention
        record = [MetricsFile(path / METRICS_FILE), EventsFile(path / EVENTS_FILE)]
        self.stream = EventStream([console, *sinks], record=record)
        self._settings = settings
        self._changes = changes
        self._console = console
        self._columns = console.chosen
        self._stack = stack  # holds the lock
        self._watching = watching
        self._last_step = _last_step(parse_rows(path / METRICS_FILE, _checked_row))
        self._began_s = time.monotonic()

    def __enter__(self) -> Self:
        with self._stack as opening:
            opening.enter_context(logging_to(self.path / LOGS_FILE, self._console))
            self.stream.emit("run.start", path=str(self.path))
            for name, change in self._changes.items():
                self.stream.emit("run.config_changed", field=name, change=str(change))
            self.stream.log_hparams(self._settings)
            opening.enter_context(Watch(self._watching.stall_after_s).on())
            if self._watching.enable_trace:
                opening.enter_context(tracing(self.path))
            self._stack = opening.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        outcome = "completed" if kind is None else kind.__name__
        with self._stack:
            if isinstance(error, Exception):
                log.error("the run stopped", exc_info=error)
            reason: dict[str, Any] = {} if not str(error or "") else {"reason": str(error)[:_MAX_REASON]}
            try:
                self.stream.emit("run.stop", seconds=time.monotonic() - self._began_s, outcome=outcome, **reason)
                self.stream.close()
            except WriteFailed as failure:
                if error is None:
                    raise
                log.error("nor could its end be recorded: %s", failure)

    @property
    def revisions(self) -> dict[str, str]:
        """Of data sets of a hub, the commits that the run began with: a run that goes on reads them again."""
        return revisions_in(self.path)

    def record_data(self, dataset: str, loaded: "Loaded[Any]") -> None:
        """Keeps in data.json what was read of `dataset`, emits `dataset.load` with the numbers, and logs which rows
        were of no use. Data that differs from what the run has learnt from so far is refused."""
        record_data(self.path, dataset, loaded.sources)
        numbers = {"num_train": len(loaded.train), "num_test": len(loaded.test), "num_skipped": loaded.num_left_out}
        self.emit("dataset.load", dataset=dataset, **numbers)
        if loaded.left_out:
            reasons = "; ".join(f"{number}: {reason}" for reason, number in loaded.left_out.items())
            log.warning("%d rows of %s are of no use and left out: %s", loaded.num_left_out, dataset, reasons)

    @property
    def evaluated_step(self) -> int:
        """Of an evaluation that runs: the step that begins with the weights that it measures, as
        `tracking.evaluated.evaluating` says; else the step whose row comes next."""
        step = step_evaluated_here()
        return self._last_step + 1 if step is None else step

    @property
    def config_digest(self) -> str:
        """Equal for equal configs."""
        return hashlib.sha256(self._config_json).hexdigest()[:16]

    def store_config(self) -> None:
        """Writes config.json. `start_at` does it where the config is of another length than the run was: one that its
        loop refuses is not stored."""
        write_file(self.path / CONFIG_FILE, self._config_json)

    def start_at(self, step: int, num_steps: int | None = None) -> None:
        """Call it before the first step, with the step that a resumed run goes on from, and with how many it is to have
        in all, which `stovetop runs` and the report show. Rows of metrics.jsonl from
        there on belong to steps that run again: they are dropped, and metrics.jsonl.pre_resume_N keeps a copy. Their
        events stay in events.jsonl, and `load` leaves them out. Their rollouts are removed, and
        what evaluations measured after `step`."""
        self.store_config()
        write_plan(self.path, Plan(num_steps, self._columns))
        file = self.path / METRICS_FILE
        rows = parse_rows(file, _checked_row)
        kept = [row for row in rows if step_of_row(row) < step]
        if len(kept) < len(rows):
            number = 1 + len(list(self.path.glob(f"{METRICS_FILE}.pre_resume_*")))
            write_file(self.path / f"{METRICS_FILE}.pre_resume_{number}", file.read_bytes())
            write_file(file, b"".join(json.dumps(row).encode() + b"\n" for row in kept))
            log.info(
                "dropped %d rows of %s from step %d on, which run again", len(rows) - len(kept), METRICS_FILE, step
            )
        drop_rollouts(self.path, step)
        drop_evaluations(self.path, step)
        self._last_step = _last_step(kept)
        if step > 0 or any(event.step is not None for event in _read_events(self.path)):
            self.stream.emit(_RESUME, step=step, num_rows_dropped=len(rows) - len(kept))

    def log_metrics(self, metrics: Mapping[str, SupportsFloat], step: int) -> None:
        """The one row of this step; steps only go up. Gather what belongs to a step, then log it once."""
        if step <= self._last_step:
            raise InvalidRequest(
                f"{METRICS_FILE} has one row a step, in order, and its last is {self._last_step}; log a step once, and "
                f"call start_at after a resume: {step}"
            )
        self.stream.log_metrics(metrics, step)
        self._last_step = step

    def emit(self, name: str, /, *, step: int | None = None, **fields: SupportsFloat | str) -> None:
        """`run.emit("training.step", step=3, loss=0.5)`: see `EventStream.emit`."""
        self.stream.emit(name, step=step, **fields)

    async def retain(self, service: "ServiceClient") -> None:
        """Deletes the checkpoints that are not to stay: call it when the row of a new one is written."""
        await self._retention.apply(service)

    async def get_logger_url(self) -> str | None:
        """Where a tracker shows the run, once it has it: a few seconds after the run was opened; None without one."""
        return await in_thread(self.stream.get_logger_url)

    async def user_metadata(self) -> dict[str, str]:
        """For a training client of this run: where a tracker shows the run, as "url"."""
        url = await self.get_logger_url()
        return {} if url is None else {"url": url}

    def progress(self, description: str, *, total: int, completed: int = 0) -> AbstractContextManager[Bar]:
        """`with run.progress("training", total=100) as bar: ... bar.advance()`. Shows the last metrics beside it."""
        return self._console.progress(description, total=total, completed=completed)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str | float]]) -> None:
        """Shows a table, and keeps it in events.jsonl as Markdown."""
        self.stream.log_long_text(title, markdown_table(columns, rows))

    def plot(self, name: str, lines: Mapping[str, str], *, title: str, y_label: str, running_mean: int = 1) -> Path:
        """`{name}.png` in the run directory: metrics over steps, each line's label and the metric it shows."""
        record = load(self.path)
        series = {label: record.series(metric) for label, metric in lines.items()}
        path = plot_lines(
            self.path / f"{name}.png",
            [Line(label, steps, values) for label, (steps, values) in series.items()],
            title=title,
            x_label="step",
            y_label=y_label,
            running_mean=running_mean,
        )
        self.stream.emit("run.plot", path=str(path))
        return path


def _checked_row(row: "dict[str, JsonValue]") -> "dict[str, JsonValue]":
    metrics_from_row(row)
    return row


def _last_step(rows: "Sequence[Mapping[str, JsonValue]]") -> int:
    return max(map(step_of_row, rows), default=-1)


# ---- a run that is read again ----------------------------------------------------------------------------------------


class Series(NamedTuple):
    """One metric over the steps that have it: two lists of the same length."""

    steps: list[int]
    values: list[float]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run left behind."""

    path: Path
    config: "Mapping[str, JsonValue]"
    config_class: str  # "module:name"
    metrics: Sequence[Mapping[str, float]]  # one a step, in order, each with "step"
    events: Sequence[Event]  # those of steps that ran again, after a kill, once

    def series(self, metric: str) -> Series:
        """The steps that have this metric, and its values."""
        rows = [row for row in self.metrics if metric in row]
        if not rows:
            raise UnknownName("metric", metric, {key for row in self.metrics for key in row}, hint=str(self.path))
        return Series([int(row["step"]) for row in rows], [row[metric] for row in rows])

    def config_as(self, config_class: type[ConfigT]) -> ConfigT:
        """The config as a value again, checked field by field."""
        return StoredConfig(self.path, self.config_class, self.config).config_as(config_class)


def load(path: str | Path) -> RunRecord:
    """The record of the run in this directory, which may still be running."""
    path = Path(path).expanduser().resolve()
    stored = read_config(path)
    metrics = parse_rows(path / METRICS_FILE, metrics_from_row)
    return RunRecord(path, stored.config, stored.config_class, metrics, _read_events(path))


def _read_events(path: Path) -> list[Event]:
    """Without those of steps that a resumed run ran again: the ones from its step on that came before it. And what it
    says again of its data, word for word, is there once."""
    events: list[Event] = []
    said_before, said = set[object](), set[object]()
    for event in parse_rows(path / EVENTS_FILE, event_from_row):
        if event.name == "run.start":
            said_before |= said
        if event.name == _RESUME and event.step is not None:
            begins = event.step
            events = [each for each in events if each.step is None or each.step < begins or each.name == _RESUME]
        if event.step is None and not event.name.startswith(_OF_A_PROCESS):
            words = (event.name, frozenset(event.values.items()), frozenset(event.labels.items()))
            said.add(words)
            if words in said_before:
                continue
        events.append(event)
    return events
