"""Where the time went: sums over all steps from the rows of metrics, and, from the end of events.jsonl, what stages of
the last steps did when, as bars over time.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from stovetop.reports.curves import ENGINE, TIMES, Curve
from stovetop.reports.drawing import Bar
from stovetop.tracking.events import Event
from stovetop.tracking.page import visible

LAST_STEPS = 6  # that are drawn
MOST_BARS = 600
SHORT = 0.002  # of the time that is drawn: a stage that never takes as much cannot be seen, and has no row
WHOLE = ("time/step", "time/total")  # of a step, not of a part of it


class TimeRow(NamedTuple):
    """One `time/` metric over all rows."""

    metric: str
    total_s: float
    num_steps: int  # that have it
    mean_s: float
    max_s: float
    share: float | None  # of the time of all steps; above 1 in sum where steps overlap. None: it is no part


def times_of(curves: Mapping[str, Curve]) -> list[TimeRow]:
    """The longest first, after the time of whole steps."""
    steps = curves.get("time/step")
    all_s = float(np.nansum(steps.values)) if steps is not None else 0.0
    rows = [
        TimeRow(
            name,
            float(np.nansum(curve.values)),
            len(curve.values),
            float(np.nanmean(curve.values)),
            float(np.nanmax(curve.values)),
            None if name in WHOLE or all_s == 0 else float(np.nansum(curve.values)) / all_s,
        )
        for name, curve in curves.items()
        if name.startswith(TIMES) and not name.startswith(ENGINE) and ":" not in name
        if np.isfinite(curve.values).any()
    ]
    return sorted(rows, key=lambda row: (row.share is not None, -row.total_s))


class CallRow(NamedTuple):
    """The calls of one verb, over all rows: from when each was made until it was answered."""

    verb: str
    num: int
    total_s: float
    mean_s: float
    max_s: float


def calls_of(curves: Mapping[str, Curve]) -> list[CallRow]:
    """The verbs that took longest in sum first. A row of metrics with one call of a verb has its total alone."""
    rows: list[CallRow] = []
    for name, total in curves.items():
        if not (name.startswith(TIMES) and name.endswith(":total")):
            continue
        verb = name.removeprefix(TIMES).removesuffix(":total")
        count, longest = curves.get(f"{TIMES}{verb}:count"), curves.get(f"{TIMES}{verb}:max")
        several = set[float]() if count is None else set(count.steps.tolist())
        alone = [float(value) for step, value in zip(total.steps, total.values, strict=True) if step not in several]
        num = len(alone) + (0 if count is None else int(np.nansum(count.values)))
        all_s = float(np.nansum(total.values))
        max_s = max(alone, default=0.0) if longest is None else max(*alone, 0.0, float(np.nanmax(longest.values)))
        rows.append(CallRow(verb, num, all_s, all_s / max(1, num), max_s))
    return sorted(rows, key=lambda row: -row.total_s)


class Timeline(NamedTuple):
    """The last steps, in seconds since the first bar."""

    bars: list[Bar]
    marks_s: list[float]  # where a row was logged
    first_step: int
    last_step: int
    too_short: list[str]  # stages without a row


def timeline_of(events: Sequence[Event]) -> Timeline | None:
    """The stages of the last steps that have begun and ended among these events; None where there is none. A stage that
    still runs ends with the last event."""
    if not events:
        return None
    begun: dict[tuple[str, int], float] = {}
    spans: list[tuple[str, int, float, float]] = []
    for event in events:
        stage = visible(event.labels.get("stage", ""))
        if not stage or event.step is None or not event.name.startswith("stage."):
            continue
        key = (stage, event.step)
        if event.name == "stage.start":
            begun[key] = event.time
        elif key in begun:
            spans.append((*key, begun.pop(key), event.time))
    spans += [(*key, begin_s, events[-1].time) for key, begin_s in begun.items()]
    if not spans:
        return None
    last = max(step for _, step, *_ in spans)
    shown = [span for span in spans if span[1] > last - LAST_STEPS][-MOST_BARS:]
    shown.sort(key=lambda span: span[2])
    zero_s = shown[0][2]
    seen_s = SHORT * (max(end_s for *_, end_s in shown) - zero_s)
    seen = {stage for stage, _, begin_s, end_s in shown if end_s - begin_s >= seen_s}
    bars = [
        Bar(stage, begin_s - zero_s, end_s - zero_s, step, f"{stage}, step {step}: {end_s - begin_s:.3g} s")
        for stage, step, begin_s, end_s in shown
        if stage in seen
    ]
    ends_s = [max(end_s for _, at, _, end_s in shown if at == step) - zero_s for step in {span[1] for span in shown}]
    too_short = list(dict.fromkeys(stage for stage, *_ in shown if stage not in seen))
    return Timeline(bars, sorted(ends_s), min(step for _, step, *_ in shown), last, too_short)
