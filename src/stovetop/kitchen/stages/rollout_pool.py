"""Stages of a loop that trains on the groups that are ready first: a pool plays ahead of training, up to
`max_steps_off_policy` steps, and each step takes what is done. See `rl.rollout_pool`.

Which groups meet in a batch depends on how long they take, so a run that is killed and goes on has other numbers than
one that was not. No group is lost and none is trained twice: a checkpoint's row names those that were trained early.
"""

from collections.abc import AsyncIterator
from typing import Annotated

from stovetop.checkpoints import Start
from stovetop.client import TrainingClient
from stovetop.concurrency import started
from stovetop.kitchen.nodes import Positions
from stovetop.kitchen.run import Row
from stovetop.kitchen.stage import stage
from stovetop.kitchen.stages.sampling import Sampling, emit_rollouts
from stovetop.rl.metrics import compute_sampling_client_metrics
from stovetop.rl.rollout_pool import RolloutPool
from stovetop.rl.rollouts import Rollouts
from stovetop.rl.types import RLDataset
from stovetop.rules import Whole
from stovetop.runs import Run


@stage(writes="pool")
async def rollout_pool(
    training_client: TrainingClient,
    problems: RLDataset,
    positions: Positions,
    start: Start,
    sampling: Sampling,
    max_steps_off_policy: Annotated[int, Whole(0)] = 0,
) -> AsyncIterator[RolloutPool]:
    """Plays groups until the workflow ends, at first with the weights that the run begins with."""
    client = await training_client.save_weights_and_get_sampling_client()
    pool = RolloutPool(
        problems,
        positions.num_steps,
        sampling.policy(client, positions.start),
        start=positions.start,
        ahead=max_steps_off_policy,
        trained_ahead=() if start.record is None else start.record.trained_ahead,
        on_error=sampling.on_error,
    )
    async with started((pool.work() for _ in range(pool.num_workers)), name="rollout worker"):
        yield pool


@stage(writes="rollouts")
async def take_ready(pool: RolloutPool, row: Row, run: Run) -> Rollouts:
    """The groups that are ready first, as many as a batch has; those that are too old are played again, and counted."""
    taken = await pool.take(row.step)
    lags_P, updates_P = taken.lags_P, [row.step - lag for lag in taken.lags_P]
    row.add({"lag/max": max(lags_P), "lag/mean": sum(lags_P) / len(lags_P), "stale_groups": taken.num_stale})
    row.add(compute_sampling_client_metrics(updates_P, taken.seconds_P))
    run.emit("dataset.batch", step=row.step, num_groups=len(lags_P), groups=" ".join(map(str, taken.indices_P)))
    emit_rollouts(run, row.step, taken.rollouts)
    return taken.rollouts


@stage
async def publish_policy(training_client: TrainingClient, pool: RolloutPool, sampling: Sampling, step: int) -> None:
    """The weights after this step's update: groups that begin from now on are played with them."""
    client = await training_client.save_weights_and_get_sampling_client()
    pool.publish(sampling.policy(client, step + 1), step + 1)
