"""What the runs of a sweep have come to: one metric, by the values of the fields, over the seeds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from stovetop.errors import InvalidRequest, StovetopError, UnknownName
from stovetop.evaluation.estimates import mean_of_examples
from stovetop.kitchen.phases import phases_in
from stovetop.run_folder import CONFIG_FILE, is_run
from stovetop.runs import RunRecord, load
from stovetop.sweeps.points import WIDE, Point, without_seed
from stovetop.sweeps.running import Asked
from stovetop.tracking.console import format_number
from stovetop.tracking.plots import Line, Panel, plot_panels

USUAL = (  # a metric to compare runs by, the first that there is
    "test/nll",
    "test/accuracy",
    "test/env/all/correct",
    "test/env/all/reward/total",
    "env/all/reward/total",
    "train_mean_nll",
)
_LESS_IS_BETTER = ("nll", "loss", "kl", "perplexity", "error")


class Result(NamedTuple):
    """Of one run."""

    point: Point
    folder: Path
    value: float | None  # the last of the metric; None where the run has none yet


class Row(NamedTuple):
    """Of the runs that differ in the seed alone."""

    point: Point  # without the seed
    values: list[float]
    num_runs: int  # those without a value too

    @property
    def mean(self) -> float:
        """NaN where no run has a value."""
        return mean_of_examples(self.values).value if self.values else math.nan

    @property
    def stderr(self) -> float:
        """Of the mean, from the spread over seeds. NaN for fewer than two values."""
        stderr = mean_of_examples(self.values).stderr if self.values else None
        return math.nan if stderr is None else stderr


class Results(NamedTuple):
    """Of a sweep."""

    metric: str
    is_less_better: bool
    rows: list[Row]  # the best first, those without a value last
    results: list[Result]
    damaged: Sequence[str] = ()  # what is wrong with runs whose files cannot be read

    def best_first(self) -> list[Result]:
        """The runs, those without a value last."""
        return sorted(self.results, key=lambda result: _order(result.value, self.is_less_better))


def results_of(folder: Path, asked: Asked, metric: str | None = None, goal: str | None = None) -> Results:
    """What has come so far of the sweep in this folder, by this metric, or that which the sweep was begun with."""
    damaged: list[str] = []
    records = {run: _records(run, damaged) for run in asked.folders(folder)}
    metric = _metric(metric or asked.metric, [record for of_run in records.values() for record in of_run])
    goal = goal or asked.goal
    is_less_better = goal == "min" if goal is not None else any(word in metric for word in _LESS_IS_BETTER)
    results = [Result(point, run, _last(records[run], metric)) for run, point in asked.folders(folder).items()]
    return Results(metric, is_less_better, _rows(results, is_less_better), results, damaged)


def _records(run: Path, damaged: list[str]) -> list[RunRecord]:
    """Of the run and its phases, the last phase first; none where it has not begun, or is damaged."""
    try:
        folders = [*reversed([phase.folder for phase in phases_in(run)]), run]
        return [load(folder) for folder in folders if is_run(folder) and (folder / CONFIG_FILE).is_file()]
    except StovetopError as error:
        damaged.append(f"{run}: {error}")
        return []


def _metric(wanted: str | None, records: Sequence[RunRecord]) -> str:
    there = {name for record in records for row in record.metrics for name in row if name != "step"}
    if not there:
        raise StovetopError("no run of this sweep has logged a step yet")
    if wanted is not None and wanted not in there:
        told = [name for name in there if not name.startswith("time/")] or there
        raise UnknownName("metric", wanted, told)
    found = wanted or next((name for name in USUAL if name in there), None)
    if found is None:
        raise InvalidRequest(f"which metric are these runs to be compared by? metric=...: {', '.join(sorted(there))}")
    return found


def _last(records: Iterable[RunRecord], metric: str) -> float | None:
    for record in records:
        if any(metric in row for row in record.metrics):
            return record.series(metric).values[-1]
    return None


def _rows(results: Iterable[Result], is_less_better: bool) -> list[Row]:
    by_point: dict[tuple[tuple[str, str], ...], list[float | None]] = {}
    for result in results:
        by_point.setdefault(without_seed(result.point), []).append(result.value)
    rows = [
        Row(dict(point), [value for value in values if value is not None], len(values))
        for point, values in by_point.items()
    ]
    return sorted(rows, key=lambda row: _order(row.mean, is_less_better))


def _order(value: float | None, is_less_better: bool) -> float:
    if value is None or math.isnan(value):
        return math.inf
    return value if is_less_better else -value


def numeric_fields(rows: Sequence[Row]) -> Mapping[str, list[tuple[float, Row]]]:
    """The fields all of whose values are numbers, at least two: the value in each row, in order."""
    found: dict[str, list[tuple[float, Row]]] = {}
    for field in rows[0].point if rows else ():
        try:
            values = sorted(((float(row.point[field]), row) for row in rows), key=lambda each: each[0])
        except ValueError:
            continue
        if len({value for value, _ in values}) > 1:
            found[field] = values
    return found


# ---- to look at ------------------------------------------------------------------------------------------------------


def as_table(results: Results) -> list[dict[str, str]]:
    """The best first: the values of the fields, the mean of the metric over seeds, its standard error."""
    return [
        {
            **row.point,
            results.metric: format_number(row.mean) if row.values else "-",
            "stderr": format_number(row.stderr) if len(row.values) > 1 else "-",
            "runs": str(row.num_runs) if len(row.values) == row.num_runs else f"{len(row.values)} of {row.num_runs}",
        }
        for row in results.rows
    ]


def plot_fields(path: Path, results: Results) -> Path | None:
    """The metric over each field whose values are numbers: a point for each run, and the mean over all runs that share
    the value. None where there is no such field, or no value."""
    rows = [row for row in results.rows if row.values]
    panels = [_panel(field, values) for field, values in numeric_fields(rows).items()]
    if not panels:
        return None
    return plot_panels(path, panels, title=f"{results.metric} at the end of each run", y_label=results.metric)


def _panel(field: str, values: Sequence[tuple[float, Row]]) -> Panel:
    points = [(x, value) for x, row in values for value in row.values]
    xs = sorted({x for x, _ in points})
    means = [sum(y for x, y in points if x == each) / sum(x == each for x, _ in points) for each in xs]
    return Panel(
        field,
        Line("a run", [x for x, _ in points], [y for _, y in points]),
        Line("mean", xs, means),
        is_log=xs[0] > 0 and xs[-1] / xs[0] >= WIDE,
    )
