"""Worker processes for what may hang or crash: heavy steps of environments, graders of mathematics. A call that takes
too long, or takes its process down, fails alone; the process is replaced. Sampling never happens here.
"""

import asyncio
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import current_process, get_context, parent_process
from multiprocessing.connection import Connection, wait
from typing import Any, Self, TypeVar, TypeVarTuple, cast

from stovetop.completers import StopCondition
from stovetop.errors import InvalidRequest, ServiceClosed, WorkerDied
from stovetop.rl.types import Action, Env, EnvGroupBuilder, Metrics, Observation, StepResult, Trajectory

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START_TIMEOUT_S = 60.0  # to start Python, import what is needed and prepare
_SPAWN = get_context("spawn")  # a fork would copy locks that threads of this process hold


# ---- the pool ----------------------------------------------------------------------------------------------------


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
        if num_workers < 1:
            raise InvalidRequest(f"a pool needs at least one worker: {num_workers}")
        if current_process().daemon:
            raise InvalidRequest(
                "a worker process cannot have worker processes of its own: an environment that holds a WorkerPool, as "
                "one with a MathGrader does, must step in the main process. Leave out the PooledGroupBuilder around it"
            )
        self.num_workers = num_workers
        self._prepare = prepare
        self._threads = ThreadPoolExecutor(num_workers, "worker")  # as many threads wait as processes work
        self._lock = threading.Lock()  # protects which worker is idle, and which call a worker is on
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._closed = False

    def run(self, function: Callable[[*Ts], T], *arguments: *Ts, timeout_s: float, name: str = "") -> T:
        """The result of a call, or what it raised; a TimeoutError after `timeout_s` of work, WorkerDied when the
        process ended. `name` is what errors call it."""
        return cast(T, self._submit(_call_of(function, arguments, timeout_s, name)).result())

    async def call(self, function: Callable[[*Ts], T], *arguments: *Ts, timeout_s: float, name: str = "") -> T:
        """As `run`, while the event loop goes on. Cancelling it ends the process that it is in."""
        call = _call_of(function, arguments, timeout_s, name)
        try:
            return cast(T, await asyncio.wrap_future(self._submit(call)))
        except asyncio.CancelledError:
            with self._lock:
                call.cancelled = True
                if call.worker is not None:
                    call.worker.kill()
            raise

    def close(self) -> None:
        """Ends all processes, whatever they are doing. Calls that waited for one are refused."""
        with self._lock:
            self._closed = True
            workers = list(self._all)
        for worker in workers:
            worker.kill()
        self._threads.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type["WorkerPool"], tuple[int, Callable[[], None] | None]]:
        return WorkerPool, (self.num_workers, self._prepare)

    def _submit(self, call: "_Call") -> "Future[object]":
        if self._closed:
            raise ServiceClosed("this pool of worker processes is closed")
        return self._threads.submit(self._carry_out, call)

    def _carry_out(self, call: "_Call") -> object:
        """On one of the threads. A worker that answered is idle again; one that did not is ended and forgotten."""
        if self._closed:
            raise ServiceClosed(f"this pool of worker processes was closed before {call.name} began")
        worker = self._take_idle() or self._start_worker()
        with self._lock:
            if call.cancelled:  # while its worker started
                self._idle.append(worker)
                return None
            call.worker = worker
        answered = False
        try:
            answer = worker.ask(call)
            answered = True
        finally:
            with self._lock:
                call.worker = None
                if answered and not worker.killed:
                    self._idle.append(worker)
                else:
                    self._all.discard(worker)
            if not answered:
                worker.kill()
        return answer.unwrap()

    def _take_idle(self) -> "_Worker | None":
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive():
                    return worker
                self._all.discard(worker)
        return None

    def _start_worker(self) -> "_Worker":
        worker = _Worker(self._prepare)
        with self._lock:
            self._all.add(worker)
            if self._closed:
                worker.kill()
        try:
            worker.wait_until_ready()
        except BaseException:
            worker.kill()
            with self._lock:
                self._all.discard(worker)
            raise
        return worker


@dataclass(slots=True)
class _Call:
    question: bytes  # the function and its arguments, pickled
    timeout_s: float
    name: str
    worker: "_Worker | None" = None  # while it is being carried out
    cancelled: bool = False


def _call_of(function: Callable[..., object], arguments: Sequence[object], timeout_s: float, name: str) -> _Call:
    return _Call(pickle.dumps((function, arguments)), timeout_s, name or repr(function))


# ---- one process, seen from here ---------------------------------------------------------------------------------


class _Worker:
    """A process and the pipe to it. One thread asks; any thread may kill."""

    def __init__(self, prepare: Callable[[], None] | None) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_work, args=(theirs, prepare), daemon=True)
        self._process.start()
        theirs.close()  # so that its end is noticed here
        self.killed = False

    def is_alive(self) -> bool:
        return not self.killed and self._process.is_alive()

    def wait_until_ready(self) -> None:
        try:
            self._receive(START_TIMEOUT_S, "a worker process").unwrap()
        except (WorkerDied, TimeoutError) as error:
            raise WorkerDied(
                f"{error}, while it started. A script that uses worker processes is imported by each of them: what "
                "it does must stand under `if __name__ == '__main__':`"
            ) from error

    def ask(self, call: _Call) -> "_Answer":
        try:
            self._pipe.send_bytes(call.question)
        except OSError as error:
            raise WorkerDied(f"the process of {call.name} {self._how_it_ended()}") from error
        begun = self._receive(START_TIMEOUT_S, call.name)
        return begun if begun.error is not None else self._receive(call.timeout_s, call.name)

    def kill(self) -> None:
        self.killed = True
        self._process.kill()

    def _receive(self, timeout_s: float, name: str) -> "_Answer":
        try:
            if self._pipe.poll(timeout_s):
                return pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise WorkerDied(f"the process of {name} {self._how_it_ended()}") from error
        raise TimeoutError(f"{name} did not finish within {timeout_s:g} s, and its process was ended")

    def _how_it_ended(self) -> str:
        self._process.join(timeout=5.0)
        code = self._process.exitcode
        return f"was ended by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"


@dataclass(frozen=True, slots=True)
class _Answer:
    value: object = None
    error: BaseException | None = None

    def unwrap(self) -> object:
        if self.error is not None:
            raise self.error
        return self.value


# ---- in the process ----------------------------------------------------------------------------------------------


def _work(pipe: Connection, prepare: Callable[[], None] | None) -> None:
    """Carries out calls until the pipe closes. A first answer, without a question, says that it is ready. Each call has
    two answers: that it begins, its function and arguments being here and their modules imported; and its result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to every process of a terminal; the pool's owner decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        pipe.send_bytes(_answer(prepare, ()) if prepare is not None else pickle.dumps(_Answer()))
        while True:
            try:
                function, arguments = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            except Exception as error:
                pipe.send_bytes(_pickled_error(error))
                continue
            pipe.send_bytes(pickle.dumps(_Answer()))
            pipe.send_bytes(_answer(function, arguments))
    except OSError:
        return  # the other end is gone


def _answer(function: Callable[..., object], arguments: Sequence[object]) -> bytes:
    try:
        return pickle.dumps(_Answer(function(*arguments)))
    except Exception as error:
        error.add_note(f"In a worker process:\n{traceback.format_exc()}")
        return _pickled_error(error)


def _pickled_error(error: Exception) -> bytes:
    """Some exceptions do not pickle, some pickle and cannot be read again; of those their words go over."""
    try:
        data = pickle.dumps(_Answer(error=error))
        pickle.loads(data)
    except Exception:
        data = pickle.dumps(_Answer(error=RuntimeError(f"{type(error).__name__}: {error}")))
    return data


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None  # this runs in a worker
    wait([parent.sentinel])
    os._exit(1)


# ---- environments whose steps run there --------------------------------------------------------------------------


@dataclass(slots=True)
class PooledEnv:
    """An environment whose steps run in a worker process. It goes there and comes back with every step, so it must
    pickle, and what it holds should be small. The first observation is made here."""

    env: Env
    pool: WorkerPool
    timeout_s: float  # of one step

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        return await self.env.initial_observation()

    async def step(self, action: Action) -> StepResult:
        name = f"{type(self.env).__name__}.step"
        result, self.env = await self.pool.call(_step, self.env, action, timeout_s=self.timeout_s, name=name)
        return result


@dataclass(frozen=True, slots=True)
class PooledGroupBuilder:
    """The environments of another builder, stepping in worker processes. Its group rewards are given here.

    with WorkerPool(num_workers=8) as pool:
        builders_P = [PooledGroupBuilder(builder, pool, timeout_s=30.0) for builder in dataset.get_batch(0)]
    """

    builder: EnvGroupBuilder
    pool: WorkerPool
    timeout_s: float = 60.0  # of one step

    async def make_envs(self) -> Sequence[Env]:
        return [PooledEnv(env, self.pool, self.timeout_s) for env in await self.builder.make_envs()]

    async def compute_group_rewards(
        self, trajectories_G: Sequence[Trajectory], envs_G: Sequence[Env]
    ) -> Sequence[tuple[float, Metrics]]:
        """Of the environments themselves, as their last steps left them."""
        inner_G = [cast(PooledEnv, env).env for env in envs_G]
        return await self.builder.compute_group_rewards(trajectories_G, inner_G)

    def logging_tags(self) -> Sequence[str]:
        return self.builder.logging_tags()


def _step(env: Env, action: Action) -> tuple[StepResult, Env]:
    step: Any = env.step(action)
    return asyncio.run(step), env
