"""The one thread that owns an engine and steps it. It knows no client.

It hands ops to the engine in the order they came, so submission order is program order, and turns what the engine
finished into the results of futures; what a save is to write goes to the writer's thread first (`snapshot_writer.py`).
Every call is answered once, whatever is raised where. Calls are taken from the moment it is made, while the engine
still loads.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from stovetop.backends.accepted import Accepted, Check, Finish
from stovetop.backends.callbacks import Callbacks
from stovetop.backends.endings import Crew
from stovetop.backends.expected import SECONDS_AFTER_CLOSE, AllExpected, Expected
from stovetop.backends.interruption import Interrupted, Interruptible
from stovetop.backends.queues import USUAL_BOUNDS, Entry, QueueBounds, Queues, Waiting
from stovetop.backends.snapshot_writer import SnapshotWriter
from stovetop.engine import ops
from stovetop.engine.containment import Contained, forget_frames
from stovetop.errors import ServiceClosed, StovetopError
from stovetop.futures import AnsweringThread, APIFuture, pending, refuse_in_fork

log = logging.getLogger(__name__)


CLOSED = "this client's service is closed; make a new ServiceClient"


class EngineThread:
    """Owns an engine and steps it. `call` may be used from any thread; futures resolve in the engine's, those of saves
    in the writer's, and callbacks that users add to them run in threads of their own.

    Consumes messages from its inbox, produces results of futures; waits when there is nothing to do; stopped by
    `finish`, which finishes what was accepted, or by `drop` and `interrupt`, which do not begin what has not begun. An
    engine that raises is dead: all calls are answered with the cause, later ones refused.
    """

    def __init__(
        self,
        open_engine: Callable[[], ops.Engine],
        name: str,
        crew: Crew | None = None,
        bounds: QueueBounds = USUAL_BOUNDS,
    ) -> None:
        """`name`: of the base model. The threads of one crew end together when the program ends."""
        self.name = name
        self.crew = crew or Crew()
        self.loaded: Future[ops.Engine] = pending()
        self._process = os.getpid()
        self._inbox: queue.SimpleQueue[Callable[[ops.Engine], None]] = queue.SimpleQueue()
        self._at_work: dict[ops.Ticket, Accepted] = {}  # what the engine has
        # Protects what follows, so that nothing is put behind the end of the inbox. Reentrant: whoever has it may be
        # interrupted by the garbage collector, which ends what it finds.
        self._lock = threading.RLock()
        self._closed = False
        self._dropped: ServiceClosed | None = None  # why what has not begun is not done
        self._failed: BaseException | None = None
        self._unanswered: set[Accepted] = set()
        self._expected = AllExpected()
        self._queues = Queues(bounds)
        self._warns = True  # that calls were dropped; the thread knows how many when it ends
        self._waited: tuple[float, float | None] = (0.0, None)  # seconds in all, and since when now: replaced as one
        self._ends = False  # when all that was accepted is done
        self._work = Interruptible()
        self.callbacks = Callbacks(self.crew)  # of users, on the futures of calls
        self._writer = SnapshotWriter(name, self.crew, self.callbacks.add, self._wake)
        self._ended: Future[None] = pending()
        self.thread: threading.Thread = AnsweringThread(
            partial(self._run, open_engine), f"engine {name}", self.callbacks.add
        )
        self.crew.start(self)

    @property
    def engine(self) -> ops.Engine:
        """The engine, once it is loaded."""
        self.require_open()
        return self.loaded.result()

    @property
    def failed(self) -> BaseException | None:
        """What the engine died of, or why it could not be loaded."""
        return self._failed

    @property
    def waiting(self) -> Mapping[str, Waiting]:
        """How full each queue is, where something waits or is at work."""
        with self._lock:
            return dict(self._queues.waiting)

    @property
    def closed(self) -> bool:
        """It accepts no more, but for what is still to come of calls that it accepted."""
        return self._closed

    def call(
        self,
        what: str,
        op: ops.Op,
        finish: Finish = lambda result: result,
        check: Check | None = None,
        *,
        after: "Sequence[Future[Any]]" = (),
    ) -> APIFuture[Any]:
        """Enqueues an op. `what` names the call where it fails, `finish` makes the public result from the engine's.
        What `check` refuses is refused at once, or while the engine still loads, by the future; an op that loads begins
        when the saves in `after`, of this thread, are done. Raises QueueFull where the op's queue holds as much as it
        may."""
        self.require_open()
        if check is not None and self.loaded.done():
            check(self.engine.description)
        entry = Entry.of(op)
        accepted = Accepted(what, op, finish, pending(entry.queue), check, after, entry)
        with self._lock:
            self.require_open()
            self._queues.check_room(what, entry)
            self._accept(accepted)
        return APIFuture(accepted.future, partial(self._cancel, accepted))

    def forget(self, op: ops.DropAdapter | ops.DropWeights) -> None:
        """Enqueues the end of something that no client refers to any more. Nothing waits for it. It needs no lock, so
        that a finalizer may call it wherever the garbage collector begins."""
        if os.getpid() == self._process:
            self._inbox.put(partial(self._submit_unanswered, op))

    def require_open(self, what: str | None = None) -> None:
        """Refuses a call, of this name, that nothing would ever answer."""
        refuse_in_fork(self._process, what)
        self._refuse(what, closed=self._is_closed_to_caller())

    def expect(self, expected: Expected) -> None:
        """Announces ops that come of work in another thread. `finish` waits for them, and so do those that the work
        itself asks for."""
        self.require_open()
        with self._lock:
            self.require_open()
            self._expected.add(expected)

    def call_expected(self, expected: Expected, op: ops.Op) -> "Future[Any]":
        """As `call`, also after `finish`, as long as it is expected."""
        entry = Entry.of(op)
        accepted = Accepted(expected.what, op, lambda result: result, pending(entry.queue), None, (), entry)
        with self._lock:
            self._refuse(expected.what, closed=expected not in self._expected)
            self._accept(accepted)
        return accepted.future

    def forget_expected(self, expected: Expected) -> None:
        """Nothing more comes of it."""
        with self._lock:
            self._expected.discard(expected)
            self._wake()  # the thread may have waited for this

    def finish(self) -> APIFuture[None]:
        """Accepts no more. The future is there when all that was accepted is done."""
        if os.getpid() == self._process:  # a fork has no thread to tell, and may never get the lock
            with self._lock:
                if not self._closed:
                    self._closed = True
                    self._inbox.put(self._begin_to_end)
        return APIFuture(self._ended)

    def drop(self, reason: str, *, warn: bool = True) -> None:
        """See `endings.Ending`. The log says how many calls were dropped: as a warning, or with `warn` False, where an
        exception tells it already, as information."""
        with self._lock:
            self._warns = warn
            self._dropped = self._dropped or ServiceClosed(f"dropped because {reason}")
            self._wake()  # where it waits for what a custom loss will bring
        self.finish()

    def interrupt(self) -> None:
        self._work.interrupt()

    # ---- from any thread, under the lock -----------------------------------------------------------------------------

    def _refuse(self, what: str | None, *, closed: bool) -> None:
        before = "" if what is None else f"{what}: "
        if self._failed is not None:
            raise ServiceClosed(
                f"{before}the engine of {self.name!r} has failed ({self._failed!r}); make a new client, which opens "
                "the model again"
            ) from self._failed
        if closed:
            raise ServiceClosed(f"{before}{CLOSED}")

    def refuse_within_loss(self, what: str) -> None:
        """Refuses what would wait for the custom loss that calls it."""
        self._expected.refuse_within(what)

    def _is_closed_to_caller(self) -> bool:
        """What is still to be done may call more."""
        return self._closed and not self._expected.called_from_within()

    def _accept(self, accepted: Accepted) -> None:
        self._queues.add(accepted.entry)
        self._unanswered.add(accepted)
        self._inbox.put(partial(self._submit, accepted))

    # ---- in the thread -----------------------------------------------------------------------------------------------

    def _run(self, open_engine: Callable[[], ops.Engine]) -> None:
        for part in (partial(self._open_and_serve, open_engine), self._wait_for_callbacks):
            try:
                part()
            except BaseException:  # all calls are answered by now, and somebody waits for the end
                log.exception("the end of the engine of %r failed", self.name)
        self._ended.set_result(None)
        self.crew.leave(self)

    def _wait_for_callbacks(self) -> None:
        """All calls are answered; what users do with the answers may go on."""
        give_up_s = time.monotonic() + SECONDS_AFTER_CLOSE
        are_done = self.callbacks.wait(lambda: self._dropped is not None or time.monotonic() > give_up_s)
        if not are_done and self._dropped is None:
            log.warning("%r: closed before all callbacks on futures had returned", self.name)

    def _open_and_serve(self, open_engine: Callable[[], ops.Engine]) -> None:
        try:
            self.loaded.set_result(self._work.run(open_engine))
        except BaseException as error:  # it belongs to those who wait for the engine
            self._end(self._dropped or error, as_it_is=self._dropped is None and isinstance(error, StovetopError))
            self.loaded.set_exception(self._dropped or error)
        else:
            del open_engine  # and what it was made of
            error: BaseException | None = None
            try:
                self._serve(self.loaded.result())
            except Interrupted:
                pass
            except BaseException as raised:  # the engine is not to be trusted any more, and all calls get an answer
                log.exception("the engine of %r failed", self.name)
                error = raised
                forget_frames(error)
            try:
                self._end_serving(error)
            except BaseException as raised:
                log.exception("the end of the engine of %r failed", self.name)
                self._end(raised)
            self.loaded = pending()  # nothing keeps the model
            self.loaded.set_exception(ServiceClosed(CLOSED))

    def _serve(self, engine: ops.Engine) -> None:
        """Between two steps nothing here refers to what the last one was about."""
        engine.set_gate(self._may_begin)
        while self._dropped is None and (self._read_inbox(engine) or not engine.idle):
            self._answer_all(self._work.run(engine.step))

    def _end_serving(self, error: BaseException | None) -> None:
        num_dropped = self._end_writer() + self._end(
            error or self._dropped or ServiceClosed("what it waits for did not return in time")
        )
        if self._dropped is not None and num_dropped:
            level = logging.WARNING if self._warns else logging.INFO
            log.log(level, "accepted calls that were not done: %d; %s", num_dropped, self._dropped)

    def _may_begin(self, ticket: ops.Ticket) -> bool:
        """Whether there is memory for what a save will hold, or what is to be loaded is on the disk."""
        accepted = self._at_work.get(ticket)
        if accepted is None:  # `forget`
            return True
        if isinstance(accepted.op, ops.SaveAdapter):
            return self._writer.has_room
        return all(save.done() for save in accepted.after)

    def _answer_all(self, finished: Sequence[ops.Finished]) -> None:
        for done in finished:
            accepted = self._at_work.pop(done.ticket, None)
            if accepted is not None:  # not `forget`
                self._finish(accepted, done)

    def _finish(self, accepted: Accepted, done: ops.Finished) -> None:
        """A ticket of the engine's has ended. What it saved is still to be written."""
        if not isinstance(done.result, ops.Snapshot):
            return self._answer(accepted, done.result, done.error)
        with Contained() as outcome:
            self._writer.put(done.result, partial(self._written, accepted))
        if outcome.error is not None:  # the system has no thread to give
            self._answer(accepted, None, outcome.error)
        return None

    def _written(self, accepted: Accepted, error: BaseException | None) -> None:
        """In the writer's thread."""
        try:
            self._answer(accepted, None, error)
        except BaseException as raised:  # a fault of ours, which ends the engine
            self._inbox.put(partial(_fail, raised))

    def _end_writer(self) -> int:
        """All is written that the engine has handed out, or, after `drop`, what is being written. Returns how many
        saves were dropped."""
        if self._dropped is not None:
            return self._writer.drop_waiting(self._dropped)
        self._writer.close()
        return 0

    def _wake(self) -> None:
        """Something that the thread may have waited for has come."""
        self._inbox.put(lambda engine: None)

    def _read_inbox(self, engine: ops.Engine) -> bool:
        """Does what has come, waiting for something when the engine is idle. False when nothing more is to come."""
        look_again_s = self._expected.look()
        while self._goes_on() and (engine.idle or not self._inbox.empty()):
            with suppress(queue.Empty):
                self._next_message(look_again_s)(engine)
            look_again_s = self._expected.look()
        return self._goes_on()

    def _next_message(self, timeout_s: float | None) -> "Callable[[ops.Engine], object]":
        waited_s, began_s = self._waited[0], time.perf_counter()
        self._waited = (waited_s, began_s)
        try:
            return self._inbox.get(timeout=timeout_s)
        finally:
            self._waited = (waited_s + time.perf_counter() - began_s, None)

    @property
    def waiting_s(self) -> float:
        """How long there was nothing to do since it began; a wait that goes on counts as far as it has come."""
        waited_s, since_s = self._waited
        return waited_s if since_s is None else waited_s + time.perf_counter() - since_s

    def _goes_on(self) -> bool:
        """Whether something may come: always before `finish`; after it, as long as something is written or
        expected."""
        if self._dropped is not None:
            return False
        if not self._ends or not self._writer.idle or not self._inbox.empty():
            return True
        return bool(self._expected.running)

    def _begin_to_end(self, _engine: ops.Engine) -> None:
        self._ends = True
        self._expected.close()

    def _submit(self, accepted: Accepted, engine: ops.Engine) -> None:
        with Contained() as outcome:
            if accepted.check is not None:
                accepted.check(engine.description)
        if outcome.error is not None:
            self._answer(accepted, None, outcome.error, as_it_is=isinstance(outcome.error, StovetopError))
            return
        accepted.ticket = ticket = engine.submit(accepted.op)
        self._at_work[ticket] = accepted

    def _submit_unanswered(self, op: ops.Op, engine: ops.Engine) -> None:
        try:
            engine.submit(op)
        except Exception:
            log.exception("what no client refers to was not dropped: %s", op)

    def _cancel(self, accepted: Accepted) -> None:
        """From any thread."""

        def cancel(engine: ops.Engine) -> None:
            if accepted.ticket in self._at_work:
                engine.cancel(accepted.ticket)

        self._inbox.put(cancel)

    def _answer(
        self, accepted: Accepted, result: ops.Result, error: BaseException | None, *, as_it_is: bool = False
    ) -> None:
        """Where this raises, the call is still among those that the end of the engine answers. `as_it_is`: the error
        says what was wrong with the call, which has not begun."""
        with self._lock:
            self._queues.remove(accepted.entry)
        accepted.answer(result, error, as_it_is=as_it_is)
        with self._lock:
            self._unanswered.discard(accepted)

    def _end(self, error: BaseException, *, as_it_is: bool = False) -> int:
        """Nothing more is accepted, and what was accepted and is not done fails. Returns how many calls that were."""
        with self._lock:
            self._closed = True
            if not isinstance(error, ServiceClosed):
                self._failed = error
            unanswered, expected = list(self._unanswered), self._expected.clear()
            self._unanswered.clear()
            self._queues.waiting.clear()
        self._at_work.clear()
        for accepted in unanswered:
            accepted.answer(None, error, as_it_is=as_it_is)
        for each in expected:
            each.fail(error)
        return len(unanswered)


def _fail(error: BaseException, _engine: ops.Engine) -> None:
    raise error
