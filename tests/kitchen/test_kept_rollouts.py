"""What workflows keep of their rollouts: every one of every step and evaluation, with the numbers that the metrics of
the step are means of; once, wherever a run was killed."""

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from costly import slow_but
from kitchen.stages.configs import DistillationConfig, KLConfig, RLConfig, StreamingConfig, write_problems
from kitchen.test_supervised import rows
from stovetop.backends import recording
from stovetop.kitchen import RunConfig
from stovetop.kitchen.workflow import Workflow
from stovetop.kitchen.workflows import DISTILLATION, KL_REINFORCEMENT, READY, REINFORCEMENT, STREAMING
from stovetop.runs import open_run
from stovetop.tracking.rollout_rows import RolloutRow, find_rollouts, read_rollouts


def train(config: RunConfig, workflow: Workflow) -> None:
    async def run_it() -> None:
        with (
            recording.open_service(config.log_path) as service,
            open_run(config.log_path, config, console=False) as run,
        ):
            await workflow.run(config, service=service, run=run)

    asyncio.run(run_it())


def kept(log_path: str | Path) -> list[RolloutRow]:
    return read_rollouts(find_rollouts(Path(log_path)).rollouts)


def config_of(workflow: Workflow, folder: Path) -> RunConfig:
    """Two steps and the evaluations around them."""
    own = RLConfig(dataset=write_problems(folder / "problems.jsonl"), log_path=str(folder / "run"), max_steps=2)
    if workflow is DISTILLATION:
        return DistillationConfig(dataset=own.dataset, log_path=own.log_path, max_steps=2)
    classes = {STREAMING.name: StreamingConfig, KL_REINFORCEMENT.name: KLConfig}
    of_class = classes.get(workflow.name, RLConfig)(**asdict(own))
    return replace(of_class, max_steps_off_policy=1) if workflow is READY else of_class


WORKFLOWS = [REINFORCEMENT, STREAMING, READY, KL_REINFORCEMENT, DISTILLATION]


@pytest.mark.parametrize("workflow", slow_but([READY, DISTILLATION], WORKFLOWS), ids=lambda workflow: workflow.name)
def test_all_rollouts_of_a_step_are_kept_with_the_numbers_that_its_metrics_are_means_of(
    workflow: Workflow, tmp_path: Path
) -> None:
    config = config_of(workflow, tmp_path)
    train(config, workflow)
    all_rows = kept(config.log_path)
    assert {row.split for row in all_rows} == {"train", "eval_test"}
    assert {row.step for row in all_rows if row.split == "eval_test"} == {0, 2}
    for metrics in rows(config.log_path)[:2]:
        of_step = [row for row in all_rows if row.split == "train" and row.step == metrics["step"]]
        assert len(of_step) == metrics["env/all/total_episodes"]
        assert np.mean([row.reward for row in of_step]) == pytest.approx(metrics["env/all/reward/total"])
        assert sum(row.num_tokens for row in of_step) == metrics["env/all/total_ac_tokens"]
        assert mean_gap(of_step) == pytest.approx(metrics["optim/kl_sample_train_v1"], abs=2e-6)
        lags = {None if row.policy_step is None else row.step - row.policy_step for row in of_step}
        assert lags == {metrics.get("lag")}
        assert all(row.chat[-1]["role"] == "assistant" for row in of_step)
    found = Path(config.log_path).glob("iteration_*/*.html")
    assert sorted(page.relative_to(config.log_path).as_posix() for page in found) == [
        "iteration_000000/eval_test.html",
        "iteration_000000/train.html",
        "iteration_000001/train.html",
        "iteration_000002/eval_test.html",
    ]


def mean_gap(all_rows: Sequence[RolloutRow]) -> float:
    """Of the sampler's logprobs to the trainer's, over the tokens that were trained on."""
    pairs = [
        (sampled, trained)
        for row in all_rows
        for sampled, trained in zip(row.logprobs, row.trained_logprobs, strict=True)
        if sampled is not None and trained is not None
    ]
    assert pairs
    return float(np.mean([sampled - trained for sampled, trained in pairs]))


def test_a_kill_between_the_rollouts_of_a_step_and_its_checkpoint_leaves_none_twice(tmp_path: Path) -> None:
    config = replace(config_of(REINFORCEMENT, tmp_path), save_every=1, eval_every=1, max_steps=3)
    train(config, REINFORCEMENT)
    whole = kept(config.log_path)
    killed = tmp_path / "killed"
    shutil.copytree(config.log_path, killed)
    for name, num_rows in (("checkpoints.jsonl", 2), ("metrics.jsonl", 3)):  # the third step has no checkpoint yet
        lines = (killed / name).read_bytes().splitlines(keepends=True)
        (killed / name).write_bytes(b"".join(lines[:num_rows]))
    assert kept(killed) == whole  # as far as it had come, each once
    resumed = replace(config, log_path=str(killed))
    seen: list[int] = []
    with (
        recording.open_service(resumed.log_path) as service,
        open_run(resumed.log_path, resumed, console=False) as run,
    ):
        start_at = run.start_at

        def start_and_look(step: int, num_steps: int | None = None) -> None:
            start_at(step, num_steps)
            seen.extend(row.step for row in kept(killed))

        run.start_at = start_and_look  # to look at this moment
        asyncio.run(REINFORCEMENT.run(resumed, service=service, run=run))
    assert set(seen) == {0, 1}
    assert kept(killed) == whole
