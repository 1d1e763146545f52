"""The steps that a reinforcement-learning loop is made of, in the order it takes them: a group is played, a batch is
prepared, it is trained on, the weights are saved and frozen for the next one. No loop lives here.

Shape suffixes: `P` problems, `G` members of a group, `D` datums.
"""

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

from stovetop.checkpoints import PendingCheckpoint, is_due, submit_checkpoint
from stovetop.client import SamplingClient, TrainingClient
from stovetop.completers import TokenCompleter
from stovetop.errors import InvalidRequest
from stovetop.futures import APIFuture
from stovetop.losses import PPO, LossConfig
from stovetop.rl.advantages import CENTRED, Advantage, Estimator, compute_advantages, normalize_advantages
from stovetop.rl.data_processing import (
    DatumMetadata,
    all_same,
    assemble_training_data,
    remove_constant_reward_groups,
    without_mask,
)
from stovetop.rl.kl import compute_post_kl, incorporate_kl_penalty
from stovetop.rl.metrics import compute_kl_sample_train, compute_trajectory_metrics, dict_mean
from stovetop.rl.rollouts import do_group_rollout
from stovetop.rl.types import EnvGroupBuilder, TrajectoryGroup
from stovetop.supervised.normalize import Normalize, normalize_data
from stovetop.tracking.timing import timed
from stovetop.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepResponse, TensorData

T = TypeVar("T")

ADAM = AdamParams(beta1=0.9, beta2=0.95, eps=1e-8)  # the learning rate is each step's own
_PPO = PPO()


# ---- play --------------------------------------------------------------------------------------------------------


async def do_group_rollout_and_filter_constant_reward(
    builder: EnvGroupBuilder, policy: TokenCompleter, *, do_remove_constant_reward_groups: bool = True
) -> TrajectoryGroup | None:
    """A group, or None when it would teach nothing: all its rewards are equal."""
    group = await do_group_rollout(builder, policy)
    return None if do_remove_constant_reward_groups and all_same(group.get_total_rewards()) else group


# ---- prepare -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KLPenalty:
    """A pull towards a base model, or any other frozen weights."""

    reference: SamplingClient
    coefficient: float
    discount: float = 0.0  # of the penalties of later tokens; 0: each token has its own alone


class Minibatch(NamedTuple):
    """What a batch of groups came to: the data to train on, still with its `mask`; where each datum is from; the
    metrics."""

    data_D: list[Datum]
    metadata_D: list[DatumMetadata]
    metrics: dict[str, float]


class Judged(NamedTuple):
    """The groups that are trained on, and by how much each of their trajectories did better than expected."""

    groups_P: list[TrajectoryGroup]
    advantages_P_G: list[list[Advantage]]
    metrics: dict[str, float]  # of what was left out


def judge_groups(
    owned_groups_P: Sequence[tuple[EnvGroupBuilder, TrajectoryGroup]],
    *,
    estimator: Estimator = CENTRED,
    normalizes_advantages: bool = False,
    removes_constant_reward_groups: bool = False,
) -> Judged:
    """The advantages of groups, each with its builder. Where groups of equal rewards are left out,
    `filter/groups_removed` counts them; `filter/all_constant` is 1 where none has a gradient, so that one was kept for
    its place in the loop alone."""
    kept_P, metrics = owned_groups_P, dict[str, float]()
    if removes_constant_reward_groups:
        kept_P = remove_constant_reward_groups(owned_groups_P)
        metrics["filter/groups_removed"] = len(owned_groups_P) - len(kept_P)
        metrics["filter/all_constant"] = float(all(all_same(group.get_total_rewards()) for _, group in kept_P))
    groups_P = [group for _, group in kept_P]
    advantages_P_G = compute_advantages(groups_P, estimator)
    if normalizes_advantages:
        advantages_P_G = normalize_advantages(advantages_P_G)
    return Judged(groups_P, advantages_P_G, metrics)


async def prepare_minibatch(
    owned_groups_P: Sequence[tuple[EnvGroupBuilder, TrajectoryGroup]],
    *,
    estimator: Estimator = CENTRED,
    normalizes_advantages: bool = False,
    removes_constant_reward_groups: bool = False,
    kl_penalty: KLPenalty | None = None,
) -> Minibatch:
    """From groups, each with its builder (`Rollouts.owned_groups_P`), to data: see `judge_groups`. The metrics are
    those of all groups, of those that are left out too. `group_idx` counts the groups that are kept."""
    tags_P = [builder.logging_tags() for builder, _ in owned_groups_P]
    metrics = compute_trajectory_metrics([group for _, group in owned_groups_P], tags_P)
    judged = judge_groups(
        owned_groups_P,
        estimator=estimator,
        normalizes_advantages=normalizes_advantages,
        removes_constant_reward_groups=removes_constant_reward_groups,
    )
    data_D, metadata_D = assemble_training_data(judged.groups_P, judged.advantages_P_G)
    metrics |= judged.metrics
    if kl_penalty is not None:
        reference, coefficient, discount = kl_penalty.reference, kl_penalty.coefficient, kl_penalty.discount
        data_D, kl_metrics = await incorporate_kl_penalty(data_D, reference, coefficient, discount)
        metrics |= kl_metrics
    return Minibatch(data_D, metadata_D, metrics)


# ---- train -------------------------------------------------------------------------------------------------------


class TrainStep(NamedTuple):
    """What `train_step` came to, over all its substeps."""

    logprobs_D: list[TensorData]  # the trainer's, of each datum, before the substep that it was part of
    metrics: dict[str, float]  # loss:sum, over all of them, and the optimizer's own, means over the substeps


async def train_step(
    data_D: Sequence[Datum],
    training_client: TrainingClient,
    learning_rate: float,
    num_substeps: int = 1,
    loss_fn: str = "importance_sampling",
    *,
    loss_fn_config: LossConfig | None = None,
    normalize: Normalize = "sum",
    examples_D: Sequence[Hashable] | None = None,
    adam: AdamParams = ADAM,
) -> TrainStep:
    """`num_substeps` updates, each on its part of the data (or as many as there are datums). Each is submitted before
    the one before it is awaited. `normalize` is of each update's part; see there also for `examples_D`."""
    if not data_D:
        raise InvalidRequest("there is no datum to train on: data_D is empty")
    adam = replace(adam, learning_rate=learning_rate)
    examples = list(range(len(data_D)) if examples_D is None else examples_D)
    parts = split_list(list(zip(data_D, examples, strict=True)), min(num_substeps, len(data_D)))

    def submit(part: Sequence[tuple[Datum, Hashable]]) -> _Submitted:
        scaled_D = normalize_data([datum for datum, _ in part], normalize, [example for _, example in part])
        trained = training_client.forward_backward(without_mask(scaled_D), loss_fn, loss_fn_config)
        return _Submitted(trained, training_client.optim_step(adam))

    trained: list[ForwardBackwardOutput] = []
    stepped: list[OptimStepResponse] = []
    in_flight = submit(parts[0])
    for following in [*parts[1:], None]:
        awaited = in_flight
        if following is not None:
            in_flight = submit(following)
        trained.append(await awaited.trained)
        stepped.append(await awaited.stepped)
    loss = sum(output.metrics["loss:sum"] for output in trained)
    return TrainStep(
        [outputs["logprobs"] for output in trained for outputs in output.loss_fn_outputs],
        {"loss:sum": loss, **dict_mean([response.metrics for response in stepped])},
    )


class _Submitted(NamedTuple):
    trained: APIFuture[ForwardBackwardOutput]
    stepped: APIFuture[OptimStepResponse]


async def ppo_update(
    data_D: Sequence[Datum],
    training_client: TrainingClient,
    learning_rate: float,
    *,
    ppo_epochs: int = 4,
    num_substeps: int = 1,
    loss: PPO = _PPO,
    normalize: Normalize = "sum",
    adam: AdamParams = ADAM,
) -> list[TrainStep]:
    """Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347): so many `train_step`s on the same data,
    with ratios to the logprobs that it was sampled with. `loss` has the thresholds and the sampling temperature. There
    is no model of values, hence no loss of one."""
    config = asdict(loss)
    return [
        await train_step(
            data_D,
            training_client,
            learning_rate,
            num_substeps,
            PPO.name,
            loss_fn_config=config,
            normalize=normalize,
            adam=adam,
        )
        for _ in range(ppo_epochs)
    ]


def split_list(items: Sequence[T], num_parts: int) -> list[list[T]]:
    """In order, as evenly as possible: [1, 2, 3, 4, 5] in three is [[1], [2, 3], [4, 5]]. No part is empty."""
    if not 1 <= num_parts <= len(items):
        raise InvalidRequest(f"the number of parts must be in 1..{len(items)}, the number of items: {num_parts}")
    bounds = [part * len(items) // num_parts for part in range(num_parts + 1)]
    return [list(items[start:end]) for start, end in pairwise(bounds)]


# ---- save and freeze ---------------------------------------------------------------------------------------------


class Frozen(NamedTuple):
    """The weights to sample the next batch with, and the checkpoint that was submitted with them, if one was due. Its
    row is not written yet: log the step's metrics first, then `await frozen.saved.record(log_path)`. Whatever kills the
    process in between, the run goes on before this step and logs it again; the other way round its metrics would be
    lost."""

    sampling_client: SamplingClient
    metrics: dict[str, float]
    saved: PendingCheckpoint | None


async def save_checkpoint_and_get_sampling_client(
    training_client: TrainingClient, i_batch: int, save_every: int, start_batch: int = 0
) -> Frozen:
    """The weights as of this call, to sample batch `i_batch` with. Where a checkpoint is due after so many batches
    their save is submitted, under that number, which is that of the next batch. Nothing is recorded: see `Frozen`."""
    metrics: dict[str, float] = {}
    with timed("save_checkpoint", metrics):
        saves = i_batch > start_batch and is_due(i_batch, save_every)
        saved = submit_checkpoint(training_client, f"{i_batch:06d}", {"batch": i_batch}, "both") if saves else None
        return Frozen(await training_client.save_weights_and_get_sampling_client(), metrics, saved)


async def compute_full_batch_metrics_and_get_sampling_client(
    training_client: TrainingClient,
    i_batch: int,
    data_D: Sequence[Datum],
    training_logprobs_D: Sequence[TensorData],
    save_every: int,
    *,
    do_compute_post_kl: bool = False,
) -> Frozen:
    """`save_checkpoint_and_get_sampling_client` after a step, with the gap between sampler and trainer, and how far the
    step went if that is asked for."""
    frozen = await save_checkpoint_and_get_sampling_client(training_client, i_batch, save_every)
    metrics = frozen.metrics | compute_kl_sample_train(data_D, training_logprobs_D)
    if do_compute_post_kl:
        with timed("compute_post_kl", metrics):
            metrics |= await compute_post_kl(data_D, frozen.sampling_client)
    return Frozen(frozen.sampling_client, metrics, frozen.saved)
