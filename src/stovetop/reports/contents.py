"""What a run has come to, read from its files: all that a report shows, as values. A file that is damaged, or a row of
it, is named, and the rest is read all the same.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from stovetop.checkpoints import CheckpointRecord
from stovetop.durable import parse_last_rows, parse_rows
from stovetop.errors import StovetopError
from stovetop.kitchen.phases import Listed, phases_in
from stovetop.recipes import RECIPES
from stovetop.reports.curves import Columns, Curve
from stovetop.reports.standing import Standing, standing_of
from stovetop.reports.timeline import CallRow, Timeline, TimeRow, calls_of, timeline_of, times_of
from stovetop.reports.words import Said, said_in
from stovetop.retention import remaining
from stovetop.run_folder import EVENTS_FILE, METRICS_FILE, is_run, read_plan
from stovetop.stored_configs import read_config
from stovetop.tracking.events import TEXT, Event, event_from_row, metrics_from_row
from stovetop.tracking.rollout_rows import RolloutRow, last_rollouts

if TYPE_CHECKING:
    from pydantic import JsonValue

T = TypeVar("T")

EVENTS_BYTES = (
    2 * 1024 * 1024
)  # of the end of events.jsonl: the last steps, and the tables that a recipe shows at its end
STDERR = "stderr"
NUM_ROLLOUTS = 16  # of the last step, to read on the page; a rollout of 4,000 tokens takes 50 kB of it


class Metric(NamedTuple):
    """One metric over all rows that have it."""

    metric: str
    first: float
    last: float
    lowest: float
    highest: float
    mean: float
    num_steps: int


class Evaluation(NamedTuple):
    """What was measured on examples that are not trained on."""

    metric: str
    curve: Curve
    errors: Curve | None  # the standard error of each, where there is one


class Table(NamedTuple):
    """That a recipe has shown: a title, and Markdown."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Contents:
    """Of a run, which may still be running, or of a phase of one."""

    standing: Standing
    columns: tuple[str, ...]  # the metrics that its recipe shows
    config: "Mapping[str, JsonValue]"
    num_rows: int
    curves: Mapping[str, Curve]  # by metric
    evaluations: Sequence[Evaluation]
    times: Sequence[TimeRow]
    calls: Sequence[CallRow]
    timeline: Timeline | None
    tables: Sequence[Table]
    checkpoints: Sequence[CheckpointRecord]
    said: Sequence[Said]
    rollouts: Sequence[RolloutRow]  # of the last step that has any
    files: Sequence[str]  # plots and tables, in its folder
    damage: Sequence[str] = ()  # what could not be read
    phases: "Sequence[Contents]" = field(default_factory=lambda: list[Contents]())  # that have begun

    @property
    def name(self) -> str:
        return self.standing.run.name

    def metrics(self) -> list[Metric]:
        """In the order of the rows."""
        return [_metric(name, curve) for name, curve in self.curves.items()]

    def whole_damage(self) -> list[str]:
        """With that of its phases."""
        return [*self.damage, *(each for phase in self.phases for each in phase.whole_damage())]

    def go_on(self) -> str | None:
        """The command that goes on with it; None where nothing is left to do, or it is at work."""
        if self.standing.state in ("complete", "running") or self.standing.phase:
            return None
        if self.standing.recipe in RECIPES or self.standing.recipe.endswith(".py"):
            return f"stovetop resume {shlex.quote(str(self.standing.run))}"
        return None


def contents_of(folder: Path) -> Contents:
    """Of the run in this folder, and of its phases."""
    damage: list[str] = []

    def part(read: Callable[[], T], without: T) -> T:
        try:
            return read()
        except StovetopError as error:
            damage.append(str(error))
            return without

    none: list[Event] = []
    columns = Columns()
    part(lambda: parse_rows(folder / METRICS_FILE, lambda row: columns.add(metrics_from_row(row))), list[None]())
    events = part(lambda: parse_last_rows(folder / EVENTS_FILE, event_from_row, EVENTS_BYTES), none)
    curves = columns.curves()
    return Contents(
        standing_of(folder),
        read_plan(folder).columns,
        part(lambda: read_config(folder).config, {}),
        columns.num_rows,
        curves,
        _evaluations(curves, events),
        times_of(curves),
        calls_of(curves),
        timeline_of(events),
        [Table(event.labels.get("title", ""), event.labels.get("text", "")) for event in events if event.name == TEXT],
        part(lambda: remaining(folder), list[CheckpointRecord]()),
        part(lambda: said_in(folder), list[Said]()),
        part(lambda: last_rollouts(folder, NUM_ROLLOUTS), list[RolloutRow]()),
        sorted(file.name for file in folder.iterdir() if file.suffix in (".png", ".md", ".html")),
        damage,
        [
            contents_of(phase.folder)
            for phase in part(lambda: phases_in(folder), list[Listed]())
            if is_run(phase.folder)
        ],
    )


def _metric(name: str, curve: Curve) -> Metric:
    """Of the values that are numbers, if any."""
    values = curve.values[np.isfinite(curve.values)]
    found = values if len(values) else curve.values
    low, high, mean = float(found.min()), float(found.max()), float(found.mean())
    return Metric(name, float(curve.values[0]), float(curve.values[-1]), low, high, mean, len(curve.values))


def _evaluations(curves: Mapping[str, Curve], events: Sequence[Event]) -> list[Evaluation]:
    """The metrics of `eval.complete`, those that have a standard error, and those called test/..."""
    told = {name for event in events if event.name == "eval.complete" for name in event.values}
    errors = {name: _errors_of(name, curves) for name in curves}
    return [
        Evaluation(name, curve, errors[name])
        for name, curve in curves.items()
        if not name.endswith(STDERR) and (name in told or name.startswith("test/") or f"{name}/{STDERR}" in curves)
    ]


def _errors_of(name: str, curves: Mapping[str, Curve]) -> Curve | None:
    """`<name>/stderr`; of an evaluator that measures one thing, `stderr` beside it. Of a mean reward, s / sqrt(n) of
    the spread and the number of episodes that are beside it."""
    if name.endswith("/reward/total"):
        spread = curves.get(f"{name.removesuffix('total')}std")
        num = curves.get(f"{name.removesuffix('reward/total')}total_episodes")
        if spread is not None and num is not None and len(spread.values) == len(num.values):
            return Curve(spread.steps, spread.values / np.sqrt(np.maximum(num.values, 1)))
    beside = f"{name.rpartition('/')[0]}/{STDERR}".lstrip("/")
    own = curves.get(f"{name}/{STDERR}")
    return own if own is not None else curves.get(beside) if name.endswith("win_rate") else None
