"""A report as one HTML page that needs nothing else: no network, no other file, and to be read no script. A small one
tells the numbers under the pointer. Light and dark, wide and narrow. What runs have written is escaped.
"""

import base64
import os
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stovetop.reports import curves, drawing
from stovetop.reports.contents import STDERR, Contents
from stovetop.reports.listing import as_cells, duration
from stovetop.reports.views import (
    Part,
    Shown,
    changing,
    compared,
    differences,
    evaluation_steps,
    flat,
    measured,
    pages_of,
    parts_of,
    plots_of,
    shown_of,
)
from stovetop.tracking.console import format_number
from stovetop.tracking.page import html_page, templates, visible
from stovetop.tracking.rollout_pages import rollouts_css, rollouts_fragment, rollouts_script

if TYPE_CHECKING:
    from markupsafe import Markup


class Lead(NamedTuple):
    """What stands before the runs, where they belong together: a sweep."""

    title: str
    rows: Sequence[Mapping[str, str]]  # of a table; the columns are those of the first
    plot_png: bytes | None


def page_of(runs: Sequence[Contents], to: Path, lead: Lead | None = None) -> str:
    """The page, for this file: links are relative to it."""
    whole = shown_of(runs)
    title = ", ".join(each.label for each in whole) if lead is None else lead.title
    body = (
        templates()
        .from_string(_asset("report.html"))
        .render(
            lead=None if lead is None else _lead(lead),
            runs=[_run(each, to) for each in whole],
            differences=differences(whole) if len(whole) > 1 else [],
            parts=[_part(part, to) for part in parts_of(whole)],
            made_at=time.strftime("%Y-%m-%d %H:%M:%S"),
            rules={
                "most_points": curves.MOST_POINTS,
                "smooth_from": curves.SMOOTH_FROM,
                "log_from": f"{curves.LOG_FROM:.0f}",
                "smooth_share": f"{curves.SMOOTH_SHARE:.0%}",
            },
            markdown=_markdown,
            duration=duration,
            short=format_number,
        )
    )
    style, script = _asset("report.css"), _asset("report.js")
    if any(run.rollouts for each in runs for run in (each, *each.phases)):
        style, script = style + rollouts_css(), f"{script}\n{rollouts_script()}"
    return html_page(f"report: {title}", body, css=style, script=script)


def _lead(lead: Lead) -> dict[str, Any]:
    png = None if lead.plot_png is None else base64.b64encode(lead.plot_png).decode()
    return {
        "title": lead.title,
        "columns": list(lead.rows[0]),
        "rows": [list(row.values()) for row in lead.rows],
        "png": png,
    }


def _run(shown: Shown, to: Path) -> dict[str, Any]:
    """The head of the page."""
    standing = shown.contents.standing
    return {
        "label": shown.label,
        "colour": shown.colour % drawing.NUM_COLOURS,
        "cells": as_cells(standing),
        "state": standing.state,
        "reason": standing.reason,
        "folder": str(standing.run),
        "phases": [as_cells(phase.standing) | {"name": phase.standing.phase} for phase in shown.contents.phases],
        "config": flat(shown.contents.config),
        "go_on": shown.contents.go_on(),
        "damage": shown.contents.whole_damage(),
        "said": [(each, said) for each, of_each in _said(shown.contents) for said in of_each],
        "tables": shown.contents.tables,
        "files": shown.contents.files,
        "rollouts": _rollouts(shown.contents),
        "pages": [
            (f"{page.parent.name}/{page.name}", os.path.relpath(page, to.parent))
            for folder in (standing.run, *(phase.standing.run for phase in shown.contents.phases))
            for page in pages_of(folder)
        ],
    }


def _rollouts(contents: Contents) -> "Markup | None":
    """Those of the last step, of the last phase that has any."""
    from markupsafe import Markup

    rows = next((each.rollouts for each in (*reversed(contents.phases), contents) if each.rollouts), ())
    return Markup(rollouts_fragment(rows)) if rows else None


def _said(contents: Contents) -> list[tuple[str, Sequence[Any]]]:
    phases = [(phase.standing.phase, phase.said) for phase in contents.phases]
    return [("", contents.said), *phases]


def _part(part: Part, to: Path) -> dict[str, Any]:
    groups, same = plots_of(part)
    return {
        "title": part.title,
        "groups": [
            {
                "title": group.title,
                "plots": [_plot(metric, drawn) for metric, drawn in group.metrics],
            }
            for group in groups
        ],
        "same": same,
        "compared": compared(part),
        "shown": [_shown(each) for each in part.shown],
    }


def _plot(metric: str, drawn: Sequence[tuple[Shown, curves.Curve]]) -> dict[str, Any]:
    """One metric, of all runs that have it."""
    from markupsafe import Markup

    svg = drawing.line_plot(
        [
            drawing.DrawnCurve(each.label, each.colour, curve, each.contents.curves.get(f"{metric}/{STDERR}"))
            for each, curve in drawn
        ]
    )
    notes: list[str] = []
    if curves.is_logarithmic(curve for _, curve in drawn):
        notes.append("log scale")
    if any(curves.smoothed(curve) is not None for _, curve in drawn):
        notes.append(f"mean of {curves.window(max(len(curve.values) for _, curve in drawn))}")
    if num := sum(curve.num_not_finite for _, curve in drawn):
        notes.append(f"{num} not finite")
    return {"metric": metric, "svg": Markup(svg), "notes": ", ".join(notes)}


def _shown(shown: Shown) -> dict[str, Any]:
    """What each run has for itself: evaluations, times, checkpoints."""
    from markupsafe import Markup

    contents = shown.contents
    evaluations, always = changing(contents.evaluations)
    steps, num_measured = evaluation_steps(evaluations)
    timeline = contents.timeline
    return {
        "label": shown.label,
        "colour": shown.colour % drawing.NUM_COLOURS,
        "evaluations": [each.metric for each in evaluations],
        "always": always,
        "measured": [(step, [measured(each, step) for each in evaluations]) for step in steps],
        "num_measured": num_measured,
        "times": contents.times,
        "calls": contents.calls,
        "timeline": timeline,
        "chart": None if timeline is None else Markup(drawing.bar_chart(timeline.bars, marks_s=timeline.marks_s)),
        "checkpoints": [record.to_dict() for record in contents.checkpoints],
    }


def _markdown(text: str) -> "Markup":
    """HTML in it is shown as text; so is what a browser would take for a script in a link."""
    from markdown_it import MarkdownIt
    from markupsafe import Markup

    return Markup(MarkdownIt("commonmark", {"html": False}).enable("table").disable("image").render(visible(text)))


def _asset(name: str) -> str:
    return (files("stovetop.reports") / "pages" / name).read_text(encoding="utf-8")
