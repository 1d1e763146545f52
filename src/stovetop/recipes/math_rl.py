r"""Reinforcement learning on mathematics: a data set of problems by its name in, a model that solves more of them out.
The workflow REINFORCEMENT, with a penalty on the distance to the start if `kl_penalty_coef` is above 0.

    stovetop run math_rl                               sums of two numbers up to 100, and a model from the hub
    stovetop run math_rl dataset=math max_tokens=512   competition mathematics, answered in \boxed{}
    stovetop run math_rl:small                         without a network, in minutes
    stovetop run math_rl dataset=reasoning_gym:chain_sum,max_terms=3 max_tokens=64   made and scored by reasoning-gym

`loss_fn=ppo num_substeps=4` makes four clipped updates of a batch, each on a part; `max_steps_off_policy=1` samples the
next batch while this one is trained on. `kitchen.edits` has more: `as_ppo(WORKFLOW)` passes over each batch several
times. `rl_loop` shows the heart of it as one flat loop.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

from stovetop.checks import check_all
from stovetop.client import ServiceClient
from stovetop.data_record import check_data, revisions_in
from stovetop.kitchen import When
from stovetop.kitchen.stages.preference import init_reference
from stovetop.kitchen.stages.rl import compute_post_kl, is_penalised, kl_penalty, measures_post_kl
from stovetop.kitchen.workflows import REINFORCEMENT
from stovetop.recipes.configs import check_training
from stovetop.recipes.rl_basic import SolvingConfig
from stovetop.recipes.settings import LearningRate, NotNegative, Positive, check_num_steps
from stovetop.rules import Whole
from stovetop.runs import open_run
from stovetop.tasks.math_sets import (
    Answers,
    build_math_groups,
    check_math,
    load_math,
    load_math_rows,
    open_math_grader,
)
from stovetop.tracking.configs import MAY_CHANGE


@dataclass(frozen=True, kw_only=True)
class Config(SolvingConfig):
    dataset: str = "arithmetic"  # arithmetic, gsm8k, math, polaris, deepmath, reasoning_gym:NAME; FILE.jsonl or sample:
    answers: Answers | None = None  # how they are written: boxed or as a number; None: boxed, but for arithmetic
    few_shot: bool | None = None  # each chat begins with a solved example; None: as is usual for the dataset
    model_name: str = "Qwen/Qwen3.5-9B"
    log_path: str = field(default="runs/math_rl", metadata=MAY_CHANGE)
    groups_per_batch: Positive = 100
    group_size: Annotated[int, Whole(2)] = 4
    max_tokens: Positive = 5
    learning_rate: LearningRate = 1e-5
    kl_penalty_coef: NotNegative = 0.0  # what the distance to the weights that the run began with costs
    compute_post_kl: bool = False  # measure how far each update went: another pass over its data


WORKFLOW = (
    REINFORCEMENT.replace("load_problems", load_math_rows, open_math_grader)
    .replace("build_env_group", build_math_groups)
    .insert_after("init_session", When(is_penalised, init_reference))
    .insert_after("assemble_rl_batch", When(is_penalised, kl_penalty))
    .insert_after("freeze_policy", When(measures_post_kl, compute_post_kl))
)
COLUMNS = (
    "env/all/reward/total",
    "env/all/correct",
    "env/all/by_group/frac_mixed",
    "optim/entropy",
    "kl_policy_base",
    "lag",
    "time/step",
    "test/env/all/correct",
)


def check(config: Config) -> None:
    """Refuses what can be known to be wrong without a model and without writing anything."""
    check_training(config, lambda: check_problems(config))


def check_problems(config: Config) -> None:
    """Refuses problems that cannot be had, read or have changed, and a warm-up that is longer than the run on them."""
    revisions = revisions_in(config.log_path)
    found = load_math(config.dataset, config.test_dataset, config.test_size, config.seed, config.answers, revisions)
    num, batch_size = len(found.loaded.train), config.groups_per_batch
    check_all(
        lambda: check_data(config.log_path, config.dataset, found.loaded.sources, config.behavior_if_exists),
        lambda: check_math(found),
        lambda: check_num_steps(num, batch_size, config.num_epochs, config.max_steps, config.warmup_steps),
    )


async def main(config: Config) -> None:
    with config.open_service() as service:
        await train(config, service)


async def train(config: Config, service: ServiceClient) -> None:
    with open_run(config.log_path, config, columns=COLUMNS, **config.run_options()) as run:
        await WORKFLOW.run(config, service=service, run=run)
        correct = {"right in a batch": "env/all/correct"}
        run.plot("accuracy", correct, title="Mathematics", y_label="share of answers", running_mean=5)


PRESETS = {
    # Which of two numbers is larger, after an example of a short answer: at first it talks, or names the smaller.
    "small": Config(
        dataset="sample:compared_numbers",
        test_size=64,
        answers="number",
        few_shot=True,
        model_name="smollm2",
        log_path="runs/math_rl_small",
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
