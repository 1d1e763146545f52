"""Stages of a step in minibatches: all are played at once, each is trained on as soon as it is there, and one update
follows, or several, each after minibatches of its own. It is on-policy, and gains where some minibatches take longer to
play than others.

Shape suffixes: `P` problems, `D` datums.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from stovetop.client import TrainingClient
from stovetop.concurrency import started
from stovetop.futures import APIFuture
from stovetop.kitchen.nodes import Positions
from stovetop.kitchen.run import Row
from stovetop.kitchen.stage import stage
from stovetop.kitchen.stages.policies import Policy
from stovetop.kitchen.stages.rl import PolicyLoss, add_episodes, emit_advantages, emit_batch
from stovetop.kitchen.stages.sampling import Sampling, emit_rollouts
from stovetop.rl.advantages import CENTRED, Estimator, compute_advantages
from stovetop.rl.data_processing import assemble_training_data, without_mask
from stovetop.rl.metrics import dict_mean
from stovetop.rl.rollout_pool import join_rollouts
from stovetop.rl.rollouts import ErrorPolicy, Rollouts, do_rollouts
from stovetop.rl.sampling_policy import SamplingPolicy
from stovetop.rl.steps import split_list
from stovetop.rl.types import EnvGroupBuilder, RLDataset
from stovetop.rules import Whole
from stovetop.runs import Run
from stovetop.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepResponse, TensorData

OnPolicy = Annotated[
    int, Whole(0, 0, hint="minibatches are played with the weights that they train; READY and REINFORCEMENT play ahead")
]


class Streaming(NamedTuple):
    """How minibatches are made and played."""

    num_minibatches: int
    num_substeps: int
    sampling: Sampling


@stage(writes="streaming")
def choose_streaming(
    sampling: Sampling,
    num_minibatches: Annotated[int, Whole(1)] = 2,
    num_substeps: Annotated[int, Whole(1)] = 1,
    max_steps_off_policy: OnPolicy = 0,
) -> Streaming:
    """How many updates a step has, and how many minibatches each of them; all are played on-policy."""
    return Streaming(num_minibatches, num_substeps, sampling)


class Minibatch(NamedTuple):
    """Groups to play, and what plays them."""

    builders_P: Sequence[EnvGroupBuilder]
    sampling: SamplingPolicy
    on_error: ErrorPolicy
    is_last: bool  # of its update


@stage(writes="minibatches")
def get_minibatches(problems: RLDataset, step: int, policy: Policy, streaming: Streaming, run: Run) -> list[Minibatch]:
    """The batch of this step in parts. Each has a sampler of its own, so that no answer depends on which part is
    first; two equal prompts in different parts get equal answers."""
    builders_P = problems.get_batch(step)
    run.emit("dataset.batch", step=step, num_groups=len(builders_P))
    substeps = split_list(builders_P, min(streaming.num_substeps, len(builders_P)))
    parts_of = [split_list(substep_P, min(streaming.num_minibatches, len(substep_P))) for substep_P in substeps]
    return [
        Minibatch(
            part_P, streaming.sampling.policy(policy.client, step), streaming.sampling.on_error, part_P is parts[-1]
        )
        for parts in parts_of
        for part_P in parts
    ]


class Streamed(NamedTuple):
    """What a step came to, over all its minibatches."""

    rollouts: Rollouts
    data_D: list[Datum]
    logprobs_D: list[TensorData]


class _Submitted(NamedTuple):
    rollouts: Rollouts
    data_D: list[Datum]
    trained: APIFuture[ForwardBackwardOutput]


@stage(writes=("rollouts", "data_D", "logprobs_D"))
async def stream_step(
    training_client: TrainingClient,
    minibatches: list[Minibatch],
    adam: AdamParams,
    policy_loss: PolicyLoss,
    row: Row,
    estimator: Estimator = CENTRED,
) -> Streamed:
    """Trains on each minibatch in order, as soon as it and those before it are played, and updates after the last one
    of each update. The gradient is that of all of them together."""
    submitted: list[_Submitted] = []
    updates: list[APIFuture[OptimStepResponse]] = []
    async with started((_play(minibatch) for minibatch in minibatches), name="minibatch") as played:
        for minibatch, awaited in zip(minibatches, played, strict=True):
            rollouts = await awaited
            groups_P = [group for _, group in rollouts.owned_groups_P]
            data_D = assemble_training_data(groups_P, compute_advantages(groups_P, estimator))[0]
            trained = training_client.forward_backward(without_mask(data_D), policy_loss.name, policy_loss.config)
            submitted.append(_Submitted(rollouts, data_D, trained))
            updates += [training_client.optim_step(adam)] if minibatch.is_last else []
    outputs = [await each.trained for each in submitted]
    stepped = dict_mean([(await update).metrics for update in updates])
    loss = sum(output.metrics["loss:sum"] for output in outputs)
    row.add({"optim/lr": adam.learning_rate, "optim/num_updates": len(updates), "loss:sum": loss, **stepped})
    return Streamed(
        join_rollouts([each.rollouts for each in submitted]),
        [datum for each in submitted for datum in each.data_D],
        [outputs["logprobs"] for output in outputs for outputs in output.loss_fn_outputs],
    )


async def _play(minibatch: Minibatch) -> Rollouts:
    return await do_rollouts(minibatch.builders_P, minibatch.sampling, minibatch.on_error)


@stage
def log_episodes(rollouts: Rollouts, data_D: list[Datum], positions: Positions, row: Row, run: Run) -> None:
    """How the episodes of all minibatches went, into the row."""
    add_episodes(row, rollouts, positions)
    emit_rollouts(run, row.step, rollouts)
    emit_advantages(run, row.step, [group for _, group in rollouts.owned_groups_P])
    emit_batch(run, row.step, data_D)
