"""Stages of reinforcement learning: problems to groups, groups to advantages, advantages to data, the update. Those
that play groups are in `sampling.py`.

Shape suffixes: `P` problems, `G` members of a group, `D` datums.
"""

import logging
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from stovetop.client import SamplingClient, ServiceClient, TrainingClient
from stovetop.datasets import Split, log_epoch
from stovetop.kitchen.nodes import Positions
from stovetop.kitchen.run import Row
from stovetop.kitchen.stage import stage
from stovetop.kitchen.stages.evaluation import Evaluators
from stovetop.kitchen.stages.policies import Policy
from stovetop.losses import PPO, LossConfig, parse_loss
from stovetop.model_families import context_length
from stovetop.named_data import load_data
from stovetop.renderers.base import Renderer
from stovetop.rl import data_processing, kl, steps
from stovetop.rl.advantages import CENTRED, Advantage, Estimator
from stovetop.rl.evaluation import RLTestSetEvaluator
from stovetop.rl.metrics import (
    compute_clip_fraction,
    compute_kl_sample_train,
    compute_rollout_metrics,
    compute_update_metrics,
    dict_mean,
    rl_step_fields,
)
from stovetop.rl.problem_env import PosedProblem, ProblemDataset, problem_builders, problem_of_row
from stovetop.rl.rollout_record import RolloutRecord
from stovetop.rl.rollouts import Rollouts
from stovetop.rl.types import EnvGroupBuilder, RLDataset, TrajectoryGroup
from stovetop.rules import Whole
from stovetop.runs import Run
from stovetop.supervised.normalize import normalize_data
from stovetop.types import AdamParams, Datum, TensorData

log = logging.getLogger(__name__)

# ---- problems --------------------------------------------------------------------------------------------------------


@stage(writes="posed")
def load_problems(
    dataset: str, run: Run, test_dataset: str | None = None, test_size: int = 0, seed: int = 0
) -> Split[PosedProblem]:
    """Rows of a question and its answer: to train on, in a first order of their own, and held out."""
    loaded = load_data(
        dataset,
        problem_of_row,
        test_dataset=test_dataset,
        test_size=test_size,
        seed=seed,
        revisions=run.revisions,
    )
    run.record_data(dataset, loaded)
    return Split(loaded.train, loaded.test)


@stage(writes="max_prompt_tokens")
def limit_prompts(service: ServiceClient, training_client: TrainingClient, max_tokens: int) -> int | None:
    """What the model's context leaves beside an answer; None where the service does not say."""
    context = context_length(service, training_client)
    return None if context is None else context - max_tokens


class Builders(NamedTuple):
    """A builder of environments for each problem."""

    builders: Sequence[EnvGroupBuilder]
    test_builders: Sequence[EnvGroupBuilder]


@stage(writes=("builders", "test_builders"))
def build_env_group(
    posed: Split[PosedProblem], renderer: Renderer, group_size: int, run: Run, max_prompt_tokens: int | None = None
) -> Builders:
    """Problems with one right answer, `group_size` tries at each, and one at those held out. Replace it for other
    environments."""
    train = problem_builders(posed.train, renderer, group_size, max_prompt_tokens=max_prompt_tokens)
    test = problem_builders(posed.test, renderer, group_size=1, max_prompt_tokens=max_prompt_tokens)
    run.emit("rl.env_group_built", num_train=len(train), num_test=len(test), group_size=group_size)
    return Builders(train, test)


class Problems(NamedTuple):
    """The batches of all epochs."""

    problems: RLDataset
    num_per_epoch: int


@stage(writes=("problems", "num_per_epoch"))
def batch_problems(
    builders: Sequence[EnvGroupBuilder], groups_per_batch: int, num_epochs: int = 1, seed: int = 0
) -> Problems:
    """Each epoch in an order of its own."""
    batches = ProblemDataset(builders, groups_per_batch, seed=seed, num_epochs=num_epochs)
    log_epoch("problems", len(builders), groups_per_batch)
    return Problems(batches, len(batches) // num_epochs)


@stage(writes="evaluators")
def make_rl_evaluators(
    test_builders: Sequence[EnvGroupBuilder],
    max_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    rollout_record: RolloutRecord | None = None,
) -> Evaluators:
    """The rewards of the problems that are held out, if there are any."""
    evaluator = RLTestSetEvaluator(test_builders, max_tokens, temperature, seed=seed, record=rollout_record)
    return Evaluators(sampling=(evaluator,) if test_builders else ())


class PolicyLoss(NamedTuple):
    """Which loss of `losses.py`, with its options."""

    name: str
    config: LossConfig


@stage(writes="policy_loss")
def make_policy_loss(
    loss_fn: str = "importance_sampling",
    loss_fn_config: dict[str, float] | None = None,
    temperature: float = 1.0,
    max_steps_off_policy: int = 0,
) -> PolicyLoss:
    """The loss of the config, at the temperature that answers are sampled with."""
    config = {**(loss_fn_config or {}), "temperature": temperature}
    parse_loss(loss_fn, config)  # refuses what is wrong before anything is sampled
    if max_steps_off_policy > 1 and loss_fn == "importance_sampling":
        log.warning(
            "answers are up to %d updates older than what they train, and nothing limits the ratios of "
            "loss_fn=importance_sampling: a few large ones can undo the run. loss_fn=ppo or cispo clips them",
            max_steps_off_policy,
        )
    return PolicyLoss(loss_fn, config)


class ProximalUpdates(NamedTuple):
    """How often each batch is trained on, in how many updates each time, and with which limits of the ratios."""

    loss: PPO
    num_epochs: int
    num_substeps: int


@stage(writes="proximal_updates")
def make_ppo_loss(
    loss_fn_config: dict[str, float] | None = None,
    temperature: float = 1.0,
    ppo_epochs: Annotated[int, Whole(1)] = 4,
    num_substeps: Annotated[int, Whole(1)] = 1,
) -> ProximalUpdates:
    """The clipped loss, at the temperature that answers are sampled with, the number of passes over each batch and of
    updates in a pass."""
    loss = parse_loss(PPO.name, {**(loss_fn_config or {}), "temperature": temperature})
    assert isinstance(loss, PPO)
    return ProximalUpdates(loss, ppo_epochs, num_substeps)


# ---- judge -----------------------------------------------------------------------------------------------------------


class Judged(NamedTuple):
    """The groups that are trained on, and by how much each of their trajectories did better than expected."""

    groups_P: list[TrajectoryGroup]
    advantages_P_G: list[list[Advantage]]


@stage(writes=("groups_P", "advantages_P_G"))
def compute_advantages(
    rollouts: Rollouts,
    row: Row,
    run: Run,
    remove_constant_reward_groups: bool = False,
    normalizes_advantages: bool = False,
    estimator: Estimator = CENTRED,
) -> Judged:
    """Of every trajectory; groups that teach nothing are left out if that is asked for, and counted."""
    groups_P, advantages_P_G, metrics = steps.judge_groups(
        rollouts.owned_groups_P,
        estimator=estimator,
        normalizes_advantages=normalizes_advantages,
        removes_constant_reward_groups=remove_constant_reward_groups,
    )
    row.add(metrics)
    emit_advantages(run, row.step, groups_P)
    return Judged(groups_P, advantages_P_G)


def emit_advantages(run: Run, step: int, groups_P: Sequence[TrajectoryGroup]) -> None:
    """That the groups of a step are compared, of how many trajectories."""
    num_trajectories = sum(len(group.trajectories_G) for group in groups_P)
    run.emit("rl.advantages_computed", step=step, num_groups=len(groups_P), num_trajectories=num_trajectories)


@stage(writes="data_D")
def assemble_rl_batch(
    groups_P: list[TrajectoryGroup],
    advantages_P_G: list[list[Advantage]],
    rollouts: Rollouts,
    positions: Positions,
    row: Row,
    run: Run,
) -> list[Datum]:
    """The data to train on, still with their mask; and how the episodes went, into the row."""
    add_episodes(row, rollouts, positions)
    data_D = data_processing.assemble_training_data(groups_P, advantages_P_G)[0]
    emit_batch(run, row.step, data_D)
    return data_D


def emit_batch(run: Run, step: int, data_D: Sequence[Datum]) -> None:
    """That the data of a step are made."""
    num_tokens = sum(datum.model_input.length for datum in data_D)
    run.emit("rl.batch_assembled", step=step, num_datums=len(data_D), num_tokens=num_tokens)


def add_episodes(row: Row, rollouts: Rollouts, positions: Positions) -> None:
    """How they went, into the row."""
    row.add({"progress/batch": row.step, "progress/done_frac": (row.step + 1) / positions.num_steps})
    row.add(compute_rollout_metrics(rollouts))


def is_penalised(kl_penalty_coef: float) -> bool:
    """Whether the distance to a reference costs anything."""
    return kl_penalty_coef > 0


@stage(writes="data_D")
async def kl_penalty(
    data_D: list[Datum],
    reference: SamplingClient,
    row: Row,
    kl_penalty_coef: float = 0.1,
    kl_discount_factor: float = 0.0,
) -> list[Datum]:
    """Pulls the advantages towards frozen weights: `init_reference` makes them those that the run began with."""
    penalised_D, metrics = await kl.incorporate_kl_penalty(data_D, reference, kl_penalty_coef, kl_discount_factor)
    row.add(metrics)
    return penalised_D


@stage(writes="data_D")
def weigh_episodes_alike(
    data_D: list[Datum], groups_P: list[TrajectoryGroup], advantages_P_G: list[list[Advantage]]
) -> list[Datum]:
    """Each episode counts as much, however many tokens it has and data it came to: behind `assemble_rl_batch`, where
    the loss is else a sum over tokens."""
    metadata_D = data_processing.assemble_training_data(groups_P, advantages_P_G)[1]
    return normalize_data(data_D, "example", metadata_D)


# ---- train -----------------------------------------------------------------------------------------------------------


@stage(writes="logprobs_D")
async def train_step(
    training_client: TrainingClient,
    data_D: list[Datum],
    adam: AdamParams,
    policy_loss: PolicyLoss,
    row: Row,
    num_substeps: int = 1,
) -> list[TensorData]:
    """One update, or `num_substeps` of them on parts of the data. Returns the trainer's logprobs."""
    config = policy_loss.config
    trained = await steps.train_step(
        data_D, training_client, adam.learning_rate, num_substeps, policy_loss.name, loss_fn_config=config, adam=adam
    )
    row.add({"optim/lr": adam.learning_rate, "optim/num_updates": min(num_substeps, len(data_D)), **trained.metrics})
    return trained.logprobs_D


@stage(writes="logprobs_D")
async def ppo_update(
    training_client: TrainingClient,
    data_D: list[Datum],
    adam: AdamParams,
    proximal_updates: ProximalUpdates,
    row: Row,
    run: Run,
) -> list[TensorData]:
    """Several passes over the same data, each of one update or of several, with ratios to the logprobs that it was
    sampled with. Returns those of before the first."""
    loss, num_epochs, num_substeps = proximal_updates
    passes = await steps.ppo_update(
        data_D,
        training_client,
        adam.learning_rate,
        ppo_epochs=num_epochs,
        num_substeps=num_substeps,
        loss=loss,
        adam=adam,
    )
    num_updates = num_epochs * min(num_substeps, len(data_D))
    low, high = loss.clip_low_threshold, loss.clip_high_threshold
    clipped = dict_mean([compute_clip_fraction(data_D, each.logprobs_D, low, high) for each in passes])
    metrics = dict_mean([each.metrics for each in passes])
    row.add({"optim/lr": adam.learning_rate, "optim/num_updates": num_updates, **metrics, **clipped})
    entropy = compute_kl_sample_train(data_D, passes[0].logprobs_D)["optim/entropy"]
    run.emit("rl.ppo_update", step=row.step, policy_loss=metrics["loss:sum"], entropy=entropy, num_updates=num_updates)
    return passes[0].logprobs_D


def measures_post_kl(compute_post_kl: bool) -> bool:
    """Whether that is asked for."""
    return compute_post_kl


@stage
async def compute_post_kl(data_D: list[Datum], policies: list[Policy], row: Row) -> None:
    """How far the update went, by the logprobs of what was trained on: stands behind `freeze_policy`, one evaluation of
    the batch a step."""
    row.add(await kl.compute_post_kl(data_D, policies[-1].client))


@stage
def log_rl_metrics(
    data_D: list[Datum], logprobs_D: list[TensorData], row: Row, run: Run, policy: Policy | None = None
) -> None:
    """How far sampler and trainer were apart; and how many steps, where one policy has sampled the whole batch."""
    if policy is not None:
        row.add({"lag": row.step - policy.num_updates})
    metrics = compute_update_metrics(data_D, logprobs_D)
    row.add({name: value for name, value in metrics.items() if name not in row.values})  # an update may have said more
    run.emit("rl.step", step=row.step, **rl_step_fields(row.values))
