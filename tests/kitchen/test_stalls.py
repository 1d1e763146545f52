"""A workflow that stands still says what it waits for."""

import asyncio
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kitchen.stages.configs import RLConfig, write_problems
from stovetop.backends import recording
from stovetop.client import SamplingClient
from stovetop.kitchen import stage
from stovetop.kitchen.stages.evaluation import Evaluators
from stovetop.kitchen.stages.rl import Builders
from stovetop.kitchen.workflow import Workflow
from stovetop.kitchen.workflows import REINFORCEMENT
from stovetop.rl.types import Action, Env, EnvGroupBuilder, StepResult, Trajectory
from stovetop.runs import open_run

AFTER_S = 0.2
GROUP = r"stage 'do_rollout' at step \d > group \d of 3, HangingGroup\(.*"
ENVIRONMENT = rf"{GROUP} > rollout 2 of HangingGroup: Hangs\.step 0: for \d s$"
EVALUATOR = r"stage 'evaluate' at step 0 > evaluator HangingEvaluator: for \d s$"


@dataclass(frozen=True)
class Hangs:
    """An environment that comes to no end in one of its calls."""

    inner: Env
    waits: Callable[[], Awaitable[None]]

    async def initial_observation(self):
        return await self.inner.initial_observation()

    async def step(self, action: Action) -> StepResult:
        await self.waits()
        return await self.inner.step(action)


@dataclass(frozen=True)
class HangingGroup(EnvGroupBuilder):
    inner: EnvGroupBuilder
    waits: Callable[[], Awaitable[None]]
    grades: bool = False

    async def make_envs(self) -> Sequence[Env]:
        envs = list(await self.inner.make_envs())
        return envs if self.grades else [*envs[:2], Hangs(envs[2], self.waits), *envs[3:]]

    async def compute_group_rewards(self, trajectories_G: Sequence[Trajectory], envs_G: Sequence[Env]):
        if self.grades:
            await self.waits()
        return await self.inner.compute_group_rewards(trajectories_G, envs_G)


@dataclass(frozen=True)
class HangingEvaluator:
    waits: Callable[[], Awaitable[None]]

    async def __call__(self, client: SamplingClient) -> dict[str, float]:
        await self.waits()
        return {}


def with_hanging(what: str, waits: Callable[[], Awaitable[None]]) -> Workflow:
    @stage(writes=("builders", "test_builders"))
    def hang_one(builders: Sequence[EnvGroupBuilder], test_builders: Sequence[EnvGroupBuilder]) -> Builders:
        hanging = HangingGroup(builders[5], waits, grades=what == "grader")
        return Builders([*builders[:5], hanging, *builders[6:]], test_builders)

    @stage(writes="evaluators")
    def hang_evaluators(evaluators: Evaluators) -> Evaluators:
        return Evaluators(sampling=(HangingEvaluator(waits),))

    @stage(writes="opened")
    async def opens() -> AsyncIterator[int]:
        yield 0
        await waits()

    if what == "end of a stage":
        return REINFORCEMENT.insert_before("load_problems", opens)
    if what == "evaluator":
        return REINFORCEMENT.insert_after("make_rl_evaluators", hang_evaluators)
    return REINFORCEMENT.insert_after("build_env_group", hang_one)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("environment", ENVIRONMENT),
        pytest.param("grader", rf"{GROUP} > compute_group_rewards: for \d s$", marks=pytest.mark.slow),
        pytest.param("evaluator", EVALUATOR, marks=pytest.mark.slow),
        pytest.param("end of a stage", r"the end of stage 'opens': for \d s$", marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.parametrize("blocks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_hangs_is_named_after_a_stated_time(what: str, named: str, blocks: bool, tmp_path: Path) -> None:
    """Whether it awaits or blocks the event loop."""
    said = threading.Event()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if any(re.search(named, line) for line in record.getMessage().splitlines()):
                said.set()

    async def waits() -> None:
        while not said.is_set():
            if blocks:
                time.sleep(0.01)
            else:
                await asyncio.sleep(0.01)

    config = RLConfig(
        dataset=write_problems(tmp_path / "problems.jsonl"), log_path=str(tmp_path / "run"), max_steps_off_policy=1,
        stall_after_s=AFTER_S, num_epochs=1,
    )  # fmt: skip
    logger = logging.getLogger("stovetop.tracking.waiting")
    logger.addHandler(heard := Heard())
    try:
        with (
            recording.open_service(config.log_path) as service,
            open_run(config.log_path, config, console=False, **config.run_options()) as run,
        ):
            asyncio.run(with_hanging(what, waits).run(config, service=service, run=run))
    finally:
        logger.removeHandler(heard)
    assert any(re.search(named, line) for line in (tmp_path / "run" / "logs.log").read_text().splitlines())
