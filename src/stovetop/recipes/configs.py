"""The fields that recipes share, each with its one meaning, as base classes of their configs. A recipe's config extends
those that fit, and adds fields of its own; a field whose default differs it has once more, without the comment. What a
field takes is in its annotation (`settings.py`).

    ModelConfig       a model is asked, and maybe trained
    AdapterConfig     and it is trained, in one phase or in several
    TrainingConfig    and once
    RolloutConfig     answers are drawn from a model that is trained
    RewardConfig      and rewarded
    PolicyLossConfig  and trained on with a loss that can be chosen

Each is also a RunConfig. Of several bases the one that has defaults of the recipe's own comes first.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from stovetop.checks import check as check_fields
from stovetop.checks import check_all
from stovetop.kitchen import RunConfig
from stovetop.lr_schedules import LRSchedule
from stovetop.recipes.settings import (
    Beta,
    Count,
    Epsilon,
    LearningRate,
    NotNegative,
    Positive,
    Temperature,
    check_policy_loss,
    check_rate,
    check_renderer_name,
    check_start,
    check_weights,
)
from stovetop.rl.rollouts import OnRolloutError, Seconds
from stovetop.rules import Whole
from stovetop.runs import check_opening
from stovetop.tracking.configs import HOW_LONG, MAY_CHANGE
from stovetop.tracking.trackers import check_trackers, parse_trackers
from stovetop.types import Rank, Seed


@dataclass(frozen=True, kw_only=True)
class ModelConfig(RunConfig):
    """A model is asked, and maybe trained."""

    model_name: str  # a folder, a fetched model, or a name on the hub
    renderer_name: str | None = None  # None: the one recommended for the model
    seed: Seed = 0  # of the adapter, the split, the order and the answers

    def __post_init__(self) -> None:
        check_model_config(self)


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(ModelConfig):
    """A model is trained, in one phase or in several."""

    lora_rank: Rank = 32  # of the adapter's matrices
    train_unembed: bool = True  # the output head too
    max_steps: Positive | None = field(default=None, metadata=HOW_LONG)  # at most; None: as many as the epochs have
    eval_every: Count = field(default=20, metadata=MAY_CHANGE)  # steps; 0: only at the end
    save_every: Count = field(default=20, metadata=MAY_CHANGE)  # steps; 0: only at the end
    adam_beta1: Beta = 0.9  # of the mean of gradients
    adam_beta2: Beta = 0.95  # of the mean of their squares
    adam_eps: Epsilon = 1e-8  # added to the root of that
    weight_decay: NotNegative = 0.0  # what a weight loses in a step, times the rate
    grad_clip_norm: NotNegative = 0.0  # 0: gradients are not clipped


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(AdapterConfig):
    """A model is trained once."""

    load_checkpoint_path: str | None = None  # weights to start from, with a fresh optimizer
    learning_rate: LearningRate  # at its highest; auto: derived from the model
    lr_schedule: LRSchedule  # how the rate falls
    warmup_steps: Count = 0  # in which the rate rises
    num_epochs: Positive = field(default=1, metadata=HOW_LONG)  # passes over the data


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(ModelConfig):
    """Answers are drawn from a model that is trained."""

    groups_per_batch: Positive  # prompts a step; the last step of an epoch may have fewer
    max_tokens: Positive  # of an answer
    temperature: Temperature = 1.0  # of the answers
    num_substeps: Positive = 1  # updates a step, each on a part of the data
    max_steps_off_policy: Count = 0  # how many steps sampling may be ahead of training
    num_groups_to_log: Count = field(default=4, metadata=MAY_CHANGE)  # of each step, as a page to read; 0: no pages
    on_rollout_error: OnRolloutError = "retry"  # raise at once, raise after three retries, or then skip and count it
    rollout_timeout_s: Seconds | None = None  # of one try; what takes longer is an error


@dataclass(frozen=True, kw_only=True)
class RewardConfig(RolloutConfig):
    """They are rewarded: each by how much better it is than the others of its group."""

    group_size: Annotated[int, Whole(2)]  # answers to each prompt; one alone has no others to be better than
    remove_constant_reward_groups: bool = False  # they have no gradient


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig(RolloutConfig):
    """They are trained on with a loss that can be chosen."""

    loss_fn: str = "importance_sampling"  # or "ppo", "cispo"
    loss_fn_config: dict[str, float] = field(default_factory=dict[str, float])  # loss_fn_config.KEY=1.5 sets one

    def __post_init__(self) -> None:
        check_policy_loss_config(self)


def check_model_config(config: ModelConfig) -> None:
    """For `__post_init__`: refuses what is wrong with the fields by themselves."""
    check_all(
        lambda: check_fields(config),
        lambda: check_renderer_name(config.renderer_name),
        lambda: parse_trackers(config.trackers),
    )


def check_policy_loss_config(config: PolicyLossConfig) -> None:
    """Likewise."""
    check_all(
        lambda: check_model_config(config),
        lambda: check_policy_loss(config.loss_fn, config.loss_fn_config, config.temperature),
    )


def check_training(config: TrainingConfig, *more: Callable[[], object]) -> None:
    """For a recipe's `check`: refuses what can be known to be wrong with the run's folder, the weights and the rate,
    and what `more` refuses; all of it at once."""
    path = config.load_checkpoint_path
    check_all(
        lambda: check_opening(config.log_path, config, config.behavior_if_exists),
        *more,
        lambda: check_weights(config.base_url, config.model_name, path),
        lambda: check_start("load_checkpoint_path", path, config.lora_rank, config.train_unembed),
        lambda: check_rate(config.learning_rate, config.model_name),
        lambda: check_trackers(config.trackers),
    )
