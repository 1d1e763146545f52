"""Stages of every step, whatever is trained: the rate, the update, waiting for it, rows, checkpoints."""

from dataclasses import replace
from typing import Protocol

from stovetop.checkpoints import PendingCheckpoint, is_due, submit_checkpoint
from stovetop.client import ServiceClient, TrainingClient
from stovetop.durable import parse_rows
from stovetop.futures import APIFuture
from stovetop.hyperparams import GivenRate, settled_rate
from stovetop.kitchen.nodes import Positions
from stovetop.kitchen.run import Row
from stovetop.kitchen.stage import stage
from stovetop.kitchen.stages.policies import Policy, saved_paths
from stovetop.lr_schedules import LRSchedule, compute_schedule_lr_multiplier
from stovetop.rl.rollout_pool import RolloutPool
from stovetop.run_folder import METRICS_FILE
from stovetop.runs import Run
from stovetop.tracking.events import metrics_from_row
from stovetop.types import AdamParams, OptimStepResponse

# ---- conditions ------------------------------------------------------------------------------------------------------


def enters_epoch(enters_epoch: bool) -> bool:
    """At the first step of an epoch, and at the first after a resume."""
    return enters_epoch


def ends_epoch(ends_epoch: bool) -> bool:
    """At the last step of an epoch."""
    return ends_epoch


def saves(step: int, positions: Positions, save_every: int = 0) -> bool:
    """After every `save_every` steps, but for the last: there the final checkpoint is."""
    return is_due(step + 1, save_every) and step + 1 < positions.num_steps


# ---- before ----------------------------------------------------------------------------------------------------------


class HasEpochs(Protocol):
    """Data that are written anew, or shuffled, for each epoch."""

    def set_epoch(self, seed: int) -> None:
        """An order of its own for each seed."""
        ...


@stage
def set_epoch(data: HasEpochs, epoch: int, seed: int = 0) -> None:
    """Shuffles the data for this epoch. It changes them: keep it in the station that reads them."""
    data.set_epoch(seed + epoch)


@stage(writes="optimizer")
def make_optimizer(
    learning_rate: GivenRate,
    model_name: str = "",
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.95,
    adam_eps: float = 1e-8,
    weight_decay: float = 0.0,
    grad_clip_norm: float = 0.0,
) -> AdamParams:
    """What the config says of the optimizer, as one value. The rate "auto" is the one derived from the model."""
    return AdamParams(
        settled_rate(learning_rate, model_name), adam_beta1, adam_beta2, adam_eps, weight_decay, grad_clip_norm
    )


# ---- train -----------------------------------------------------------------------------------------------------------


@stage(writes="adam")
def schedule(
    step: int,
    positions: Positions,
    optimizer: AdamParams,
    lr_schedule: LRSchedule = "constant",
    warmup_steps: int = 0,
) -> AdamParams:
    """The optimizer with the rate of this step."""
    multiplier = compute_schedule_lr_multiplier(lr_schedule, step, positions.num_steps, warmup_steps)
    return replace(optimizer, learning_rate=optimizer.learning_rate * multiplier)


@stage(writes="stepped")
def optim_step(training_client: TrainingClient, adam: AdamParams) -> APIFuture[OptimStepResponse]:
    """Submits the update."""
    return training_client.optim_step(adam)


@stage(writes="result")
async def await_future(future: APIFuture[object]) -> object:
    """Waits for what was submitted."""
    return await future


await_forward_backward = await_future.using("await_forward_backward", future="trained", result="trained_output")
await_optim_step = await_future.using("await_optim_step", future="stepped", result="stepped_response")


# ---- record ----------------------------------------------------------------------------------------------------------


@stage
def log_step(row: Row, run: Run) -> None:
    """Writes the row of this step."""
    row.log(run)


@stage
def log_epoch_metrics(run: Run, step: int, epoch: int, positions: Positions) -> None:
    """Emits the mean of every metric over the rows of the epoch that have it, those of before a resume too: they are
    read from metrics.jsonl."""
    first = epoch * positions.num_per_epoch
    rows = parse_rows(run.path / METRICS_FILE, metrics_from_row)
    of_epoch = [row for row in rows if first <= row["step"] <= step]
    names = dict.fromkeys(name for row in of_epoch for name in row if name != "step" and not name.startswith("time/"))
    means = {name: _mean([row[name] for row in of_epoch if name in row]) for name in names}
    run.emit("training.epoch", step=step, **{"epoch": epoch, "num_steps": len(of_epoch), **means})


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@stage(writes="saved")
def save_checkpoint(training_client: TrainingClient, step: int) -> PendingCheckpoint:
    """Submits the save of what the next step begins with."""
    return submit_checkpoint(training_client, f"{step + 1:06d}", {"batch": step + 1})


@stage
async def record_checkpoint(
    saved: PendingCheckpoint,
    run: Run,
    step: int,
    policies: list[Policy] | None = None,
    reference_path: str | None = None,
    pool: RolloutPool | None = None,
) -> None:
    """Writes the checkpoint's row, the last thing that is written of a step: a resumed run does not run it again."""
    run.emit("training.checkpoint", step=step, name=saved.name)
    run.stream.sync()
    await saved.record(
        run.path,
        policy_paths=await saved_paths(policies or []),
        trained_ahead=() if pool is None else pool.trained_ahead,
        reference_path=reference_path,
    )


@stage
async def delete_old_checkpoints(service: ServiceClient, run: Run) -> None:
    """Deletes the checkpoints that `keep_checkpoints` does not keep."""
    await run.retain(service)


delete_old_checkpoints_at_end = delete_old_checkpoints.using("delete_old_checkpoints_at_end")
