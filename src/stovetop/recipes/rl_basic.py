r"""Reinforcement learning with a verifiable reward: problems in, a model that solves more of them out. The workflow
REINFORCEMENT with its own problems: school mathematics, answered in \boxed{}.

    stovetop run rl_basic                                                     GSM8K and a model from the hub
    stovetop run rl_basic:small                                               without a network, in minutes

`rl_loop` shows the same as one flat loop, on-policy: with `answers=exact` both give the same rows and weights.
`max_steps_off_policy=1` samples the next batch while this one is trained on.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from stovetop.checks import check_all
from stovetop.client import ServiceClient
from stovetop.data_record import check_data, revisions_in
from stovetop.datasets import Row
from stovetop.kitchen.workflows import REINFORCEMENT
from stovetop.lr_schedules import LRSchedule
from stovetop.recipes.configs import PolicyLossConfig, RewardConfig, TrainingConfig, check_training
from stovetop.recipes.settings import Count, LearningRate, Positive, check_num_steps
from stovetop.rl.problem_env import problems_from_rows
from stovetop.rules import Whole
from stovetop.runs import open_run
from stovetop.tasks import math, problems
from stovetop.tasks.math_grading import grade_here
from stovetop.tasks.problem_groups import Answers, build_problem_groups, open_grader
from stovetop.tasks.problems import load_named_problems
from stovetop.tracking.configs import MAY_CHANGE


@dataclass(frozen=True, kw_only=True)
class SolvingConfig(TrainingConfig, RewardConfig, PolicyLossConfig):
    """What recipes share that reward right answers to problems."""

    dataset: str = "gsm8k"  # gsm8k, math, polaris, deepmath; FILE.jsonl with "question" and "answer"; sample:NAME
    test_dataset: str | None = None  # held-out problems, likewise; None: a test split, or test_size of the dataset
    test_size: Count = 32  # problems held out of a dataset that has no test split; 0: none
    model_name: str = "Qwen/Qwen3.5-9B-Base"
    groups_per_batch: Positive = 128
    group_size: Annotated[int, Whole(2)] = 16
    max_tokens: Positive = 256
    learning_rate: LearningRate = 4e-5
    lr_schedule: LRSchedule = "constant"


@dataclass(frozen=True, kw_only=True)
class Config(SolvingConfig):
    log_path: str = field(default="runs/rl_basic", metadata=MAY_CHANGE)
    answers: Answers = "boxed"  # boxed: equal as mathematics; exact: equal as text, as in rl_loop
    few_shot: bool = True  # boxed: each chat begins with a solved example


WORKFLOW = REINFORCEMENT.replace("load_problems", load_named_problems, open_grader).replace(
    "build_env_group", build_problem_groups
)
COLUMNS = (
    "env/all/reward/total",
    "env/all/by_group/frac_mixed",
    "optim/entropy",
    "optim/kl_sample_train_v2",
    "lag",
    "time/step",
    "test/env/all/reward/total",
)


def check(config: Config) -> None:
    """Refuses what can be known to be wrong without a model and without writing anything."""
    check_training(config, lambda: check_problems(config))


def check_problems(config: Config) -> None:
    """Refuses problems that cannot be had, read or have changed, and a warm-up that is longer than the run on them."""
    revisions = revisions_in(config.log_path)
    rows = problems.load(config.dataset, config.test_dataset, config.test_size, config.seed, revisions)
    num, batch_size = len(rows.train), config.groups_per_batch
    check_all(
        lambda: check_data(config.log_path, config.dataset, rows.sources, config.behavior_if_exists),
        *(partial(check_rows, part, config.answers) for part in (rows.train, rows.test)),
        lambda: check_num_steps(num, batch_size, config.num_epochs, config.max_steps, config.warmup_steps),
    )


def check_rows(rows: Sequence[Row], answers: Answers) -> None:
    """Refuses rows that are no problems with answers of this kind."""
    if answers == "exact":
        problems_from_rows(rows)
    else:
        _ = [math.problem_of_row(row, grade_here, f"row {index}") for index, row in enumerate(rows)]


async def main(config: Config) -> None:
    with config.open_service() as service:
        await train(config, service)


async def train(config: Config, service: ServiceClient) -> None:
    with open_run(config.log_path, config, columns=COLUMNS, **config.run_options()) as run:
        await WORKFLOW.run(config, service=service, run=run)
        reward = {"reward of a batch": "env/all/reward/total"}
        run.plot("reward", reward, title="Reinforcement learning", y_label="mean reward", running_mean=5)


PRESETS = {
    # Two words the other way round, after two examples in the chat; no word of the test is in training.
    "small": Config(
        dataset="sample:swapped_words",
        test_dataset="sample:swapped_words_test",
        answers="exact",
        model_name="smollm2",
        log_path="runs/rl_basic_small",
        groups_per_batch=8,
        group_size=8,
        max_tokens=8,
        learning_rate=2e-4,
        max_steps=24,
        lora_rank=16,
        train_unembed=False,
        eval_every=8,
        save_every=8,
    ),
}


if __name__ == "__main__":
    asyncio.run(main(Config()))
