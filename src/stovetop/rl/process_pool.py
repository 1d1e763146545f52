"""Worker processes for what may hang or crash: graders of mathematics, steps of environments (`pooled_env.py`). A call
that takes too long, or takes its process down, fails alone. What a process does is in `worker_process.py`.

Libraries were tried. Python's own pool, loky and mpire lose every call with a process that is killed, and Pebble some
times. Deadpool does not end what holds the interpreter's lock, as a regular expression does, nor a call whose result
cannot be pickled; in billiard a call whose error cannot be read never ends.
"""

import asyncio
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import current_process
from typing import Self, TypeVar, TypeVarTuple, cast

from stovetop.checks import take
from stovetop.errors import InvalidRequest, ServiceClosed
from stovetop.rl.worker_process import Question, WorkerProcess, unpacked
from stovetop.rules import Whole

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(slots=True)
class _Call:
    question: Question
    worker: WorkerProcess | None = None  # while it is being carried out
    is_cancelled: bool = False


class WorkerPool:
    """Up to `num_workers` processes, each with one call at a time; further calls wait for their turn. Processes start
    when first needed. What is called, its arguments and its result must pickle.

        with WorkerPool(num_workers=2) as pool:
            answer = pool.run(math.factorial, 5, timeout_s=1.0)

    The clock of a call begins when its function and arguments are there, with the modules that they live in. `prepare`
    runs once in each process before that: what a first call would have to load otherwise belongs there. A pool pickles
    as its settings; the copy starts processes of its own, which a worker process cannot: there the copy is refused.
    """

    def __init__(self, num_workers: int = 2, prepare: Callable[[], None] | None = None) -> None:
        if current_process().daemon:
            raise InvalidRequest(
                "a worker process cannot have worker processes of its own: an environment that holds a WorkerPool, as "
                "one with a MathGrader does, must step in the main process. Leave out the PooledGroupBuilder around it"
            )
        self.num_workers = take(Whole(1), num_workers, "WorkerPool: num_workers")
        pickle.dumps(prepare)  # what does not pickle is said now, not when the first process starts
        self._prepare = prepare
        self._made_in = os.getpid()
        self._threads = ThreadPoolExecutor(self.num_workers, "worker")  # as many threads wait as processes work
        self._lock = threading.Lock()  # protects the following, and which worker a call is in
        self._workers = set[WorkerProcess]()
        self._idle: list[WorkerProcess] = []
        self._closed = False

    def run(self, function: Callable[[*Ts], T], *arguments: *Ts, timeout_s: float, name: str = "") -> T:
        """The result of a call, or what it raised; a TimeoutError after `timeout_s` of work, WorkerDied when the
        process ended. `name` is what errors call it. Ctrl-C ends the process that it is in."""
        call = _Call(Question.of(function, arguments, timeout_s, name))
        try:
            return cast(T, self._submit(call).result())
        except BaseException:
            self._cancel(call)  # unless it is over
            raise

    async def call(self, function: Callable[[*Ts], T], *arguments: *Ts, timeout_s: float, name: str = "") -> T:
        """As `run`, while the event loop goes on. Cancelling it ends the process that it is in."""
        call = _Call(Question.of(function, arguments, timeout_s, name))
        try:
            return cast(T, await asyncio.wrap_future(self._submit(call)))
        except BaseException:
            self._cancel(call)
            raise

    def close(self) -> None:
        """Ends all processes, whatever they are doing. Calls that waited for one are refused."""
        if os.getpid() != self._made_in:
            return  # in a fork: the pool is its parent's, which goes on with it
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.end()
        self._threads.shutdown()
        for worker in self._idle:
            worker.clear_away()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type["WorkerPool"], tuple[int, Callable[[], None] | None]]:
        return WorkerPool, (self.num_workers, self._prepare)

    def _submit(self, call: _Call) -> Future[object]:
        if os.getpid() != self._made_in:
            raise InvalidRequest(
                f"this pool answers in process {self._made_in}, which made it, and this is a fork of that one, "
                f"{os.getpid()}: make a WorkerPool here for {call.question.name}"
            )
        with self._lock:
            if self._closed:
                raise ServiceClosed("this pool of worker processes is closed")
            return self._threads.submit(self._carry_out, call)

    def _cancel(self, call: _Call) -> None:
        with self._lock:
            call.is_cancelled = True
            if call.worker is not None:
                call.worker.end()

    def _carry_out(self, call: _Call) -> object:
        """On one of the threads. A worker that answered is idle again; one that did not is ended and forgotten."""
        worker = self._take_worker(call)
        try:
            worker.wait_until_ready()
            with self._lock:
                if call.is_cancelled:  # while its worker started, which the next call will need
                    return None
                call.worker = worker
            answer = worker.ask(call.question)
        except BaseException:
            worker.end()
            self._refuse_if_closed(call)
            raise
        finally:
            with self._lock:
                call.worker = None
                (self._workers.discard if worker.is_ended else self._idle.append)(worker)
            if worker.is_ended:
                worker.clear_away()
        return unpacked(answer)

    def _take_worker(self, call: _Call) -> WorkerProcess:
        """One that is idle, or a new one, which starts."""
        self._refuse_if_closed(call)
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive():
                    return worker
                self._workers.discard(worker)
                worker.clear_away()
        worker = WorkerProcess(self._prepare)
        with self._lock:
            self._workers.add(worker)
            if self._closed:
                worker.end()
        return worker

    def _refuse_if_closed(self, call: _Call) -> None:
        """A call that has begun goes on, or died with its process."""
        if self._closed and call.worker is None:
            raise ServiceClosed(f"this pool of worker processes was closed before {call.question.name} began")
