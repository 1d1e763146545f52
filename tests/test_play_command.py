import io
import sys

import pytest

from stovetop.cli import main
from stovetop.tasks import TASKS


def play(monkeypatch: pytest.MonkeyPatch, typed: str, *words: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    return main(["play", *words])


def test_a_task_is_played_from_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert play(monkeypatch, "512\n\n\nI give up\n\n\n", "guess_number", "--index", "3") == 0
    said = capsys.readouterr().out
    assert "User: I have chosen a whole number from 0 to 1023." in said
    assert said.endswith("The episode is over: parse_error. Turns: 2, total reward: -1\n")


def test_input_that_ends_early_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert play(monkeypatch, "512\n", "guess_number") == 1
    assert "error: the input ended before the episode did" in capsys.readouterr().err


def test_help_names_the_tasks_and_a_wrong_name_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        play(monkeypatch, "", "--help")
    said = capsys.readouterr().out
    assert all(name in said for name in TASKS)
    assert play(monkeypatch, "", "guess_numbr") == 2
    assert "did you mean 'guess_number'?" in capsys.readouterr().err
    assert play(monkeypatch, "", "sort_digits", "--index", "64") == 1
    assert "--index must be in 0..63" in capsys.readouterr().err
