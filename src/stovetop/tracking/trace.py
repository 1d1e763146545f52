"""What ran when, as a trace that Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev) open.

    @scope                                      # a function, or a coroutine: a span of its name each time it runs
    async def grade(answer): ...

    with scope_span("grade", problem=3):        # a block
        set_scope_attributes(reward=1.0)        # of the innermost span

Spans nest as the code does, and each asyncio task has its own: tasks that run at the same time lie in lanes of their
own.
Outside of `tracing` all of this does nothing. Within a run that has `enable_trace`, stages, calls of the service and
whatever a run waits for (`tracking/waiting.py`) are spans too.

    trace_events.jsonl   an event a line, appended as it happens: what a killed run leaves can be read
    trace.json           the same as an array, written when the run ends, for the two programs
"""

import asyncio
import heapq
import inspect
import json
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from stovetop.calls import AnsweredCall
from stovetop.durable import cut_torn_row, write_file, writing

P = ParamSpec("P")
R = TypeVar("R")
Attribute = str | float | int | bool | None

EVENTS_FILE, TRACE_FILE = "trace_events.jsonl", "trace.json"
FLUSH_EVERY_S, FLUSH_AT = 1.0, 2000  # events that wait to be written
_CALLS = 0  # the lane of calls, which overlap as they like


class Tracer:
    """Writes the events of one trace. May be used from any thread."""

    def __init__(self, file: Path, *, clock_s: Callable[[], float] = time.time) -> None:
        self._file = file
        self._clock_s = clock_s
        self._lock = threading.Lock()  # protects what follows
        self._lines: list[str] = []
        self._flushed_s = clock_s()
        self._lane_of: dict[object, tuple[int, int]] = {}  # by task or thread: its lane, and how many spans are open
        self._free: list[int] = []
        self._num_lanes = 0
        self._num_calls = 0
        self._pid = os.getpid()

    def begin(self, name: str, attributes: Mapping[str, Attribute]) -> None:
        """A span of this task begins."""
        at_s = self._clock_s()
        self._write(self._line("B", name, self._enter(_here()), at_s, attributes), at_s)

    def end(self, name: str, attributes: Mapping[str, Attribute]) -> None:
        """The innermost span of this task ends."""
        at_s = self._clock_s()
        self._write(self._line("E", name, self._leave(_here()), at_s, attributes), at_s)

    def call(self, call: AnsweredCall) -> None:
        """A call of a service, from when it was made until it was answered."""
        with self._lock:
            self._num_calls += 1
            number = self._num_calls
        more = f',"cat":"call","id":{number}'
        begun = self._line("b", call.verb, _CALLS, call.begun_s, call.tokens._asdict(), more)
        ended = self._line("e", call.verb, _CALLS, call.ended_s, more=more)
        named = self._named(_CALLS, "calls of the service") if number == 1 else ""
        self._write(named + begun + ended, call.ended_s)

    def flush(self) -> None:
        """Writes what waits."""
        with self._lock:
            lines, self._lines = self._lines, []
            self._flushed_s = self._clock_s()
            if lines:
                cut_torn_row(self._file)
                with writing(self._file), self._file.open("a", encoding="utf-8") as file:
                    file.write("".join(lines))

    def _enter(self, place: object) -> int:
        """The lane of a task: a free one when it opens its first span."""
        with self._lock:
            lane, num_open = self._lane_of.get(place, (0, 0))
            if num_open == 0:
                if self._free:
                    lane = heapq.heappop(self._free)
                else:
                    self._num_lanes += 1
                    lane = self._num_lanes
                    self._lines.append(self._named(lane, f"task lane {lane}"))
            self._lane_of[place] = (lane, num_open + 1)
            return lane

    def _leave(self, place: object) -> int:
        with self._lock:
            lane, num_open = self._lane_of[place]
            if num_open == 1:
                del self._lane_of[place]
                heapq.heappush(self._free, lane)
            else:
                self._lane_of[place] = (lane, num_open - 1)
            return lane

    def _line(
        self,
        kind: str,
        name: str,
        lane: int,
        at_s: float,
        attributes: Mapping[str, Attribute] | None = None,
        more: str = "",
    ) -> str:
        """An event. Put together by hand, which takes a third of the time: there are thousands in a step."""
        args = f',"args":{json.dumps(attributes, default=str)}' if attributes else ""
        head = f'{{"ph":"{kind}","name":{json.dumps(name)},"ts":{at_s * 1e6:.0f},"pid":{self._pid},"tid":{lane}'
        return f"{head}{more}{args}}}\n"

    def _named(self, lane: int, name: str) -> str:
        return self._line("M", "thread_name", lane, 0.0, {"name": name})

    def _write(self, lines: str, at_s: float) -> None:
        with self._lock:
            self._lines.append(lines)
            is_due = len(self._lines) >= FLUSH_AT or at_s - self._flushed_s >= FLUSH_EVERY_S
        if is_due:
            self.flush()


@dataclass(slots=True, eq=False)
class _Span:
    """Where this code is: the tracer, and what is to be told of the innermost span when it ends."""

    tracer: Tracer
    attributes: dict[str, Attribute] = field(default_factory=dict[str, Attribute])


_SPAN: ContextVar[_Span | None] = ContextVar("span", default=None)


def _here() -> object:
    """The task that runs; outside of an event loop, the thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident() if task is None else task


# ---- spans -----------------------------------------------------------------------------------------------------------


@contextmanager
def tracing(folder: Path) -> Generator[Tracer]:
    """Within, in this task and in those that it makes, spans are written to this folder."""
    tracer = Tracer(folder / EVENTS_FILE)
    before = _SPAN.get()
    _SPAN.set(_Span(tracer))
    try:
        yield tracer
    finally:
        _SPAN.set(before)  # not reset: a run may be left in another thread than it was entered in
        tracer.flush()
        convert(folder)


def current_tracer() -> Tracer | None:
    """That of the trace that is on."""
    span = _SPAN.get()
    return None if span is None else span.tracer


@contextmanager
def scope_span(name: str, **attributes: Attribute) -> Generator[None]:
    """A span of this name."""
    outer = _SPAN.get()
    if outer is None:
        yield
        return
    span = _Span(outer.tracer)
    token = _SPAN.set(span)
    span.tracer.begin(name, attributes)
    try:
        yield
    except BaseException as error:
        span.attributes["error"] = type(error).__name__
        raise
    finally:
        span.tracer.end(name, span.attributes)
        _SPAN.reset(token)


def set_scope_attributes(**attributes: Attribute) -> None:
    """Adds to what is told of the innermost span."""
    span = _SPAN.get()
    if span is not None:
        span.attributes.update(attributes)


def scope(function: Callable[P, R]) -> Callable[P, R]:
    """A span of the function's name each time that it runs; of a coroutine, until it has ended."""
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def traced(*args: P.args, **kwargs: P.kwargs) -> Any:
            with scope_span(function.__qualname__):
                return await cast("Callable[P, Any]", function)(*args, **kwargs)

        return cast("Callable[P, R]", traced)

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with scope_span(function.__qualname__):
            return function(*args, **kwargs)

    return called


# ---- for the programs that show it -----------------------------------------------------------------------------------


def convert(folder: Path) -> Path | None:
    """Writes trace.json of what is in trace_events.jsonl, that of earlier parts of the run too; None without it."""
    try:
        *lines, _torn = (folder / EVENTS_FILE).read_bytes().split(b"\n")
    except FileNotFoundError:
        return None
    if not lines:
        return None
    write_file(folder / TRACE_FILE, b"[" + b",\n".join(lines) + b"]\n")
    return folder / TRACE_FILE
