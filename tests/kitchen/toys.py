"""A workflow small enough to see through: it adds numbers, on a line of two stations, and carries its sum."""

from dataclasses import dataclass
from typing import NamedTuple

from stovetop.kitchen import Loop, Positions, Row, Station, When, Workflow, stage


@dataclass(frozen=True, kw_only=True)
class Config:
    num_steps: int = 6
    num_per_epoch: int = 3
    start: int = 0
    depth: int = 0
    every: int = 2


class Set(NamedTuple):
    positions: Positions
    totals: list[int]


@stage(writes=("positions", "totals"))
def plan(num_steps: int, num_per_epoch: int, start: int) -> Set:
    """Where the loop begins and ends."""
    return Set(Positions(num_per_epoch, num_steps, start), [0])


@stage(writes="number")
async def draw(step: int) -> int:
    """A number."""
    return step


@stage(writes="number")
async def double(number: int) -> int:
    """Changes it."""
    return 2 * number


def is_even(step: int, every: int) -> bool:
    return step % every == 0


@stage(writes="total")
async def add(number: int, total: int, row: Row) -> int:
    """What is carried."""
    row.add({"number": number, "seen": total})
    return total + number


@stage(writes="extra")
async def measure(number: int) -> float:
    """Only sometimes."""
    return number / 2


def logger(rows: list[dict[str, float]]):
    @stage
    async def log(row: Row, extra: float | None = None) -> None:
        """Keeps the row."""
        rows.append({"step": row.step, **row.values, **({} if extra is None else {"extra": extra})})

    return log


def toy(rows: list[dict[str, float]] | None = None) -> Workflow:
    return Workflow(
        "toy",
        plan,
        Loop(
            "positions",
            Station(draw, together=True),
            Station(When(is_even, measure), add, logger([] if rows is None else rows)),
            depth="depth",
            carry={"total": "totals"},
        ),
    )
