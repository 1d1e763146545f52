"""Callbacks that users have added to the futures of calls. They are a user's code, so they never run in the thread that
brings the results: it would be held."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from stovetop.backends.endings import Crew, Helper
from stovetop.backends.interruption import Interrupted

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 0.05  # at whether to wait on


class Callbacks:
    """Those of one engine's calls. Of each owner, which is a client, one runs after the other, in the order in which
    the results came; one that takes long, or never returns, delays its owner's alone. The thread that they run in is
    there as long as there are any."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._waiting: dict[str, deque[Callable[[], object]]] = {}  # by owner, while its thread is there
        self._threads: set[int] = set()
        self._changed = threading.Condition()  # protects both

    def add(self, owner: str, callback: Callable[[], object]) -> None:
        """It runs when those of its owner before it are done."""
        with self._changed:
            if owner in self._waiting:
                self._waiting[owner].append(callback)
                return
            self._waiting[owner] = deque([callback])
        try:
            Helper(self._crew, partial(self._run, owner), f"callbacks of {owner}")
        except BaseException:
            log.exception("the system has no thread to give, so a callback runs in the thread that brings results")
            self._run(owner)

    def run_here(self) -> bool:
        """Whether the code that asks is a callback of these."""
        return threading.get_ident() in self._threads

    def wait(self, gave_up: Callable[[], bool]) -> bool:
        """Until all are done, or nobody waits any more. Whether they are done."""
        with self._changed:
            while self._waiting and not gave_up():
                self._changed.wait(SECONDS_BETWEEN_LOOKS)
            return not self._waiting

    def _run(self, owner: str) -> None:
        """In the thread of this owner's callbacks."""
        with self._changed:
            self._threads.add(threading.get_ident())
        while (callback := self._next(owner)) is not None:
            try:
                callback()
            except Interrupted:  # the program ends
                raise
            except BaseException:  # sys.exit() in a callback ends no thread
                log.exception("a callback on the future of a call raised")

    def _next(self, owner: str) -> Callable[[], object] | None:
        with self._changed:
            if self._waiting[owner]:
                return self._waiting[owner].popleft()
            del self._waiting[owner]
            self._threads.discard(threading.get_ident())
            self._changed.notify_all()
        return None
