"""What a run has come to, from its files: how far it is, what its metrics were, and what it left."""

import argparse
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from stovetop.checkpoints import load_checkpoints_file
from stovetop.cli.disk import show_disk_use
from stovetop.cli.runs import run_in
from stovetop.cli.sweep_table import show_sweep
from stovetop.cli.tables import filled, print_table, text_width, watch_table
from stovetop.cli.words import Action
from stovetop.errors import InvalidRequest
from stovetop.reports import listing
from stovetop.reports.listing import list_runs, rows_of, run_folders
from stovetop.reports.standing import recipe_of, standing_of
from stovetop.run_folder import is_run
from stovetop.runs import load
from stovetop.sweeps.running import is_sweep, read_sweep
from stovetop.tracking.console import format_number
from stovetop.tracking.events import encode_number

TIMES = "time/"  # of a metric that is a number of seconds
WATCH_EVERY_S = 2.0
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
    state: str  # see `standing.Standing`
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
        standing_of(folder).state,
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


# ---- the commands ----------------------------------------------------------------------------------------------------


def runs(words: Sequence[str]) -> Action:
    parser = argparse.ArgumentParser(
        "stovetop runs",
        description="The runs in a folder, and in those within it: how far each is, its last numbers, since when.",
        epilog="states: running; complete; stopped, that is interrupted or killed; failed, with the reason; damaged,\n"
        "with the file. A run that is not complete goes on with stovetop resume RUN.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="?", default="runs", help="where they are (default: runs)")
    parser.add_argument("--json", action="store_true", help="for programs: a list of objects")
    parser.add_argument("--watch", action="store_true", help="keep the table up to date, until Ctrl-C")
    parser.add_argument("--du", action="store_true", help="what they take of the disk, the largest first")
    options = parser.parse_args(words)
    if options.watch and (options.json or options.du):
        raise InvalidRequest("--json and --du are one answer, and --watch does not end; leave one of them out")
    folder = Path(options.folder)
    if not folder.is_dir():
        raise InvalidRequest(f"there is no such folder: {options.folder!r}; runs are made by `stovetop run RECIPE`")
    if options.du:
        return lambda: show_disk_use(run_folders(folder), as_json=options.json)
    return partial(_watch_runs, folder) if options.watch else partial(_show_runs, folder, as_json=options.json)


def _show_runs(folder: Path, *, as_json: bool) -> None:
    standings = list(list_runs(folder))
    if as_json:
        print(json.dumps([listing.as_json(standing) for standing in standings], indent=1))
    elif standings:
        print_table(rows_of(standings))
    else:
        print(f"no runs in {folder}")


def _watch_runs(folder: Path) -> None:
    with suppress(KeyboardInterrupt):  # which is how it is meant to end
        watch_table(lambda: rows_of(list(list_runs(folder))), WATCH_EVERY_S)


def report(words: Sequence[str]) -> Action:
    parser = argparse.ArgumentParser(
        "stovetop report",
        description="What a run has come to: its metrics, and what it left; or a sweep: its runs, the best first.",
    )
    parser.add_argument("run", help="its folder, such as runs/sl_basic or runs/sweep_sl_basic")
    parser.add_argument("--json", action="store_true", help="for programs: one object with all of it")
    options = parser.parse_args(words)
    if is_sweep(sweep := Path(options.run)):
        asked = read_sweep(sweep)
        return lambda: show_sweep(sweep, asked, as_json=options.json)
    folder = run_in(options.run)
    return lambda: show_report(report_of(folder), as_json=options.json)
