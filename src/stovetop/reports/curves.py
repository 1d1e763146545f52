"""From rows of metrics to what is drawn: curves by metric, in groups, thinned; which are smoothed, and which are drawn
on a logarithmic scale.

Rules, which the page states too:

- thinned: of more than MOST_POINTS points, each of MOST_POINTS / 2 runs of neighbours gives its lowest and its highest,
  so that no peak is lost; more than MANY_LINES lines in one plot share the points of so many, down to FEWEST_POINTS;
- smoothed: a curve of at least SMOOTH_FROM points that turns at more than a quarter of them is drawn faint, and over it
  the mean of the last SMOOTH_SHARE of its points;
- logarithmic: all values are above zero, and the largest is more than LOG_FROM times the smallest.
"""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stovetop.tracking.plots import mean_of_last

Numbers = npt.NDArray[np.float64]

MOST_POINTS = 600  # of a curve: about two a pixel column of a plot on a page
MANY_LINES, FEWEST_POINTS = 8, 40  # a page of a hundred runs stays small: more lines hide each other
SMOOTH_FROM, SMOOTH_SHARE, TURNS = 40, 1 / 25, 0.25
LOG_FROM = 100.0
TIMES = "time/"  # of a metric that is a number of seconds, or says what an engine did in them:
ENGINE = "time/engine/"
COUNTERS = ("epoch", "progress", "progress/batch", "progress/done_frac")  # they only count steps


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """One metric of one run, over the steps that have it."""

    steps: Numbers
    values: Numbers

    @property
    def is_constant(self) -> bool:
        """One value at all steps, however many."""
        return len(self.values) > 0 and bool((self.values == self.values[0]).all())

    @property
    def num_not_finite(self) -> int:
        return int((~np.isfinite(self.values)).sum())


class Columns:
    """Rows of metrics as they are read, by metric: a run of 100,000 steps is held once, and as numbers."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._steps: dict[str, array[float]] = {}
        self._values: dict[str, array[float]] = {}

    def add(self, row: Mapping[str, float]) -> None:
        """A row with its step."""
        self.num_rows += 1
        step = row["step"]
        for name, value in row.items():
            if name not in self._values:
                self._values[name], self._steps[name] = array("d"), array("d")
            self._values[name].append(value)
            self._steps[name].append(step)

    def curves(self) -> dict[str, Curve]:
        """In the order in which metrics first appear."""
        return {
            name: Curve(np.asarray(self._steps[name]), np.asarray(values))
            for name, values in self._values.items()
            if name != "step"
        }


def most_points(num_lines: int) -> int:
    """Of each curve of a plot with so many."""
    return max(FEWEST_POINTS, MOST_POINTS * MANY_LINES // max(MANY_LINES, num_lines))


def thinned(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """The same curve in at most `most` points; see the top of this file. What is not finite stays a gap where a whole
    run of neighbours is not."""
    num = len(curve.values)
    if num <= most:
        return curve
    num_buckets = most // 2
    starts = np.arange(num_buckets) * num // num_buckets
    finite = np.isfinite(curve.values)
    low = np.where(finite, curve.values, math.inf)
    high = np.where(finite, curve.values, -math.inf)
    kept = set[int]()
    for start, end in zip(starts, [*starts[1:], num], strict=True):
        kept |= {int(start + low[start:end].argmin()), int(start + high[start:end].argmax())}
    chosen = np.asarray(sorted(kept))
    return Curve(curve.steps[chosen], curve.values[chosen])


def smoothed(curve: Curve) -> Curve | None:
    """What is drawn over a noisy curve, of all of its points, before it is thinned; None for one that is smooth or
    short."""
    values = curve.values[np.isfinite(curve.values)]
    if len(values) < SMOOTH_FROM:
        return None
    rises = np.sign(np.diff(values))
    if (rises[1:] * rises[:-1] < 0).sum() <= TURNS * len(values):
        return None
    return Curve(curve.steps, np.asarray(mean_of_last(curve.values, window(len(values))), np.float64))


def window(num_points: int) -> int:
    """How many points a smoothed curve is the mean of."""
    return max(5, round(num_points * SMOOTH_SHARE))


def is_logarithmic(curves: Iterable[Curve]) -> bool:
    """Of the curves of one plot."""
    found = [curve.values[np.isfinite(curve.values)] for curve in curves]
    values = np.concatenate(found) if found else np.zeros(0)
    return len(values) > 1 and bool(values.min() > 0 and values.max() > LOG_FROM * values.min())


# ---- groups ----------------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Metrics that belong together."""

    title: str
    metrics: list[str]


def grouped(names: Iterable[str], headline: Sequence[str] = ()) -> list[Group]:
    """First what the recipe shows; then by the first word of the name, with those first that are measured on examples
    held out. Times are not among them, which have a part of the page of their own, nor what only counts steps."""
    groups: dict[str, list[str]] = {}
    shown = [name for name in names if _is_drawn(name)]
    first = [name for name in headline if name in shown]
    for name in shown:
        if name not in first:
            prefix, _, rest = name.removeprefix(TIMES).partition("/")
            groups.setdefault(prefix if rest else "", []).append(name)
    order = sorted(groups, key=lambda prefix: (prefix != "test", prefix != "", prefix))
    listed = [Group(prefix or "of every step", groups[prefix]) for prefix in order]
    return [Group("at a glance", first), *listed] if first else listed


def _is_drawn(name: str) -> bool:
    if name.startswith(TIMES):
        return name.startswith(ENGINE)
    return not name.endswith("/stderr") and name not in COUNTERS
