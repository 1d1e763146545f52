"""Plots as SVG for a page, drawn by matplotlib: lines over steps, and bars over time. Text stays text; colours are the
page's, as variables of its style sheet, so that a plot follows it into the dark. No element has a style of its own,
which the page's Content-Security-Policy would not take.
"""

# matplotlib does not say what its keyword arguments are:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stovetop.reports.curves import Curve, is_logarithmic, most_points, smoothed, thinned
from stovetop.tracking.plots import drawable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_COLOURS = 8  # of lines and bars: --c0 ... --c7 of the page
_INK, _GRID = "#010101", "#020202"  # what becomes var(--soft) and var(--line)
_LINES = [f"#0300{index:02x}" for index in range(NUM_COLOURS)]  # what becomes var(--c0) ...
_VARIABLES = {_INK: "var(--soft)", _GRID: "var(--line)"} | {
    colour: f"var(--c{index})" for index, colour in enumerate(_LINES)
}
WIDTH, HEIGHT = 4.3, 2.3  # inches, at 72 points each: the page scales them
MARKED = 40  # points of a curve, up to which each has a mark


@dataclass(frozen=True, slots=True)
class DrawnCurve:
    """A curve and the place of its colour."""

    label: str
    colour: int
    curve: Curve
    errors: Curve | None = None  # the standard error at each point


@dataclass(frozen=True, slots=True)
class Bar:
    """A piece of time in a row of a chart: from when to when, in seconds."""

    row: str
    begins_s: float
    ends_s: float
    colour: int
    label: str


def line_plot(curves: Sequence[DrawnCurve]) -> str:
    """One metric over steps, a line for each run. Scale and smoothing are chosen by the rules of `curves.py`."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure(HEIGHT)
    axes = figure.add_axes((0.125, 0.12, 0.86, 0.83))
    is_log, most = is_logarithmic(each.curve for each in curves), most_points(len(curves))
    for number, each in enumerate(curves):
        colour = _LINES[each.colour % NUM_COLOURS]
        over = smoothed(each.curve)
        _draw(axes, each, thinned(each.curve, most), colour, f"line-{number}", is_faint=over is not None)
        if each.errors is not None and len(each.errors.steps) == len(each.curve.steps) <= MARKED:
            low, high = each.curve.values - each.errors.values, each.curve.values + each.errors.values
            axes.vlines(each.curve.steps, drawable(low), drawable(high), color=colour, alpha=0.5, linewidth=1)
        if over is not None:
            _draw(axes, each, thinned(over, most), colour, f"smooth-{number}")
    if is_log:
        axes.set_yscale("log")
    _style(axes)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    low_x, high_x = axes.get_xlim()
    low_y, high_y = axes.get_ylim()
    limits = f"{low_x:.6g} {high_x:.6g} {low_y:.6g} {high_y:.6g}"
    box = axes.get_position()
    place = f"{box.x0:.4f} {box.x1:.4f} {box.y0:.4f} {box.y1:.4f}"
    labels = {f"{kind}-{number}": each.label for number, each in enumerate(curves) for kind in ("line", "smooth")}
    return _svg(figure, labels, f' data-limits="{limits}" data-place="{place}" data-log="{int(is_log)}"')


def bar_chart(bars: Sequence[Bar], *, marks_s: Sequence[float] = ()) -> str:
    """Rows of bars over time, the first row on top; `marks_s` are lines through all, such as where steps end."""
    rows = list(dict.fromkeys(bar.row for bar in bars))
    height = 0.4 + 0.15 * len(rows)
    figure = _figure(height, width=2.2 * WIDTH)
    axes = figure.add_axes((0.17, 0.22 / height, 0.82, 1 - 0.28 / height))
    seen_s = max((bar.ends_s for bar in bars), default=0.0) / 2000 or 1.0  # what is shorter is drawn as long
    for number, bar in enumerate(bars):
        place = len(rows) - 1 - rows.index(bar.row)
        span = (bar.begins_s, max(bar.ends_s - bar.begins_s, seen_s))
        colour = _LINES[bar.colour % NUM_COLOURS]
        axes.broken_barh([span], (place - 0.38, 0.76), facecolors=colour, gid=f"bar-{number}")
    for mark_s in marks_s:
        axes.axvline(mark_s, color=_GRID, linewidth=0.8, zorder=0)
    axes.set_yticks(range(len(rows)), list(reversed(rows)))
    axes.set_ylim(-0.6, len(rows) - 0.4)
    _style(axes, grid="x")
    axes.tick_params(labelsize=6)
    axes.margins(x=0.005)
    return _svg(figure, {f"bar-{number}": bar.label for number, bar in enumerate(bars)}, "")


# ---- with matplotlib -------------------------------------------------------------------------------------------------


def _figure(height: float, width: float = WIDTH) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=72, facecolor="none")


def _draw(axes: "Axes", drawn: DrawnCurve, curve: Curve, colour: str, gid: str, *, is_faint: bool = False) -> None:
    y = drawable(np.where(np.isfinite(curve.values), curve.values, math.nan))
    marker = "o" if len(y) <= MARKED else None
    width, alpha = (0.8, 0.35) if is_faint else (1.6, 1.0)
    axes.plot(curve.steps, y, color=colour, linewidth=width, alpha=alpha, marker=marker, markersize=3, gid=gid)


def _style(axes: "Axes", grid: str = "y") -> None:
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GRID)
    axes.tick_params(which="both", colors=_INK, length=2, labelsize=8)
    axes.grid(axis="y" if grid == "y" else "x", color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_offset_text().set(color=_INK, fontsize=7)


def _svg(figure: "Figure", labels: dict[str, str], attributes: str) -> str:
    """The figure as an element of a page."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)
    written = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": None, "svg.id": None, "path.simplify_threshold": 0.2}):
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = written.getvalue()
    return _for_page(text[text.index("<svg") :], labels, attributes)


def _for_page(svg: str, labels: dict[str, str], attributes: str) -> str:
    """Styles become attributes, colours variables, and groups without a meaning lose their names."""
    from markupsafe import escape

    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r' style="([^"]*)"', lambda found: _attributes(found[1]), svg)
    svg = re.sub(r'<g id="([^"]*)"', lambda found: _group(found[1], labels), svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    svg = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    head = re.compile(r'<svg[^>]*viewBox="([^"]*)"[^>]*>')
    return head.sub(lambda found: f'<svg role="img" viewBox="{escape(found[1])}"{attributes}>', svg, count=1)


def _attributes(style: str) -> str:
    """`fill: none; stroke-width: 2` as attributes; the font is the page's."""
    pairs = [pair.partition(":") for pair in style.split(";") if pair.strip()]
    kept = {name.strip(): value.strip() for name, _, value in pairs}
    font = kept.pop("font", None)
    if font is not None:
        size = re.search(r"([\d.]+)px", font)
        kept["font-size"] = size[1] if size else "8"
    kept.pop("font-family", None)
    kept["font-size"] = kept["font-size"].removesuffix("px") if "font-size" in kept else ""
    return "".join(f' {name}="{value}"' for name, value in kept.items() if value)


def _group(name: str, labels: dict[str, str]) -> str:
    from markupsafe import escape

    if name in labels:
        return f'<g class="{name.partition("-")[0]}" data-label="{escape(labels[name])}"'
    return "<g"
