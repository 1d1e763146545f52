import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import pytest

from stovetop.completers import StopCondition, TokensWithLogprobs
from stovetop.errors import EnvError, GradeError, InvalidRequest
from stovetop.rl.limits import NO_LIMITS, ParseErrorPolicy, RolloutLimits, TerminationRewardPolicy, agentic, simple
from stovetop.rl.metrics import compute_trajectory_metrics
from stovetop.rl.rollouts import MinViableGroup, do_group_rollout, do_rollouts, do_single_rollout
from stovetop.rl.types import Action, Env, Metrics, Observation, StepResult, StopReason, Trajectory
from stovetop.types import ModelInput
from virtual_time import run

from .scripted import CountingEnv, Table, echo, says


async def long_answer(
    model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
) -> TokensWithLogprobs:
    """A policy that would say ten tokens, and says as many as it may."""
    num_tokens = min(10, 10 if max_tokens is None else max_tokens)
    return TokensWithLogprobs([7] * num_tokens, [-1.0] * num_tokens, "stop" if num_tokens == 10 else "length")


def endless(rewards: Sequence[float] = (1.0,) * 99, waits_s: float = 0.0) -> CountingEnv:
    """Observations of 1, 3, 5 ... tokens when each answer has one token."""
    return CountingEnv(seat=5, num_turns=99, rewards=rewards, waits_s=waits_s)


def played(limits: RolloutLimits, env: Env | None = None) -> Trajectory:
    return run(do_single_rollout(echo, env or endless(), limits=limits))


# ---- which limit ends an episode, and where ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "reason", "num_turns"),
    [
        (RolloutLimits(max_turns=3), StopReason.MAX_TURNS, 3),
        (RolloutLimits(max_sampled_tokens=4), StopReason.MAX_SAMPLED_TOKENS, 4),
        (RolloutLimits(max_trajectory_tokens=6), StopReason.MAX_TOKENS, 3),  # 5 observed and 1 said
        (RolloutLimits(max_trajectory_tokens=7), StopReason.CONTEXT_OVERFLOW, 3),  # the next observation has 7
        (RolloutLimits(max_trajectory_tokens=8), StopReason.MAX_TOKENS, 4),
        (RolloutLimits(max_turns=2, max_sampled_tokens=2), StopReason.MAX_TURNS, 2),
    ],
)
def test_an_episode_ends_after_the_turn_that_reaches_a_limit(limits: RolloutLimits, reason: StopReason, num_turns: int):
    trajectory = played(limits)
    assert (trajectory.stop_reason, len(trajectory.transitions)) == (reason, num_turns)
    assert not any(turn.episode_done for turn in trajectory.transitions)
    assert trajectory.final_ob.length == 1 + 2 * num_turns


def test_an_episode_that_the_environment_ends_has_its_reason_whatever_the_limits():
    limits = RolloutLimits(max_turns=2)
    assert played(limits, CountingEnv(5, num_turns=2)).stop_reason is StopReason.COMPLETED
    assert played(NO_LIMITS, CountingEnv(5, num_turns=2)).stop_reason is StopReason.COMPLETED


def test_an_answer_has_no_more_tokens_than_the_tightest_limit_leaves():
    def lengths(limits: RolloutLimits) -> list[int]:
        trajectory = run(do_single_rollout(long_answer, endless(), limits=limits))
        return [len(turn.ac.tokens) for turn in trajectory.transitions]

    assert lengths(RolloutLimits(max_turns=2)) == [10, 10]
    assert lengths(RolloutLimits(max_turns=2, max_turn_tokens=3)) == [3, 3]
    assert lengths(RolloutLimits(max_sampled_tokens=14)) == [10, 4]
    assert lengths(RolloutLimits(max_trajectory_tokens=20)) == [10, 8]  # 12 are observed by then
    assert lengths(RolloutLimits(max_trajectory_tokens=20, max_turn_tokens=9, max_sampled_tokens=11)) == [9, 2]


async def talkative(
    model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
) -> TokensWithLogprobs:
    """A policy that says ten tokens, whatever it may."""
    return says(*[7] * 10)


@pytest.mark.parametrize(
    ("limits", "reason", "num_turns"),
    [
        (RolloutLimits(max_sampled_tokens=15), StopReason.MAX_SAMPLED_TOKENS, 2),
        (RolloutLimits(max_trajectory_tokens=15), StopReason.MAX_TOKENS, 2),
    ],
)
def test_a_policy_that_says_more_than_it_may_is_stopped_all_the_same(
    limits: RolloutLimits, reason: StopReason, num_turns: int
):
    trajectory = run(do_single_rollout(talkative, endless(), limits=limits))
    assert (trajectory.stop_reason, len(trajectory.transitions)) == (reason, num_turns)


@dataclass
class CallingEnv:
    """Every turn makes two tool calls, and none is the last."""

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        return ModelInput.from_ints([1]), [0]

    async def step(self, action: Action) -> StepResult:
        return StepResult(0.0, False, ModelInput.from_ints([1]), [0], num_tool_calls=2)


def test_the_turn_that_reaches_the_tool_calls_allowed_is_played_to_its_end():
    trajectory = played(RolloutLimits(max_tool_calls=3), CallingEnv())
    assert (trajectory.stop_reason, len(trajectory.transitions)) == (StopReason.MAX_TOOL_CALLS, 2)


def test_when_time_runs_out_the_turns_so_far_are_kept_and_the_unfinished_one_is_left_out():
    @dataclass
    class Slower(CallingEnv):
        turn: int = 0

        async def step(self, action: Action) -> StepResult:
            self.turn += 1
            await asyncio.sleep(60.0 if self.turn == 3 else 0.0)
            return StepResult(1.0, False, ModelInput.from_ints([1, self.turn]), [0])

    trajectory = played(RolloutLimits(rollout_timeout_s=0.05), Slower())
    assert (trajectory.stop_reason, len(trajectory.transitions)) == (StopReason.ROLLOUT_TIMEOUT, 2)
    assert trajectory.final_ob.to_ints() == [1, 2]


def test_an_answer_that_takes_too_long_ends_the_episode_without_its_turn():
    class Tiring:
        turn = 0

        async def __call__(
            self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
        ) -> TokensWithLogprobs:
            self.turn += 1
            await asyncio.sleep(60.0 if self.turn == 3 else 0.0)
            return says(7)

    limits = RolloutLimits(sampling_turn_timeout_s=0.05)
    trajectory = run(do_single_rollout(Tiring(), endless(), limits=limits))
    assert (trajectory.stop_reason, len(trajectory.transitions)) == (StopReason.ROLLOUT_TIMEOUT, 2)
    slow_env = run(do_single_rollout(echo, CountingEnv(5, num_turns=2, waits_s=0.06), limits=limits))
    assert slow_env.stop_reason is StopReason.COMPLETED  # the time is that of answers alone


def test_an_episode_without_a_turn_in_time_fails():
    async def silent(
        model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        await asyncio.sleep(60.0)
        return says(7)

    with pytest.raises(EnvError, match=r"CountingEnv had no turn in time: rollout_timeout_s=0\.02"):
        played(RolloutLimits(rollout_timeout_s=0.02), endless(waits_s=60.0))
    limits = RolloutLimits(sampling_turn_timeout_s=0.02)
    rollouts = run(do_rollouts([Table(CountingEnv, 1)], silent, MinViableGroup(max_retries=0), limits=limits))
    assert rollouts.num_errors == {"TimeoutError": 1}


def test_a_first_observation_that_leaves_no_room_is_an_error_that_names_the_limit():
    with pytest.raises(EnvError, match="it has 1 tokens, and max_trajectory_tokens is 1"):
        played(RolloutLimits(max_trajectory_tokens=1))


def test_a_timeout_that_an_environment_raises_itself_is_its_failure_and_no_limit():
    env = CountingEnv(5, fails=lambda: TimeoutError("its own"))
    with pytest.raises(EnvError, match="its own"):
        played(RolloutLimits(rollout_timeout_s=60.0), env)


# ---- what it is worth ----------------------------------------------------------------------------------------------


def test_rewards_of_an_episode_that_a_limit_ended_may_be_at_most_zero():
    earned = [1.0, -0.5, 2.0]
    limits = RolloutLimits(max_turns=3, rewards=TerminationRewardPolicy(zero_reward_on_limit=True))
    assert [turn.reward for turn in played(limits, endless(earned)).transitions] == [0.0, -0.5, 0.0]
    done = CountingEnv(5, num_turns=3, rewards=earned)
    assert [turn.reward for turn in played(limits, done).transitions] == earned
    keeps = replace(limits, rewards=TerminationRewardPolicy())
    assert [turn.reward for turn in played(keeps, endless(earned)).transitions] == earned


def seat(index: int) -> CountingEnv:
    """Seat 0 is done after one turn; seat 1 after two."""
    return CountingEnv(index, num_turns=index + 1, rewards=[0.0] * 2)


def test_the_groups_reward_of_an_episode_that_a_limit_ended_may_be_at_most_zero():
    limits = RolloutLimits(max_turns=1, rewards=TerminationRewardPolicy(zero_reward_on_limit=True))
    table = Table(seat, 2, score=lambda envs_G: [(3.0, {}) for _ in envs_G])
    assert run(do_group_rollout(table, echo, limits=limits)).final_rewards_G == [3.0, 0.0]


def test_an_episode_that_ran_out_of_time_may_be_kept_from_the_grader():
    def slow(index: int) -> CountingEnv:
        return CountingEnv(index, num_turns=99, waits_s=0.004) if index == 0 else CountingEnv(index)

    def score(envs_G: Sequence[Env]) -> Sequence[tuple[float, Metrics]]:
        seen.append(len(envs_G))
        return [(3.0, {"graded": 1.0}) for _ in envs_G]

    seen: list[int] = []
    limits = RolloutLimits(rollout_timeout_s=0.03, rewards=TerminationRewardPolicy(skip_grading_on_timeout=True))
    group = run(do_group_rollout(Table(slow, 3, score=score), echo, limits=limits))
    assert seen == [2]
    assert group.final_rewards_G == [0.0, 3.0, 3.0]
    assert group.metrics_G == [{}, {"graded": 1.0}, {"graded": 1.0}]


def test_a_grader_that_takes_too_long_is_a_grade_error_and_not_a_reward():
    class Stuck(Table):
        async def compute_group_rewards(self, trajectories_G: Sequence[Trajectory], envs_G: Sequence[Env]):
            await asyncio.sleep(60.0)
            return self.score(envs_G)

    limits = RolloutLimits(rewards=TerminationRewardPolicy(grader_timeout_s=0.02))
    with pytest.raises(GradeError, match=r"Stuck\.compute_group_rewards failed: .*0\.02 s"):
        run(do_group_rollout(Stuck(CountingEnv, 1), echo, limits=limits))
    rollouts = run(do_rollouts([Stuck(CountingEnv, 1)], echo, MinViableGroup(), limits=limits))
    assert (rollouts.num_groups_skipped, rollouts.num_errors) == (1, {"GradeError": 1})


# ---- metrics, presets ----------------------------------------------------------------------------------------------


def test_metrics_say_which_fraction_of_the_episodes_ended_for_which_reason():
    limits = RolloutLimits(max_turns=1)
    group = run(do_group_rollout(Table(lambda index: seat(index % 2), 4), echo, limits=limits))
    metrics = compute_trajectory_metrics([group], [[]])
    stops = {name: value for name, value in metrics.items() if "/stop/" in name}
    assert stops == {"env/all/stop/completed": 0.5, "env/all/stop/max_turns": 0.5}


def test_the_simple_preset_limits_nothing_and_the_agentic_one_says_what_it_limits():
    assert simple() == (NO_LIMITS, ParseErrorPolicy(max_consecutive=0)) == (RolloutLimits(), ParseErrorPolicy())
    limits, parse_errors = agentic()
    assert (limits.max_turns, limits.max_trajectory_tokens, limits.max_tool_calls) == (10, 65_536, 30)
    assert (limits.rewards.zero_reward_on_limit, limits.rewards.grader_timeout_s) == (True, 900.0)
    assert parse_errors.max_consecutive == 2


@pytest.mark.parametrize("field", [field.name for field in fields(RolloutLimits) if field.name != "rewards"])
def test_a_limit_must_be_positive(field: str):
    with pytest.raises(InvalidRequest, match=f"RolloutLimits.{field} must be positive, or None for no limit: 0"):
        RolloutLimits(**{field: 0})


def test_answers_of_no_tokens_count_as_turns():
    async def silent(
        model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        return says()

    trajectory = run(do_single_rollout(silent, endless(), limits=RolloutLimits(max_turns=4)))
    assert len(trajectory.transitions) == 4
