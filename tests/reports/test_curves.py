"""What is drawn of a curve: never more points than a page can show, and never without its peaks."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stovetop.reports.curves import MOST_POINTS, Columns, Curve, grouped, is_logarithmic, most_points, smoothed, thinned
from stovetop.reports.drawing import Bar, DrawnCurve, bar_chart, line_plot
from stovetop.reports.timeline import calls_of


def curve(values: list[float]) -> Curve:
    return Curve(np.arange(len(values), dtype=float), np.asarray(values, dtype=float))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500), st.integers(2, 60))
def test_a_thinned_curve_keeps_its_peaks_its_order_and_its_bound(values: list[float], most: int) -> None:
    thin = thinned(curve(values), most)
    assert len(thin.values) <= most
    assert (thin.values.min(), thin.values.max()) == (min(values), max(values))
    assert (np.diff(thin.steps) > 0).all()
    assert [values[int(step)] for step in thin.steps] == thin.values.tolist()


def test_a_value_that_is_none_hides_no_peak_beside_it() -> None:
    values = [float("nan")] * 10 + [1.0, float("nan"), 9.0, float("inf")] + [2.0] * 10
    assert (
        np.nanmax(np.where(np.isfinite(thinned(curve(values), 6).values), thinned(curve(values), 6).values, -1)) == 9.0
    )


def test_a_noisy_curve_is_smoothed_and_a_smooth_or_a_short_one_is_not() -> None:
    noisy = [(-1.0) ** step for step in range(100)]
    over = smoothed(curve(noisy))
    assert over is not None
    assert abs(over.values[-1]) < 0.3
    assert smoothed(curve(noisy[:20])) is None
    assert smoothed(curve([0.99**step for step in range(100)])) is None


@pytest.mark.parametrize(
    ("values", "is_log"),
    [([1e-3, 1.0], True), ([0.5, 1.0], False), ([0.0, 1.0], False), ([-1.0, 1e3], False), ([1.0], False), ([], False)],
)
def test_the_scale_is_logarithmic_over_more_than_two_decades_above_zero(values: list[float], is_log: bool) -> None:
    assert is_logarithmic([curve(values)]) is is_log


def test_metrics_are_grouped_with_what_the_recipe_shows_first() -> None:
    names = ["loss", "epoch", "env/all/x", "test/a", "test/a/stderr", "time/step", "optim/lr"]
    groups = grouped(names, ["optim/lr", "time/step", "absent"])
    assert [(group.title, group.metrics) for group in groups] == [
        ("at a glance", ["optim/lr"]), ("test", ["test/a"]), ("of every step", ["loss"]), ("env", ["env/all/x"]),
    ]  # fmt: skip


def test_columns_are_the_rows_by_metric() -> None:
    columns = Columns()
    columns.add({"step": 3, "a": 1.0})
    columns.add({"step": 4, "a": 2.0, "b": 5.0})
    found = {name: (each.steps.tolist(), each.values.tolist()) for name, each in columns.curves().items()}
    assert found == {"a": ([3, 4], [1, 2]), "b": ([4], [5])}
    assert columns.num_rows == 2


def test_calls_are_summed_over_rows_with_one_and_rows_with_several() -> None:
    columns = Columns()
    columns.add(
        {"step": 0, "time/sample:total": 6.0, "time/sample:count": 3, "time/sample:mean": 2, "time/sample:max": 4}
    )
    columns.add({"step": 1, "time/sample:total": 5.0, "time/step:x": 1.0})
    assert calls_of(columns.curves()) == [("sample", 4, 11.0, 2.75, 5.0)]


def test_what_the_engine_did_is_drawn_and_times_are_not() -> None:
    assert grouped(["time/engine/waiting_share", "time/step", "time/sample:total"]) == [
        ("engine", ["time/engine/waiting_share"])
    ]


# ---- as SVG ----------------------------------------------------------------------------------------------------------


def test_a_plot_has_its_lines_its_texts_as_text_and_no_style_or_colour_of_its_own() -> None:
    svg = line_plot([DrawnCurve("<b>one</b>", 0, curve([1.0, 0.5])), DrawnCurve("two", 1, curve([2.0, 0.25]))])
    assert svg.count('class="line"') == 2
    assert 'data-label="&lt;b&gt;one&lt;/b&gt;"' in svg
    assert "style" not in svg
    assert "http" not in svg
    assert re.findall(r"#[0-9a-f]{6}\b", svg) == []
    assert {"var(--c0)", "var(--c1)", "var(--soft)"} <= set(re.findall(r"var\(--\w+\)", svg))
    assert re.search(r">2\.0+</text>", svg)


def test_small_numbers_keep_their_digits() -> None:
    assert ">0.0005</text>" in line_plot([DrawnCurve("rate", 0, curve([5e-4, 4e-4, 1e-4]))])


@pytest.mark.parametrize("values", [[1.0], [float("nan")], [float("nan"), 1.0], [0.0, 0.0]])
def test_a_curve_of_one_point_or_of_none_that_is_finite_is_drawn(values: list[float]) -> None:
    assert 'class="line"' in line_plot([DrawnCurve("a", 0, curve(values))])


def test_the_size_of_a_plot_does_not_grow_with_the_run() -> None:
    long = curve(np.random.default_rng(0).random(20_000).tolist())
    svg = line_plot([DrawnCurve("a", 0, long)])
    assert len(svg) < 40_000
    assert svg.count(" L ") < 3 * MOST_POINTS


def test_a_bar_tells_what_it_is() -> None:
    svg = bar_chart([Bar("train", 0.0, 1.0, 0, 'step 0: "1 s" <b>'), Bar("wait", 1.0, 1.0, 1, "step 1")], marks_s=[1.0])
    assert svg.count('class="bar"') == 2
    assert "<b>" not in svg
    assert ">train</text>" in svg


def test_many_lines_share_the_points_of_a_plot_down_to_some() -> None:
    assert [most_points(num) for num in (0, 1, 8, 16, 100, 5000)] == [600, 600, 600, 300, 48, 40]
