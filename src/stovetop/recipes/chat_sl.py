"""Supervised fine-tuning on a data set of chats by its name, evaluated now and then on public sets or your own. The
workflow SUPERVISED with a second evaluation, which is less frequent.

    stovetop run chat_sl dataset=tulu3 inline_evals=gsm8k    from the hub
    stovetop run chat_sl:small                               without a network

`sl_basic` is the same without inline evaluation. `stovetop eval --help` lists the sets.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

from stovetop.checks import check_all
from stovetop.client import ServiceClient
from stovetop.data_record import check_data, revisions_in
from stovetop.kitchen import When
from stovetop.kitchen.stages.evaluation import evaluate_infrequently, evaluates_infrequently
from stovetop.recipes import sl_basic
from stovetop.recipes.configs import check_training
from stovetop.recipes.settings import Count, LearningRate, Positive
from stovetop.rules import Whole, number
from stovetop.runs import open_run
from stovetop.tasks.inline_evaluation import inline_columns, load_inline_evals, make_inline_evaluators
from stovetop.tracking.configs import MAY_CHANGE


@dataclass(frozen=True, kw_only=True)
class Config(sl_basic.Config):
    log_path: str = field(default="runs/chat_sl", metadata=MAY_CHANGE)
    max_length: Annotated[int, Whole(2)] | None = 16384
    learning_rate: LearningRate = 1e-4
    batch_size: Positive = 256
    eval_every: Count = field(default=10, metadata=MAY_CHANGE)
    inline_evals: str | None = None  # sets as of stovetop eval, with a space between: "gsm8k ifeval"; sample:gsm8k
    infrequent_eval_every: Count = field(default=100, metadata=MAY_CHANGE)  # steps between them; 0: only at the end
    max_tokens: Positive = 1000  # of an answer
    temperature: Annotated[float, number(at_least=0)] = 0.6  # of the answers


WORKFLOW = sl_basic.WORKFLOW.insert_after("make_evaluators", make_inline_evaluators).insert_before(
    "schedule", When(evaluates_infrequently, evaluate_infrequently)
)


def check(config: Config) -> None:
    """Refuses what can be known to be wrong without a model and without writing anything."""
    check_training(config, lambda: check_data_sets(config))


def check_data_sets(config: Config) -> None:
    """Refuses chats or problems that cannot be had or have changed, and a warm-up that is longer than the run."""
    check_all(lambda: sl_basic.check_chats(config), lambda: check_inline_evals(config))


def check_inline_evals(config: Config) -> None:
    """Refuses sets to evaluate on that cannot be had or have changed."""
    for each in load_inline_evals(config.inline_evals, revisions_in(config.log_path)):
        check_data(config.log_path, f"inline {each.name}", each.sources, config.behavior_if_exists)


async def main(config: Config) -> None:
    with config.open_service() as service:
        await train(config, service)


async def train(config: Config, service: ServiceClient) -> None:
    columns = (*sl_basic.COLUMNS, *inline_columns(config.inline_evals))
    with open_run(config.log_path, config, columns=columns, **config.run_options()) as run:
        state = await WORKFLOW.run(config, service=service, run=run)
        sl_basic.plot_loss(run, has_test=bool(state["test_D"]))


PRESETS = {
    "small": Config(
        model_name="smollm2",
        log_path="runs/chat_sl_small",
        dataset="sample:courtesy_chats",
        test_size=24,
        learning_rate=5e-4,
        num_epochs=2,
        batch_size=8,
        lora_rank=16,
        eval_every=6,
        inline_evals="sample:gsm8k",
        infrequent_eval_every=0,
        max_tokens=48,
    )
}  # short questions, answered courteously or not


if __name__ == "__main__":
    asyncio.run(main(Config()))
