"""Stages that play groups of environments with a policy: for reinforcement learning, and for distillation on what the
student writes.

Shape suffixes: `P` problems, `G` members of a group.
"""

from typing import Annotated, NamedTuple

import numpy as np

from stovetop.client import SamplingClient
from stovetop.errors import EnvError
from stovetop.kitchen.run import Row
from stovetop.kitchen.stage import stage
from stovetop.kitchen.stages.policies import Policy
from stovetop.renderers.base import Renderer
from stovetop.rl.rollout_record import RolloutRecord, TrainedOn
from stovetop.rl.rollouts import (
    ErrorPolicy,
    OnRolloutError,
    RetryOnFailure,
    Rollouts,
    do_rollouts,
    error_policy,
)
from stovetop.rl.sampling_policy import SamplingPolicy
from stovetop.rl.types import RLDataset, TrajectoryGroup
from stovetop.rules import Whole
from stovetop.runs import Run
from stovetop.types import Datum, TensorData


class Sampling(NamedTuple):
    """How answers are sampled, and what becomes of a rollout that fails."""

    max_tokens: int
    temperature: float
    seed: int
    on_error: ErrorPolicy = RetryOnFailure()

    def policy(self, client: SamplingClient, num_updates: int) -> SamplingPolicy:
        """Weights as a policy. Its answers depend on their number, so that no two policies of a run draw alike."""
        return SamplingPolicy(client, self.max_tokens, self.temperature, seed=self.seed + num_updates)


@stage(writes="sampling")
def choose_sampling(
    max_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    on_rollout_error: OnRolloutError = "retry",
    rollout_timeout_s: float | None = None,
) -> Sampling:
    """What the config says of sampling, as one value."""
    return Sampling(max_tokens, temperature, seed, error_policy(on_rollout_error, rollout_timeout_s))


@stage(writes="rollouts")
async def do_rollout(problems: RLDataset, step: int, policy: Policy, sampling: Sampling, run: Run) -> Rollouts:
    """Answers to every problem of the batch, graded."""
    builders_P = problems.get_batch(step)
    run.emit("dataset.batch", step=step, num_groups=len(builders_P))
    rollouts = await do_rollouts(builders_P, sampling.policy(policy.client, step), sampling.on_error)
    emit_rollouts(run, step, rollouts)
    return rollouts


@stage(writes="rollout_record")
def open_rollout_record(run: Run, renderer: Renderer, num_groups_to_log: Annotated[int, Whole(0)] = 4) -> RolloutRecord:
    """Where the rollouts of all steps and evaluations are kept."""
    return RolloutRecord(run, renderer, num_groups_to_log)


@stage
async def keep_rollouts(
    rollout_record: RolloutRecord,
    rollouts: Rollouts,
    data_D: list[Datum],
    logprobs_D: list[TensorData],
    row: Row,
    groups_P: list[TrajectoryGroup] | None = None,
) -> None:
    """Keeps the rollouts of the step, with the trainer's logprobs of their tokens, and makes a page of the first. Where
    one policy has played them all, the row has its lag."""
    trained_P = [group for _, group in rollouts.owned_groups_P] if groups_P is None else groups_P
    policy_step = row.step - int(row.values["lag"]) if "lag" in row.values else None
    await rollout_record.keep_step(row.step, rollouts, TrainedOn(trained_P, data_D, logprobs_D), policy_step)


def emit_rollouts(run: Run, step: int, rollouts: Rollouts) -> None:
    """That the groups of a step are played. Refused where all of them were skipped: there is nothing to train on."""
    if not rollouts.owned_groups_P:
        errors = ", ".join(f"{number} {kind}" for kind, number in rollouts.num_errors.items())
        raise EnvError(
            f"all {rollouts.num_groups_skipped} groups of the step were skipped, as too few of their rollouts "
            f"succeeded; mend the environment, or raise rollout_timeout_s. Their errors: {errors}"
        )
    groups_P = [group for _, group in rollouts.owned_groups_P]
    rewards_PG = [reward for group in groups_P for reward in group.get_total_rewards()]
    run.emit(
        "rl.rollout_complete",
        step=step,
        num_groups=len(groups_P),
        num_episodes=len(rewards_PG),
        reward_mean=np.mean(rewards_PG),
        reward_std=np.std(rewards_PG),
    )
