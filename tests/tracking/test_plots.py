import sys
from pathlib import Path

import numpy as np
import pytest

from stovetop.errors import InvalidRequest
from stovetop.reports.curves import Curve
from stovetop.reports.drawing import DrawnCurve, line_plot
from stovetop.tracking.plots import Line, mean_of_last, plot_lines


def test_a_plot_is_a_png_and_leaves_pyplot_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # half a second: matplotlib is imported
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # another test's library may have wanted it
    line = Line("reward", [0, 1, 2], [0.1, float("nan"), 0.3])
    path = plot_lines(
        tmp_path / "plots" / "reward.png", [line, line], title="Reward", x_label="step", y_label="mean", running_mean=2
    )
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules


def test_the_same_lines_give_the_same_bytes(tmp_path: Path):
    pictures = [
        plot_lines(tmp_path / name, [Line("a", [0], [1])], title="t", x_label="x", y_label="y").read_bytes()
        for name in ("one.png", "two.png")
    ]
    assert pictures[0] == pictures[1]


def test_a_run_that_has_diverged_has_a_plot(tmp_path: Path):
    line = Line("loss", [0, 1, 2], [1e308, -1e308, float("inf")])
    assert plot_lines(tmp_path / "x.png", [line], title="t", x_label="x", y_label="y").is_file()
    assert "<svg" in line_plot([DrawnCurve("a", 0, Curve(np.array([0.0, 1.0]), np.array([1e308, -1e308])), None)])


def test_a_running_mean_takes_the_last_n_and_leaves_out_what_is_not_finite():
    assert mean_of_last(np.array([1.0, 3.0, 5.0, 7.0]), 2).tolist() == [1, 2, 4, 6]
    means = mean_of_last(np.array([np.nan, 1.0, np.inf, 5.0]), 2)
    assert np.array_equal(means, [np.nan, 1, 1, 5], equal_nan=True)
    assert mean_of_last(np.array([1.0, 3.0]), 5).tolist() == [1, 2]


def test_a_line_needs_as_many_x_as_y():
    with pytest.raises(InvalidRequest, match=r"'reward'.*2, 1"):
        Line("reward", [0, 1], [1.0])


def test_a_plot_without_lines_is_refused(tmp_path: Path):
    with pytest.raises(InvalidRequest, match="0 lines"):
        plot_lines(tmp_path / "none.png", [], title="", x_label="", y_label="")
