"""What is true of code_rl alone: the sandbox that it needs, and the settings that it makes of the published ones."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from stovetop.cli import main
from stovetop.errors import InvalidRequest, SandboxError
from stovetop.kitchen.phases import plan_phases
from stovetop.recipes import code_rl
from stovetop.runs import load
from stovetop.tasks import code_grading
from stovetop.tasks.code import CodeTest
from stovetop.tasks.code_grading import CodeGrade, CodeGrader
from stovetop.tasks.sandbox import bubblewrap

WORDS = [
    *("run", "code_rl", "base_url=recording", "model=any/model", "renderer_name=role_colon"),
    *("dataset=sample:small_functions", "test_size=1", "groups_per_batch=2", "group_size=2", "max_tokens=6"),
    *("max_steps=2", "ppo_epochs=1", "eval_every=0"),
]


def test_the_clip_and_the_number_of_rollouts_are_those_of_the_second_phase():
    [_, planned] = plan_phases(code_rl.PHASES, code_rl.Config(clip_epsilon=0.1, max_steps=7))
    config = planned.config
    assert isinstance(config, code_rl.CodeConfig)
    assert config.loss_fn_config == {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    assert (config.max_steps, config.dataset) == (7, "deepcoder")
    assert planned.phase.workflow.name == "reinforcement"


def test_the_published_names_of_its_fields_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = [word.replace("max_steps=", "num_rollouts=").replace("dataset=", "env=") for word in WORDS]
    assert main([*words, f"log_path={tmp_path / 'run'}", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "max_steps" in said.out + said.err


def test_without_a_sandbox_it_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(bubblewrap, "installed", list)
    monkeypatch.chdir(tmp_path)
    for more in ([], ["--dry-run"]):
        assert main([*WORDS, f"log_path={tmp_path / 'run'}", *more]) == 2
        said = capsys.readouterr().err
        assert "bubblewrap is not installed" in said
        assert "pip install 'stovetop[sandbox]'" in said
    assert list(tmp_path.iterdir()) == []


def test_groups_whose_sandbox_fails_stop_the_run_or_are_skipped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The sandbox fails for every second problem or so."""

    def grade(self: CodeGrader, code: str, tests: Sequence[CodeTest]) -> CodeGrade:
        if int(tests[0].output) % 2:
            raise SandboxError("the sandbox did not start")
        return CodeGrade(True)

    monkeypatch.setattr(CodeGrader, "grade", grade)
    monkeypatch.setattr(code_grading, "last_block", lambda text: "x = 1")
    assert main([*WORDS, f"log_path={tmp_path / 'stops'}", "on_rollout_error=raise"]) == 1
    assert "the sandbox did not start" in capsys.readouterr().err
    assert main([*WORDS, f"log_path={tmp_path / 'skips'}", "on_rollout_error=skip", "groups_per_batch=6"]) == 0
    rows = [row for row in load(tmp_path / "skips" / "2_reinforcement").metrics if "env/all/correct" in row]
    assert sum(row["rollout_errors/groups_skipped"] for row in rows) >= 1
    assert {row["env/all/correct"] for row in rows} == {1.0}  # of the others; what could not be graded is no zero


def test_what_is_wrong_is_said_at_once(tmp_path: Path):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"problem": "Add them.", "tests": "[]"}))
    config = replace(
        code_rl.PRESETS["small"], dataset=str(path), test_dataset=None, model_name="no/such-model", base_url=None
    )
    with pytest.raises(InvalidRequest, match=r"it has no tests"):
        code_rl.check(config)


@pytest.mark.parametrize("field", ["gamma", "clip_epsilon"])
def test_what_would_leave_nothing_to_learn_from_is_refused(field: str):
    with pytest.raises(InvalidRequest, match=rf"Config\.{field} must be a finite number above 0 and at most 1: 0"):
        replace(code_rl.PRESETS["small"], **{field: 0.0})


def test_a_warm_up_that_is_longer_than_the_run_is_refused(tmp_path: Path):
    config = replace(code_rl.PRESETS["small"], base_url="recording", log_path=str(tmp_path / "run"))
    code_rl.check(replace(config, warmup_steps=16))
    with pytest.raises(InvalidRequest, match=r"warmup_steps must be at most 16, the number of steps: 17"):
        code_rl.check(replace(config, warmup_steps=17))


@pytest.mark.slow
def test_a_run_of_a_config_that_was_made_in_a_program(tmp_path: Path):
    config = replace(
        code_rl.PRESETS["small"], base_url="recording", model_name="any/model", renderer_name="role_colon",
        log_path=str(tmp_path / "run"), groups_per_batch=2, group_size=2, max_steps=1, eval_every=0, max_tokens=4,
    )  # fmt: skip
    asyncio.run(code_rl.main(config))
    [row] = [row for row in load(tmp_path / "run" / "2_reinforcement").metrics if "env/all/correct" in row]
    assert row["env/all/correct"] == 0
    assert row["optim/num_updates"] == 1
