"""What a sweep has come to: for the commands sweep and report, which write its page or print its table."""

import json
from pathlib import Path
from typing import Literal

from stovetop.cli.tables import print_table
from stovetop.durable import write_file
from stovetop.errors import StovetopError
from stovetop.reports.contents import contents_of
from stovetop.reports.drawing import NUM_COLOURS
from stovetop.reports.page import Lead, page_of
from stovetop.run_folder import is_run
from stovetop.sweeps.results import Results, as_table, plot_fields, results_of
from stovetop.sweeps.running import Asked
from stovetop.tracking.console import markdown_table
from stovetop.tracking.events import encode_number

PLOT, PAGE = "sweep.png", "report.html"

Form = Literal["page", "json", "markdown"]


def show_sweep(folder: Path, asked: Asked, form: Form = "page", to: Path | None = None) -> None:
    """Prints the table of what has come of it so far; and, as a page, writes that with the curves of its best runs,
    into its folder unless `to` says where."""
    results = results_of(folder, asked)
    title = f"{results.metric} at the end of each run, {'less' if results.is_less_better else 'more'} is better"
    table = as_table(results)
    match form:
        case "json":
            print(json.dumps(_as_json(results), indent=1))
        case "markdown":
            print(f"{title}\n\n{markdown_table(list(table[0]), [list(row.values()) for row in table])}")
        case "page":
            print(title)
            print_table(table)
            print(f"the page: {_write_page(folder, results, title, to)}")
    if results.damaged:
        listed = "".join(f"\n  {each}" for each in results.damaged)
        raise StovetopError(f"runs that are damaged have no value in the table:{listed}")


def _write_page(folder: Path, results: Results, title: str, to: Path | None) -> Path:
    """As many runs as a plot has colours."""
    plot = plot_fields(folder / PLOT, results)
    best = [result.folder for result in results.best_first() if is_run(result.folder)][:NUM_COLOURS]
    num_runs = len(results.results)
    about = title if len(best) == num_runs else f"{title}; below, the {len(best)} best of {num_runs} runs"
    lead = Lead(f"{folder.name}: {about}", as_table(results), None if plot is None else plot.read_bytes())
    to = (to or folder / PAGE).expanduser().resolve()
    write_file(to, page_of([contents_of(run) for run in best], to, lead).encode())
    return to


def _as_json(results: Results) -> dict[str, object]:
    return {
        "metric": results.metric,
        "goal": "min" if results.is_less_better else "max",
        "points": [
            {
                "point": dict(row.point),
                "mean": encode_number(row.mean),
                "stderr": encode_number(row.stderr),
                "values": row.values,
            }
            for row in results.rows
        ],
        "runs": [
            {"point": dict(result.point), "folder": str(result.folder), "value": result.value}
            for result in results.results
        ],
    }
