import asyncio
import os
import signal
import time
from dataclasses import dataclass

import pytest

from stovetop.completers import StopCondition
from stovetop.errors import EnvError
from stovetop.rl.pooled_env import PooledEnv, PooledGroupBuilder
from stovetop.rl.process_pool import WorkerPool
from stovetop.rl.rollouts import MinViableGroup, do_rollouts, do_single_rollout
from stovetop.rl.types import Action, Env, Observation, StepResult
from stovetop.types import ModelInput

from .scripted import Table, echo

LONG_S = 60.0


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
    assert pool.run(abs, -42, timeout_s=LONG_S) == 42
