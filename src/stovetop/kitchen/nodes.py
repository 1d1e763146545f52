"""What a workflow is made of besides stages: conditions, the loop and its stations, and the positions it goes through.
Plain values; what they mean is said in `workflow.py`."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from stovetop.errors import InvalidRequest
from stovetop.kitchen.stage import AnyStage, Stage, reading
from stovetop.rules import Whole


@dataclass(frozen=True, init=False)
class When:
    """Stages that run where a condition holds: a pure function whose parameters are what it reads. It is asked once an
    item, before the first stage that depends on it: two Whens with the same function always agree."""

    condition: Stage[..., bool]
    stages: tuple[AnyStage, ...]

    def __init__(self, condition: Callable[..., bool], /, *stages: AnyStage) -> None:
        check_kinds("a When", stages, Stage)
        others = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        if not inspect.isfunction(condition) or any(is_other(condition) for is_other in others):
            raise InvalidRequest(f"a condition is a plain function that returns a bool: {condition!r}")
        vars(self).update(condition=reading(condition, {}), stages=stages)


@dataclass(frozen=True, init=False)
class Station:
    """Stages that serve one item at a time, in the order of the items; with `together`, each item at once when it
    comes. So items overlap by being in different stations."""

    nodes: "tuple[AnyStage | When, ...]"
    together: bool

    def __init__(self, *nodes: "AnyStage | When", together: bool = False) -> None:
        check_kinds("a Station", nodes, Stage, When)
        vars(self).update(nodes=nodes, together=together)


@dataclass(frozen=True, init=False)
class Loop:
    """Takes the items of the state `items`, a `Positions`, through the stations, like an assembly line.

    depth  how many items may be on the line besides the first; the name of a config field, for what a run may choose
    carry  inside the loop `policy` of {"policy": "policies"} is what the item `depth` + 1 before has left; the first
           `depth` + 1 items take it from the list `policies`, written before the loop: item start + i has
           policies[min(i, len - 1)]. Exactly one stage of the loop writes `policy`. Behind it, and after the loop,
           `policies` is what a loop that goes on from there begins with
    """

    items: str
    stations: tuple[Station, ...]
    depth: int | str
    carry: Mapping[str, str]

    def __init__(
        self, items: str, /, *stations: Station, depth: int | str = 0, carry: Mapping[str, str] | None = None
    ) -> None:
        check_kinds("a Loop", stations, Station)
        carry = dict(carry or {})
        if not isinstance(depth, str) and not Whole(0).fits(depth):
            raise InvalidRequest(f"the depth of a loop is 0 or more, or the name of a config field: {depth!r}")
        if len(set(carry.values())) < len(carry):
            raise InvalidRequest(f"each name that is carried has a list of its own: {carry}")
        vars(self).update(items=items, stations=stations, depth=depth, carry=carry)


Node = AnyStage | When | Loop
Phase = Literal["before", "loop", "after"]  # of the loop; a workflow without one is all before


class Placed(NamedTuple):
    """A stage and where it is."""

    stage: AnyStage
    condition: AnyStage | None
    phase: Phase
    station: int | None = None  # counted from 1
    together: bool = False

    def __str__(self) -> str:
        station = f", station {self.station}{', together' if self.together else ''}" if self.station else ""
        condition = f", when {self.condition.name}" if self.condition else ""
        return f"{'loop' if self.phase == 'loop' else f'{self.phase} the loop'}{station}{condition}"


def placed(
    nodes: Sequence[Node], phase: Phase = "before", station: int | None = None, *, together: bool = False
) -> list[Placed]:
    """All stages, in order."""
    found: list[Placed] = []
    for node in nodes:
        if isinstance(node, Loop):
            for number, each in enumerate(node.stations, start=1):
                found += placed(each.nodes, "loop", number, together=each.together)
            phase = "after"
        elif isinstance(node, When):
            found += [Placed(stage, node.condition, phase, station, together) for stage in node.stages]
        else:
            found.append(Placed(node, None, phase, station, together))
    return found


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
