"""What became of the calls of a service, told to listeners: how long each took, and how many tokens it was about.
Nothing is measured while there is no listener.
"""

import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from stovetop.futures import when_done


class Tokens(NamedTuple):
    """Of one call."""

    computed: int = 0  # of data and prompts, with those that are cached
    cached: int = 0  # of a prompt, taken over from an earlier one
    drawn: int = 0


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A call that has its result. Times are in seconds since 1970: from when it was made until it was answered, so with
    its time in the queue."""

    verb: str
    begun_s: float
    ended_s: float
    tokens: Tokens


Listener = Callable[[AnsweredCall], None]  # quick: it is called by the thread that brings results


class Calls:
    """Those of one service."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()

    @contextmanager
    def told_to(self, listener: Listener) -> Generator[None]:
        """Within, each call that is made from now on is told when it is answered. Calls that fail are not."""
        self._listeners = (*self._listeners, listener)
        try:
            yield
        finally:
            self._listeners = tuple(each for each in self._listeners if each is not listener)

    def follow(self, verb: str, future: "Future[Any]", count: Callable[[Any], Tokens] = lambda _: Tokens()) -> None:
        """A call that was just made; `count` says what it was about, from its result."""
        listeners = self._listeners
        if not listeners:
            return
        begun_s = time.time()

        def tell(done: "Future[Any]") -> None:
            if done.exception() is None:
                call = AnsweredCall(verb, begun_s, time.time(), count(done.result()))
                for listener in listeners:
                    listener(call)

        when_done(future, tell)
