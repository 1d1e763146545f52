"""Edits of reinforcement learning, on REINFORCEMENT and on workflows that recipes have made of it."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kitchen.stages.configs import RLConfig, write_problems
from kitchen.test_supervised import rows
from stovetop.backends import recording
from stovetop.client import ServiceClient
from stovetop.kitchen import stage
from stovetop.kitchen.edits import as_ppo, as_ready, as_streaming, with_kl_penalty
from stovetop.kitchen.workflow import Workflow
from stovetop.kitchen.workflows import REINFORCEMENT
from stovetop.recipes import math_rl, rl_basic
from stovetop.rl.rollouts import Rollouts
from stovetop.runs import Run, open_run

PORTS = {"service": ServiceClient, "run": Run}


@pytest.mark.parametrize("edit", [as_ppo, as_ready, as_streaming, with_kl_penalty])
def test_each_edit_fits_the_workflow_of_rl_basic(edit: object) -> None:
    assert callable(edit)
    workflow = edit(rl_basic.WORKFLOW)
    assert isinstance(workflow, Workflow)
    assert workflow.check(rl_basic.Config(), PORTS).problems == ()
    assert workflow.name != rl_basic.WORKFLOW.name


def test_what_stands_behind_the_rollouts_comes_along_to_where_groups_are_taken_when_ready() -> None:
    @stage(writes="rollouts")
    def shorten(rollouts: Rollouts) -> Rollouts:
        return rollouts

    ready = as_ready(math_rl.WORKFLOW.insert_after("do_rollout", shorten).remove("compute_post_kl"))
    assert ready.check(math_rl.Config(kl_penalty_coef=0.1), PORTS).problems == ()
    in_loop = [place.stage.name for place in ready.stages if place.phase == "loop"]
    assert in_loop[:7] == [
        "evaluate", "take_ready", "shorten", "compute_advantages", "assemble_rl_batch", "kl_penalty", "schedule",
    ]  # fmt: skip
    assert [str(place) for place in ready.stages if place.stage.name == "kl_penalty"] == [
        "loop, station 1, when is_penalised"
    ]


def test_edits_stand_together_a_penalty_on_what_is_ready_first_on_policy_is_that_of_reinforcement(
    tmp_path: Path,
) -> None:
    def trained(name: str, workflow: Workflow) -> list[dict[str, float]]:
        data = write_problems(tmp_path / "problems.jsonl")
        config = replace(RLConfig(dataset=data, log_path=str(tmp_path / name)), max_steps=3)
        with (
            recording.open_service(config.log_path) as service,
            open_run(config.log_path, config, console=False) as run,
        ):
            asyncio.run(workflow.run(config, service=service, run=run))
        return rows(config.log_path)

    penalised = with_kl_penalty(REINFORCEMENT)
    found, expected = trained("ready", as_ready(penalised)), trained("in order", penalised)
    for row, other in zip(found, expected, strict=True):
        assert {name: row.get(name) for name in other if name != "lag"} == {
            name: value for name, value in other.items() if name != "lag"
        }
    assert max(row.get("kl_policy_base", 0.0) for row in found) > 0
