"""The runner: takes a checked workflow from its first stage to its last.

It looks up what each stage reads and keeps what it writes, asks conditions, emits the events of the stages and of the
whole, and closes what generators have opened. How items share the line is `concurrency.assembly_line`'s business.
"""

import asyncio
import inspect
import logging
import time
from collections import ChainMap, deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import SupportsFloat, cast

from stovetop.client import ServiceClient
from stovetop.concurrency import LineStation, assembly_line, first_failure, is_cancelled
from stovetop.errors import InvalidRequest, StageFailed, StovetopError
from stovetop.kitchen.annotations import fits, shown
from stovetop.kitchen.nodes import Loop, Placed, Positions
from stovetop.kitchen.stage import AnyStage
from stovetop.runs import Run
from stovetop.tracking.events import as_number
from stovetop.tracking.step_times import StepTimes, listening
from stovetop.tracking.timing import span
from stovetop.tracking.trace import scope_span
from stovetop.tracking.waiting import waiting_for

log = logging.getLogger(__name__)


class Runner:
    """One run of a workflow."""

    def __init__(self, workflow: str, stages: Sequence[Placed], given: Mapping[str, object]) -> None:
        self._workflow = workflow
        self._stages = stages
        self._given = given  # config fields and ports
        self._state = dict(given)
        self._run = run if isinstance(run := given.get("run"), Run) else None
        self._emit: Callable[..., None] = self._run.emit if self._run else lambda *_, **__: None
        self._gives = {each.stage.name: each.stage.gives() for each in stages}  # here, as signatures are slow to read
        self._carries: dict[str, _Carry] = {}  # by the name that an item sees
        self._opened = AsyncExitStack()

    async def run(self, loop: Loop | None) -> dict[str, object]:
        """What the stages outside the loop have written, and the carry with its list."""
        with span("workflow", self._emit, workflow=self._workflow):
            async with self._opened:
                await self._visit_all("before")
                if loop is not None:
                    await self._loop(loop)
                await self._visit_all("after")
        return {name: value for name, value in self._state.items() if name not in self._given}

    async def _visit_all(self, phase: str) -> None:
        await self._visit_each([place for place in self._stages if place.phase == phase], _Scope(ChainMap(self._state)))

    async def _loop(self, loop: Loop) -> None:
        positions = cast(Positions, self._state[loop.items])
        depth = cast(int, self._state[loop.depth] if isinstance(loop.depth, str) else loop.depth)
        self._carries = {name: _Carry(listed, self._state[listed], depth) for name, listed in loop.carry.items()}
        line: list[LineStation[_Scope]] = []
        for _, places in groupby((each for each in self._stages if each.phase == "loop"), lambda each: each.station):
            station = list(places)
            line.append(LineStation(partial(self._visit_each, station), together=station[0].together))
        total, completed = positions.num_steps, positions.start
        progress = self._run.progress(self._workflow, total=total, completed=completed) if self._run else nullcontext()
        service = self._given.get("service")
        heard = listening(service if isinstance(service, ServiceClient) else None)
        with progress as bar, heard as times:

            async def leave(item: _Scope) -> None:
                item.values.maps[0].clear()
                if bar is not None:
                    bar.advance()

            await assembly_line(self._items(positions, times), [*line, LineStation(leave)], depth=depth)
        for name, carry in self._carries.items():
            self._state |= {carry.listed: list(carry.waiting), name: carry.waiting[-1]}

    def _items(self, positions: Positions, times: StepTimes) -> Iterator["_Scope"]:
        for number, position in enumerate(positions):
            row = Row(position.step, times)
            carried = {name: carry.seen_by(number) for name, carry in self._carries.items()}
            yield _Scope(ChainMap({**position._asdict(), "row": row, **carried}, self._state), row)

    # ---- one stage

    async def _visit_each(self, places: Sequence[Placed], scope: "_Scope") -> None:
        for place in places:
            if place.condition is None or self._holds(place.condition, scope):
                await self._visit(place.stage, scope)

    def _holds(self, condition: AnyStage, scope: "_Scope") -> bool:
        if condition.function not in scope.conditions:
            with self._failures_of(condition.name, scope, kind="condition"):
                scope.conditions[condition.function] = bool(condition.function(**_arguments(condition, scope)))
        return scope.conditions[condition.function]

    async def _visit(self, stage: AnyStage, scope: "_Scope") -> None:
        row, began_s = scope.row, time.perf_counter()
        if row is not None:
            row.writer = stage.name
        at = "" if scope.step is None else f" at step {scope.step}"
        with (
            self._failures_of(stage.name, scope),
            span("stage", self._emit, step=scope.step, stage=stage.name),
            scope_span(stage.name, step=scope.step),
            waiting_for("stage %r%s", stage.name, at),
        ):
            value = stage.function(**_arguments(stage, scope))
            if inspect.iscoroutine(value):
                value = await value
            elif inspect.isasyncgen(value):
                value = await self._open(stage.name, cast("AsyncGenerator[object]", value))
            self._write(stage, value, scope)
        if row is not None:
            row.took(stage.name, time.perf_counter() - began_s)

    def _write(self, stage: AnyStage, value: object, scope: "_Scope") -> None:
        for name, written in _named(stage, value).items():
            annotation = self._gives[stage.name][name]
            if not fits(type(written), annotation, exactly=True):
                raise InvalidRequest(
                    f"{name!r} must be {shown(annotation)}, as the function says; is a return missing? It is "
                    f"{type(written).__name__}"
                )
            if carry := self._carries.get(name):
                scope.values[carry.listed] = carry.leave(written)
            else:
                scope.values[name] = written

    # ---- what a generator has opened

    async def _open(self, name: str, generator: AsyncGenerator[object]) -> object:
        value = await anext(generator, _NOTHING)
        if value is _NOTHING:
            raise InvalidRequest("it yields nothing; a stage that opens something yields it")
        self._opened.push_async_exit(partial(self._close, name, generator))
        return value

    async def _close(self, name: str, generator: AsyncGenerator[object], *failure: object) -> None:
        """Runs the rest. What went wrong first is raised; where that is a cancellation, this generator may be what
        cancelled: its task group does when a task of it fails."""
        try:
            with self._failures_of(name), waiting_for("the end of stage %r", name):
                if await anext(generator, _NOTHING) is not _NOTHING:
                    await generator.aclose()
                    raise InvalidRequest("it yields a second time; a stage that opens something yields once")
        except StageFailed as error:
            if failure[1] is None or isinstance(failure[1], asyncio.CancelledError):
                raise
            log.error("after a failure, another one: %s", error)

    # ---- failures

    @contextmanager
    def _failures_of(self, name: str, scope: "_Scope | None" = None, kind: str = "stage") -> Generator[None]:
        """Within, what is raised becomes a StageFailed; a cancellation too, unless this task is cancelled."""
        step = scope and scope.step
        try:
            yield
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            why = "something that it waited for was cancelled"
            raise StageFailed(name, self._workflow, step, why, kind) from error
        except Exception as error:
            first = first_failure(error)
            why = str(first) if isinstance(first, StovetopError) else f"{type(first).__name__}: {first}"
            raise StageFailed(name, self._workflow, step, why, kind) from error


_NOTHING = object()


def _arguments(reader: AnyStage, scope: "_Scope") -> dict[str, object]:
    """What it reads; of what it may do without, what is there."""
    return {parameter: scope.values[name] for parameter, name in reader.reads.items() if name in scope.values}


def _named(stage: AnyStage, value: object) -> Mapping[str, object]:
    """What a stage gave, by the names that it goes by."""
    if not stage.writes and value is not None:
        raise InvalidRequest(f"it writes nothing and returned a value; name it in @stage(writes=...): {value!r}")
    if len(stage.writes) < 2:
        return dict.fromkeys(stage.writes.values(), value)
    fields = {own: getattr(value, own) for own in getattr(value, "_fields", ())}
    given = cast("dict[str, object]", value) if isinstance(value, dict) else fields
    if absent := [own for own in stage.writes if own not in given]:
        raise InvalidRequest(
            f"it must return a NamedTuple or a dict with {', '.join(stage.writes)}; {', '.join(absent)} is not in it"
        )
    return {name: given[own] for own, name in stage.writes.items()}


# ---- what stages see -------------------------------------------------------------------------------------------------


class Row:
    """The row of metrics of one step, which its stages fill and one of them logs."""

    def __init__(self, step: int, times: StepTimes | None = None) -> None:
        self.step = step
        self.writer = ""  # the stage that is running
        self.is_logged = False
        self._values: dict[str, float] = {}
        self._writers: dict[str, str] = {}
        self._times = times
        self._began_s = time.perf_counter()

    @property
    def values(self) -> Mapping[str, float]:
        """What is in it now."""
        return self._values

    def add(self, metrics: Mapping[str, SupportsFloat]) -> None:
        """Refused are a metric that is there already, and any once the row is logged."""
        if self.is_logged:
            names = ", ".join(metrics)
            raise InvalidRequest(f"the row of step {self.step} is logged; add to it in an earlier stage: {names!r}")
        if "step" in metrics:
            raise InvalidRequest("a metric cannot be called 'step', rows are numbered by that; rename it")
        for key, value in metrics.items():
            if key in self._values:
                raise InvalidRequest(
                    f"the row of step {self.step} has this metric already, from stage {self._writers.get(key, '')!r}; "
                    f"give one of them another name: {key!r}"
                )
            self._values[key], self._writers[key] = as_number(key, value), self.writer

    def took(self, stage: str, seconds: float) -> None:
        """Notes how long a stage took, unless the row is logged or the stage has said so itself."""
        if not self.is_logged:
            self._values.setdefault(f"time/{stage}", seconds)

    def log(self, run: Run) -> None:
        """Writes the row, once. `time/step` is the time since the row before, which is what a step takes where several
        overlap; `time/total` is that since this step began, which is more where the next one begins before this one has
        ended; `time/STAGE` is there of every stage before this one. What else is under `time/`: `StepTimes`."""
        if self._times is not None:
            self.add({**self._times.since_last_row(), "time/total": time.perf_counter() - self._began_s})
        run.log_metrics(self._values, self.step)
        self.is_logged = True


@dataclass(frozen=True)
class _Scope:
    """Outside the loop the state; for an item also what is its own."""

    values: ChainMap[str, object]
    row: Row | None = None
    conditions: dict[object, bool] = field(default_factory=dict[object, bool])  # asked once

    @property
    def step(self) -> int | None:
        return None if self.row is None else self.row.step


class _Carry:
    """What the items to come see: each what the item `depth` + 1 before it has left, the first ones what is listed."""

    def __init__(self, listed: str, first: object, depth: int) -> None:
        self.listed = listed
        first = cast("Sequence[object]", first)
        if not first:
            raise InvalidRequest(f"the loop begins with what is in this list, and it is empty: {listed!r}")
        self.waiting = deque([first[min(number, len(first) - 1)] for number in range(depth + 1)], depth + 1)
        self._num_left = 0

    def seen_by(self, number: int) -> object:
        """Numbers are those of the items, counted from the first of this run."""
        return self.waiting[number - self._num_left]

    def leave(self, value: object) -> list[object]:
        """Called by each item, in order. Returns what a loop that begins with the next one begins with."""
        self._num_left += 1
        self.waiting.append(value)
        return list(self.waiting)
