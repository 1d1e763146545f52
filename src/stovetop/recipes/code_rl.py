"""Reinforcement learning on programming problems: a program is right if it passes every test of its problem, in a
sandbox. The workflow REINFORCEMENT with clipped updates (PPO), each batch in several passes, and advantages by GAE; and
before it, if chats are named, SUPERVISED as a warm start.

    stovetop run code_rl                     DeepCoder, and a model from the hub
    stovetop run code_rl dataset=FILE.jsonl  problems of your own, in the form of DeepCoder's rows
    stovetop run code_rl:small               functions of one line, without a network

It needs a sandbox, and is refused without one: docs/graders.md. `max_tokens` is 4096 here, where the published config
has 5, left over from another recipe.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from stovetop.checks import collecting
from stovetop.client import ServiceClient
from stovetop.data_record import check_data, revisions_in
from stovetop.kitchen import Finished, Phase, When, run_phases, stage
from stovetop.kitchen.edits import as_ppo
from stovetop.kitchen.phases import check_phases, config_from, plan_phases
from stovetop.kitchen.stages.preference import init_reference
from stovetop.kitchen.stages.rl import is_penalised, kl_penalty
from stovetop.kitchen.workflows import REINFORCEMENT, SUPERVISED
from stovetop.lr_schedules import LRSchedule
from stovetop.recipes.configs import RewardConfig, TrainingConfig, check_training
from stovetop.recipes.settings import Count, LearningRate, NotNegative, Positive, check_num_steps, check_rate
from stovetop.rl.advantages import GAE
from stovetop.rl.rollouts import Seconds
from stovetop.rules import Whole, number
from stovetop.tasks import chats, code
from stovetop.tasks.chats import load_named_chats
from stovetop.tasks.code import load_code_problems
from stovetop.tasks.code_groups import build_code_groups, find_grader
from stovetop.tasks.sandbox import find_sandbox
from stovetop.tracking.configs import HOW_LONG, MAY_CHANGE

Share = Annotated[float, number(at_least=0, at_most=1)]
SomeShare = Annotated[float, number(above=0, at_most=1)]


@dataclass(frozen=True, kw_only=True)
class Learner(TrainingConfig):
    """What both phases have."""

    model_name: str = "meta-llama/Llama-3.1-8B-Instruct"
    learning_rate: LearningRate = 1e-5
    lr_schedule: LRSchedule = "constant"


@dataclass(frozen=True, kw_only=True)
class Solving(Learner, RewardConfig):
    """What the second phase and the whole have. The loss is PPO's, so there is none to choose."""

    dataset: str = "deepcoder"  # the problems; or FILE.jsonl in the form of its rows, sample:NAME
    test_dataset: str | None = None  # held-out problems, likewise; None: a test split, or test_size of the problems
    test_size: Count = 32  # problems held out of data that has no test split; 0: none
    groups_per_batch: Positive = 100
    group_size: Annotated[int, Whole(2)] = 4
    max_steps: Positive | None = field(default=100, metadata=HOW_LONG)  # at most, of the reinforcement
    max_tokens: Positive = 4096
    test_time_s: Seconds = 6.0  # of one test of a program
    max_sandboxes: Positive = field(default=4, metadata=MAY_CHANGE)  # at once
    gamma: SomeShare = 0.99  # discount of a turn; episodes have one here
    gae_lambda: Share = 0.95  # 0: rewards of one turn and the values; 1: rewards alone
    ppo_epochs: Positive = 4  # passes over each batch
    num_substeps: Positive = 1  # updates a pass, each on a part of the data
    kl_penalty_coef: NotNegative = 0.0  # what the distance to the weights that the run began with costs


@dataclass(frozen=True, kw_only=True)
class Config(Solving):
    log_path: str = field(default="runs/code_rl", metadata=MAY_CHANGE)
    clip_epsilon: SomeShare = 0.2  # ratios are limited to 1 - clip_epsilon .. 1 + clip_epsilon
    warm_dataset: str | None = None  # chats to begin with, as in sl_basic; None: there is no such phase
    warm_batch_size: Positive = 16  # chats a step
    warm_learning_rate: LearningRate = 2e-4  # auto likewise
    warm_num_epochs: Positive = 1  # passes over the chats


# ---- the first phase -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WarmConfig(Learner):
    dataset: str
    batch_size: Positive


def supervised(config: Config, done: Mapping[str, Finished]) -> WarmConfig | None:
    """Not run where no chats are named."""
    if config.warm_dataset is None:
        return None
    return config_from(
        config,
        WarmConfig,
        dataset=config.warm_dataset,
        batch_size=config.warm_batch_size,
        learning_rate=config.warm_learning_rate,
        warmup_steps=0,
        max_steps=None,
        num_epochs=config.warm_num_epochs,
    )


# ---- the second phase ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CodeConfig(Solving):
    loss_fn_config: dict[str, float]


def reinforcement(config: Config, done: Mapping[str, Finished]) -> CodeConfig:
    """From what the chats taught, if there were any."""
    taught = {"load_checkpoint_path": done["supervised"].state_path} if "supervised" in done else {}
    clips = {"clip_low_threshold": 1 - config.clip_epsilon, "clip_high_threshold": 1 + config.clip_epsilon}
    return config_from(config, CodeConfig, loss_fn_config=clips, **taught)


@stage(writes="estimator")
def choose_estimator(gamma: float = 0.99, gae_lambda: float = 0.95) -> GAE:
    """Generalized advantage estimation, with the mean of a group as the value."""
    return GAE(gamma, gae_lambda)


SOLVING_PROGRAMS = (
    as_ppo(REINFORCEMENT)
    .named(REINFORCEMENT.name)
    .replace("load_problems", load_code_problems, find_grader, choose_estimator)
    .replace("build_env_group", build_code_groups)
    .insert_after("init_session", When(is_penalised, init_reference))
    .insert_after("assemble_rl_batch", When(is_penalised, kl_penalty))
)
PHASES = (
    Phase("supervised", SUPERVISED.replace("load_dataset", load_named_chats), supervised, columns=("train_mean_nll",)),
    Phase(
        "reinforcement",
        SOLVING_PROGRAMS,
        reinforcement,
        columns=(
            "env/all/reward/total",
            "env/all/correct",
            "env/all/format",
            "env/all/by_group/frac_mixed",
            "optim/entropy",
            "optim/clip_fraction",
            "time/step",
            "test/env/all/correct",
        ),
    ),
)


def check(config: Config) -> None:
    """Refuses what can be known to be wrong without a model and without writing anything; also where no sandbox can be
    made."""
    check_training(
        config,
        lambda: check_phases(PHASES, config),
        lambda: check_data_sets(config),
        find_sandbox,
        lambda: check_rate(config.warm_learning_rate, config.model_name),
    )


def check_data_sets(config: Config) -> None:
    """Refuses chats or problems that cannot be had or have changed, and a warm-up that is longer than the run."""
    with collecting() as problem:
        for own in (planned.config for planned in plan_phases(PHASES, config)):
            with problem:
                if isinstance(own, WarmConfig):
                    loaded = chats.load(own.dataset, seed=own.seed, revisions=revisions_in(own.log_path))
                    check_data(own.log_path, own.dataset, loaded.sources, config.behavior_if_exists)
                if isinstance(own, CodeConfig):
                    revisions = revisions_in(own.log_path)
                    problems = code.load(own.dataset, own.test_dataset, own.test_size, own.seed, revisions)
                    num = len(problems.train)
                    with problem:
                        check_data(own.log_path, own.dataset, problems.sources, config.behavior_if_exists)
                    check_num_steps(num, own.groups_per_batch, own.num_epochs, own.max_steps, own.warmup_steps)


COOKBOOK_NAMES = {"num_rollouts": "max_steps"}


async def main(config: Config) -> None:
    with config.open_service() as service:
        await train(config, service)


async def train(config: Config, service: ServiceClient) -> None:
    await run_phases(PHASES, config, service.at)


PRESETS = {
    # Functions of one line. The chats teach how an answer is written; half of their functions are wrong.
    "small": Config(
        dataset="sample:small_functions",
        test_dataset="sample:small_functions_test",
        model_name="smollm2",
        log_path="runs/code_rl_small",
        lora_rank=16,
        train_unembed=False,
        warm_dataset="sample:small_functions_chats",
        warm_num_epochs=3,
        groups_per_batch=8,
        group_size=8,
        max_tokens=40,
        learning_rate=1e-4,
        num_epochs=2,
        max_steps=16,
        ppo_epochs=1,
        eval_every=8,
        save_every=8,
    ),
}


if __name__ == "__main__":
    asyncio.run(main(Config()))
