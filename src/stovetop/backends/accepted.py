"""A call that was accepted, and how it is answered: with a result or an error that a client can read."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from stovetop.backends.queues import Entry
from stovetop.engine import ops
from stovetop.errors import Cancelled, CheckpointError, RequestFailedError, StovetopError

Check = Callable[[ops.Description], None]  # raises what a call is refused with
Finish = Callable[[Any], Any]  # makes the public result of a call from the engine's


@dataclass(slots=True, eq=False)
class Accepted:
    """A call that will be answered."""

    what: str
    op: ops.Op
    finish: Finish
    future: "Future[Any]"
    check: Check | None
    after: "Sequence[Future[Any]]"
    entry: Entry  # in its queue
    ticket: ops.Ticket | None = None  # since the engine has it

    def answer(self, result: ops.Result, error: BaseException | None, *, as_it_is: bool = False) -> None:
        """Once: what comes later is left out. `as_it_is`: the error says what was wrong with the call."""
        if error is None:
            try:
                result = self.finish(result)
            except BaseException as raised:
                error = raised
        if error is not None and as_it_is:
            with suppress(InvalidStateError):
                self.future.set_exception(error)
        else:
            settle(self.future, self.what, result, error)


def settle(future: "Future[Any]", what: str, result: Any, error: BaseException | None) -> None:
    """The answer to a call."""
    with suppress(InvalidStateError):  # it was answered before, by the end of the thread
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(_public(what, error))


def _public(what: str, error: BaseException) -> BaseException:
    """As a client sees it: by the name of the call."""
    if isinstance(error, CheckpointError | RequestFailedError | Cancelled):
        return error
    category = "user" if isinstance(error, StovetopError) else "server"
    failure = RequestFailedError(f"{what} failed: {error or type(error).__name__}", category)
    failure.__cause__ = error
    return failure
