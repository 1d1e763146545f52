"""What a verb returns: a result that is on its way. `await` it, or call `.result()`; both as often as you like."""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

from stovetop.checks import take
from stovetop.errors import InvalidRequest
from stovetop.rules import Maybe, number

log = logging.getLogger(__name__)

T = TypeVar("T")

_TIMEOUT = Maybe(number(at_least=0, at_most=threading.TIMEOUT_MAX))  # seconds: as many as a lock can wait


class APIFuture(Generic[T]):
    """A result that is on its way. The call was queued when it was made: waiting, or not waiting, changes nothing,
    and cancelling a waiter does not take the call back; `cancel` does."""

    def __init__(self, future: "concurrent.futures.Future[T]", cancel: Callable[[], None] = lambda: None) -> None:
        self._future = future
        self._cancel = cancel

    def result(self, timeout: float | None = None) -> T:
        """Blocks until the result is there. After `timeout` seconds TimeoutError is raised; the call still runs."""
        return self._future.result(take(_TIMEOUT, timeout, "result: timeout"))

    async def result_async(self, timeout: float | None = None) -> T:
        async with asyncio.timeout(take(_TIMEOUT, timeout, "result_async: timeout")):
            return await asyncio.wrap_future(self._future)

    def __await__(self) -> Generator[object, None, T]:
        return self.result_async().__await__()

    async def coroutine(self) -> T:
        return await self

    def future(self) -> "concurrent.futures.Future[T]":
        return self._future

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("a future cannot be pickled or copied: it belongs to this process. Pass its result()")

    def done(self) -> bool:
        return self._future.done()

    def cancel(self) -> None:
        """Takes the call back if it has not begun, or ends the samples that it draws: the future then fails with
        `Cancelled`. A call that trains or saves already goes on; so does one that a provider cannot take back. A
        custom loss is taken back also while its function runs, and the client goes on without what that returns."""
        self._cancel()


class ClientFuture(APIFuture[T]):
    """A client that is being made. It forwards every call to the client, waiting for it first, so `.result()` on it
    is optional."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.result(), name)


class _Answer(concurrent.futures.Future[T]):
    """A future whose callbacks cannot keep its answer from each other, nor end the thread that brings it: the library
    logs what is raised in one of them if it is an Exception, and lets the rest go by, sys.exit() for one."""

    def add_done_callback(self, fn: "Callable[[concurrent.futures.Future[T]], object]") -> None:
        super().add_done_callback(partial(_contained, fn))


def _contained(
    callback: "Callable[[concurrent.futures.Future[T]], object]", done: "concurrent.futures.Future[T]"
) -> None:
    try:
        callback(done)
    except BaseException:
        log.exception("a callback on the future of a call raised")


def pending() -> "concurrent.futures.Future[Any]":
    """A future that nobody can cancel: what was queued will be done."""
    future: concurrent.futures.Future[Any] = _Answer()
    future.set_running_or_notify_cancel()
    return future


def resolved(value: T) -> APIFuture[T]:
    future: concurrent.futures.Future[T] = pending()
    future.set_result(value)
    return APIFuture(future)
