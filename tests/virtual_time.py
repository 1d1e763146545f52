"""An event loop whose clock jumps to the next thing that is due: sleeps and time limits take no time, and who is first
does not depend on how busy the machine is. For coroutines that wait for nothing but each other and the clock."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)


class _Selector(selectors.DefaultSelector):
    """Never waits for the clock."""

    skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout:
            self.skipped_s += timeout
            timeout = 0
        return super().select(timeout)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.skipped_s
