"""Stages of reinforcement learning: problems to groups, groups to advantages, advantages to data, the update.

Shape suffixes: `P` problems, `G` members of a group, `D` datums.
"""

from collections.abc import Sequence
from typing import NamedTuple

from stovetop.client import SamplingClient, ServiceClient, TrainingClient
from stovetop.datasets import Split, load_rows, split_rows
from stovetop.kitchen.nodes import Positions
from stovetop.kitchen.run import Row
from stovetop.kitchen.stage import stage
from stovetop.kitchen.stages.evaluation import Evaluators
from stovetop.kitchen.stages.policies import Policy
from stovetop.losses import PPO, LossConfig, parse_loss
from stovetop.model_families import context_length
from stovetop.renderers.base import Renderer
from stovetop.rl import advantages, data_processing, kl, steps
from stovetop.rl.advantages import CENTRED, Advantage, Estimator
from stovetop.rl.evaluation import RLTestSetEvaluator
from stovetop.rl.metrics import (
    compute_clip_fraction,
    compute_kl_sample_train,
    compute_trajectory_metrics,
    dict_mean,
    rl_step_fields,
)
from stovetop.rl.problem_env import PosedProblem, ProblemDataset, problem_builders, problems_from_rows
from stovetop.rl.rollouts import RetryOnFailure, Rollouts, SamplingPolicy, do_rollouts
from stovetop.rl.types import EnvGroupBuilder, RLDataset, TrajectoryGroup
from stovetop.runs import Run
from stovetop.types import AdamParams, Datum, TensorData

# ---- problems --------------------------------------------------------------------------------------------------------


@stage(writes="posed")
def load_problems(
    dataset: str, run: Run, test_dataset: str | None = None, test_size: int = 0, seed: int = 0
) -> Split[PosedProblem]:
    """Rows of a question and its answer: to train on, in a first order of their own, and held out."""
    posed = split_rows(problems_from_rows(load_rows(dataset)), 0 if test_dataset else test_size, seed)
    if test_dataset:
        posed = posed._replace(test=problems_from_rows(load_rows(test_dataset)))
    run.emit("dataset.load", dataset=dataset, num_train=len(posed.train), num_test=len(posed.test))
    return posed


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
    return Problems(batches, len(batches) // num_epochs)


@stage(writes="evaluators")
def make_rl_evaluators(
    test_builders: Sequence[EnvGroupBuilder], max_tokens: int, temperature: float = 1.0, seed: int = 0
) -> Evaluators:
    """The rewards of the problems that are held out, if there are any."""
    evaluator = RLTestSetEvaluator(test_builders, max_tokens, temperature, seed=seed)
    return Evaluators(sampling=(evaluator,) if test_builders else ())


def evaluates_at_end(evaluators: Evaluators, is_complete: bool, eval_every: int = 0) -> bool:
    """Where there is something to measure with, now and then, and the run was not complete when it began."""
    return any(evaluators) and eval_every > 0 and not is_complete


class PolicyLoss(NamedTuple):
    """Which loss of `losses.py`, with its options."""

    name: str
    config: LossConfig


@stage(writes="policy_loss")
def make_policy_loss(
    loss_fn: str = "importance_sampling", loss_fn_config: dict[str, float] | None = None, temperature: float = 1.0
) -> PolicyLoss:
    """The loss of the config, at the temperature that answers are sampled with."""
    config = {**(loss_fn_config or {}), "temperature": temperature}
    parse_loss(loss_fn, config)  # refuses what is wrong before anything is sampled
    return PolicyLoss(loss_fn, config)


# ---- sample ----------------------------------------------------------------------------------------------------------


@stage(writes="rollouts")
async def do_rollout(
    problems: RLDataset, step: int, policy: Policy, max_tokens: int, temperature: float = 1.0, seed: int = 0
) -> Rollouts:
    """Answers to every problem of the batch, graded."""
    sampling = SamplingPolicy(policy.client, max_tokens, temperature, seed=seed + step)
    return await do_rollouts(problems.get_batch(step), sampling, RetryOnFailure())


class Judged(NamedTuple):
    """The groups that are trained on, and by how much each of their trajectories did better than expected."""

    groups_P: list[TrajectoryGroup]
    advantages_P_G: list[list[Advantage]]


@stage(writes=("groups_P", "advantages_P_G"))
def compute_advantages(
    rollouts: Rollouts,
    row: Row,
    remove_constant_reward_groups: bool = False,
    normalizes_advantages: bool = False,
    estimator: Estimator = CENTRED,
) -> Judged:
    """Of every trajectory; groups that teach nothing are left out if that is asked for, and counted."""
    owned_P = list(rollouts.owned_groups_P)
    kept_P = owned_P
    if remove_constant_reward_groups:
        kept_P = data_processing.remove_constant_reward_groups(owned_P)
        row.add({"filter/groups_removed": len(owned_P) - len(kept_P)})
    groups_P = [group for _, group in kept_P]
    advantages_P_G = advantages.compute_advantages(groups_P, estimator)
    if normalizes_advantages:
        advantages_P_G = advantages.normalize_advantages(advantages_P_G)
    return Judged(groups_P, advantages_P_G)


@stage(writes="data_D")
def assemble_rl_batch(
    groups_P: list[TrajectoryGroup],
    advantages_P_G: list[list[Advantage]],
    rollouts: Rollouts,
    positions: Positions,
    row: Row,
) -> list[Datum]:
    """The data to train on, still with their mask; and how the episodes went, into the row."""
    add_episodes(row, rollouts, positions)
    return data_processing.assemble_training_data(groups_P, advantages_P_G)[0]


def add_episodes(row: Row, rollouts: Rollouts, positions: Positions) -> None:
    """How they went, into the row."""
    tags_P = [builder.logging_tags() for builder, _ in rollouts.owned_groups_P]
    row.add({"progress/batch": row.step, "progress/done_frac": (row.step + 1) / positions.num_steps})
    row.add(rollouts.error_metrics())
    row.add(compute_trajectory_metrics([group for _, group in rollouts.owned_groups_P], tags_P))


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
    policy_loss: PolicyLoss,
    row: Row,
    ppo_epochs: int = 4,
) -> list[TensorData]:
    """Several updates on the same data, with ratios to the logprobs that it was sampled with. Returns those of before
    the first."""
    loss = parse_loss(PPO.name, policy_loss.config)
    assert isinstance(loss, PPO)
    passes = await steps.ppo_update(
        data_D, training_client, adam.learning_rate, ppo_epochs=ppo_epochs, loss=loss, adam=adam
    )
    row.add({"optim/lr": adam.learning_rate, "optim/num_updates": ppo_epochs, **dict_mean([p.metrics for p in passes])})
    return passes[0].logprobs_D


@stage
def log_rl_metrics(
    data_D: list[Datum], logprobs_D: list[TensorData], rollouts: Rollouts, policy: Policy, row: Row, run: Run
) -> None:
    """How far sampler and trainer were apart, and how many steps."""
    row.add({"lag": row.step - policy.num_updates})
    row.add(compute_kl_sample_train(data_D, logprobs_D) | compute_clip_fraction(data_D, logprobs_D))
    fields = rl_step_fields([group for _, group in rollouts.owned_groups_P], row.values)
    run.emit("rl.step", step=row.step, policy_loss=row.values["loss:sum"], **fields)
