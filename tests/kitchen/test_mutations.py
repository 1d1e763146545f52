"""The kills see what they are to see: each of these workflows breaks one rule that makes a resumed run exact, and some
of its resumed runs are not the run that would have been."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kitchen.modes import MODES, kill_at_boundaries
from stovetop.checkpoints import PendingCheckpoint, Start, submit_checkpoint
from stovetop.client import TrainingClient
from stovetop.kitchen import When, stage
from stovetop.kitchen.stages.policies import Policy, saved_paths
from stovetop.kitchen.stages.steps import saves, set_epoch
from stovetop.kitchen.workflow import Workflow
from stovetop.runs import Run


def assert_some_are_bad(mode: str, workflow: Workflow, folder: Path, *, after: str = "record_checkpoint") -> None:
    """Of the runs that are killed when this stage has ended."""
    killed = kill_at_boundaries(replace(MODES[mode], workflow=workflow), folder, after)
    assert len(killed.outcome.rows) > 5
    assert any(killed.resumed(copy) != killed.outcome for copy in killed.copies)


@stage(writes="policies")
async def begin_with_resumed_weights(training_client: TrainingClient, start: Start) -> list[Policy]:
    """A run that samples ahead would go on with the policies of its checkpoint."""
    return [Policy(await training_client.save_weights_and_get_sampling_client(), start.batch, None)]


@pytest.mark.slow
def test_a_run_ahead_that_is_resumed_with_the_weights_of_its_checkpoint_alone(tmp_path: Path) -> None:
    workflow = MODES["one step ahead"].workflow.replace("initial_policies", begin_with_resumed_weights)
    assert_some_are_bad("one step ahead", workflow, tmp_path)


def begins_epoch(batch: int) -> bool:
    return batch == 0


def test_an_epoch_that_is_entered_at_its_first_batch_only(tmp_path: Path) -> None:
    sets = set_epoch.using("set_epoch_late", data="preference_dataset")
    workflow = MODES["preference"].workflow.insert_before("set_epoch", When(begins_epoch, sets)).remove("set_epoch")
    assert_some_are_bad("preference", workflow, tmp_path)


@stage(writes="hidden")
def hide(training_client: TrainingClient) -> object:
    """From the check, which refuses what follows."""
    return training_client


@stage(writes="saved")
def save_late(hidden: Any, step: int) -> PendingCheckpoint:
    return submit_checkpoint(hidden, f"{step + 1:06d}", {"batch": step + 1})


@pytest.mark.slow
def test_a_checkpoint_that_is_submitted_in_the_second_station(tmp_path: Path) -> None:
    workflow = MODES["supervised"].workflow.remove("save_checkpoint").insert_after("init_session", hide)
    workflow = workflow.insert_after("await_optim_step", When(saves, save_late))
    assert_some_are_bad("supervised", workflow, tmp_path)


@pytest.mark.slow
def test_a_checkpoint_that_is_recorded_before_the_row_is_logged(tmp_path: Path) -> None:
    @stage
    async def record_early(saved: PendingCheckpoint, run: Run, policies: list[Policy] | None = None) -> None:
        await saved.record(run.path, policy_paths=await saved_paths(policies or []))

    workflow = MODES["one step ahead"].workflow.remove("record_checkpoint")
    workflow = workflow.insert_before("log_step", When(saves, record_early))
    assert_some_are_bad("one step ahead", workflow, tmp_path, after="record_early")
