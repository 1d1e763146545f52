"""Line plots as PNG files. Uses matplotlib's objects, never pyplot: nothing global is touched, no window is opened."""

# matplotlib does not say what its keyword arguments are:
# pyright: reportUnknownMemberType=false

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from stovetop.durable import write_file
from stovetop.errors import InvalidRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind can tell apart; text and grid in greys.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_HIGHEST = 5e307  # of what is drawn: with margins, a plot of such is below the largest float
_INK, _GRID = "#333333", "#E3E3E3"


@dataclass(frozen=True, slots=True)
class Line:
    """Points in the order they are joined. A y that is not finite is a gap."""

    label: str
    x: Sequence[float]
    y: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or len(self.x) == 0:
            raise InvalidRequest(
                f"line {self.label!r} needs as many x as y, at least one: {len(self.x)}, {len(self.y)}"
            )


def plot_lines(
    path: Path, lines: Sequence[Line], *, title: str, x_label: str, y_label: str, running_mean: int = 1
) -> Path:
    """Draws the lines into one PNG. With `running_mean` of n > 1 the points themselves become faint and the mean of the
    last n stands out. Returns `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if not lines or running_mean < 1:
        raise InvalidRequest(f"a plot needs a line and running_mean >= 1: {len(lines)} lines, {running_mean}")
    figure = Figure(figsize=(7.2, 4.2), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, line in enumerate(lines):
        _draw(axes, line, _COLOURS[index % len(_COLOURS)], running_mean)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_INK, pad=12)
    axes.set_xlabel(x_label, color=_INK)
    axes.set_ylabel(y_label, color=_INK)
    _dress(axes)
    axes.margins(x=0.02)
    if all(float(x).is_integer() for line in lines for x in line.x):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(lines) > 1 or running_mean > 1:
        axes.legend(frameon=False, labelcolor=_INK, loc="best")
    return _written(figure, path)


@dataclass(frozen=True, slots=True)
class Panel:
    """One of several plots side by side: points, and a line through others."""

    x_label: str
    points: Line
    means: Line
    is_log: bool  # x by its logarithm


def plot_panels(path: Path, panels: Sequence[Panel], *, title: str, y_label: str) -> Path:
    """Draws them into one PNG, all with the same y. Returns `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.2 + 4.2 * len(panels), 4.2), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(all_axes, panels, strict=True):
        axes.scatter(panel.points.x, panel.points.y, s=18, color=_COLOURS[0], alpha=0.5, label=panel.points.label)
        axes.plot(panel.means.x, panel.means.y, color=_COLOURS[1], linewidth=2, marker="o", label=panel.means.label)
        axes.set_xlabel(panel.x_label, color=_INK)
        if panel.is_log:
            axes.set_xscale("log")
        _dress(axes)
    all_axes[0].set_ylabel(y_label, color=_INK)
    all_axes[0].legend(frameon=False, labelcolor=_INK, loc="best")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=_INK)
    return _written(figure, path)


def _dress(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors=_INK, length=3)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _written(figure: "Figure", path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    write_file(path, png.getvalue())
    return path


def _draw(axes: "Axes", line: Line, colour: str, running_mean: int) -> None:
    x, y = np.asarray(line.x, dtype=float), np.asarray(line.y, dtype=float)
    y = drawable(np.where(np.isfinite(y), y, math.nan))
    marker = "o" if len(y) <= 40 else None
    if running_mean == 1:
        axes.plot(x, y, color=colour, linewidth=2, marker=marker, markersize=4, label=line.label)
        return
    axes.plot(x, y, color=colour, alpha=0.3, linewidth=1, marker=marker, markersize=3)
    label = f"{line.label}, mean of {running_mean}"
    axes.plot(x, mean_of_last(y, running_mean), color=colour, linewidth=2.2, label=label)


def drawable(values: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """Where a run has diverged, the height of a plot itself must still be a number."""
    return np.clip(values, -_HIGHEST, _HIGHEST)


def mean_of_last(values: npt.NDArray[np.floating], num: int) -> npt.NDArray[np.floating]:
    """At each place the mean of the last `num` values, fewer at the start; what is not finite is left out."""
    finite = np.isfinite(values)
    sums = np.cumsum(np.where(finite, values, 0.0))
    counts = np.cumsum(finite)
    sums[num:] = sums[num:] - sums[:-num]
    counts[num:] = counts[num:] - counts[:-num]
    return np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)
