"""Environments whose steps run in worker processes, where they may hang or crash. Sampling never happens there."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from stovetop.completers import StopCondition
from stovetop.rl.process_pool import WorkerPool
from stovetop.rl.types import Action, Env, EnvGroupBuilder, Metrics, Observation, StepResult, Trajectory


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
