"""One report of several runs, as what its page and its Markdown show: runs side by side, phase by phase."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stovetop.reports.contents import Contents, Evaluation
from stovetop.reports.curves import Curve, grouped
from stovetop.tracking.console import format_number

if TYPE_CHECKING:
    from pydantic import JsonValue

MOST_EVALUATIONS = 24  # rows of a table: the first, the last, and others between them
MOST_PAGES = 12  # of rollouts, the last ones


@dataclass(frozen=True, slots=True)
class Shown:
    """A run, or a phase of one, with what tells it from the others."""

    label: str
    colour: int
    contents: Contents


class Part(NamedTuple):
    """Runs that are compared: all of them, or one phase of each."""

    title: str  # of the phase; "" for runs
    shown: list[Shown]


def labels_of(folders: Sequence[Path]) -> list[str]:
    """The names of the folders, with as much of their paths as tells them apart."""
    names = [folder.name for folder in folders]
    if len(set(names)) == len(names):
        return names
    common = os.path.commonpath([folder.parent for folder in folders])
    return [str(folder.relative_to(common)) for folder in folders]


def shown_of(runs: Sequence[Contents]) -> list[Shown]:
    """Each with the name and the colour that it has in all of a report."""
    labels = labels_of([each.standing.run for each in runs])
    return [Shown(label, colour, run) for colour, (label, run) in enumerate(zip(labels, runs, strict=True))]


def parts_of(whole: Sequence[Shown]) -> list[Part]:
    """The runs themselves, as far as they have rows; then their phases, in order, those of one name together."""
    phases: dict[str, list[Shown]] = {}
    for each in whole:
        for phase in each.contents.phases:
            phases.setdefault(phase.standing.phase, []).append(Shown(each.label, each.colour, phase))
    own = [each for each in whole if not each.contents.phases]
    return [*([Part("", own)] if own else []), *(Part(name, phases[name]) for name in sorted(phases))]


# ---- config ----------------------------------------------------------------------------------------------------------


def flat(config: "Mapping[str, JsonValue]", prefix: str = "") -> dict[str, str]:
    """Each field as text, nested ones with dots."""
    cells: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            cells |= flat(value, f"{prefix}{name}.")
        else:
            cells[prefix + name] = value if isinstance(value, str) else json.dumps(value)
    return cells


def differences(shown: Sequence[Shown]) -> list[tuple[str, list[str]]]:
    """The fields that are not the same in all of them, with the value of each; but for the folder."""
    configs = [flat(each.contents.config) for each in shown]
    names = dict.fromkeys(name for config in configs for name in config if name != "log_path")
    rows = [(name, [config.get(name, "(absent)") for config in configs]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


# ---- metrics ---------------------------------------------------------------------------------------------------------


class PlotGroup(NamedTuple):
    """Plots under a heading: each a metric, and the runs that have it."""

    title: str
    metrics: list[tuple[str, list[tuple[Shown, Curve]]]]


def plots_of(part: Part) -> tuple[list[PlotGroup], list[tuple[str, str]]]:
    """What is drawn, and what is the same in every row of all runs, with its value."""
    names = dict.fromkeys(name for each in part.shown for name in each.contents.curves)
    columns = list(dict.fromkeys(name for each in part.shown for name in each.contents.columns))
    groups: list[PlotGroup] = []
    same: list[tuple[str, str]] = []
    for title, metrics in grouped(names, columns):
        drawn: list[tuple[str, list[tuple[Shown, Curve]]]] = []
        for metric in metrics:
            curves = [(each, curve) for each in part.shown if (curve := each.contents.curves.get(metric)) is not None]
            if _is_one_value([curve for _, curve in curves]):
                same.append((metric, tidy(float(curves[0][1].values[0]))))
            else:
                drawn.append((metric, curves))
        if drawn:
            groups.append(PlotGroup(title, drawn))
    return groups, same


def tidy(value: float) -> str:
    """A whole number without decimals: rows say 8, and arrays 8.0."""
    return format_number(int(value) if value.is_integer() else value)


def _is_one_value(curves: Sequence[Curve]) -> bool:
    """Nothing to see, in a run of more than one step."""
    values = {float(curve.values[0]) for curve in curves}
    return len(values) == 1 and all(curve.is_constant for curve in curves) and max(len(c.values) for c in curves) > 1


# ---- evaluations -----------------------------------------------------------------------------------------------------


def with_error(value: float, error: float | None) -> str:
    """0.5123 ± 0.021."""
    return format_number(value) if error is None else f"{format_number(value)} ± {error:.2g}"


def measured(evaluation: Evaluation, step: float) -> str:
    """At this step; "" where it was not measured."""
    value = _at(evaluation.curve, step)
    return "" if value is None else with_error(value, _at(evaluation.errors, step))


def _at(curve: Curve | None, step: float) -> float | None:
    if curve is None:
        return None
    place = int(np.searchsorted(curve.steps, step))
    return float(curve.values[place]) if place < len(curve.steps) and curve.steps[place] == step else None


def evaluation_steps(evaluations: Sequence[Evaluation]) -> tuple[list[int], int]:
    """The steps that a table has a row for, and at how many it was measured in all."""
    steps = sorted({int(step) for evaluation in evaluations for step in evaluation.curve.steps})
    if len(steps) <= MOST_EVALUATIONS:
        return steps, len(steps)
    places = np.linspace(0, len(steps) - 1, MOST_EVALUATIONS).round().astype(int)
    return [steps[place] for place in places], len(steps)


def changing(evaluations: Sequence[Evaluation]) -> tuple[list[Evaluation], list[tuple[str, str]]]:
    """Those that a table is for; and those that were measured several times and came to the same each time, with what
    that was."""
    same = [each for each in evaluations if len(each.curve.values) > 1 and each.curve.is_constant]
    always = [(each.metric, tidy(float(each.curve.values[0]))) for each in same]
    found = [each for each in evaluations if each not in same]
    return (found, always) if found else (list(evaluations), [])


def compared(part: Part) -> list[tuple[str, list[str]]]:
    """What each metric was measured to be last, run by run; nothing where there is one run."""
    if len(part.shown) < 2:
        return []
    by_run = [{each.metric: each for each in shown.contents.evaluations} for shown in part.shown]
    names = dict.fromkeys(name for evaluations in by_run for name in evaluations)
    return [(name, [_last(evaluations.get(name)) for evaluations in by_run]) for name in names]


def _last(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return ""
    step = float(evaluation.curve.steps[-1])
    return f"{measured(evaluation, step)} (step {int(step)})"


# ---- rollouts --------------------------------------------------------------------------------------------------------


def pages_of(run: Path) -> list[Path]:
    """The pages of the last iterations, as far as a run has written any, the newest first."""
    folders = sorted((folder for folder in run.glob("iteration_*") if folder.is_dir()), reverse=True)
    pages = [page for folder in folders[:MOST_PAGES] for page in sorted(folder.glob("*.html"))]
    return pages[:MOST_PAGES]
