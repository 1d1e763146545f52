"""Runs as a recipe leaves them, made without a model: rows, events and checkpoints of so many steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stovetop.durable import append_row
from stovetop.run_folder import CHECKPOINTS_FILE
from stovetop.runs import Run, open_run
from stovetop.tracking.configs import MAY_CHANGE

COLUMNS = ("learning_rate", "loss", "test/accuracy", "time/step")


@dataclass(frozen=True, kw_only=True)
class Config:
    """What these runs are begun with."""

    log_path: str = field(metadata=MAY_CHANGE)
    learning_rate: float = 1e-3
    dataset: str = "chats"


def make_run(
    path: Path,
    num_rows: int = 4,
    *,
    num_steps: int = 4,
    learning_rate: float = 1e-3,
    fails: BaseException | None = None,
    columns: Sequence[str] = COLUMNS,
) -> Path:
    """A run of `num_steps` steps that has logged `num_rows`; it fails then, or is complete when it has all."""
    with open_run(path, Config(log_path=str(path), learning_rate=learning_rate), console=False, columns=columns) as run:
        run.start_at(0, num_steps)
        log_steps(run, range(num_rows), learning_rate)
        if fails is not None:
            raise fails
        if num_rows == num_steps:
            append_row(path / CHECKPOINTS_FILE, {"name": "final", "batch": num_steps, "final": True, "state_path": "s"})
    return path


def log_steps(run: Run, steps: range, learning_rate: float = 1e-3) -> None:
    """Rows of a supervised run, and the events of two stages."""
    for step in steps:
        row = {"learning_rate": learning_rate, "loss": 2.0 / (step + 1), "time/step": 0.5, "time/train": 0.4}
        if step % 2 == 0:
            row |= {"test/accuracy": step / 10, "test/accuracy/stderr": 0.05}
            run.emit("eval.complete", step=step, accuracy=step / 10)
        for name in ("get_batch", "train"):
            run.emit("stage.start", step=step, stage=name)
            run.emit("stage.stop", step=step, stage=name, seconds=0.1)
        run.log_metrics(row, step)
