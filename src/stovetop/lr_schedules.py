"""Learning-rate schedules: what to multiply the peak rate with at each step. Which peak rate: see `hyperparams`."""

import math
from typing import Literal, get_args

from stovetop.errors import InvalidRequest, UnknownName

LRSchedule = Literal["linear", "cosine", "constant"]


def compute_schedule_lr_multiplier(
    lr_schedule: LRSchedule, step: int, total_steps: int, warmup_steps: int = 0
) -> float:
    """In [0, 1] for step 0, 1, ...; 0 from `total_steps` on, unless the schedule is constant.

    With x the fraction of the run that is over: linear 1 - x, cosine ½(1 + cos πx), constant 1. A warm-up comes first:
    (step + 1) / (warmup_steps + 1), so that no step is spent at rate 0; x then counts what is left after it.
    """
    if min(step, total_steps, warmup_steps) < 0 or warmup_steps > total_steps:
        raise InvalidRequest(
            "a schedule needs step >= 0 and 0 <= warmup_steps <= total_steps: "
            f"step={step}, warmup_steps={warmup_steps}, total_steps={total_steps}"
        )
    if lr_schedule not in get_args(LRSchedule):
        raise UnknownName("lr_schedule", lr_schedule, get_args(LRSchedule))
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    x = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    match lr_schedule:
        case "linear":
            return 1 - x
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * x))
        case "constant":
            return 1.0
