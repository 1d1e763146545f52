"""A report as Markdown, as JSON, and as the few lines that a terminal shows."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stovetop.reports import listing
from stovetop.reports.contents import Contents, Metric
from stovetop.reports.listing import as_cells
from stovetop.reports.views import (
    Part,
    Shown,
    differences,
    evaluation_steps,
    measured,
    pages_of,
    parts_of,
    shown_of,
)
from stovetop.tracking.console import format_number, markdown_table
from stovetop.tracking.events import encode_number

if TYPE_CHECKING:
    from pydantic import JsonValue

COLUMNS = ("metric", "first", "last", "lowest", "highest")  # of a table of metrics


# ---- Markdown --------------------------------------------------------------------------------------------------------


def markdown_of(runs: Sequence[Contents]) -> str:
    """What the page says, but for the plots: metrics are a table with their first, last, lowest and highest value."""
    shown = shown_of(runs)
    labels = [each.label for each in shown]
    blocks = [f"# Report: {', '.join(labels)}"]
    for each in shown:
        blocks += _run(each)
    if len(shown) > 1 and (different := differences(shown)):
        blocks += ["## What differs", markdown_table(["field", *labels], [[name, *cells] for name, cells in different])]
    for part in parts_of(shown):
        blocks += _part(part)
    for each in shown:
        blocks += _words(each)
    return "\n\n".join(blocks) + "\n"


def _run(shown: Shown) -> list[str]:
    run, cells = shown.contents, as_cells(shown.contents.standing)
    facts = {"recipe": cells["recipe"], "step": cells["step"], "began": cells["began"], "time": cells["time"]}
    lines = [f"**{cells['state']}**", *(f"{name}: {value}" for name, value in facts.items() if value)]
    lines += [
        f"folder: `{run.standing.run}`",
        *(f"phase {each.standing.phase}: {as_cells(each.standing)['state']}" for each in run.phases),
    ]
    if (command := run.go_on()) is not None:
        lines.append(f"to go on: `{command}`")
    lines += [f"damaged: {each}" for each in run.whole_damage()]
    tables = [block for table in run.tables for block in (f"### {table.title}", table.text)]
    return [f"## {shown.label}", "\n".join(f"- {line}" for line in lines), *tables]


def _part(part: Part) -> list[str]:
    blocks: list[str] = []
    for each in part.shown:
        title = " ".join(filter(None, (each.label, part.title)))
        run = each.contents
        if run.curves:
            blocks += [f"## Metrics: {title}", markdown_table(COLUMNS, [metric[:5] for metric in run.metrics()])]
        steps, _ = evaluation_steps(run.evaluations)
        if steps:
            rows = [[str(step), *(measured(one, step) for one in run.evaluations)] for step in steps]
            names = ["step", *(one.metric for one in run.evaluations)]
            blocks += [f"## Evaluations: {title}", "± is one standard error.", markdown_table(names, rows)]
        if run.times:
            rows = [
                [row.metric, row.total_s, row.mean_s, row.max_s, "" if row.share is None else f"{row.share:.1%}"]
                for row in run.times
            ]
            names = ["metric", "total s", "mean s", "longest s", "share"]
            blocks += [f"## Where the time went: {title}", markdown_table(names, rows)]
        if run.calls:
            rows = [[row.verb, row.num, row.total_s, row.mean_s, row.max_s] for row in run.calls]
            names = ["verb", "calls", "total s", "mean s", "longest s"]
            blocks += [f"## Calls of the service: {title}", markdown_table(names, rows)]
        if run.checkpoints:
            lines = [f"- {record.name}: `{record.state_path or record.sampler_path}`" for record in run.checkpoints]
            blocks += [f"## Checkpoints: {title}", "\n".join(lines)]
    return blocks


def _words(shown: Shown) -> list[str]:
    said = [each for run in (shown.contents, *shown.contents.phases) for each in run.said]
    pages = pages_of(shown.contents.standing.run)
    blocks = [f"## Rollouts: {shown.label}", "\n".join(f"- `{page}`" for page in pages)] if pages else []
    if said:
        lines = [
            f"- {each.level} ({each.at}, {each.num} times): {each.text.splitlines()[0]}" for each in said if each.text
        ]
        blocks += [f"## Warnings and errors: {shown.label}", "\n".join(lines)]
    return blocks


# ---- JSON ------------------------------------------------------------------------------------------------------------


def json_of(run: Contents) -> dict[str, object]:
    """All of a run's report, for programs: `metrics` are summaries, the rows themselves are in metrics.jsonl."""
    return {
        **listing.as_json(run.standing),
        "num_rows": run.num_rows,
        "config": dict(run.config),
        "metrics": [_metric(metric) for metric in run.metrics()],
        "evaluations": [
            {
                "metric": each.metric,
                "steps": [int(step) for step in each.curve.steps],
                "values": [encode_number(float(value)) for value in each.curve.values],
                "errors": None
                if each.errors is None
                else [encode_number(float(value)) for value in each.errors.values],
            }
            for each in run.evaluations
        ],
        "times": [row._asdict() for row in run.times],
        "calls": [row._asdict() for row in run.calls],
        "checkpoints": [dict(record.to_dict()) for record in run.checkpoints],
        "words": [each._asdict() for each in run.said],
        "files": list(run.files),
        "rollouts": [str(page) for page in pages_of(run.standing.run)],
        "go_on": run.go_on(),
        "damage": list(run.damage),
        "phases": [json_of(phase) for phase in run.phases],
    }


def _metric(metric: Metric) -> "dict[str, JsonValue]":
    """A number that is none has no JSON, and becomes its name."""
    return {name: value if isinstance(value, str) else encode_number(value) for name, value in metric._asdict().items()}


# ---- on a terminal ---------------------------------------------------------------------------------------------------


def summary_of(run: Contents) -> str:
    """One line."""
    cells = as_cells(run.standing)
    rows = "" if run.phases else f", {run.num_rows} rows of metrics"
    took = f", {cells['time']}" if cells["time"] else ""
    return f"{run.standing.run}: {run.standing.recipe}, {cells['state']}{rows}{took}"


def table_of(run: Contents) -> tuple[list[dict[str, str]], list[str]]:
    """The metrics that change, as rows of a table, and what is the same in every row; of times, that of a step."""
    shown = [each for each in run.metrics() if not each.metric.startswith("time/") or each.metric == "time/step"]
    changed = [{name: _cell(getattr(each, name)) for name in COLUMNS} for each in shown if each.lowest != each.highest]
    return changed, [f"{each.metric}={each.last:.4g}" for each in shown if each.lowest == each.highest]


def _cell(value: str | float) -> str:
    return value if isinstance(value, str) else format_number(value)


def page_place(folders: Sequence[Path]) -> Path:
    """Where a page is written unless another place is said: into the run; of several, into the current folder."""
    return (folders[0] if len(folders) == 1 else Path.cwd()) / "report.html"


def words_of_damage(runs: Sequence[Contents]) -> str | None:
    """What of these runs could not be read."""
    damage = [each for run in runs for each in run.whole_damage()]
    return (
        None
        if not damage
        else "parts of what was asked for could not be read:" + "".join(f"\n  {each}" for each in damage)
    )
