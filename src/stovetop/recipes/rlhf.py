"""Reinforcement learning from human feedback (Ouyang et al. 2022, arXiv:2203.02155), in three phases: SUPERVISED on
chats, REWARD_MODEL on comparisons, and PAIRWISE_REINFORCEMENT of the supervised model: the reward of an answer is how
often the reward model prefers it to the others of its group.

    stovetop run rlhf          No Robots, helpful and harmless, and a model from the hub
    stovetop run rlhf:small    without a network

`sft_checkpoint_path` and `rm_weights_path` give what the first two phases would leave: they are then not run.
`run_rl=False` ends before the third; the same command without it goes on there.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

from stovetop.checks import check_all, collecting
from stovetop.client import ServiceClient
from stovetop.data_record import check_data, revisions_in
from stovetop.kitchen import Finished, Phase, run_phases
from stovetop.kitchen.phases import config_from, plan_phases
from stovetop.kitchen.workflows import PAIRWISE_REINFORCEMENT, REWARD_MODEL
from stovetop.lr_schedules import LRSchedule
from stovetop.preference.comparison_renderer import check_judge
from stovetop.recipes import sl_basic
from stovetop.recipes.configs import AdapterConfig, PolicyLossConfig, RewardConfig, TrainingConfig
from stovetop.recipes.settings import Count, LearningRate, Positive, check_rate, check_start, check_weights
from stovetop.rules import Whole
from stovetop.runs import check_opening
from stovetop.tasks import comparisons as data
from stovetop.tasks.comparisons import load_named_comparisons
from stovetop.tracking.configs import HOW_LONG, MAY_CHANGE
from stovetop.types import Rank


@dataclass(frozen=True, kw_only=True)
class Config(AdapterConfig, RewardConfig, PolicyLossConfig):
    model_name: str = "Qwen/Qwen3.5-9B-Base"
    log_path: str = field(default="runs/rlhf", metadata=MAY_CHANGE)
    sft_dataset: str = "no_robots"  # chats: no_robots, tulu3; FILE.jsonl with {"messages": [...]}; sample:NAME
    dataset: str = "hhh"  # hhh, helpsteer3, ultrafeedback; FILE.jsonl with prompt, chosen and rejected; sample:NAME
    test_dataset: str | None = None  # held-out rows of the same form; None: a test split, or test_size of the dataset
    test_size: Count = 1024  # comparisons held out of a dataset that has no test split, half of them at most; 0: none
    sft_checkpoint_path: str | None = None  # a supervised model: the policy starts from it, and none is trained
    rm_weights_path: str | None = None  # a reward model: it judges, and none is trained
    run_rl: bool = field(default=True, metadata=MAY_CHANGE)  # False: the supervised and the reward model alone
    max_length: Annotated[int, Whole(2)] | None = 16384  # tokens of a chat, which is cut off, or of a comparison
    batch_size: Positive = 256  # chats or comparisons a step; the last step of an epoch may have fewer
    sft_learning_rate: LearningRate = 2e-4  # at the first step; it falls to 0
    sft_num_epochs: Positive = 1  # passes over the chats
    rm_learning_rate: LearningRate = 3e-4  # at the first step; it falls to 0
    rm_num_epochs: Positive = 1  # passes over the comparisons
    rl_learning_rate: LearningRate = 1e-5  # constant
    rl_num_epochs: Positive = field(default=1, metadata=HOW_LONG)  # passes over the prompts
    rl_test_size: Count = 256  # likewise as test_size: prompts whose answers are judged against the better ones
    groups_per_batch: Positive = 256
    group_size: Annotated[int, Whole(2)] = 4
    max_tokens: Positive = 1024
    max_steps: Positive | None = field(default=None, metadata=HOW_LONG)  # of each phase; None: as the epochs have
    lora_rank: Rank = 64
    save_every: Count = field(default=100, metadata=MAY_CHANGE)


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(TrainingConfig, RewardConfig, PolicyLossConfig):
    """That of the policy."""

    dataset: str
    test_dataset: str | None
    test_size: Count
    rm_weights_path: str
    lr_schedule: LRSchedule = "constant"


def supervised(config: Config, done: Mapping[str, Finished]) -> sl_basic.Config | None:
    """Chats, for a model that answers; not where there is one."""
    if config.sft_checkpoint_path is not None:
        return None
    return config_from(
        config,
        sl_basic.Config,
        dataset=config.sft_dataset,
        test_dataset=None,
        test_size=4,  # chats that have no test split
        learning_rate=config.sft_learning_rate,
        num_epochs=config.sft_num_epochs,
    )


def reward(config: Config, done: Mapping[str, Finished]) -> sl_basic.Config | None:
    """Comparisons, for a model that judges; not where there is one. What trains it is supervised learning too."""
    if config.rm_weights_path is not None:
        return None
    return config_from(config, sl_basic.Config, learning_rate=config.rm_learning_rate, num_epochs=config.rm_num_epochs)


def reinforcement(config: Config, done: Mapping[str, Finished]) -> PolicyConfig | None:
    """The prompts of the comparisons: the first model answers, the second judges."""
    if not config.run_rl:
        return None
    return config_from(
        config,
        PolicyConfig,
        test_size=config.rl_test_size,
        load_checkpoint_path=config.sft_checkpoint_path or done["supervised"].state_path,
        rm_weights_path=config.rm_weights_path or done["reward"].sampler_path,
        learning_rate=config.rl_learning_rate,
        num_epochs=config.rl_num_epochs,
    )


PHASES = (
    Phase("supervised", sl_basic.WORKFLOW, supervised, columns=sl_basic.COLUMNS),
    Phase(
        "reward",
        REWARD_MODEL.replace("load_comparisons", load_named_comparisons),
        reward,
        columns=("learning_rate", "train_mean_nll", "test/nll", "test/accuracy", "grad_norm", "time/step"),
    ),
    Phase(
        "reinforcement",
        PAIRWISE_REINFORCEMENT.replace("load_comparisons", load_named_comparisons),
        reinforcement,
        columns=("env/all/format", "optim/entropy", "optim/kl_sample_train_v2", "test/win_rate", "time/step"),
    ),
)


def check(config: Config) -> None:
    """Refuses what can be known to be wrong without a model and without writing anything."""
    rates = (config.sft_learning_rate, config.rm_learning_rate, config.rl_learning_rate)
    check_all(
        lambda: check_opening(config.log_path, config, config.behavior_if_exists),
        lambda: check_data_sets(config),
        lambda: check_weights(
            config.base_url,
            config.model_name,
            sft_checkpoint_path=config.sft_checkpoint_path,
            rm_weights_path=config.rm_weights_path,
        ),
        lambda: check_start("sft_checkpoint_path", config.sft_checkpoint_path, config.lora_rank, config.train_unembed),
        lambda: check_judge(config.base_url, config.model_name, config.renderer_name),
        *(partial(check_rate, rate, config.model_name) for rate in rates),
    )


def check_data_sets(config: Config) -> None:
    """Refuses chats or comparisons that cannot be had or have changed."""
    of_chats, *of_comparisons = (planned.config for planned in plan_phases(PHASES, config))
    with collecting() as problem:
        if isinstance(of_chats, sl_basic.Config):
            with problem:
                sl_basic.check_chats(replace(of_chats, behavior_if_exists=config.behavior_if_exists))
        for own in of_comparisons:
            if isinstance(own, sl_basic.Config | PolicyConfig):
                with problem:
                    loaded = data.load(
                        own.dataset, own.test_dataset, own.test_size, revisions=revisions_in(own.log_path)
                    )
                    check_data(own.log_path, own.dataset, loaded.sources, config.behavior_if_exists)


async def main(config: Config) -> None:
    with config.open_service() as service:
        await train(config, service)


async def train(config: Config, service: ServiceClient) -> None:
    await run_phases(PHASES, config, service.at)


PRESETS = {
    "small": Config(
        model_name="smollm2",
        dtype="bfloat16",
        log_path="runs/rlhf_small",
        sft_dataset="sample:courtesy_chats",
        dataset="sample:courtesy",
        test_size=48,
        rl_test_size=48,
        lora_rank=16,
        batch_size=4,
        sft_learning_rate=5e-4,
        sft_num_epochs=2,
        rm_learning_rate=5e-4,
        rm_num_epochs=2,
        rl_learning_rate=5e-4,
        groups_per_batch=8,
        max_tokens=24,
        eval_every=200,
    )
}  # of two right answers the more courteous one is better


if __name__ == "__main__":
    asyncio.run(main(Config()))
