"""What a workflow is made of besides stages: conditions, the loop and its stations, and the positions it goes through.
Plain values; what they mean is said in `workflow.py`."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from stovetop.errors import InvalidRequest
from stovetop.kitchen.stage import AnyStage, Stage, parameters_of

Condition = Callable[..., bool]


@dataclass(frozen=True, init=False)
class When:
    """Stages that run where a condition holds: a pure function whose parameters are what it reads. It is asked once an
    item, before the first stage that depends on it: two Whens with the same function always agree."""

    condition: Condition
    stages: tuple[AnyStage, ...]

    def __init__(self, condition: Condition, /, *stages: AnyStage) -> None:
        check_kinds("a When", stages, Stage)
        if not inspect.isfunction(condition) or inspect.iscoroutinefunction(condition):
            raise InvalidRequest(f"a condition is a plain function that returns a bool: {condition!r}")
        parameters_of(condition)
        object.__setattr__(self, "condition", condition)
        object.__setattr__(self, "stages", stages)


@dataclass(frozen=True, init=False)
class Station:
    """Stages that serve one item at a time, in the order of the items; with `together`, each item at once when it
    comes. So items overlap by being in different stations."""

    nodes: "tuple[AnyStage | When, ...]"
    together: bool

    def __init__(self, *nodes: "AnyStage | When", together: bool = False) -> None:
        check_kinds("a Station", nodes, Stage, When)
        object.__setattr__(self, "nodes", nodes)
        object.__setattr__(self, "together", together)


@dataclass(frozen=True, init=False)
class Loop:
    """Takes the items of the state `items`, a `Positions`, through the stations, like an assembly line.

    depth  how many items may be on the line besides the first; the name of a config field, for what a run may choose
    carry  inside the loop `policy` of {"policy": "policies"} is what the item `depth` + 1 before has left; the first
           `depth` + 1 items take it from the list `policies`, written before the loop: item start + i has
           policies[min(i, len - 1)]. Exactly one stage of the loop writes `policy`. In the last station behind it, and
           after the loop, `policies` is what a loop that goes on from there begins with
    """

    items: str
    stations: tuple[Station, ...]
    depth: int | str
    carry: Mapping[str, str]

    def __init__(
        self, items: str, /, *stations: Station, depth: int | str = 0, carry: Mapping[str, str] | None = None
    ) -> None:
        check_kinds("a Loop", stations, Station)
        if isinstance(depth, int) and depth < 0:
            raise InvalidRequest(f"the depth of a loop is 0 or more: {depth}")
        object.__setattr__(self, "items", items)
        object.__setattr__(self, "stations", stations)
        object.__setattr__(self, "depth", depth)
        object.__setattr__(self, "carry", dict(carry or {}))


Node = AnyStage | When | Loop
Phase = Literal["before", "loop", "after"]  # of the loop; a workflow without one is all before


class Placed(NamedTuple):
    """A stage and where it is."""

    stage: AnyStage
    phase: Phase
    station: int | None  # counted from 1
    together: bool
    condition: Condition | None

    def __str__(self) -> str:
        station = f", station {self.station}{', together' if self.together else ''}" if self.station else ""
        condition = f", when {self.condition.__name__}" if self.condition else ""
        return f"{'loop' if self.phase == 'loop' else f'{self.phase} the loop'}{station}{condition}"


def placed(nodes: Sequence[Node]) -> list[Placed]:
    """All stages, in order."""
    phase: Phase = "before"
    found: list[Placed] = []
    for node in nodes:
        if isinstance(node, Loop):
            for number, station in enumerate(node.stations, start=1):
                found += _placed(station.nodes, "loop", number, together=station.together)
            phase = "after"
        else:
            found += _placed((node,), phase, None, together=False)
    return found


def _placed(nodes: Sequence[AnyStage | When], phase: Phase, station: int | None, *, together: bool) -> list[Placed]:
    conditional = [((node.condition, node.stages) if isinstance(node, When) else (None, (node,))) for node in nodes]
    return [Placed(stage, phase, station, together, condition) for condition, stages in conditional for stage in stages]


def check_kinds(where: str, nodes: Sequence[object], *kinds: type) -> None:
    """Refuses nodes of another kind, which an untyped call may pass."""
    for node in nodes:
        if not isinstance(node, kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            hint = "; decorate it with @stage" if inspect.isfunction(node) else ""
            raise InvalidRequest(f"{where} is made of {names} alone{hint}: {node!r}")


# ---- positions -------------------------------------------------------------------------------------------------------


class Position(NamedTuple):
    """An item of the loop. Its stages read these by name."""

    step: int  # counted over the whole run
    epoch: int
    batch: int  # within the epoch
    enters_epoch: bool  # of the first step of an epoch, and of the first one after a resume
    ends_epoch: bool


@dataclass(frozen=True, slots=True)
class Positions:
    """The steps that a run has before it: from `start` up to `num_steps`, `num_per_epoch` an epoch."""

    num_per_epoch: int
    num_steps: int
    start: int = 0

    def __post_init__(self) -> None:
        if self.num_per_epoch < 1 or self.num_steps < 0 or self.start < 0:
            raise InvalidRequest(f"an epoch has at least 1 step, and steps are counted from 0: {self}")

    def __iter__(self) -> Iterator[Position]:
        for step in range(self.start, self.num_steps):
            epoch, batch = divmod(step, self.num_per_epoch)
            yield Position(step, epoch, batch, batch == 0 or step == self.start, batch == self.num_per_epoch - 1)
