"""A run is a directory. Opening one, what happens when it exists already, writing its record, and reading it again.

    config.json         the config, and the class it is of
    metrics.jsonl       one row a step
    events.jsonl        everything else that happened
    checkpoints.jsonl   written by `checkpoints.py`
    code.diff           what differed from the last commit when the run was begun, if git was there
    logs.log            the package's words

Which weights a run goes on from is `checkpoints.resume_or_create`'s question.
"""

import json
import logging
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, SupportsFloat, TypeVar, get_args

from stovetop.durable import read_rows, write_file
from stovetop.errors import InvalidRequest, StovetopError, UnknownName
from stovetop.tracking.configs import changed_fields, class_path, config_to_dict
from stovetop.tracking.console import Bar, ConsoleSink, markdown_table, open_console
from stovetop.tracking.events import Event, EventStream, Sink, decode_number, event_from_row
from stovetop.tracking.plots import Line, plot_lines
from stovetop.tracking.sinks import EventsFile, MetricsFile

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import JsonValue

log = logging.getLogger(__name__)
ConfigT = TypeVar("ConfigT", bound="DataclassInstance")

BehaviorIfExists = Literal["resume", "delete", "ask", "raise"]

CONFIG_FILE, METRICS_FILE, EVENTS_FILE = "config.json", "metrics.jsonl", "events.jsonl"

# Config fields that a resumed run may change: how long, how often, where to and what to show. All others decide what
# is learnt, and a run that learns something else is another run.
SAFE_TO_CHANGE = frozenset(
    {
        "log_path",
        "behavior_if_exists",
        "behavior_if_log_dir_exists",
        "num_epochs",
        "max_steps",
        "eval_every",
        "infrequent_eval_every",
        "save_every",
        "num_groups_to_log",
        "base_url",
        "wandb_project",
        "wandb_name",
    }
)


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
) -> "Run":
    """The run in this directory, made or resumed; enter it with `with`.

    A run is resumed only with the config that it was begun with, but for SAFE_TO_CHANGE, unless changes are allowed.
    "delete" begins afresh, "raise" refuses a directory that is not empty, "ask" asks on a terminal and is refused where
    there is none. `columns` are the metrics to show on the console; `sinks` get every event too.
    """
    path = Path(log_path).expanduser().resolve()
    resumes = _settle(path, behavior_if_exists)
    settings = config_to_dict(config)
    changes = changed_fields(_read_config(path)["config"], settings) if resumes else {}
    if not allow_config_changes:
        _refuse_unsafe(changes, path)
    path.mkdir(parents=True, exist_ok=True)
    stored = {"class": class_path(type(config)), "config": settings}
    write_file(path / CONFIG_FILE, json.dumps(stored, indent=1).encode())
    if not resumes and (diff := _git_diff()) is not None:
        write_file(path / "code.diff", diff)
    return Run(path, settings, changes, ConsoleSink(open_console(shown=console), columns), sinks)


def _settle(path: Path, behavior: BehaviorIfExists) -> bool:
    """Whether there is a run to resume, once the behaviour asked for has had its way with what is there."""
    if behavior not in get_args(BehaviorIfExists):
        raise UnknownName("behavior_if_exists", behavior, get_args(BehaviorIfExists))
    if path.exists() and not path.is_dir():
        raise InvalidRequest(f"a run needs a directory, and there is a file: {path}")
    if not path.exists() or not any(path.iterdir()):
        return False
    if behavior == "ask":
        behavior = _ask(path)
    if behavior == "raise":
        raise InvalidRequest(
            f"the directory is not empty; choose another log_path, or behavior 'resume' or 'delete': {path}"
        )
    is_run = (path / CONFIG_FILE).is_file()
    if behavior == "resume":
        return is_run
    if not is_run:
        raise InvalidRequest(f"refused to delete what is not a run, it has no {CONFIG_FILE}; do it yourself: {path}")
    doomed = path.with_name(f".{path.name}.deleted-{uuid.uuid4().hex[:8]}")
    path.rename(doomed)
    shutil.rmtree(doomed)
    return False


def _refuse_unsafe(changes: Mapping[str, str], path: Path) -> None:
    unsafe = [f"  {name}: {change}" for name, change in changes.items() if name not in SAFE_TO_CHANGE]
    if unsafe:
        listed = "\n".join(unsafe)
        raise InvalidRequest(
            f"this run was begun with another config:\n{listed}\nTake the old values, choose another log_path, delete "
            f"the run, or pass allow_config_changes=True: {path}"
        )


def _ask(path: Path) -> BehaviorIfExists:
    if not sys.stdin.isatty():
        raise InvalidRequest(
            f"the directory is not empty and there is no terminal to ask on; choose behavior 'resume', 'delete' or "
            f"'raise': {path}"
        )
    from rich.prompt import Prompt

    behaviors: dict[str, BehaviorIfExists] = {"resume": "resume", "delete": "delete", "stop": "raise"}
    return behaviors[Prompt.ask(f"{path} is not empty", choices=list(behaviors), default="resume")]


def _read_config(path: Path) -> "dict[str, dict[str, JsonValue]]":
    try:
        return json.loads((path / CONFIG_FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise StovetopError(f"this is not a run, {CONFIG_FILE} cannot be read ({error}): {path}") from error


def _git_diff() -> bytes | None:
    """The commit and what differs from it in the working directory; None outside a repository."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, check=True).stdout
        diff = subprocess.run(["git", "diff", "HEAD"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return b"# commit " + commit + diff


@contextmanager
def _logging_to(path: Path, console: ConsoleSink) -> Generator[None]:
    """While open, what the package logs goes to logs.log, and to the console unless the program shows it by itself.
    Only the logger "stovetop" is touched, and left as it was."""
    logger = logging.getLogger("stovetop")
    file = logging.FileHandler(path / "logs.log", encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    shown = console.log_handler()
    shown.addFilter(lambda record: record.exc_info is None)  # tracebacks are for the file: the caller shows the error
    handlers = [file] if logging.getLogger().handlers else [file, shown]
    level = logger.level
    logger.setLevel(logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(level)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


# ---- a run that is open ----------------------------------------------------------------------------------------------


class Run:
    """Made by `open_run`. Use within `with`."""

    def __init__(
        self,
        path: Path,
        settings: "Mapping[str, JsonValue]",
        changes: Mapping[str, str],
        console: ConsoleSink,
        sinks: Sequence[Sink],
    ) -> None:
        self.path = path
        self.stream = EventStream([MetricsFile(path / METRICS_FILE), EventsFile(path / EVENTS_FILE), console, *sinks])
        self._settings = settings
        self._changes = changes
        self._console = console
        self._stack = ExitStack()
        self._last_step = _last_step(path)
        self._began_s = time.monotonic()

    def __enter__(self) -> Self:
        self._stack.enter_context(_logging_to(self.path, self._console))
        self.stream.emit("run.start", path=str(self.path))
        for name, change in self._changes.items():
            self.stream.emit("run.config_changed", field=name, change=change)
        self.stream.log_hparams(self._settings)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        outcome = "completed" if kind is None else kind.__name__
        if isinstance(error, Exception):
            log.error("the run stopped", exc_info=error)
        self.stream.emit("run.stop", seconds=time.monotonic() - self._began_s, outcome=outcome)
        self.stream.close()
        self._stack.close()

    def start_at(self, step: int) -> None:
        """Call it before the first step, with the step that a resumed run goes on from. Rows of metrics.jsonl from
        there on belong to steps that run again: they are dropped, and metrics.jsonl.pre_resume_N keeps a copy."""
        file = self.path / METRICS_FILE
        rows = read_rows(file)
        kept = [row for row in rows if row["step"] < step]
        if len(kept) < len(rows):
            number = 1 + len(list(self.path.glob(f"{METRICS_FILE}.pre_resume_*")))
            write_file(self.path / f"{METRICS_FILE}.pre_resume_{number}", file.read_bytes())
            write_file(file, b"".join(json.dumps(row).encode() + b"\n" for row in kept))
            log.info(
                "dropped %d rows of %s from step %d on, which run again", len(rows) - len(kept), METRICS_FILE, step
            )
        self._last_step = _last_step(self.path)
        if step > 0:
            self.stream.emit("run.resume", step=step, num_rows_dropped=len(rows) - len(kept))

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


def _last_step(path: Path) -> int:
    return max((int(row["step"]) for row in read_rows(path / METRICS_FILE)), default=-1)


# ---- a run that is read again ----------------------------------------------------------------------------------------


class Series(NamedTuple):
    steps: list[int]
    values: list[float]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run left behind."""

    path: Path
    config: "Mapping[str, JsonValue]"
    config_class: str  # "module:name"
    metrics: Sequence[Mapping[str, float]]  # one a step, in order, each with "step"
    events: Sequence[Event]

    def series(self, metric: str) -> Series:
        """The steps that have this metric, and its values."""
        rows = [row for row in self.metrics if metric in row]
        if not rows:
            raise UnknownName("metric", metric, {key for row in self.metrics for key in row}, hint=str(self.path))
        return Series([int(row["step"]) for row in rows], [row[metric] for row in rows])

    def config_as(self, config_class: type[ConfigT]) -> ConfigT:
        """The config as a value again, checked field by field."""
        from pydantic import TypeAdapter, ValidationError

        names = [field.name for field in fields(config_class)]
        for name in self.config:
            if name not in names:
                raise UnknownName(f"field of {config_class.__name__}", name, names, hint=str(self.path))
        try:
            return TypeAdapter(config_class).validate_python(dict(self.config))
        except ValidationError as error:
            raise InvalidRequest(f"the config of {self.path} is no {config_class.__name__}: {error}") from error


def load(path: str | Path) -> RunRecord:
    """The record of the run in this directory, which may still be running."""
    path = Path(path).expanduser().resolve()
    stored = _read_config(path)
    metrics = [{key: decode_number(value) for key, value in row.items()} for row in read_rows(path / METRICS_FILE)]
    events = [event_from_row(row) for row in read_rows(path / EVENTS_FILE)]
    return RunRecord(path, stored["config"], str(stored["class"]), metrics, events)
