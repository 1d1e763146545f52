import asyncio
import dataclasses
import math

import pytest

from stovetop.errors import GradeError, InvalidRequest
from stovetop.rl.types import Env, EnvGroupBuilder, StepResult, Trajectory, TrajectoryGroup, Transition
from stovetop.types import ModelInput

from .scripted import STOP, CountingEnv, Table, group, says, trajectory


def test_a_total_reward_is_the_sum_of_the_steps_and_the_final_reward():
    two_turns = Trajectory(
        [
            Transition(ModelInput.from_ints([1]), says(2), 0.25, episode_done=False),
            Transition(ModelInput.from_ints([1, 2, 3]), says(4), 0.5, episode_done=True),
        ],
        ModelInput.empty(),
    )
    scored = TrajectoryGroup([two_turns, trajectory(([1], [2]), reward=1.0)], [1.0, -2.0], [{}, {}])
    assert scored.get_total_rewards() == [1.75, -1.0]


@pytest.mark.parametrize("lengths", [(2, 1, 2), (2, 2, 1), (1, 2, 2), (0, 0, 0)])
def test_a_group_refuses_rewards_and_metrics_that_do_not_match_its_trajectories(lengths: tuple[int, int, int]):
    num_trajectories, num_rewards, num_metrics = lengths
    with pytest.raises(InvalidRequest, match=f"{num_trajectories}, {num_rewards}, {num_metrics}"):
        TrajectoryGroup([trajectory(([1], [2]))] * num_trajectories, [0.0] * num_rewards, [{}] * num_metrics)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_no_value_holds_a_reward_that_is_not_a_finite_number(reward: float):
    with pytest.raises(GradeError, match=f"finite number: {reward}"):
        StepResult(reward, True, ModelInput.empty(), STOP)
    with pytest.raises(GradeError, match=f"finite number: {reward}"):
        trajectory(([1], [2]), reward=reward)
    with pytest.raises(GradeError, match=f"rollout 1 must be a finite number: {reward}"):
        TrajectoryGroup([trajectory(([1], [2]))] * 2, [0.0, reward], [{}, {}])


def test_an_observation_without_tokens_cannot_be_answered():
    with pytest.raises(InvalidRequest, match="observation"):
        trajectory(([], [2]))
    with pytest.raises(InvalidRequest, match="transition"):
        Trajectory([], ModelInput.empty())


def test_what_happened_cannot_be_changed():
    for value, name in [(trajectory(([1], [2])), "final_ob"), (group(1.0), "final_rewards_G")]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)


def test_step_results_and_transitions_have_no_metrics_unless_given():
    assert StepResult(0.0, True, ModelInput.empty(), STOP).metrics == {}
    assert trajectory(([1], [2])).transitions[0].metrics == {}


def test_a_builder_that_only_makes_environments_gives_no_group_reward_and_no_tags():
    class Bare(EnvGroupBuilder):
        async def make_envs(self) -> list[Env]:
            return [CountingEnv(0), CountingEnv(1)]

    trajectories_G = [trajectory(([1], [2]))] * 2
    builder = Bare()
    rewards_and_metrics = asyncio.run(builder.compute_group_rewards(trajectories_G, asyncio.run(builder.make_envs())))
    assert list(rewards_and_metrics) == [(0.0, {}), (0.0, {})]
    assert list(builder.logging_tags()) == []


def test_a_builder_makes_fresh_environments_each_time():
    table = Table(CountingEnv, 2)
    first, second = asyncio.run(table.make_envs()), asyncio.run(table.make_envs())
    assert first == second
    assert first[0] is not second[0]
