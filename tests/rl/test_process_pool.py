import asyncio
import math
import os
import pickle
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from typing import Any

import psutil
import pytest

from processes import ctrl_c_is_heard
from stovetop.concurrency import together
from stovetop.errors import InvalidRequest, ServiceClosed, UnknownName, WorkerDied
from stovetop.rl.process_pool import WorkerPool

LONG_S = 60.0


# ---- what is called there ----------------------------------------------------------------------------------------


def double(number: int) -> int:
    return 2 * number


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def say_unknown(name: str) -> None:
    raise UnknownName("dish", name, ["stew"])


def process_id(waits_s: float = 0.0) -> int:
    time.sleep(waits_s)
    return os.getpid()


# ---- the pool ----------------------------------------------------------------------------------------------------


def test_a_call_runs_in_another_process_which_the_next_call_finds_again(pool: WorkerPool):
    assert pool.run(double, 21, timeout_s=LONG_S) == 42
    ids = {pool.run(process_id, timeout_s=LONG_S) for _ in range(3)}
    assert len(ids) == 1
    assert os.getpid() not in ids


def test_as_many_calls_run_at_once_as_there_are_workers(pool_of_two: WorkerPool):
    async def three() -> set[int]:
        calls = [pool_of_two.call(process_id, 0.05, timeout_s=LONG_S) for _ in range(3)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
        return {task.result() for task in tasks}

    assert len(asyncio.run(three())) == 2


def test_a_call_that_takes_too_long_is_a_timeout_and_its_process_is_replaced(pool: WorkerPool):
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"a nap did not finish within 0\.05 s"):
        pool.run(time.sleep, LONG_S, timeout_s=0.05, name="a nap")
    assert pool.run(double, 21, timeout_s=LONG_S) == 42
    assert time.monotonic() - start < LONG_S / 2


def test_a_process_that_ends_in_a_call_says_how_and_is_replaced(pool: WorkerPool):
    with pytest.raises(WorkerDied, match=r"the process of .*die.* was ended by SIGKILL"):
        pool.run(die, timeout_s=LONG_S)
    with pytest.raises(WorkerDied, match="ended with exit code 3"):
        pool.run(os._exit, 3, timeout_s=LONG_S)
    assert pool.run(double, 21, timeout_s=LONG_S) == 42


@pytest.mark.parametrize("waits", [False, True])
def test_an_idle_process_that_ended_is_replaced_before_the_next_call(pool: WorkerPool, waits: bool):
    """Also where something else has asked the system how it ended, which the pool can then no longer do."""
    idle = psutil.Process(pool.run(process_id, timeout_s=LONG_S))
    idle.kill()
    if waits:
        idle.wait(timeout=10)
    else:
        time.sleep(0.05)
    assert pool.run(double, 21, timeout_s=LONG_S) == 42


def test_what_a_call_raises_comes_back_with_the_traceback_of_its_process(pool: WorkerPool):
    with pytest.raises(ZeroDivisionError) as raised:
        pool.run(divmod, 1, 0, timeout_s=LONG_S)
    assert "In a worker process" in raised.value.__notes__[0]
    with pytest.raises(RuntimeError, match="UnknownName: unknown dish 'soup'"):  # which cannot be read from a pickle
        pool.run(say_unknown, "soup", timeout_s=LONG_S)


def test_what_cannot_be_pickled_is_refused_and_costs_no_process(pool: WorkerPool):
    before = pool.run(process_id, timeout_s=LONG_S)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pool.run(lambda: 1, timeout_s=LONG_S)
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        pool.run(asyncio.new_event_loop, timeout_s=LONG_S)
    assert pool.run(process_id, timeout_s=LONG_S) == before


def test_cancelling_a_call_ends_its_process(pool: WorkerPool):
    async def cancelled_soon() -> None:
        async with asyncio.timeout(0.05):
            await pool.call(time.sleep, LONG_S, timeout_s=LONG_S)

    start = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(cancelled_soon())
    assert pool.run(double, 21, timeout_s=LONG_S) == 42
    assert time.monotonic() - start < LONG_S / 2


def cannot_prepare() -> None:
    raise KeyError("not here")


def test_a_worker_that_cannot_prepare_says_why():
    with WorkerPool(1, prepare=cannot_prepare) as broken, pytest.raises(KeyError, match="not here"):
        broken.run(double, 1, timeout_s=LONG_S)


def test_a_worker_that_ends_while_it_starts_says_what_to_look_at():
    with WorkerPool(1, prepare=die) as broken, pytest.raises(WorkerDied, match=r"SIGKILL, while it started\. A script"):
        broken.run(double, 1, timeout_s=LONG_S)


@pytest.fixture
def warm() -> Iterator[WorkerPool]:
    """A pool of its own, whose process has started."""
    with WorkerPool(1) as opened:
        opened.run(double, 21, timeout_s=LONG_S)
        yield opened


def test_closing_waits_for_no_call_leaves_no_process_and_later_calls_are_refused(warm: WorkerPool):
    start = time.monotonic()
    id_of_process = warm.run(process_id, timeout_s=LONG_S)
    with ThreadPoolExecutor() as threads:
        asleep, waits = (threads.submit(warm.run, time.sleep, LONG_S, timeout_s=LONG_S, name="a nap") for _ in range(2))
        time.sleep(0.05)
        warm.close()
    assert {str(asleep.exception()), str(waits.exception())} == {
        "the process of a nap was ended with its pool",
        "this pool of worker processes was closed before a nap began",
    }
    assert not psutil.pid_exists(id_of_process)  # no zombie either
    with pytest.raises(ServiceClosed, match="closed"):
        warm.run(double, 21, timeout_s=LONG_S)
    assert time.monotonic() - start < LONG_S / 2


def test_a_call_whose_process_starts_when_its_pool_is_closed_has_not_begun():
    starts_for_long = WorkerPool(1, prepare=partial(time.sleep, LONG_S))
    with starts_for_long, ThreadPoolExecutor() as threads:
        early = threads.submit(starts_for_long.run, double, 21, timeout_s=LONG_S)
        time.sleep(0.05)
        starts_for_long.close()
        with pytest.raises(ServiceClosed, match=r"closed before .*double.* began"):
            early.result()


def test_ctrl_c_ends_the_call_that_is_waited_for(pool: WorkerPool):
    pool.run(double, 21, timeout_s=LONG_S)
    start = time.monotonic()
    ctrl_c = threading.Timer(0.1, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
    ctrl_c.start()
    with ctrl_c_is_heard(), pytest.raises(KeyboardInterrupt):
        pool.run(time.sleep, LONG_S, timeout_s=LONG_S)
    assert pool.run(double, 21, timeout_s=LONG_S) == 42
    assert time.monotonic() - start < LONG_S / 2


def test_a_fork_of_the_process_is_refused_and_does_the_pool_no_harm(pool: WorkerPool):
    before = pool.run(process_id, timeout_s=LONG_S)
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with pool:
                pool.run(double, 21, timeout_s=LONG_S)
        except BaseException as error:
            os.write(writes, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with open(reads) as said:
        assert re.fullmatch(
            r"InvalidRequest\(.this pool answers in process \d+, .* make a WorkerPool here.*", said.read()
        )
    os.waitpid(child, 0)
    assert pool.run(process_id, timeout_s=LONG_S) == before


def test_a_pool_pickles_as_its_settings():
    copy = pickle.loads(pickle.dumps(WorkerPool(3, prepare=die)))
    assert copy.num_workers == 3


@pytest.mark.parametrize("num_workers", [0, -1, 2.5, "2", True, None])
def test_a_pool_needs_a_worker(num_workers: Any):
    with pytest.raises(InvalidRequest, match=rf"num_workers must be an integer of at least 1: .*{num_workers}"):
        WorkerPool(num_workers)


def test_a_prepare_that_does_not_pickle_is_refused_at_once():
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        WorkerPool(1, prepare=lambda: None)


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.nan, math.inf, "1", None])
def test_a_time_limit_is_a_number_of_seconds_and_another_costs_no_process(pool: WorkerPool, timeout_s: Any):
    with pytest.raises(InvalidRequest, match=rf"a nap: timeout_s must be a finite number above 0 .*: .?{timeout_s}"):
        pool.run(time.sleep, 0.0, timeout_s=timeout_s, name="a nap")


# ---- all at once -------------------------------------------------------------------------------------------------


async def storm(pool: WorkerPool, seed: int, num_calls: int) -> Counter[str]:
    """What became of calls some of which are cancelled, late or at once, or end their process, or take too long."""
    random = Random(seed)

    async def one() -> str:
        match random.randrange(12):
            case 0:
                call, patience_s = pool.call(die, timeout_s=LONG_S), LONG_S
            case 1:
                call, patience_s = pool.call(time.sleep, LONG_S, timeout_s=0.05), LONG_S
            case _:
                call, patience_s = pool.call(process_id, timeout_s=LONG_S), random.choice([0.0, 0.01, 0.5, LONG_S])
        try:
            async with asyncio.timeout(patience_s):
                await call
        except (TimeoutError, WorkerDied) as error:
            return type(error).__name__
        return "answered"

    return Counter(await together([one() for _ in range(num_calls)]))


@pytest.mark.slow
def test_in_a_storm_of_calls_every_one_ends_and_no_process_is_left_over(warm: WorkerPool):
    before = set(psutil.Process().children())  # Python's own resource tracker among them
    with WorkerPool(2) as pool, ThreadPoolExecutor() as threads:
        storms = [threads.submit(asyncio.run, storm(pool, seed, num_calls=10)) for seed in range(2)]
        outcomes = sum((storm.result() for storm in storms), Counter[str]())
        assert outcomes.keys() == {"answered", "TimeoutError", "WorkerDied"}
        assert outcomes.total() == 20
        assert pool.run(double, 21, timeout_s=LONG_S) == 42
    assert set(psutil.Process().children()) == before
