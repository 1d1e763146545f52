"""Stages of a step in minibatches: all are played at once, each is trained on as soon as it is there, and one update
follows. It is on-policy, and gains where some minibatches take longer to play than others.

Shape suffixes: `P` problems, `D` datums.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from stovetop.client import TrainingClient
from stovetop.concurrency import started
from stovetop.errors import InvalidRequest
from stovetop.futures import APIFuture
from stovetop.kitchen.nodes import Positions
from stovetop.kitchen.run import Row
from stovetop.kitchen.stage import stage
from stovetop.kitchen.stages.policies import Policy
from stovetop.kitchen.stages.rl import PolicyLoss, add_episodes
from stovetop.rl.advantages import CENTRED, Estimator, compute_advantages
from stovetop.rl.data_processing import assemble_training_data, without_mask
from stovetop.rl.rollouts import RetryOnFailure, Rollouts, SamplingPolicy, do_rollouts
from stovetop.rl.steps import split_list
from stovetop.rl.types import EnvGroupBuilder, RLDataset
from stovetop.types import AdamParams, Datum, ForwardBackwardOutput, TensorData


class Streaming(NamedTuple):
    """How minibatches are made and played."""

    num_minibatches: int
    max_tokens: int
    temperature: float
    seed: int


@stage(writes="streaming")
def choose_streaming(
    max_tokens: int,
    num_minibatches: int = 2,
    temperature: float = 1.0,
    seed: int = 0,
    max_steps_off_policy: int = 0,
) -> Streaming:
    """What the config says of minibatches. Sampling cannot be ahead of training too."""
    if max_steps_off_policy:
        raise InvalidRequest(
            "streaming minibatches are played with the weights that they train: max_steps_off_policy must be 0, or "
            f"take the workflow 'reinforcement', which samples ahead: {max_steps_off_policy}"
        )
    if num_minibatches < 1:
        raise InvalidRequest(f"num_minibatches must be at least 1: {num_minibatches}")
    return Streaming(num_minibatches, max_tokens, temperature, seed)


class Minibatch(NamedTuple):
    """Groups to play, and what plays them."""

    builders_P: Sequence[EnvGroupBuilder]
    sampling: SamplingPolicy


@stage(writes="minibatches")
def get_minibatches(problems: RLDataset, step: int, policy: Policy, streaming: Streaming) -> list[Minibatch]:
    """The batch of this step in parts. Each has a sampler of its own, so that no answer depends on which part is
    first; two equal prompts in different parts get equal answers."""
    builders_P = problems.get_batch(step)
    parts = split_list(builders_P, min(streaming.num_minibatches, len(builders_P)))
    seed = streaming.seed + step
    return [
        Minibatch(part_P, SamplingPolicy(policy.client, streaming.max_tokens, streaming.temperature, seed=seed))
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
    """Trains on each minibatch in order, as soon as it and those before it are played; then updates once. The gradient
    is that of the whole batch."""
    submitted: list[_Submitted] = []
    async with started((_play(minibatch) for minibatch in minibatches), name="minibatch") as played:
        for awaited in played:
            rollouts = await awaited
            groups_P = [group for _, group in rollouts.owned_groups_P]
            data_D = assemble_training_data(groups_P, compute_advantages(groups_P, estimator))[0]
            trained = training_client.forward_backward(without_mask(data_D), policy_loss.name, policy_loss.config)
            submitted.append(_Submitted(rollouts, data_D, trained))
    stepped = training_client.optim_step(adam)
    outputs = [await each.trained for each in submitted]
    loss = sum(output.metrics["loss:sum"] for output in outputs)
    row.add({"optim/lr": adam.learning_rate, "optim/num_updates": 1, "loss:sum": loss, **(await stepped).metrics})
    return Streamed(
        _joined([each.rollouts for each in submitted]),
        [datum for each in submitted for datum in each.data_D],
        [outputs["logprobs"] for output in outputs for outputs in output.loss_fn_outputs],
    )


async def _play(minibatch: Minibatch) -> Rollouts:
    return await do_rollouts(minibatch.builders_P, minibatch.sampling, RetryOnFailure())


def _joined(parts: Sequence[Rollouts]) -> Rollouts:
    num_errors: Counter[str] = Counter()
    for part in parts:
        num_errors.update(part.num_errors)
    return Rollouts(
        [owned for part in parts for owned in part.owned_groups_P],
        num_errors,
        sum(part.num_rollouts_dropped for part in parts),
        sum(part.num_groups_skipped for part in parts),
    )


@stage
def log_episodes(rollouts: Rollouts, positions: Positions, row: Row) -> None:
    """How the episodes went, into the row."""
    add_episodes(row, rollouts, positions)
