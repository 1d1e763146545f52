"""What a run has come to, from its files: how far it is, what its metrics were, and what it left."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from stovetop.checkpoints import load_checkpoints_file
from stovetop.cli.runs import recipe_of, state_of
from stovetop.cli.tables import filled, print_table, text_width
from stovetop.run_folder import is_run
from stovetop.runs import load
from stovetop.tracking.console import format_number
from stovetop.tracking.events import encode_number

TIMES = "time/"  # of a metric that is a number of seconds
COLUMNS = ("metric", "first", "last", "lowest", "highest")  # of the table


class Metric(NamedTuple):
    """One metric over all rows that have it."""

    metric: str
    first: float
    last: float
    lowest: float
    highest: float
    mean: float
    num_steps: int


@dataclass(frozen=True, slots=True)
class Report:
    """All of it."""

    run: str  # its folder
    recipe: str  # or the class of its config, where that is no recipe's
    state: str  # see `runs.state_of`
    num_rows: int
    metrics: list[Metric]
    checkpoints: list[dict[str, object]]
    files: list[str]  # plots and tables, in its folder
    phases: "list[Report]"  # that have begun, of a run of several


def report_of(folder: Path) -> Report:
    """Of a run, which may still be running."""
    from stovetop.kitchen.phases import phases_in

    record = load(folder)
    names = dict.fromkeys(name for row in record.metrics for name in row if name != "step")
    checkpoints = load_checkpoints_file(folder)
    return Report(
        str(folder),
        recipe_of(record.config_class) or record.config_class,
        state_of(folder),
        len(record.metrics),
        [_metric(name, record.series(name).values) for name in names],
        [dict(checkpoint.to_dict()) for checkpoint in checkpoints],
        sorted(file.name for file in folder.iterdir() if file.suffix in (".png", ".md", ".html")),
        [report_of(phase.folder) for phase in phases_in(folder) if is_run(phase.folder)],
    )


def _metric(name: str, values: list[float]) -> Metric:
    return Metric(name, values[0], values[-1], min(values), max(values), sum(values) / len(values), len(values))


def show_report(report: Report, *, as_json: bool) -> None:
    """Prints it."""
    if as_json:
        print(json.dumps(_report_as_json(report), indent=1))
        return
    rows = "" if report.phases else f", {report.num_rows} rows of metrics"
    print(f"{report.run}: {report.recipe}, {report.state}{rows}")
    shown = [metric for metric in report.metrics if not metric.metric.startswith(TIMES) or metric.metric == "time/step"]
    if changed := [metric for metric in shown if metric.lowest != metric.highest]:
        print_table([{name: _cell(getattr(metric, name)) for name in COLUMNS} for metric in changed])
    if constant := [f"{metric.metric}={metric.last:.4g}" for metric in shown if metric.lowest == metric.highest]:
        print(*filled(f"the same in every row: {', '.join(constant)}", "", text_width()), sep="\n")
    for checkpoint in report.checkpoints:
        print(f"checkpoint {checkpoint['name']}: {checkpoint.get('state_path') or checkpoint.get('sampler_path')}")
    if report.files:
        print(f"in its folder: {', '.join(report.files)}")
    for phase in report.phases:
        print()
        show_report(phase, as_json=False)


def _report_as_json(report: Report) -> dict[str, object]:
    return {
        **asdict(report),
        "metrics": [_as_json(metric) for metric in report.metrics],
        "phases": [_report_as_json(phase) for phase in report.phases],
    }


def _as_json(metric: Metric) -> dict[str, str | float]:
    """A number that is none has no JSON, and becomes its name."""
    return {name: value if isinstance(value, str) else encode_number(value) for name, value in metric._asdict().items()}


def _cell(value: str | float) -> str:
    return value if isinstance(value, str) else format_number(value)
