"""The runner: takes a checked workflow from its first stage to its last.

It looks up what each stage reads and keeps what it writes, asks conditions, emits the events of the stages and of the
whole, and closes what generators have opened. How items share the line is `concurrency.assembly_line`'s business.
"""

import asyncio
import inspect
import logging
import time
from collections import ChainMap
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import SupportsFloat, cast

from stovetop.concurrency import LineStation, assembly_line, first_failure, is_cancelled
from stovetop.errors import InvalidRequest, StageFailed, StovetopError
from stovetop.kitchen.annotations import holds, shown
from stovetop.kitchen.nodes import Condition, Loop, Phase, Placed, Positions
from stovetop.kitchen.stage import AnyStage, optional_of, parameters_of
from stovetop.runs import Run
from stovetop.tracking.events import as_number
from stovetop.tracking.waiting import waiting_for

log = logging.getLogger(__name__)


class Runner:
    """One run of a workflow."""

    def __init__(self, workflow: str, stages: Sequence[Placed], given: Mapping[str, object]) -> None:
        self._workflow = workflow
        self._stages = stages
        self._given = given  # config fields and ports
        self._state = dict(given)
        run = given.get("run")
        self._run = run if isinstance(run, Run) else None
        self._gives = {each.stage.name: each.stage.gives() for each in stages}  # here, as signatures are slow to read
        conditions = {each.condition for each in stages if each.condition is not None}
        self._asks = {each: ({name: name for name in parameters_of(each)}, optional_of(each)) for each in conditions}
        self._carry: _Carry | None = None  # while in the loop
        self._opened: list[tuple[str, AsyncGenerator[object]]] = []

    async def run(self, loop: Loop | None) -> dict[str, object]:
        """What the stages outside the loop have written, and the carry with its list."""
        with self._span("workflow", None, workflow=self._workflow):
            failure: BaseException | None = None
            try:
                await self._visit_all("before", _Scope(ChainMap(self._state)))
                if loop is not None:
                    await self._loop(loop)
                await self._visit_all("after", _Scope(ChainMap(self._state)))
            except BaseException as error:
                failure = error
            await self._close(failure)
        return {name: value for name, value in self._state.items() if name not in self._given}

    async def _close(self, failure: BaseException | None) -> None:
        """Runs the rest of every generator, the last opened first; then raises what went wrong first. Where that is a
        cancellation, a generator that fails now may be what cancelled: its task group does when a task of it fails."""
        for name, generator in reversed(self._opened):
            try:
                with self._failures_of(name, None):
                    if await anext(generator, _NOTHING) is not _NOTHING:
                        await generator.aclose()
                        raise InvalidRequest("it yields a second time; a stage that opens something yields once")
            except BaseException as error:
                if failure is None or isinstance(failure, asyncio.CancelledError) or not isinstance(error, Exception):
                    failure = error
                else:
                    log.error("after a failure, another one: %s", error)
        if failure is not None:
            raise failure

    # ---- the loop

    async def _loop(self, loop: Loop) -> None:
        positions = cast(Positions, self._state[loop.items])
        depth = cast(int, self._state[loop.depth] if isinstance(loop.depth, str) else loop.depth)
        self._carry = carry = _Carry(loop.carry, depth, self._state)
        with ExitStack() as showing:
            bar = None
            if self._run is not None:
                progress = self._run.progress(self._workflow, total=positions.num_steps, completed=positions.start)
                bar = showing.enter_context(progress)

            async def leave(item: _Scope) -> None:
                carry.forget(item.number)
                item.values.maps[0].clear()
                if bar is not None:
                    bar.advance()

            in_loop = [place for place in self._stages if place.phase == "loop"]
            stations = [list(places) for _, places in groupby(in_loop, key=lambda place: place.station)]
            line = [LineStation(partial(self._visit_each, places), together=places[0].together) for places in stations]
            await assembly_line(self._items(positions, carry), [*line, LineStation(leave)], depth=depth)
        for listed, name in carry.lists.items():
            left = carry.for_a_loop_at(sum(1 for _ in positions), name)
            self._state |= {listed: left, name: left[-1]}
        self._carry = None

    def _items(self, positions: Positions, carry: "_Carry") -> Iterator["_Scope"]:
        last_row_s = time.perf_counter()

        def since_last_row() -> float:
            nonlocal last_row_s
            before_s, last_row_s = last_row_s, time.perf_counter()
            return last_row_s - before_s

        for number, position in enumerate(positions):
            row = Row(position.step, since_last_row)
            own: dict[str, object] = {**position._asdict(), "row": row, **carry.seen_by(number)}
            yield _Scope(ChainMap(own, self._state), number, row)

    # ---- one stage

    async def _visit_all(self, phase: Phase, scope: "_Scope") -> None:
        await self._visit_each([place for place in self._stages if place.phase == phase], scope)

    async def _visit_each(self, places: Sequence[Placed], scope: "_Scope") -> None:
        for place in places:
            if place.condition is None or self._holds(place.condition, scope):
                await self._visit(place.stage, scope)

    async def _visit(self, stage: AnyStage, scope: "_Scope") -> None:
        row, began_s = scope.row, time.perf_counter()
        if row is not None:
            row.writer = stage.name
        at = "" if scope.step is None else f" at step {scope.step}"
        with (
            self._failures_of(stage.name, scope.step),
            self._span("stage", scope.step, stage=stage.name),
            waiting_for("stage %r%s", stage.name, at),
        ):
            value = stage.function(**self._arguments(stage.reads, stage.optional, scope))
            if inspect.iscoroutine(value):
                value = await value
            elif inspect.isasyncgen(value):
                generator = cast("AsyncGenerator[object]", value)
                value = await anext(generator, _NOTHING)
                if value is _NOTHING:
                    raise InvalidRequest("it yields nothing; a stage that opens something yields it")
                self._opened.append((stage.name, generator))
            self._write(stage, value, scope)
        if row is not None:
            row.took(stage.name, time.perf_counter() - began_s)

    def _holds(self, condition: Condition, scope: "_Scope") -> bool:
        if condition not in scope.conditions:
            with self._failures_of(condition.__name__, scope.step):
                scope.conditions[condition] = condition(**self._arguments(*self._asks[condition], scope))
        return scope.conditions[condition]

    def _arguments(self, reads: Mapping[str, str], optional: frozenset[str], scope: "_Scope") -> dict[str, object]:
        arguments: dict[str, object] = {}
        for parameter, name in reads.items():
            if scope.row is not None and self._carry is not None and name in self._carry.lists:
                arguments[parameter] = self._carry.for_a_loop_at(scope.number + 1, self._carry.lists[name])
            elif name in scope.values or parameter not in optional:
                arguments[parameter] = scope.values[name]
        return arguments

    def _write(self, stage: AnyStage, value: object, scope: "_Scope") -> None:
        annotations = self._gives[stage.name]
        for name, written in _named(stage, value).items():
            if not holds(written, annotations[name]):
                raise InvalidRequest(
                    f"{name!r} must be {shown(annotations[name])}, as the function says; is a return missing? It is "
                    f"{type(written).__name__}"
                )
            if scope.row is not None and self._carry is not None and name in self._carry.lists.values():
                self._carry.leave(scope.number, name, written)
            else:
                scope.values[name] = written

    @contextmanager
    def _failures_of(self, name: str, step: int | None) -> Generator[None]:
        """Within, what is raised becomes a StageFailed; a cancellation too, unless this task is cancelled."""
        try:
            yield
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise StageFailed(name, self._workflow, step, "something that it waited for was cancelled") from error
        except Exception as error:
            first = first_failure(error)
            why = str(first) if isinstance(first, StovetopError) else f"{type(first).__name__}: {first}"
            raise StageFailed(name, self._workflow, step, why) from error

    @contextmanager
    def _span(self, what: str, step: int | None, **labels: str) -> Generator[None]:
        """Emits the events of what goes on within: a start, and a stop or an exception."""
        began_s = time.perf_counter()

        def emit(event: str, **fields: float | str) -> None:
            if self._run is not None:
                self._run.emit(f"{what}.{event}", step=step, **labels, **fields)

        emit("start")
        try:
            yield
        except BaseException as error:
            raised = f"{type(error).__name__}: {error}".removesuffix(": ")
            emit("exception", seconds=time.perf_counter() - began_s, error=raised)
            raise
        emit("stop", seconds=time.perf_counter() - began_s)


_NOTHING = object()


def _named(stage: AnyStage, value: object) -> Mapping[str, object]:
    """What a stage gave, by the names that it goes by."""
    if not stage.writes and value is not None:
        raise InvalidRequest(f"it writes nothing and returned a value; name it in @stage(writes=...): {value!r}")
    if len(stage.writes) < 2:
        return dict.fromkeys(stage.writes.values(), value)
    given = (
        cast("dict[str, object]", value)
        if isinstance(value, dict)
        else {own: getattr(value, own) for own in getattr(value, "_fields", ())}
    )
    if absent := [own for own in stage.writes if own not in given]:
        raise InvalidRequest(
            f"it must return a NamedTuple or a dict with {', '.join(stage.writes)}; {', '.join(absent)} is not in it"
        )
    return {name: given[own] for own, name in stage.writes.items()}


# ---- what stages see -------------------------------------------------------------------------------------------------


class Row:
    """The row of metrics of one step, which its stages fill and one of them logs."""

    def __init__(self, step: int, since_last_row: Callable[[], float] | None = None) -> None:
        self.step = step
        self.writer = ""  # the stage that is running
        self.is_logged = False
        self._values: dict[str, float] = {}
        self._writers: dict[str, str] = {}
        self._since_last_row = since_last_row

    @property
    def values(self) -> Mapping[str, float]:
        """What is in it now."""
        return self._values

    def add(self, metrics: Mapping[str, SupportsFloat]) -> None:
        """Refused are a metric that is there already, and any once the row is logged."""
        for key, value in metrics.items():
            if self.is_logged:
                raise InvalidRequest(f"the row of step {self.step} is logged; add to it in an earlier stage: {key!r}")
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
        overlap; `time/STAGE` is there of every stage before this one."""
        if self._since_last_row is not None:
            self.add({"time/step": self._since_last_row()})
        run.log_metrics(self._values, self.step)
        self.is_logged = True


@dataclass
class _Scope:
    """Outside the loop the state; for an item also what is its own. Conditions are asked once."""

    values: ChainMap[str, object]
    number: int = 0  # of the item, counted from the first of this run
    row: "Row | None" = None
    conditions: dict[Condition, bool] = field(default_factory=dict[Condition, bool])

    @property
    def step(self) -> int | None:
        return None if self.row is None else self.row.step


class _Carry:
    """What each item sees of what those before it have left."""

    def __init__(self, carry: Mapping[str, str], depth: int, state: Mapping[str, object]) -> None:
        self.lists = {listed: name for name, listed in carry.items()}
        self._depth = depth
        self._seen: dict[int, dict[str, object]] = {number: {} for number in range(depth + 1)}  # by number of the item
        for listed, name in self.lists.items():
            first = cast("Sequence[object]", state[listed])
            if not first:
                raise InvalidRequest(f"the loop begins with what is in this list, and it is empty: {listed!r}")
            for number, seen in self._seen.items():
                seen[name] = first[min(number, len(first) - 1)]

    def seen_by(self, number: int) -> Mapping[str, object]:
        return self._seen.get(number, {})

    def leave(self, number: int, name: str, value: object) -> None:
        self._seen.setdefault(number + self._depth + 1, {})[name] = value

    def forget(self, number: int) -> None:
        self._seen.pop(number, None)

    def for_a_loop_at(self, number: int, name: str) -> list[object]:
        """The list for a loop that begins with this item."""
        return [self._seen[number + ahead][name] for ahead in range(self._depth + 1)]
