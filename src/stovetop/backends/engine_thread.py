"""The one thread that owns an engine and steps it. It knows no client.

It hands ops to the engine in the order they came, so submission order is program order, and turns what the engine
finished into the results of futures.
"""

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from stovetop.backends.interruption import Interrupted, Interruptible
from stovetop.engine import ops
from stovetop.errors import CheckpointError, RequestFailedError, ServiceClosed, StovetopError
from stovetop.futures import APIFuture, pending

log = logging.getLogger(__name__)

SECONDS_TO_FINISH = 1.0  # for the step that runs when the rest is dropped; after that it is interrupted
SECONDS_TO_STOP = 60.0  # for a library in C++ to come back to Python, which takes as long as its longest call
SECONDS_BETWEEN_INTERRUPTS = 0.1


class EngineThread:
    """Owns an engine and steps it. `call` may be used from any thread; futures resolve in the engine's.

    Consumes ops from its inbox, produces results of futures; waits when there is nothing to do; stopped by `close`,
    which finishes what was accepted, or by `drop` and `stop`, which do not begin what has not begun.
    """

    def __init__(self, open_engine: Callable[[], ops.Engine], name: str) -> None:
        self._inbox: queue.SimpleQueue[_Accepted | None] = queue.SimpleQueue()
        self._engine: Future[ops.Engine] = pending()
        self._waiting: dict[ops.Op, _Accepted] = {}
        self._closed = False
        self._dropped: ServiceClosed | None = None  # why what has not begun is not done
        self._warns = True  # that calls were dropped; the thread knows how many when it ends
        self._finishing = False  # the thread has seen the closing mark, behind which nothing comes
        self._lock = threading.Lock()  # protects _closed, so that nothing is put behind the closing mark
        self._work = Interruptible()
        self._ended: Future[None] = pending()
        self._thread = threading.Thread(target=self._run, args=(open_engine,), name=f"engine {name}", daemon=True)
        atexit.register(self._drop_at_exit)
        self._thread.start()

    @property
    def engine(self) -> ops.Engine:
        """The engine, once it is loaded."""
        return self._engine.result()

    def call(self, what: str, op: ops.Op, finish: Callable[[Any], Any] = lambda result: result) -> APIFuture[Any]:
        """Enqueues an op. `what` names the call in errors, `finish` makes the public result from the engine's."""
        future: Future[Any] = pending()
        with self._lock:
            if self._closed:
                raise ServiceClosed(f"{what}: this client's service is closed; make a new ServiceClient")
            self._inbox.put(_Accepted(what, op, finish, future))
        return APIFuture(future)

    def finish(self) -> APIFuture[None]:
        """Accepts no more. The future is there when all that was accepted is done."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        return APIFuture(self._ended)

    def close(self) -> None:
        """Finishes what was accepted, and ends."""
        self.finish()
        self._thread.join()
        atexit.unregister(self._drop_at_exit)

    def drop(self, reason: str, *, warn: bool = True) -> None:
        """What was accepted and has not begun is not done: its futures fail with `reason`. Accepts no more. The log
        says how many calls that were: as a warning, or with `warn` False, where an exception tells it already, as
        information."""
        self._warns = warn
        self._dropped = self._dropped or ServiceClosed(f"dropped because {reason}")
        self.finish()

    def stop(self) -> None:
        """After `drop`: waits until the thread has ended. What runs may finish if that is quick, and is interrupted
        otherwise."""
        self._thread.join(SECONDS_TO_FINISH)
        give_up_s = time.monotonic() + SECONDS_TO_STOP
        while self._thread.is_alive() and time.monotonic() < give_up_s:
            self._work.interrupt()
            self._thread.join(SECONDS_BETWEEN_INTERRUPTS)
        atexit.unregister(self._drop_at_exit)

    def _drop_at_exit(self) -> None:
        self.drop("the program ended first; to finish, wait for its result or use the service in a `with` block")
        self.stop()

    def _run(self, open_engine: Callable[[], ops.Engine]) -> None:
        try:
            engine = self._work.run(open_engine)
        except BaseException as error:  # it belongs to whoever waits for the engine
            self._engine.set_exception(self._dropped or error)
            atexit.unregister(self._drop_at_exit)  # which would keep what was loaded until then
        else:
            self._engine.set_result(engine)
            self._serve(engine)
        self._ended.set_result(None)

    def _serve(self, engine: ops.Engine) -> None:
        try:
            while self._dropped is None and (self._accept(engine) or not engine.idle):
                for done in self._work.run(engine.step):
                    self._waiting.pop(done.ticket.op).resolve(done)
        except Interrupted:
            pass
        except BaseException as error:  # a fault of ours: the engine is not to be trusted, and all calls get an answer
            log.exception("the engine failed")
            self._fail_all(error)
        if self._dropped is not None:
            num_dropped = self._fail_all(self._dropped)
            if num_dropped:
                level = logging.WARNING if self._warns else logging.INFO
                log.log(level, "accepted calls that were not done: %d; %s", num_dropped, self._dropped)

    def _accept(self, engine: ops.Engine) -> bool:
        """Takes in what has come, waiting for something when the engine is idle. False once `close` was called."""
        while not self._finishing and (engine.idle or not self._inbox.empty()):
            accepted = self._inbox.get()
            if accepted is None:
                self._finishing = True
            else:
                self._waiting[accepted.op] = accepted
                engine.submit(accepted.op)
        return not self._finishing

    def _fail_all(self, error: BaseException) -> int:
        """What waits, and whatever still comes until it is closed. Returns how many that were."""
        waiting, self._waiting = list(self._waiting.values()), {}
        for accepted in waiting:
            accepted.fail(error)
        num_failed = len(waiting)
        while not self._finishing:
            accepted = self._inbox.get()
            if accepted is None:
                self._finishing = True
            else:
                accepted.fail(error)
                num_failed += 1
        return num_failed


@dataclass(frozen=True, slots=True, eq=False)
class _Accepted:
    what: str
    op: ops.Op
    finish: Callable[[Any], Any]
    future: "Future[Any]"

    def resolve(self, done: ops.Finished) -> None:
        if done.error is None:
            self.future.set_result(self.finish(done.result))
        else:
            self.fail(done.error)

    def fail(self, error: BaseException) -> None:
        if isinstance(error, CheckpointError | RequestFailedError):
            self.future.set_exception(error)
        else:
            category = "user" if isinstance(error, StovetopError) else "server"
            failure = RequestFailedError(f"{self.what} failed: {error or type(error).__name__}", category)
            failure.__cause__ = error
            self.future.set_exception(failure)
