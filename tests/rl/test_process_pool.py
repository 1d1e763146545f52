"""Worker processes start in a second or so, which is why these tests share them where they can."""

import asyncio
import os
import pickle
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from stovetop.completers import StopCondition
from stovetop.errors import EnvError, InvalidRequest, UnknownName, WorkerDied
from stovetop.rl.process_pool import PooledEnv, PooledGroupBuilder, WorkerPool
from stovetop.rl.rollouts import MinViableGroup, do_rollouts, do_single_rollout
from stovetop.rl.types import Action, Env, Observation, StepResult
from stovetop.types import ModelInput

from .scripted import Table, echo

LONG_S = 60.0


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """With one worker: a call that did not free it would hold up the next one."""
    with WorkerPool(num_workers=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def pool_of_two() -> Iterator[WorkerPool]:
    with WorkerPool(num_workers=2) as opened:
        yield opened


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


@dataclass
class DangerousEnv:
    """Three turns. The seat of each turn says what its step does."""

    seat: str
    turn: int = 0

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        return ModelInput.from_ints([1]), [0]

    async def step(self, action: Action) -> StepResult:
        match self.seat:
            case "hangs":
                time.sleep(LONG_S)
            case "segfaults":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "exits":
                os._exit(3)
            case "raises":
                raise KeyError("gone")
            case _:
                self.turn += 1
        return StepResult(float(os.getpid()), self.turn == 3, ModelInput.from_ints([1, self.turn]), [0])


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


def test_an_idle_process_that_ended_is_replaced_before_the_next_call(pool: WorkerPool):
    os.kill(pool.run(process_id, timeout_s=LONG_S), signal.SIGKILL)
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


def test_a_closed_pool_takes_no_calls_and_closing_does_not_wait_for_those_it_has():
    start = time.monotonic()
    closing = WorkerPool(1)
    with closing:
        with ThreadPoolExecutor() as threads:
            asleep = threads.submit(closing.run, time.sleep, LONG_S, timeout_s=LONG_S)
            time.sleep(0.05)
            closing.close()
        assert isinstance(asleep.exception(), WorkerDied)
    with pytest.raises(InvalidRequest, match="closed"):
        closing.run(double, 21, timeout_s=LONG_S)
    assert time.monotonic() - start < LONG_S / 2


def test_a_pool_pickles_as_its_settings():
    copy = pickle.loads(pickle.dumps(WorkerPool(3, prepare=die)))
    assert copy.num_workers == 3


def test_a_pool_needs_a_worker():
    with pytest.raises(InvalidRequest, match="at least one worker: 0"):
        WorkerPool(0)


# ---- environments ------------------------------------------------------------------------------------------------


def test_an_environment_steps_in_another_process_and_keeps_its_state(pool: WorkerPool):
    env = PooledEnv(DangerousEnv("is fine"), pool, timeout_s=LONG_S)
    trajectory = asyncio.run(do_single_rollout(echo, env))
    assert [turn.ob.to_ints() for turn in trajectory.transitions] == [[1], [1, 1], [1, 2]]
    assert all(turn.reward != os.getpid() for turn in trajectory.transitions)
    assert env.env == DangerousEnv("is fine", turn=3)


def test_stuck_and_crashing_steps_are_failed_rollouts_and_the_others_go_on(pool_of_two: WorkerPool):
    seats = ["is fine", "hangs", "segfaults", "exits", "raises", "is fine", "is fine"]
    table = Table(lambda index: DangerousEnv(seats[index]), 7, score=lambda envs_G: [(0.0, {}) for _ in envs_G])
    builder = PooledGroupBuilder(table, pool_of_two, timeout_s=1.0)  # which a step that is fine takes on no machine
    rollouts = asyncio.run(do_rollouts([builder], echo, MinViableGroup(min_successful=3, max_retries=0)))
    assert rollouts.num_errors == {"TimeoutError": 1, "WorkerDied": 2, "KeyError": 1}
    assert rollouts.num_rollouts_dropped == 4
    [(owner, group)] = rollouts.owned_groups_P
    assert owner is builder
    assert len(group.trajectories_G) == 3


def test_the_group_reward_sees_the_environments_as_their_last_steps_left_them(pool: WorkerPool):
    def score(envs_G: list[Env]) -> list[tuple[float, dict[str, float]]]:
        return [(float(env.turn), {}) for env in envs_G if isinstance(env, DangerousEnv)]

    table = Table(lambda index: DangerousEnv("is fine"), 2, tags=["deep"], score=score)
    builder = PooledGroupBuilder(table, pool, timeout_s=LONG_S)
    [(_, group)] = asyncio.run(do_rollouts([builder], echo)).owned_groups_P
    assert group.final_rewards_G == [3.0, 3.0]
    assert builder.logging_tags() == ["deep"]


def test_a_pool_that_is_closed_fails_the_batch_that_waits_for_it_and_skips_no_group():
    async def closed_meanwhile() -> None:
        builder = PooledGroupBuilder(Table(lambda index: DangerousEnv("hangs"), 3), closing, timeout_s=LONG_S)
        async with asyncio.TaskGroup() as group:
            group.create_task(do_rollouts([builder], echo, MinViableGroup(max_retries=0)))
            await asyncio.sleep(0.05)
            await asyncio.to_thread(closing.close)

    closing = WorkerPool(1)
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(closed_meanwhile())
    assert raised.group_contains(EnvError, match=r"this pool of worker processes was closed before DangerousEnv\.step")


@dataclass
class PoolingEnv:
    """Holds a pool of its own, as one with a MathGrader does."""

    pool: WorkerPool

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        return ModelInput.from_ints([1]), [0]

    async def step(self, action: Action) -> StepResult:
        raise NotImplementedError


def test_an_environment_that_holds_a_pool_cannot_step_in_a_worker_process_and_is_told_so(pool: WorkerPool):
    holds = PoolingEnv(WorkerPool(1))
    builder = PooledGroupBuilder(Table(lambda index: holds, 1), pool, timeout_s=LONG_S)
    with pytest.raises(EnvError, match=r"PooledEnv\.step 0 failed.*Leave out the PooledGroupBuilder around it"):
        asyncio.run(do_rollouts([builder], echo))


def test_an_error_names_the_environment_and_not_what_wraps_it(pool: WorkerPool):
    env = PooledEnv(DangerousEnv("hangs"), pool, timeout_s=0.05)
    with pytest.raises(EnvError, match=r"DangerousEnv\.step did not finish within 0\.05 s"):
        asyncio.run(do_single_rollout(echo, env))


def test_a_rollout_that_is_cut_off_from_outside_frees_its_worker(pool: WorkerPool):
    builder = PooledGroupBuilder(Table(lambda index: DangerousEnv("hangs"), 1), pool, timeout_s=LONG_S)
    on_error = MinViableGroup(max_retries=0, timeout_s=0.1)
    assert asyncio.run(do_rollouts([builder], echo, on_error)).num_errors == {"TimeoutError": 1}
    assert pool.run(double, 21, timeout_s=LONG_S) == 42
