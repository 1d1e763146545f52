"""The one thread that owns an engine and steps it. It knows no client.

It hands ops to the engine in the order they came, so submission order is program order, and turns what the engine
finished into the results of futures.
"""

import atexit
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from stovetop.engine import ops
from stovetop.errors import CheckpointError, InvalidRequest, RequestFailedError, ServiceClosed, StovetopError
from stovetop.futures import APIFuture, pending

log = logging.getLogger(__name__)

SECONDS_AT_EXIT = 10.0  # for the step that runs when the interpreter ends


class EngineThread:
    """Owns an engine and steps it. `call` may be used from any thread; futures resolve in the engine's.

    Consumes ops from its inbox, produces results of futures; waits when there is nothing to do; stopped by `close`,
    which finishes what was accepted.
    """

    def __init__(self, open_engine: Callable[[], ops.Engine], name: str) -> None:
        self._inbox: queue.SimpleQueue[_Accepted | None] = queue.SimpleQueue()
        self._engine: Future[ops.Engine] = pending()
        self._waiting: dict[ops.Op, _Accepted] = {}
        self._closed = False
        self._abandoned = False  # the interpreter ends
        self._finishing = False  # the thread has seen the closing mark, behind which nothing comes
        self._lock = threading.Lock()  # protects _closed, so that nothing is put behind the closing mark
        self._thread = threading.Thread(target=self._run, args=(open_engine,), name=f"engine {name}", daemon=True)
        atexit.register(self._stop_at_exit)
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

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        self._thread.join()
        atexit.unregister(self._stop_at_exit)

    def _stop_at_exit(self) -> None:
        """Nobody has closed the service, and threads that run when the interpreter is gone are ended wherever they are:
        within a library that cannot stand it, that ends the process with an abort. So the step that runs may finish."""
        with self._lock:
            self._abandoned = self._closed = True
            self._inbox.put(None)
        self._thread.join(SECONDS_AT_EXIT)

    def _run(self, open_engine: Callable[[], ops.Engine]) -> None:
        try:
            engine = open_engine()
        except Exception as error:
            self._engine.set_exception(error)
            atexit.unregister(self._stop_at_exit)  # which would keep what was loaded until then
            return
        self._engine.set_result(engine)
        try:
            while not self._abandoned and (self._accept(engine) or not engine.idle):
                for done in engine.step():
                    self._waiting.pop(done.ticket.op).resolve(done)
            if self._abandoned:
                self._fail_all(InvalidRequest("the interpreter ended before it was done"))
        except Exception as error:  # a fault of ours: the engine is not to be trusted, and nobody may wait for ever
            log.exception("the engine failed")
            self._fail_all(error)

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

    def _fail_all(self, error: Exception) -> None:
        """What waits, and whatever still comes until `close`."""
        for accepted in self._waiting.values():
            accepted.fail(error)
        while not self._finishing:
            accepted = self._inbox.get()
            if accepted is None:
                self._finishing = True
            else:
                accepted.fail(error)


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
