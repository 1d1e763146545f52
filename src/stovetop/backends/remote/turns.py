"""The calls of one training client, in the order in which they were made. Each is handed to the SDK when those before
it were; one may wait for other futures first, and one may hold those behind it: a load, a custom loss."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from stovetop.futures import when_done


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One call."""

    begin: "Callable[[], Future[Any] | None]"  # hands it to the SDK; those behind it wait for what it returns
    fail: Callable[[BaseException], None]  # it is not begun, or cannot be
    after: "Sequence[Future[Any]]" = ()  # that it waits for


class Turns:
    """Those of one client. A call that nothing keeps waiting is begun in the thread that makes it."""

    def __init__(self) -> None:
        self._waiting: deque[Turn] = deque()
        self._goes_on = False  # a thread begins calls, or a future will go on with them
        self._lock = threading.Lock()  # protects both

    def put(self, turn: Turn) -> None:
        """Behind all others."""
        with self._lock:
            self._waiting.append(turn)
            if self._goes_on:
                return
            self._goes_on = True
        self._go_on()

    def take_back(self, turn: Turn) -> bool:
        """Whether it had not begun, and will not."""
        with self._lock:
            if turn not in self._waiting:
                return False
            self._waiting.remove(turn)
            return True

    def drop(self, error: BaseException) -> None:
        """What has not begun fails with this."""
        with self._lock:
            dropped = list(self._waiting)
            self._waiting.clear()
        for turn in dropped:
            turn.fail(error)

    def _go_on(self) -> None:
        while (turn := self._first()) is not None:
            undone = next((future for future in turn.after if not future.done()), None)
            if undone is None and self.take_back(turn):
                undone = self._begin(turn)
            if undone is not None:
                when_done(undone, lambda _: self._go_on())
                return

    def _first(self) -> Turn | None:
        with self._lock:
            if self._waiting:
                return self._waiting[0]
            self._goes_on = False
            return None

    def _begin(self, turn: Turn) -> "Future[Any] | None":
        try:
            return turn.begin()
        except BaseException as error:  # of the SDK; it belongs to this call
            turn.fail(error)
            return None
