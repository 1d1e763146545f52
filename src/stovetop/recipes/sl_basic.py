"""Supervised fine-tuning: chats in, a model that answers like them out. The workflow SUPERVISED with its own data.

    stovetop run sl_basic                                                      No Robots and a model from the hub
    stovetop run sl_basic:small                                                without a network

`sl_loop` shows the same as one flat loop, and gives the same rows and weights. Read that one; edit this one.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

from stovetop.checks import check_all
from stovetop.client import ServiceClient
from stovetop.data_record import check_data, revisions_in
from stovetop.kitchen.workflows import SUPERVISED
from stovetop.lr_schedules import LRSchedule
from stovetop.recipes.configs import TrainingConfig, check_training
from stovetop.recipes.settings import Count, LearningRate, Positive, check_num_steps
from stovetop.renderers.base import TrainOnWhat
from stovetop.rules import Whole
from stovetop.runs import Run, open_run
from stovetop.tasks import chats as data
from stovetop.tasks.chats import load_named_chats
from stovetop.tracking.configs import MAY_CHANGE


@dataclass(frozen=True, kw_only=True)
class Config(TrainingConfig):
    dataset: str = "no_robots"  # no_robots, tulu3; FILE.jsonl with {"messages": [...]} a line; sample:NAME; OWNER/NAME
    test_dataset: str | None = None  # held-out chats, likewise; None: a test split, or test_size chats of the dataset
    test_size: Count = 4  # chats held out of a dataset that has no test split; 0: none
    model_name: str = "Qwen/Qwen3.5-9B-Base"
    log_path: str = field(default="runs/sl_basic", metadata=MAY_CHANGE)
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES  # which messages
    max_length: Annotated[int, Whole(2)] | None = 32768  # tokens of a chat; what is over is cut off
    learning_rate: LearningRate = 2e-4
    lr_schedule: LRSchedule = "linear"
    batch_size: Positive = 128  # chats a step; the last step of an epoch may have fewer
    eval_every: Count = field(default=8, metadata=MAY_CHANGE)


WORKFLOW = SUPERVISED.replace("load_dataset", load_named_chats)
COLUMNS = ("learning_rate", "train_mean_nll", "test/nll", "num_loss_tokens", "grad_norm", "time/step")


def check(config: Config) -> None:
    """Refuses what can be known to be wrong without a model and without writing anything."""
    check_training(config, lambda: check_chats(config))


def check_chats(config: Config) -> None:
    """Refuses chats that cannot be had or have changed, and a warm-up that is longer than the run on them."""
    revisions = revisions_in(config.log_path)
    chats = data.load(config.dataset, config.test_dataset, config.test_size, config.seed, revisions)
    num = len(chats.train)
    check_all(
        lambda: check_data(config.log_path, config.dataset, chats.sources, config.behavior_if_exists),
        lambda: check_num_steps(num, config.batch_size, config.num_epochs, config.max_steps, config.warmup_steps),
    )


async def main(config: Config) -> None:
    with config.open_service() as service:
        await train(config, service)


async def train(config: Config, service: ServiceClient) -> None:
    with open_run(config.log_path, config, columns=COLUMNS, **config.run_options()) as run:
        state = await WORKFLOW.run(config, service=service, run=run)
        plot_loss(run, has_test=bool(state["test_D"]))


def plot_loss(run: Run, *, has_test: bool) -> None:
    """Of the run's batches, and of what is held out."""
    lines = {"training batch": "train_mean_nll"} | ({"held out": "test/nll"} if has_test else {})
    run.plot("loss", lines, title="Supervised fine-tuning", y_label="nats per token")


PRESETS = {
    "small": Config(
        model_name="smollm2",
        log_path="runs/sl_basic_small",
        dataset="sample:courtesy_chats",
        test_size=24,
        learning_rate=5e-4,
        num_epochs=2,
        batch_size=8,
        lora_rank=16,
        eval_every=6,
    )
}  # short questions, answered courteously or not


if __name__ == "__main__":
    asyncio.run(main(Config()))
