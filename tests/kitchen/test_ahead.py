"""A run that samples ahead of training comes to its end, whatever its batches are like, and its lag keeps to its limit,
also after it was stopped and goes on."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kitchen.modes import MODES, outcome
from kitchen.stages.configs import RLConfig, write_problems
from kitchen.test_supervised import rows
from stovetop.backends import recording
from stovetop.errors import StageFailed
from stovetop.kitchen import stage
from stovetop.kitchen.stages.rl import Problems
from stovetop.kitchen.workflow import Workflow
from stovetop.kitchen.workflows import REINFORCEMENT
from stovetop.rl.types import EnvGroupBuilder
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
