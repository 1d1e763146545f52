"""Ctrl-C and SIGTERM of `stovetop run` and `resume`, in processes of their own."""

import re
import shlex
import signal
from pathlib import Path

import pytest

from kitchen import slow_recipe
from kitchen.modes import Outcome, outcome
from kitchen.stages.configs import write_problems
from processes import Ended, signal_after
from stovetop.cli import main
from stovetop.recipes import RECIPES, Recipe

PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from stovetop.cli import main
from stovetop.recipes import RECIPES, Recipe

RECIPES["slow"] = Recipe("kitchen.slow_recipe", "To be interrupted")
raise SystemExit(main(sys.argv[1:]))
"""
SOON_S = 4.0


@pytest.fixture(autouse=True)
def in_this_process_it_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "slow", Recipe("kitchen.slow_recipe", "To be interrupted"))
    monkeypatch.setattr(slow_recipe, "SECONDS_A_SAMPLE", 0.0)


def words_of(folder: Path, run: str) -> list[str]:
    return ["run", "slow", f"dataset={write_problems(folder / 'rows')}", f"log_path={folder / run}"]


def whole(folder: Path) -> Outcome:
    assert main(words_of(folder, "whole")) == 0
    return outcome(str(folder / "whole"))


def interrupted(words: list[str], seconds: float, by: signal.Signals, again_after: float | None = None) -> Ended:
    """So many seconds after its first row."""
    program = PROGRAM.format(tests=str(Path(__file__).parents[1]))
    return signal_after(["-c", program, *words], seconds, by, again_after=again_after)


def command_in(errors: str) -> list[str]:
    """The one that it says to go on with."""
    found = re.search(r"To go on where it stopped: stovetop (.*)\n", errors)
    assert found is not None, errors
    return shlex.split(found[1])


@pytest.mark.slow
def test_ctrl_c_ends_a_run_soon_and_names_the_command_with_which_it_becomes_the_run_that_would_have_been(
    tmp_path: Path,
) -> None:
    ended = interrupted(words_of(tmp_path, "a run"), 0.2, signal.SIGINT)
    assert ended.code == 130, ended.errors
    assert ended.seconds < SOON_S
    assert "Traceback" not in ended.errors
    command = command_in(ended.errors)
    assert command == ["resume", str(tmp_path / "a run")]
    assert main(command) == 0
    assert outcome(str(tmp_path / "a run")) == whole(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_sigterm_ends_a_run_and_one_that_goes_on_soon_again_and_again(seconds: float, tmp_path: Path) -> None:
    words = words_of(tmp_path, "run")
    for _ in range(2):
        ended = interrupted(words, seconds, signal.SIGTERM)
        assert ended.code == 143, ended.errors
        assert ended.seconds < SOON_S
        words = command_in(ended.errors)
    assert main(words) == 0
    assert outcome(str(tmp_path / "run")) == whole(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("again_after", [0.0, 0.05])
def test_a_second_signal_ends_a_run_at_once_and_loses_nothing_that_was_recorded(
    by: signal.Signals, code: int, again_after: float, tmp_path: Path
) -> None:
    ended = interrupted(words_of(tmp_path, "run"), 0.1, by, again_after)
    assert ended.code in (code, -by), ended.errors  # a shell has the same number for both; the latter as Python ends
    assert main(command_in(ended.errors)) == 0
    assert outcome(str(tmp_path / "run")) == whole(tmp_path)
