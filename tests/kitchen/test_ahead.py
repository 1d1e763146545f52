"""A run that samples ahead of training comes to its end, whatever its batches are like, and its lag keeps to its limit,
also after it was stopped and goes on."""

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pytest

from kitchen.modes import MODES, outcome
from kitchen.stages.configs import RLConfig, write_problems
from kitchen.test_supervised import rows
from stovetop.backends import recording
from stovetop.errors import StageFailed
from stovetop.kitchen import stage
from stovetop.kitchen.stages.rl import Builders, Problems, make_policy_loss
from stovetop.kitchen.stages.sampling import choose_sampling
from stovetop.kitchen.workflow import Workflow
from stovetop.kitchen.workflows import REINFORCEMENT
from stovetop.rl.rollouts import MinViableGroup, OnRolloutError, RetryOnFailure
from stovetop.rl.types import Action, Env, EnvGroupBuilder, StepResult
from stovetop.runs import open_run

LIMIT_S = 10.0


def train(config: RLConfig, workflow: Workflow = REINFORCEMENT) -> list[dict[str, float]]:
    with (
        recording.open_service(config.log_path) as service,
        open_run(config.log_path, config, console=False) as run,
    ):

        async def main() -> None:
            async with asyncio.timeout(LIMIT_S):
                await workflow.run(config, service=service, run=run)

        asyncio.run(main())
    return rows(config.log_path)[:-1]  # the last one is the evaluation


@pytest.fixture(params=[2, *(pytest.param(depth, marks=pytest.mark.slow) for depth in (1, 5))])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> RLConfig:
    return RLConfig(
        dataset=write_problems(tmp_path / "rows"), log_path=str(tmp_path / "run"), max_steps_off_policy=request.param
    )


def test_it_ends_where_every_group_is_constant_and_left_out(config: RLConfig) -> None:
    found = train(replace(config, max_tokens=1, remove_constant_reward_groups=True, group_size=2, temperature=0.01))
    assert [row["filter/groups_removed"] for row in found] == [2] * 6  # one of three is kept for its place in the loop
    assert [row["lag"] for row in found] == [min(step, config.max_steps_off_policy) for step in range(6)]


def test_it_ends_where_the_last_batch_is_short(config: RLConfig) -> None:
    found = train(replace(config, groups_per_batch=4))
    assert [row["env/all/total_episodes"] for row in found] == [24, 24, 6] * 2


def test_it_ends_where_a_batch_has_more_groups_than_were_asked_for(config: RLConfig) -> None:
    class Lavish:
        def __init__(self, builders: Sequence[EnvGroupBuilder]) -> None:
            self._builders = builders

        def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
            return self._builders

        def __len__(self) -> int:
            return 3

    @stage(writes=("problems", "num_per_epoch"))
    def give_all(builders: Sequence[EnvGroupBuilder], groups_per_batch: int, num_epochs: int) -> Problems:
        assert groups_per_batch < len(builders)
        return Problems(Lavish(builders), 3)

    found = train(replace(config, num_epochs=1), REINFORCEMENT.replace("batch_problems", give_all))
    assert [row["env/all/total_episodes"] for row in found] == [54] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one step ahead", "two steps ahead", "distillation, two steps ahead"])
def test_the_lag_keeps_to_its_limit_also_after_a_stop(name: str, tmp_path: Path) -> None:
    @stage
    def stops(step: int) -> None:
        if step == 4:
            raise ValueError("stopped")

    mode = MODES[name]
    config = mode.config(tmp_path)
    with pytest.raises(StageFailed, match="stage 'stops'"):
        mode.train(config, workflow=mode.workflow.insert_after("log_step", stops))
    mode.train(config)
    lags = [row["lag"] for row in outcome(config.log_path).rows if "lag" in row]
    depth = 1 if name.startswith("one") else 2
    assert lags == [min(step, depth) for step in range(6)]


# ---- environments that fail ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FlakyConfig(RLConfig):
    on_rollout_error: OnRolloutError = "skip"
    rollout_timeout_s: float | None = 0.5


@dataclass
class Faults:
    """What environments do wrong, and how often they did."""

    generator: random.Random = field(default_factory=lambda: random.Random(3))
    num: dict[str, int] = field(default_factory=lambda: {"RuntimeError": 0, "TimeoutError": 0, "ValueError": 0})

    async def strike(self) -> None:
        """Raises with p = .2, hangs with .02, has nothing to say with .05."""
        chance = self.generator.random()
        if chance < 0.2:
            self.num["RuntimeError"] += 1
            raise RuntimeError("a sandbox broke")
        if chance < 0.22:
            self.num["TimeoutError"] += 1
            await asyncio.sleep(60)
        if chance < 0.27:
            self.num["ValueError"] += 1
            raise ValueError("an empty answer")


@dataclass(frozen=True)
class FlakyEnv:
    inner: Env
    faults: Faults

    async def initial_observation(self):
        return await self.inner.initial_observation()

    async def step(self, action: Action) -> StepResult:
        await self.faults.strike()
        return await self.inner.step(action)


@dataclass(frozen=True)
class FlakyGroup(EnvGroupBuilder):
    inner: EnvGroupBuilder
    faults: Faults

    async def make_envs(self) -> Sequence[Env]:
        return [FlakyEnv(env, self.faults) for env in await self.inner.make_envs()]


def flaky(faults: Faults) -> Workflow:
    @stage(writes=("builders", "test_builders"))
    def make_flaky(builders: Sequence[EnvGroupBuilder], test_builders: Sequence[EnvGroupBuilder]) -> Builders:
        return Builders([FlakyGroup(builder, faults) for builder in builders], test_builders)

    return REINFORCEMENT.insert_after("build_env_group", make_flaky)


def test_a_run_over_environments_that_raise_hang_and_say_nothing_ends_and_counts_them_exactly(tmp_path: Path) -> None:
    config = FlakyConfig(
        dataset=write_problems(tmp_path / "rows"), log_path=str(tmp_path / "run"), max_steps_off_policy=2
    )
    faults = Faults()
    found = train(config, flaky(faults))
    assert [row["lag"] for row in found] == [0, 1, 2, 2, 2, 2]
    counted = {kind: sum(row.get(f"rollout_errors/{kind}", 0) for row in found) for kind in faults.num}
    assert counted == faults.num
    assert all(number > 0 for number in faults.num.values())
    assert sum(row["rollout_errors/total"] for row in found) == sum(faults.num.values())


def test_a_step_of_which_no_group_is_left_is_an_error_that_says_why(tmp_path: Path) -> None:
    class Broken(Faults):
        async def strike(self) -> None:
            raise RuntimeError("a sandbox broke")

    config = FlakyConfig(dataset=write_problems(tmp_path / "rows"), log_path=str(tmp_path / "run"))
    with pytest.raises(StageFailed, match=r"all 3 groups of the step were skipped.* Their errors: 72 RuntimeError"):
        train(config, flaky(Broken()))
    raising = FlakyConfig(**{**asdict(config), "on_rollout_error": "raise"})
    with pytest.raises(StageFailed, match="a sandbox broke"):
        train(raising, flaky(Broken()))


def test_what_becomes_of_a_failed_rollout_is_chosen_by_name() -> None:
    assert choose_sampling(3).on_error == RetryOnFailure()
    assert choose_sampling(3, on_rollout_error="raise", rollout_timeout_s=1.0).on_error == RetryOnFailure(0, 1.0)
    assert choose_sampling(3, on_rollout_error="skip", rollout_timeout_s=1.0).on_error == MinViableGroup(timeout_s=1.0)


def test_ratios_without_a_limit_are_warned_of_where_answers_are_old(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make_policy_loss(max_steps_off_policy=1)
        make_policy_loss("ppo", max_steps_off_policy=3)
        assert caplog.messages == []
        make_policy_loss(max_steps_off_policy=3)
    assert "answers are up to 3 updates older" in caplog.text
