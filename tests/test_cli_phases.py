"""A recipe of several phases on the command line, on a fake model."""

import json
from pathlib import Path

import pytest

from kitchen import warm_start
from kitchen.test_phases import FOLDERS, outcome
from stovetop.cli import main
from stovetop.kitchen import stage
from stovetop.kitchen.workflows import REINFORCEMENT
from stovetop.recipes import RECIPES, Recipe

WORDS = ["base_url=recording", "max_steps=2"]


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "warm_start", Recipe(warm_start.__name__, "Examples, then reward"))


def run_in(folder: Path, *more: str) -> int:
    return main(["run", "warm_start", *WORDS, f"log_path={folder}", *more])


def said_by(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(words) == 0
    return capsys.readouterr().out


def dies_in_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    @stage
    def dies(step: int) -> None:
        if step == 1:
            raise RuntimeError("power cut")

    supervised, reinforcement = warm_start.PHASES
    dying = type(reinforcement)("reinforcement", REINFORCEMENT.insert_after("log_step", dies), warm_start.reinforcement)
    monkeypatch.setattr(warm_start, "PHASES", (supervised, dying))


@pytest.mark.slow  # recipes/test_conformance has a short one
def test_what_was_killed_goes_on_by_the_same_command_or_by_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_in(tmp_path / "whole") == 0
    for name in ("again", "resumed"):
        with monkeypatch.context() as patched:
            dies_in_reward(patched)
            assert run_in(tmp_path / name) == 1
    assert run_in(tmp_path / "again") == 0
    assert main(["resume", str(tmp_path / "resumed" / FOLDERS[1])]) == 2
    assert f"goes on as a whole: stovetop resume {tmp_path / 'resumed'}" in capsys.readouterr().err
    assert main(["resume", str(tmp_path / "resumed")]) == 0
    assert outcome(tmp_path / "again") == outcome(tmp_path / "resumed") == outcome(tmp_path / "whole")


def test_a_dry_run_checks_all_phases_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = said_by(capsys, "run", "warm_start", *WORDS, f"log_path={tmp_path / 'run'}", "--dry-run")
    assert f"Phase 1_supervised, in {tmp_path}/run/1_supervised:\n" in said
    assert f"  load_checkpoint_path={tmp_path}/run/1_supervised: state, will exist\n" in said
    assert "The stages: load_problems" in said
    assert list(tmp_path.iterdir()) == []
    given = ["run", "warm_start", *WORDS, f"log_path={tmp_path / 'run'}", "start_path=/weights", "--dry-run"]
    assert "Phase 1_supervised is not run: this config does not need it." in said_by(capsys, *given)


def test_a_dry_run_finds_what_is_wrong_with_a_later_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    supervised, reinforcement = warm_start.PHASES
    workflow = REINFORCEMENT.remove("do_rollout")
    broken = type(reinforcement)("reinforcement", workflow, warm_start.reinforcement)
    monkeypatch.setattr(warm_start, "PHASES", (supervised, broken))
    for more in ([], ["--dry-run"]):
        assert run_in(tmp_path / "run", *more) == 2
        assert "phase '2_reinforcement': stage 'compute_advantages' reads 'rollouts'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_describe_shows_the_stages_of_each_phase(capsys: pytest.CaptureFixture[str]) -> None:
    said = said_by(capsys, "describe", "warm_start")
    assert "Phase 1_supervised.\nThe stages of the workflow 'supervised'" in said
    assert "Phase 2_reinforcement.\nThe stages of the workflow 'reinforcement'" in said
    assert "  chats_learning_rate: float = 0.5" in said
    described = json.loads(said_by(capsys, "describe", "warm_start", "--json"))
    assert [(each["phase"], each["workflow"]) for each in described["phases"]] == [
        ("1_supervised", "supervised"), ("2_reinforcement", "reinforcement"),
    ]  # fmt: skip


def test_runs_and_report_show_them_as_phases_of_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        dies_in_reward(patched)
        assert run_in(tmp_path / "run") == 1
    expected = [("", "failed"), ("1_supervised", "complete"), ("2_reinforcement", "failed")]
    listed = json.loads(said_by(capsys, "runs", str(tmp_path), "--json"))
    assert [(each["phase"], each["state"]) for each in listed] == expected
    assert {each["recipe"] for each in listed} == {"warm_start"}
    assert (listed[0]["num_done"], listed[0]["num_phases"]) == (1, 2)
    assert listed[0]["reason"] == listed[2]["reason"] != ""
    table = said_by(capsys, "runs", str(tmp_path))
    assert "phase 2 of 2" in table
    assert "  2_reinforcement" in table
    assert run_in(tmp_path / "run") == 0
    listed = json.loads(said_by(capsys, "runs", str(tmp_path), "--json"))
    assert [each["state"] for each in listed] == ["complete"] * 3
    report = json.loads(said_by(capsys, "report", str(tmp_path / "run"), "--json"))
    assert (report["state"], report["num_rows"]) == ("complete", 0)
    assert [Path(phase["run"]).name for phase in report["phases"]] == list(FOLDERS)
    assert all(phase["checkpoints"][-1]["name"] == "final" for phase in report["phases"])
    said = said_by(capsys, "report", str(tmp_path / "run"))
    assert said.index("1_supervised: ") < said.index("2_reinforcement: ")
    assert (
        main(["chat", str(tmp_path / "run")]) == 1
    )  # with its last checkpoint, but that of a model that does not exist
    assert "unknown base_model 'any/model'" in capsys.readouterr().err
