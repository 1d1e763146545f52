"""What a sweep has come to, as a table: for the commands sweep and report."""

import json
from pathlib import Path

from stovetop.cli.tables import print_table
from stovetop.sweeps.results import Results, as_table, plot_fields, results_of
from stovetop.sweeps.running import Asked
from stovetop.tracking.events import encode_number

PLOT = "sweep.png"


def show_sweep(
    folder: Path, asked: Asked, metric: str | None = None, goal: str | None = None, *, as_json: bool = False
) -> None:
    """What has come of it so far; the plot is drawn anew."""
    results = results_of(folder, asked, metric, goal)
    if as_json:
        print(json.dumps(_as_json(results), indent=1))
        return
    print(f"{results.metric} at the end of each run, {'less' if results.is_less_better else 'more'} is better")
    print_table(as_table(results))
    if (plot := plot_fields(folder / PLOT, results)) is not None:
        print(f"plot: {plot}")


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
