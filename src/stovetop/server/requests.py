"""Requests that were accepted, and their results: what a client submits is answered with an id, and it asks for the
result under this id until it comes.

A training request is in the journal, so it is known after a restart; its result may be asked for as often as a client
likes. A sample is in memory alone: after a restart its id is gone, and the client draws it again.
"""

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal, cast

from stovetop.errors import APIStatusError, CheckpointError, InvalidRequest, RequestFailedError, StovetopError
from stovetop.futures import pending, when_done
from stovetop.server.activity import Activity, Ended
from stovetop.server.journal import Journal
from stovetop.server.limits import Limits
from stovetop.server.rows import Change, ResultRow, put

log = logging.getLogger(__name__)

KEPT_S = 600.0  # a result, after it was delivered: a client may have lost the answer
MOST_KEPT = 1000  # results that were delivered to one owner, the last ones: a bound, not a tuned number
NEVER_ASKED_S = 3600.0  # a sample that no client comes for

Form = Literal["forward_backward", "sample", "json", "failed"]


class Gone(APIStatusError):
    """It was there, and is no more: a client may ask for it anew."""

    status_code = 410


@dataclass(frozen=True, slots=True)
class Result:
    """What a client gets: a protobuf message of this form, or JSON."""

    form: Form
    body: bytes

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> "Result":
        return cls("json", json.dumps(value, allow_nan=False).encode())

    @classmethod
    def stored(cls, row: ResultRow) -> "Result":
        return cls(cast("Form", row.form), row.body)  # of the journal, which this file writes

    @classmethod
    def failed(cls, message: str, category: str) -> "Result":
        return cls("failed", json.dumps({"error": message, "category": category}).encode())

    @property
    def is_fault(self) -> bool:
        """A failure that was none of the client's."""
        return self.form == "failed" and json.loads(self.body)["category"] == "server"

    @property
    def message(self) -> str:
        """Of a failure."""
        return json.loads(self.body)["error"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A result, and what goes into the journal with it. A result with changes is told when they are committed and
    `appear` was called, which shows to others what was made."""

    result: Result
    changes: tuple[Change, ...] = ()
    appear: Callable[[], None] = lambda: None
    num_steps: int = 0  # that it took
    num_tokens: int = 0  # that were trained on, scored and drawn


def _nothing() -> None:
    pass


@dataclass(slots=True, eq=False)
class Request:
    """One request that was accepted."""

    id: str
    owner: str
    what: str  # for messages
    verb: str  # what the client calls it
    digest: bytes  # of what the client sent
    n: int | None = None  # its place in the journal; None for a sample
    response: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the answer to its submission, besides the id
    committed: "Future[None]" = field(default_factory=pending)
    finished: "Future[Result]" = field(default_factory=pending)
    cancel: Callable[[], None] = _nothing
    words: dict[str, str] = field(default_factory=dict[str, str])  # of messages: what the client calls it instead
    num_tokens: int = 0  # that it computes and draws at most
    prompt: Callable[[], str] | None = None  # its text, for a log in which it is asked for; until it has ended
    accepted_s: float = field(default_factory=time.monotonic)
    finished_s: float | None = None  # monotonic, as the others
    delivered_s: float | None = None
    released: bool = False  # its client has the result, and says so

    def submitted(self) -> dict[str, Any]:
        """What a client is answered when it submits it."""
        return {"request_id": self.id, **self.response}

    def finish(self, result: Result) -> None:
        """Its result is there. Nothing is left to cancel, so the call goes, with all that it was given."""
        self.finished_s, self.cancel = time.monotonic(), _nothing
        self.finished.set_result(result)

    def require_same(self, digest: bytes) -> None:
        """Refuses another request in its place."""
        if digest != self.digest:
            raise InvalidRequest(
                f"{self.what} was used by another request; a request that is sent again must be the same, and a new "
                "one takes the next seq_id"
            )


def digest_of(identity: bytes) -> bytes:
    """Tells requests apart by what they ask."""
    return hashlib.sha256(identity).digest()


class Requests:
    """All that are in memory. One thread writes down what results come, in the order in which they come."""

    def __init__(
        self,
        journal: Journal,
        limits: Limits,
        activity: Activity,
        has_failed: Callable[[], bool],
        end: Callable[[], object],
    ) -> None:
        """`has_failed` says that an engine has died. What its requests were answered with is not true of them: they
        are done again by the next process, and `end` ends this one."""
        self._journal = journal
        self._limits = limits
        self._activity = activity
        self.has_failed = has_failed
        self._end = end
        self._closed = False
        self._by_id: dict[str, Request] = {}
        self._lock = threading.Lock()  # protects the table, which threads change
        self._finishing = ThreadPoolExecutor(1, thread_name_prefix="results")

    def add(self, request: Request, *, is_sample: bool = False) -> None:
        """Where it is not done, it is in the queue now. Raises RateLimitError for a sample for which there is no room:
        then it is not added."""
        if not request.finished.done():
            owner, num_tokens = request.owner, request.num_tokens
            self._limits.enter(owner, num_tokens, is_sample=is_sample)
            when_done(request.finished, lambda _: self._limits.leave(owner, num_tokens))
        with self._lock:
            self._by_id[request.id] = request

    def find(self, request_id: str, owner: str) -> Request | None:
        """A request of this owner that is in memory. One of another is as good as none."""
        request = self._by_id.get(request_id)
        return request if request is not None and request.owner == owner else None

    def discard(self, request: Request, error: BaseException) -> None:
        """One that was added could not be begun."""
        with self._lock:
            del self._by_id[request.id]
        request.finished.set_exception(error)

    def follow(self, request: Request, future: "Future[Any]", written: Callable[[Any], Outcome]) -> None:
        """When the future is done, so is the request: `written` makes the outcome of its value."""
        when_done(future, lambda done: self.later(lambda: self._finish(request, done, written)))

    def later(self, work: Callable[[], None]) -> None:
        """Does it in the thread of results, behind those that came before."""

        def guarded() -> None:
            try:
                work()
            except BaseException:
                log.exception("a result could not be written down")

        if not self._closed:
            self._finishing.submit(guarded)

    def end_if_failed(self) -> None:
        """For one that waits for what is no request of this table: see `__init__`."""
        if self.has_failed():
            self._end()

    def sweep(self, now_s: float) -> list[Request]:
        """Forgets the requests whose results have been kept for long enough, and returns them."""
        with self._lock:
            beyond = {request.id for request in _beyond(self._by_id.values())}
            over = [each for each in self._by_id.values() if each.id in beyond or _is_over(each, now_s)]
            for request in over:
                del self._by_id[request.id]
        return over

    def drop(self, requests: Iterable[Request]) -> None:
        """Forgets these samples, whether or not they are done."""
        with self._lock:
            for request in requests:
                self._by_id.pop(request.id, None)

    def close(self) -> None:
        """Returns when all results that have come are written down. What comes later is of a request that is not done:
        the journal has it."""
        self._finishing.submit(self._close).result()
        self._finishing.shutdown(wait=True)

    def _close(self) -> None:
        self._closed = True

    def _finish(self, request: Request, done: "Future[Any]", written: Callable[[Any], Outcome]) -> None:
        try:
            outcome = written(done.result())
        except BaseException as error:  # it belongs to the one who waits
            outcome = Outcome(failure_of(request, error))
        self.end_if_failed()
        if self.has_failed() or self._closed:
            return
        self._activity.ended(_ended(request, outcome), request.prompt)
        request.prompt = None
        changes = outcome.changes
        if request.n is not None:
            row = ResultRow(request.n, outcome.result.form, outcome.result.body, time.time())
            changes = (put(row), *changes)
        if outcome.changes or (request.n is not None and outcome.result.form == "failed"):
            # what others may see from now on is committed first, and a failure, which a replay could not repeat
            self._journal.put(*changes).add_done_callback(lambda put: _tell(request, outcome, put))
        else:
            if changes:
                self._journal.put_soon(*changes)
            request.finish(outcome.result)


def _tell(request: Request, outcome: Outcome, put: "Future[None]") -> None:
    """In the journal's thread."""
    if put.exception() is None:
        outcome.appear()
        request.finish(outcome.result)


def _ended(request: Request, outcome: Outcome) -> Ended:
    result = outcome.result
    return Ended(
        id=request.id,
        owner=request.owner,
        verb=request.verb,
        seconds=time.monotonic() - request.accepted_s,
        num_steps=outcome.num_steps,
        num_tokens=outcome.num_tokens,
        outcome="ok" if result.form != "failed" else "server" if result.is_fault else "user",
        message=result.message if result.form == "failed" else "",
    )


def _is_over(request: Request, now_s: float) -> bool:
    if request.finished_s is None:
        return False
    if request.released:
        return True
    if request.delivered_s is not None:
        return now_s > request.delivered_s + KEPT_S
    return now_s > request.finished_s + NEVER_ASKED_S


def _beyond(requests: Iterable[Request]) -> Iterable[Request]:
    """Those that were delivered before the last `MOST_KEPT` of their owner, so that memory does not grow with what an
    owner asks for."""
    delivered: dict[str, list[tuple[float, Request]]] = {}
    for request in requests:
        if request.finished_s is not None and request.delivered_s is not None:
            delivered.setdefault(request.owner, []).append((request.delivered_s, request))
    for of_owner in delivered.values():
        of_owner.sort(key=itemgetter(0))
        yield from (request for _, request in of_owner[:-MOST_KEPT])


def failure_of(request: Request, error: BaseException) -> Result:
    """As the client sees it: by the names that the client knows, not by those of this process."""
    cause = error.__cause__ if isinstance(error, RequestFailedError) and error.__cause__ is not None else error
    category = category_of(error)
    if category == "server":
        log.error("%s failed", request.what, exc_info=error)
    kind = f"{type(cause).__name__}: " if isinstance(cause, CheckpointError) else ""  # a client of ours raises the same
    message = f"{request.what} failed: {kind}{str(cause) or type(cause).__name__}"
    for ours, theirs in request.words.items():
        message = message.replace(ours, theirs)
    return Result.failed(message, category)


def category_of(error: BaseException) -> str:
    """Whose fault it was: "user" or "server"."""
    if isinstance(error, RequestFailedError):
        return error.category
    return "user" if isinstance(error, StovetopError) else "server"
