"""Supervised fine-tuning as one flat loop: chats in, a model that answers like them out.

    stovetop run sl_loop                        24 chats and the small model: it needs no preset and no network
    stovetop run sl_loop dataset=chats.jsonl    chats of your own

Everything that happens is on this page, in order. Two things are worth a second look. **Look-ahead**: step i+1 is
submitted before step i is awaited, so the engine never waits for us. **Program order**: all that must see the weights
after i updates (the evaluation, the checkpoint, step i itself) is submitted in one function, so a checkpoint named i
holds exactly i updates. What is left out: workflows, several datasets, evaluation by sampling.
"""

import asyncio
import time
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, NamedTuple

import numpy as np

import stovetop
from stovetop import AdamParams, APIFuture, Datum, ForwardBackwardOutput, OptimStepResponse
from stovetop.checkpoints import PendingCheckpoint, is_due, resume_or_create, save_final_checkpoint, submit_checkpoint
from stovetop.checks import check as check_fields
from stovetop.checks import check_all
from stovetop.client import ServiceClient
from stovetop.data_record import check_data, revisions_in
from stovetop.datasets import Batches, log_epoch
from stovetop.hyperparams import settled_rate
from stovetop.lr_schedules import LRSchedule, compute_schedule_lr_multiplier
from stovetop.model_families import context_length, recommended_renderer_name
from stovetop.named_data import Loaded
from stovetop.recipes.settings import (
    Beta,
    Count,
    Epsilon,
    LearningRate,
    Positive,
    check_at_most,
    check_rate,
    check_renderer_name,
    check_start,
    check_weights,
)
from stovetop.renderers import get_renderer
from stovetop.renderers.base import TrainOnWhat
from stovetop.renderers.messages import Message
from stovetop.retention import KeepCheckpoints
from stovetop.rules import Whole
from stovetop.runs import BehaviorIfExists, check_opening, open_run
from stovetop.supervised.data import data_of_chats
from stovetop.supervised.nll import mean_nll
from stovetop.tasks import chats as data
from stovetop.tracking.configs import HOW_LONG, MAY_CHANGE
from stovetop.tracking.step_times import StepTimes, listening
from stovetop.tracking.trackers import check_trackers, parse_trackers
from stovetop.types import Rank, Seed


@dataclass(frozen=True, kw_only=True)
class Config:
    dataset: str = "sample:chats"  # FILE.jsonl with {"messages": [...]} a line, sample:NAME, or OWNER/NAME of a hub
    test_dataset: str | None = None  # held-out chats, likewise; None: test_size chats of the dataset
    test_size: Count = 4  # chats held out of the dataset when there is no test_dataset; 0: none
    model_name: str = "smollm2"  # a folder, a fetched model, or a name on the hub
    log_path: str = field(default="runs/sl_loop", metadata=MAY_CHANGE)  # the run directory; again: it goes on
    behavior_if_exists: BehaviorIfExists = field(default="resume", metadata=MAY_CHANGE)  # of a run that is there
    keep_checkpoints: KeepCheckpoints = field(default="2", metadata=MAY_CHANGE)  # 2, "2 lowest:METRIC", all
    trackers: str = field(default="", metadata=MAY_CHANGE)  # wandb, trackio, mlflow, tensorboard; NAME:PROJECT, several
    enable_trace: bool = field(default=False, metadata=MAY_CHANGE)  # trace.json, for Perfetto: what ran when
    base_url: str | None = field(default=None, metadata=MAY_CHANGE)  # None: in this process; recording: a fake; a URL
    load_checkpoint_path: str | None = None  # weights to start from, with a fresh optimizer
    renderer_name: str | None = None  # None: the one recommended for the model
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES  # which messages
    max_length: Annotated[int, Whole(2)] | None = None  # tokens of a chat; what is over is cut off
    learning_rate: LearningRate = 2e-4  # at its highest; auto: derived from the model
    lr_schedule: LRSchedule = "linear"  # how the rate falls
    warmup_steps: Count = 0  # in which the rate rises
    num_epochs: Positive = field(default=4, metadata=HOW_LONG)  # passes over the data
    batch_size: Positive = 4  # chats a step; the last step of an epoch may have fewer
    lora_rank: Rank = 32  # of the adapter's matrices
    train_unembed: bool = True  # the output head too
    seed: Seed = 0  # of the adapter, the split, the order and the answers
    adam_beta1: Beta = 0.9  # of the mean of gradients
    adam_beta2: Beta = 0.95  # of the mean of their squares
    adam_eps: Epsilon = 1e-8  # added to the root of that
    eval_every: Count = field(default=5, metadata=MAY_CHANGE)  # steps; 0: only at the end
    save_every: Count = field(default=5, metadata=MAY_CHANGE)  # steps; 0: only at the end

    def __post_init__(self) -> None:
        check_all(
            lambda: check_fields(self),
            lambda: check_renderer_name(self.renderer_name),
            lambda: parse_trackers(self.trackers),
        )


def check(config: Config) -> None:
    """Refuses what can be known to be wrong without a model and without writing anything."""
    path = config.load_checkpoint_path
    check_all(
        lambda: check_opening(config.log_path, config, config.behavior_if_exists),
        lambda: load(config),
        lambda: check_weights(config.base_url, config.model_name, path),
        lambda: check_start("load_checkpoint_path", path, config.lora_rank, config.train_unembed),
        lambda: check_rate(config.learning_rate, config.model_name),
        lambda: check_trackers(config.trackers),
    )


def load(config: Config) -> Loaded[list[Message]]:
    """The chats to train on, in a first order of their own, and those held out."""
    revisions = revisions_in(config.log_path)
    chats = data.load(config.dataset, config.test_dataset, config.test_size, config.seed, revisions)
    num_steps = -(-len(chats.train) // config.batch_size) * config.num_epochs
    check_all(
        lambda: check_at_most("warmup_steps", config.warmup_steps, num_steps, "steps"),
        lambda: check_data(config.log_path, config.dataset, chats.sources, config.behavior_if_exists),
    )
    return chats


class InFlight(NamedTuple):
    """A step that was submitted and not awaited."""

    step: int
    submitted_s: float
    learning_rate: float
    batch_D: list[Datum]
    evaluated: APIFuture[ForwardBackwardOutput] | None
    trained: APIFuture[ForwardBackwardOutput]
    stepped: APIFuture[OptimStepResponse]
    saved: PendingCheckpoint | None


async def main(config: Config) -> None:
    with stovetop.ServiceClient(config.base_url, storage=config.log_path) as service:
        await train(config, service)


async def train(config: Config, service: ServiceClient) -> None:
    chats = load(config)  # before anything is written
    columns = ("learning_rate", "train_mean_nll", "test/nll", "num_loss_tokens", "grad_norm")
    with open_run(
        config.log_path,
        config,
        behavior_if_exists=config.behavior_if_exists,
        columns=columns,
        keep_checkpoints=config.keep_checkpoints,
        trackers=config.trackers,
        enable_trace=config.enable_trace,
    ) as run:
        run.record_data(config.dataset, chats)
        start = await resume_or_create(
            service,
            run.path,
            model_name=config.model_name,
            lora_rank=config.lora_rank,
            seed=config.seed,
            train_unembed=config.train_unembed,
            load_checkpoint_path=config.load_checkpoint_path,
            user_metadata=await run.user_metadata(),
        )
        trainer = start.training_client
        peak_rate = settled_rate(config.learning_rate, config.model_name)

        # Chats become datums once: tokens, shifted by one, and a weight for each; a chat's weights sum to 1.
        tokenizer = trainer.get_tokenizer()
        renderer = get_renderer(config.renderer_name or recommended_renderer_name(tokenizer), tokenizer)
        context = context_length(service, trainer)
        # A chat may make several datums, where its renderer shows earlier turns otherwise later; a batch counts chats.
        train_chats, test_chats = (
            data_of_chats(
                part, renderer, config.max_length, config.train_on_what, context_length=context, indices=indices
            )
            for part, indices in ((chats.train, chats.train_indices), (chats.test, chats.test_indices))
        )
        test_D = list(chain.from_iterable(test_chats.data_of_chat))
        batches = Batches(train_chats.data_of_chat, config.batch_size, num_epochs=config.num_epochs, seed=config.seed)
        num_steps = len(batches)
        num_datums = sum(map(len, train_chats.data_of_chat))
        log_epoch("chats", len(train_chats.data_of_chat), config.batch_size, num_datums)
        if start.is_complete(num_steps):
            return
        run.start_at(start.batch, num_steps)

        def submit(step: int) -> InFlight:
            """Everything that belongs to this step, in program order; nothing is awaited."""
            evaluates = bool(test_D) and is_due(step, config.eval_every)
            multiplier = compute_schedule_lr_multiplier(config.lr_schedule, step, num_steps, config.warmup_steps)
            rate = peak_rate * multiplier
            adam = AdamParams(rate, config.adam_beta1, config.adam_beta2, config.adam_eps)
            batch_D = list(chain.from_iterable(batches[step]))
            return InFlight(
                step,
                time.perf_counter(),
                rate,
                batch_D,
                evaluated=trainer.forward(test_D, "cross_entropy") if evaluates else None,
                trained=trainer.forward_backward(batch_D, "cross_entropy"),
                stepped=trainer.optim_step(adam),
                saved=submit_checkpoint(trainer, f"{step + 1:06d}", {"batch": step + 1})
                if is_due(step + 1, config.save_every) and step + 1 < num_steps
                else None,
            )

        async def finish(flight: InFlight, times: StepTimes) -> None:
            """Awaits a step and writes its one row: the loss of the weights that it began with."""
            metrics = {
                "epoch": batches.epoch_of(flight.step),
                "progress": flight.step / num_steps,
                "learning_rate": flight.learning_rate,
                "num_sequences": len(flight.batch_D),
                "num_untrainable": len(train_chats.untrainable),  # chats left out: nothing in them to train on
                "num_tokens": sum(datum.model_input.length for datum in flight.batch_D),
                "num_loss_tokens": sum(np.count_nonzero(d.loss_fn_inputs["weights"].array) for d in flight.batch_D),
            }
            if flight.evaluated is not None:
                metrics["test/nll"] = mean_nll(await flight.evaluated, test_D)
            metrics["train_mean_nll"] = mean_nll(await flight.trained, flight.batch_D)
            metrics |= (await flight.stepped).metrics
            metrics |= times.since_last_row() | {"time/total": time.perf_counter() - flight.submitted_s}
            run.log_metrics(metrics, flight.step)
            shown = {name: metrics[name] for name in ("learning_rate", "epoch")}
            run.emit("training.step", step=flight.step, loss=metrics["train_mean_nll"], **shown)
            if flight.saved is not None:
                await flight.saved.record(run.path)
                await run.retain(service)

        progress = run.progress("training", total=num_steps, completed=start.batch)
        with progress as bar, listening(service) as times:
            flight = submit(start.batch) if start.batch < num_steps else None
            while flight is not None:
                following = submit(flight.step + 1) if flight.step + 1 < num_steps else None
                await finish(flight, times)
                bar.advance()
                flight = following

        if test_D:
            held_out = mean_nll(await trainer.forward(test_D, "cross_entropy"), test_D)
            run.log_metrics({"progress": 1.0, "test/nll": held_out}, num_steps)
        await save_final_checkpoint(trainer, run.path, start=start, num_batches=num_steps)
        await run.retain(service)
        lines = {"training batch": "train_mean_nll"} | ({"held out": "test/nll"} if test_D else {})
        run.plot("loss", lines, title="Supervised fine-tuning", y_label="nats per token")


if __name__ == "__main__":
    asyncio.run(main(Config()))
