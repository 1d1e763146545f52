"""What a run waits for, which is said when nothing has gone on for a while. Else an environment, a grader or an
evaluator that hangs looks like one that is slow.

Whoever hands over to code that may hang says so, nested as the work is: `with waiting_for("group %s", index): ...`. A
`Watch` that is on at that moment hears of it.
"""

import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from stovetop.tracking.trace import current_tracer, scope_span

log = logging.getLogger(__name__)

STALL_AFTER_S = 300.0
_MAX_CHARACTERS = 160  # of an object
_NUM_OLDEST, _NUM_NEWEST = 8, 2  # what is listed: one that hangs is an old one, one that blocks the loop the newest


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """For something that has begun and not ended."""

    what: str
    arguments: tuple[object, ...]
    within: "_Wait | None"
    since_s: float

    def __str__(self) -> str:
        own = self.what % tuple(_shown(each) for each in self.arguments)
        return own if self.within is None else f"{self.within} > {own}"


def _shown(argument: object) -> object:
    """In short: an object may be as large as the data that it holds."""
    if isinstance(argument, str | int):
        return argument
    try:
        text = repr(argument)
    except Exception:  # it is the user's code, and may raise anything
        return f"a {type(argument).__name__}"
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


@dataclass(frozen=True, slots=True)
class _Place:
    """Where this task is."""

    watch: "Watch"
    within: _Wait | None = None


_PLACE: ContextVar[_Place | None] = ContextVar("place", default=None)


@contextmanager
def waiting_for(what: str, *arguments: object) -> Generator[None]:
    """Within, this is what is waited for, and a span of the trace where one is on. `what` has a %s for each argument;
    it is put together when it is said."""
    if current_tracer() is None:
        with _waiting(what, arguments):
            yield
        return
    told = what % tuple(_shown(each) for each in arguments)
    with scope_span(_name_of(what) or told, **({"what": told} if _name_of(what) else {})), _waiting(what, arguments):
        yield


def _name_of(what: str) -> str:
    """The words of its own, as the name of a span: "group" of "group %s of %s"."""
    before, sign, _ = what.partition("%")
    return (before.strip(" :,") or what.rpartition("%s")[2].strip(" :,")) if sign else what


@contextmanager
def _waiting(what: str, arguments: tuple[object, ...]) -> Generator[None]:
    place = _PLACE.get()
    if place is None:
        yield
        return
    wait = _Wait(what, arguments, place.within, place.watch.clock())
    token = _PLACE.set(_Place(place.watch, wait))
    place.watch.begin(wait)
    try:
        yield
    finally:
        place.watch.end(wait)
        _PLACE.reset(token)


class Watch:
    """Says what is waited for, and since when, once nothing has begun or ended for `after_s` seconds; and again each
    time that this has lasted twice as long."""

    def __init__(
        self,
        after_s: float = STALL_AFTER_S,
        *,
        say: Callable[[str], None] = log.warning,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._after_s = after_s
        self._say = say
        self._open: dict[_Wait, None] = {}  # in the order in which they began
        self._last_s = clock()  # that something began or ended
        self._due_s = after_s
        self._num_within = 0  # watches that are on within this one
        self._is_off = threading.Event()

    def begin(self, wait: _Wait) -> None:
        self._open[wait] = None
        self._go_on()

    def end(self, wait: _Wait) -> None:
        del self._open[wait]
        self._go_on()

    def _go_on(self) -> None:
        self._last_s, self._due_s = self.clock(), self._after_s

    @contextmanager
    def on(self) -> Generator[None]:
        """Within, in this task and in those that it makes. The watch is kept by a thread, which sees too that the event
        loop itself stands still, as while an environment sleeps without `await`. One that was on before, such as that
        of a run of which this one is a phase, is silent as long."""
        thread = threading.Thread(target=self._keep, name="watch of progress", daemon=True)
        thread.start()
        before = _PLACE.get()
        _PLACE.set(_Place(self))
        if before is not None:
            before.watch._num_within += 1
        try:
            yield
        finally:
            if before is not None:
                before.watch._num_within -= 1
                before.watch._go_on()
            _PLACE.set(before)  # not reset: a run may be left in another thread than it was entered in
            self._is_off.set()
            thread.join()

    def _keep(self) -> None:
        """Stopped by: the end of `on`."""
        while not self._is_off.wait(self._after_s / 10):
            self.look()

    def look(self) -> None:
        """Says it if it is due, and no watch within this one is on, which says it for both."""
        if self._num_within:
            return
        quiet_s = self.clock() - self._last_s
        if quiet_s >= self._due_s:
            self._due_s = 2 * quiet_s
            self._say(self._described(quiet_s))

    def _described(self, quiet_s: float) -> str:
        waits = list(self._open)
        outer = {wait.within for wait in waits}
        innermost = [wait for wait in waits if wait not in outer]
        num_more = max(0, len(innermost) - _NUM_OLDEST - _NUM_NEWEST)
        listed = [*innermost[:_NUM_OLDEST], *innermost[_NUM_OLDEST + num_more :]]
        lines = [f"\n  {wait}: for {self.clock() - wait.since_s:.0f} s" for wait in listed]
        more = f"\n  and {num_more} more" if num_more else ""
        return f"nothing has gone on for {quiet_s:.0f} s. What is waited for:{''.join(lines)}{more}"
