"""Work in other threads of which ops will come for an engine: custom losses. How long the engine waits for it.

Code is known to be a part of such work by a ContextVar, the only one outside of `tracking/`: what a loss gives to
`asyncio.to_thread`, or calls as a loss within a loss, runs in other threads, and only its context goes with it.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from stovetop.errors import InvalidRequest

log = logging.getLogger(__name__)

SECONDS_FOR_WORK = 3600.0  # more than a loss takes; one that waits for itself is ended by this
SECONDS_AFTER_CLOSE = 300.0  # that a close waits for work, since then or since it began
SECONDS_UNTIL_TOLD = 60.0  # before the log says that it goes on
SECONDS_UNTIL_TOLD_AFTER_CLOSE = 5.0


@dataclass(slots=True, eq=False)
class Expected:
    """One piece of such work."""

    what: str  # the call that it is a part of
    give_up: Callable[[str], None]  # it took too long: the reason
    fail: Callable[[BaseException], None]  # the engine takes no more
    began_s: float | None = None
    told: bool = False


_AT_WORK: ContextVar[tuple[Expected, ...]] = ContextVar("expected work that this code is a part of", default=())


def enter(expected: Expected) -> None:
    """What runs in this context from now on is a part of it: its coroutines too, and what it gives to
    `asyncio.to_thread`. A thread that it starts itself begins with an empty context, so that is not known."""
    _AT_WORK.set((*_AT_WORK.get(), expected))


def is_within(expected: Expected | None) -> bool:
    """Whether this code is a part of it."""
    return expected in _AT_WORK.get()


def refuse_own_client(running: Expected | None, what: str) -> None:
    """Refuses a call, of this name, of the client whose loss runs, by the loss itself: it would wait for itself."""
    if running is not None and is_within(running):
        raise InvalidRequest(
            f"{what}: a custom loss cannot call the client that it is computed for, whose calls wait for it; call "
            "another client, or do this before or after the loss"
        )


def refuse_own_service(in_loss: bool, what: str) -> None:
    """Refuses to close a service `in_loss`: from within one of its losses."""
    if in_loss:
        raise InvalidRequest(
            f"{what}: a custom loss cannot close its own service, which waits for it; do this before or after it"
        )


class AllExpected:
    """What one engine waits for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects _all
        self._all: set[Expected] = set()
        self._closed_s: float | None = None

    def add(self, expected: Expected) -> None:
        """The engine waits for it from now on."""
        with self._lock:
            self._all.add(expected)

    def discard(self, expected: Expected) -> None:
        """Nothing more comes of it."""
        with self._lock:
            self._all.discard(expected)

    def __contains__(self, expected: Expected) -> bool:
        with self._lock:
            return expected in self._all

    def clear(self) -> list[Expected]:
        """Nothing is expected any more. Returns what was."""
        with self._lock:
            cleared, self._all = list(self._all), set()
        return cleared

    def close(self) -> None:
        """Waits for less long from now on."""
        self._closed_s = time.monotonic()

    @property
    def running(self) -> list[Expected]:
        """What has begun. The rest waits for ops that the engine has, or for what has begun."""
        with self._lock:
            return [expected for expected in self._all if expected.began_s is not None]

    def called_from_within(self) -> bool:
        """Whether this code is a part of anything that is expected here."""
        return any(expected in self for expected in _AT_WORK.get())

    def refuse_within(self, what: str) -> None:
        """Refuses a call, of this name, that would wait for the code that makes it."""
        refuse_own_service(self.called_from_within(), what)

    def look(self) -> float | None:
        """Gives up what is late, and tells what goes on for long. Returns in how many seconds to look again."""
        now_s, until = time.monotonic(), list[float]()
        for expected in self.running:
            late_s, tell_s = self._times_s(expected.began_s or 0.0)
            if now_s >= late_s:
                expected.give_up(self._reason)
            elif now_s >= tell_s and not expected.told:
                expected.told = True
                log.warning("%s: the custom loss still runs; %s", expected.what, self._advice)
            until += [late_s] if expected.told else [late_s, tell_s]
        return max(0.0, min(until) - now_s) if until else None

    def _times_s(self, began_s: float) -> tuple[float, float]:
        """When work is given up, and when it is told."""
        if self._closed_s is None:
            return began_s + SECONDS_FOR_WORK, began_s + SECONDS_UNTIL_TOLD
        since_s = max(began_s, self._closed_s)
        late_s = min(began_s + SECONDS_FOR_WORK, since_s + SECONDS_AFTER_CLOSE)
        return late_s, since_s + SECONDS_UNTIL_TOLD_AFTER_CLOSE

    @property
    def _reason(self) -> str:
        if self._closed_s is None:
            return f"the custom loss did not return in {SECONDS_FOR_WORK:g} s; does it wait for a call of its client?"
        return f"the custom loss did not return in {SECONDS_AFTER_CLOSE:g} s after the service was closed"

    @property
    def _advice(self) -> str:
        if self._closed_s is None:
            return "later calls of its client wait for it. If it waits for one of these, end it: cancel() its future"
        return f"closing waits for it, {SECONDS_AFTER_CLOSE:g} s at most. Ctrl-C drops it"
