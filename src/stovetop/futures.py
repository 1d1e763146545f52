"""What a verb returns: a result that is on its way. `await` it, or call `.result()`; both as often as you like."""

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

from stovetop.checks import take
from stovetop.errors import InvalidRequest, ServiceClosed
from stovetop.rules import Maybe, number

log = logging.getLogger(__name__)

S = TypeVar("S")
T = TypeVar("T")

_TIMEOUT = Maybe(number(at_least=0, at_most=threading.TIMEOUT_MAX))  # seconds: as many as a lock can wait


class APIFuture(Generic[T]):
    """A result that is on its way. The call was queued when it was made: waiting, or not waiting, changes nothing,
    and cancelling a waiter does not take the call back; `cancel` does."""

    def __init__(self, future: "concurrent.futures.Future[T]", cancel: Callable[[], None] = lambda: None) -> None:
        self._future = future
        self._cancel = cancel
        self._process = os.getpid()

    def result(self, timeout: float | None = None) -> T:
        """Blocks until the result is there. After `timeout` seconds TimeoutError is raised; the call still runs."""
        self._refuse_in_fork("result")
        return self._future.result(take(_TIMEOUT, timeout, "result: timeout"))

    async def result_async(self, timeout: float | None = None) -> T:
        self._refuse_in_fork("result_async")
        async with asyncio.timeout(take(_TIMEOUT, timeout, "result_async: timeout")):
            return await asyncio.wrap_future(_linked(self._future))

    def __await__(self) -> Generator[object, None, T]:
        return self.result_async().__await__()

    async def coroutine(self) -> T:
        return await self

    def future(self) -> "concurrent.futures.Future[T]":
        """The same result as a future of the standard library. Callbacks on the futures of one client run in a thread
        of their own, one after the other, in the order in which the results come. They may take long, make calls and
        wait for them; `close()` of the service waits for those that run, five minutes at most."""
        return self._future

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("a future cannot be pickled or copied: it belongs to this process. Pass its result()")

    def done(self) -> bool:
        return self._future.done()

    def cancel(self) -> None:
        """Takes the call back if it has not begun, or ends the samples that it draws: the future then fails with
        `Cancelled`. A call that trains or saves already goes on; so does one that a provider cannot take back. A
        custom loss is taken back also while its function runs, and the client goes on without what that returns."""
        self._refuse_in_fork("cancel")
        self._cancel()

    def _refuse_in_fork(self, what: str) -> None:
        """A result that was not there when this process was forked comes to the other one alone."""
        if not self._future.done():
            refuse_in_fork(self._process, what)


class ClientFuture(APIFuture[T]):
    """A client that is being made. It forwards every call to the client, waiting for it first, so `.result()` on it
    is optional."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.result(), name)


HandOver = Callable[[str, Callable[[], object]], None]  # a callback, to what runs those of this owner


class AnsweringThread(threading.Thread):
    """A thread that brings results of calls. What users do with them, it hands over to other threads."""

    def __init__(self, target: Callable[[], None], name: str, hand_over: HandOver) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.hand_over = hand_over


class _Answer(concurrent.futures.Future[T]):
    """A future whose callbacks cannot hold the thread that brings its answer, keep it from each other, or end that
    thread: the library logs what is raised in one of them if it is an Exception, and lets the rest go by, sys.exit()
    for one."""

    def __init__(self, owner: str) -> None:
        super().__init__()
        self._owner = owner

    def add_done_callback(self, fn: "Callable[[concurrent.futures.Future[T]], object]") -> None:
        super().add_done_callback(partial(_call_elsewhere, self._owner, fn))


def _call_elsewhere(
    owner: str, callback: "Callable[[concurrent.futures.Future[T]], object]", done: "concurrent.futures.Future[T]"
) -> None:
    thread = threading.current_thread()
    if isinstance(thread, AnsweringThread):
        thread.hand_over(owner, partial(callback, done))
    else:
        _contained(callback, done)


def _contained(
    callback: "Callable[[concurrent.futures.Future[T]], object]", done: "concurrent.futures.Future[T]"
) -> None:
    try:
        callback(done)
    except BaseException:
        log.exception("a callback on the future of a call raised")


def when_done(
    future: "concurrent.futures.Future[T]", function: "Callable[[concurrent.futures.Future[T]], object]"
) -> None:
    """Calls `function` with the future when it is done, in the thread that brings its result: for what is quick, and no
    user's."""
    concurrent.futures.Future[T].add_done_callback(future, partial(_contained, function))


def when_all_done(futures: "Sequence[concurrent.futures.Future[Any]]", function: Callable[[], object]) -> None:
    """Calls the function once, when all have ended, in the thread that ends the last one; now, if there are none."""
    left, lock = len(futures), threading.Lock()  # protects `left`: futures end in several threads

    def one_has_ended(_: "concurrent.futures.Future[Any]") -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            function()

    for future in futures:
        when_done(future, one_has_ended)
    if not futures:
        function()


def pending(owner: str = "") -> "concurrent.futures.Future[Any]":
    """A future that nobody can cancel: what was queued will be done. Callbacks on those of one owner, a client, run one
    after the other."""
    future: concurrent.futures.Future[Any] = _Answer(owner)
    future.set_running_or_notify_cancel()
    return future


def _linked(future: "concurrent.futures.Future[T]") -> "concurrent.futures.Future[T]":
    """A future of the library with the same result, for asyncio's callback, which is quick."""
    link: concurrent.futures.Future[T] = concurrent.futures.Future()
    link.set_running_or_notify_cancel()

    def pass_on(done: "concurrent.futures.Future[T]") -> None:
        error = done.exception()
        if error is None:
            link.set_result(done.result())
        else:
            link.set_exception(error)

    when_done(future, pass_on)
    return link


def then(future: "concurrent.futures.Future[S]", function: Callable[[S], T]) -> "concurrent.futures.Future[T]":
    """What `function` makes of a result, in the thread that brought it. Its errors, and those of `future`, are the
    errors of the new one."""
    following: concurrent.futures.Future[T] = pending()

    def follow(done: "concurrent.futures.Future[S]") -> None:
        try:
            following.set_result(function(done.result()))
        except BaseException as error:  # whatever it is, it has to reach the one who waits
            following.set_exception(error)

    when_done(future, follow)
    return following


def refuse_in_fork(process: int, what: str | None = None) -> None:
    """Refuses a call, of this name, that needs the threads of the process of this id, in a child that was forked from
    it: a fork has the memory and none of the threads, so it would wait for ever."""
    if os.getpid() != process:
        raise ServiceClosed(
            f"{'' if what is None else f'{what}: '}this process was forked from the one that opened the service, and "
            "the engine runs only there. Make a ServiceClient here, or start the process with multiprocessing's "
            f"'spawn': process {os.getpid()}, opened in {process}"
        )


def resolved(value: T) -> APIFuture[T]:
    future: concurrent.futures.Future[T] = pending()
    future.set_result(value)
    return APIFuture(future)
