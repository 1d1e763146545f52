r"""Reinforcement learning with a verifiable reward: problems in, a model that solves more of them out. The workflow
REINFORCEMENT with its own problems: school mathematics, answered in \boxed{}.

    stovetop run rl_basic                                                     GSM8K and a model from the hub
    stovetop run rl_basic:small                                               without a network, in minutes

`rl_loop` shows the same as one flat loop, on-policy: with `answers=exact` both give the same rows and weights.
`max_steps_off_policy=1` samples the next batch while this one is trained on.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

import stovetop
from stovetop.checks import check as check_fields
from stovetop.checks import check_all
from stovetop.client import ServiceClient
from stovetop.data_record import check_data, revisions_in
from stovetop.datasets import Row, Split
from stovetop.kitchen import RunConfig, stage
from stovetop.kitchen.stages.rl import Builders
from stovetop.kitchen.workflows import REINFORCEMENT
from stovetop.lr_schedules import LRSchedule
from stovetop.recipes.settings import (
    Beta,
    Count,
    Epsilon,
    LearningRate,
    NotNegative,
    Positive,
    Temperature,
    check_num_steps,
    check_policy_loss,
    check_rate,
    check_renderer_name,
    check_weights,
)
from stovetop.renderers.base import Renderer
from stovetop.rl.problem_env import ProblemGroupBuilder, problem_builders, problems_from_rows
from stovetop.rl.rollouts import OnRolloutError, Seconds
from stovetop.rules import Whole
from stovetop.runs import Run, check_opening, open_run
from stovetop.tasks import math, math_grading, problems
from stovetop.tasks.math_grading import Grade, grade_here
from stovetop.tasks.problems import load_named_problems
from stovetop.tracking.configs import HOW_LONG, MAY_CHANGE
from stovetop.types import Rank, Seed

Answers = Literal["boxed", "exact"]


@dataclass(frozen=True, kw_only=True)
class SolvingConfig(RunConfig):
    """What recipes share that reward right answers to problems."""

    dataset: str = "gsm8k"  # or math, polaris, deepmath; FILE.jsonl with "question" and "answer", sample:NAME
    test_dataset: str | None = None  # held-out problems, likewise; None: a test split, or test_size of the dataset
    test_size: Count = 32  # problems held out of a dataset that has no test split; 0: none
    model_name: str = "Qwen/Qwen3.5-9B-Base"  # a folder, a fetched model, or a name on the hub
    load_checkpoint_path: str | None = None  # weights to start from, with a fresh optimizer
    renderer_name: str | None = None  # None: the one recommended for the model
    groups_per_batch: Positive = 128  # problems a step
    group_size: Annotated[int, Whole(2)] = 16  # answers to each; one alone has no others to be better than
    max_tokens: Positive = 256  # of an answer
    temperature: Temperature = 1.0  # of the answers
    learning_rate: LearningRate = 4e-5  # before the schedule; auto: derived from the model
    lr_schedule: LRSchedule = "constant"  # how the rate falls
    warmup_steps: Count = 0  # in which the rate rises
    num_epochs: Positive = field(default=1, metadata=HOW_LONG)  # passes over the data
    max_steps: Positive | None = field(default=None, metadata=HOW_LONG)  # None: as many as the epochs have
    max_steps_off_policy: Count = 0  # how many steps sampling may be ahead of training
    on_rollout_error: OnRolloutError = "retry"  # raise at once, raise after three retries, or then skip and count it
    rollout_timeout_s: Seconds | None = None  # of one try; what takes longer is an error
    num_substeps: Positive = 1  # updates a step, each on a part of the data
    loss_fn: str = "importance_sampling"  # or "ppo", "cispo"
    loss_fn_config: dict[str, float] = field(default_factory=dict[str, float])  # loss_fn_config.KEY=1.5 sets one
    remove_constant_reward_groups: bool = False  # they have no gradient
    lora_rank: Rank = 32  # of the adapter's matrices
    train_unembed: bool = True  # the output head too
    seed: Seed = 0  # of the adapter, the order and the answers
    adam_beta1: Beta = 0.9  # of the mean of gradients
    adam_beta2: Beta = 0.95  # of the mean of their squares
    adam_eps: Epsilon = 1e-8  # added to the root of that
    weight_decay: NotNegative = 0.0  # what a weight loses in a step, times the rate
    grad_clip_norm: NotNegative = 0.0  # 0: gradients are not clipped
    eval_every: Count = field(default=20, metadata=MAY_CHANGE)  # steps; 0: never
    save_every: Count = field(default=20, metadata=MAY_CHANGE)  # steps; 0: only at the end

    def __post_init__(self) -> None:
        check_all(
            lambda: check_fields(self),
            lambda: check_renderer_name(self.renderer_name),
            lambda: check_policy_loss(self.loss_fn, self.loss_fn_config, self.temperature),
        )


@dataclass(frozen=True, kw_only=True)
class Config(SolvingConfig):
    log_path: str = field(default="runs/rl_basic", metadata=MAY_CHANGE)  # the run directory; again: it goes on
    answers: Answers = "boxed"  # boxed: equal as mathematics; exact: equal as text, as in rl_loop
    few_shot: bool = True  # boxed: each chat begins with a solved example


# ---- problems --------------------------------------------------------------------------------------------------------


@stage(writes="grade")
async def open_grader(answers: Answers) -> AsyncIterator[Grade | None]:
    """Compares answers as mathematics, in processes of its own, which end with the workflow; None: as text."""
    if answers == "exact":
        yield None
        return
    with math_grading.open_grader() as grade:
        yield grade


@stage(writes=("builders", "test_builders"))
def build_problem_groups(
    problem_rows: Split[Row],
    renderer: Renderer,
    grade: Grade | None,
    group_size: int,
    run: Run,
    few_shot: bool = True,
    max_prompt_tokens: int | None = None,
) -> Builders:
    """`group_size` tries at each problem, and one at those held out."""

    def groups(rows: list[Row], size: int) -> list[ProblemGroupBuilder]:
        if grade is None:
            return problem_builders(problems_from_rows(rows), renderer, size, max_prompt_tokens=max_prompt_tokens)
        return math.builders(rows, renderer, size, grade, few_shot=few_shot, max_prompt_tokens=max_prompt_tokens)

    train, test = groups(problem_rows.train, group_size), groups(problem_rows.test, 1)
    run.emit("rl.env_group_built", num_train=len(train), num_test=len(test), group_size=group_size)
    return Builders(train, test)


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
    check_all(
        lambda: check_opening(config.log_path, config, config.behavior_if_exists),
        lambda: check_problems(config),
        lambda: check_weights(config.base_url, config.model_name, config.load_checkpoint_path),
        lambda: check_rate(config.learning_rate, config.model_name),
    )


def check_problems(config: Config) -> None:
    """Refuses problems that cannot be had, read or have changed, and a warm-up that is longer than the run on them."""
    revisions = revisions_in(config.log_path)
    rows = problems.load(config.dataset, config.test_dataset, config.test_size, config.seed, revisions)
    check_data(config.log_path, config.dataset, rows.sources, config.behavior_if_exists)
    for part in (rows.train, rows.test):
        if config.answers == "exact":
            problems_from_rows(part)
        else:
            _ = [math.problem_of_row(row, grade_here, f"row {index}") for index, row in enumerate(part)]
    check_num_steps(len(rows.train), config.groups_per_batch, config.num_epochs, config.max_steps, config.warmup_steps)


async def main(config: Config) -> None:
    with stovetop.ServiceClient(config.base_url, storage=config.log_path, **config.engine_options()) as service:
        await train(config, service)


async def train(config: Config, service: ServiceClient) -> None:
    with open_run(config.log_path, config, columns=COLUMNS, **config.run_options()) as run:
        await WORKFLOW.run(config, service=service, run=run)
        reward = {"reward of a batch": "env/all/reward/total"}
        run.plot("reward", reward, title="Reinforcement learning", y_label="mean reward", running_mean=5)


PRESETS = {
    # Three digits in ascending order, after two examples in the chat; no answer of the test is one in training.
    "small": Config(
        dataset="sample:sorted_digits",
        test_dataset="sample:sorted_digits_test",
        answers="exact",
        model_name="smollm2",
        log_path="runs/rl_basic_small",
        groups_per_batch=8,
        group_size=8,
        max_tokens=8,
        learning_rate=2e-4,
        num_epochs=3,
        max_steps=40,
        lora_rank=16,
        train_unembed=False,
        eval_every=10,
        save_every=10,
    ),
}


if __name__ == "__main__":
    asyncio.run(main(Config()))
