import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import pytest

from stovetop.backends import recording
from stovetop.completers import StopCondition, TokensWithLogprobs
from stovetop.concurrency import together
from stovetop.errors import EnvError, GradeError, InvalidRequest, RequestFailedError, ServiceClosed
from stovetop.rl.data_processing import remove_constant_reward_groups
from stovetop.rl.metrics import compute_trajectory_metrics
from stovetop.rl.rollouts import (
    ErrorPolicy,
    FailFast,
    MinViableGroup,
    RetryOnFailure,
    do_group_rollout,
    do_rollouts,
    do_single_rollout,
)
from stovetop.rl.sampling_policy import SamplingPolicy
from stovetop.rl.types import Action, Env, Observation, StepResult
from stovetop.types import ModelInput
from virtual_time import run

from .scripted import CountingEnv, Scores, Table, echo, says


def failing(*attempts_that_fail: int, error: Callable[[], Exception] = lambda: KeyError("gone")):
    """For CountingEnv.fails: raises on these calls, counted from 0 over all environments that share it."""
    calls = itertools.count()
    return lambda: error() if next(calls) in attempts_that_fail else None


def always(error: Exception) -> Callable[[], Exception]:
    return lambda: error


# ---- the policy --------------------------------------------------------------------------------------------------


def shows(seat: int) -> CountingEnv:
    return CountingEnv(seat % 2)  # of four seats, two show the same


def test_a_policy_asks_once_for_all_that_show_the_same_prompt_and_gives_each_its_own_answer(tmp_path: Path):
    with recording.open_service(tmp_path) as service:
        client = service.create_sampling_client(base_model="any/name").result()
        policy = SamplingPolicy(client, max_tokens=30, temperature=0.5, seed=0)
        group = asyncio.run(do_group_rollout(Table(shows, 4), policy))
        samples = [call.arguments for call in service.calls if call.verb == "sample"]
    assert [(sample["prompt"].to_ints(), sample["num_samples"]) for sample in samples] == [([0], 2), ([1], 2)]
    assert {sample["sampling_params"].temperature for sample in samples} == {0.5}
    answers = [tuple(trajectory.transitions[0].ac.tokens) for trajectory in group.trajectories_G]
    assert len(set(answers)) == 4


def test_the_answers_of_a_policy_depend_on_its_seed_and_are_not_the_same_twice(tmp_path: Path):
    with recording.open_service(tmp_path) as service:
        client = service.create_sampling_client(base_model="any/name").result()

        def two_groups(seed: int) -> list[list[list[int]]]:
            policy = SamplingPolicy(client, max_tokens=30, seed=seed)
            groups = [asyncio.run(do_group_rollout(Table(shows, 4), policy)) for _ in range(2)]
            return [[trajectory.transitions[0].ac.tokens for trajectory in group.trajectories_G] for group in groups]

        assert two_groups(0) == two_groups(0) != two_groups(1)
        first, second = two_groups(0)
    assert not any(answer in second for answer in first)


def test_the_answers_of_a_policy_depend_on_how_many_were_asked_for_and_not_on_how_they_were_grouped(tmp_path: Path):
    with recording.open_service(tmp_path) as service:
        client = service.create_sampling_client(base_model="any/name").result()

        async def answers_of(*sizes: int) -> list[TokensWithLogprobs]:
            policy = SamplingPolicy(client, max_tokens=30, seed=0)
            prompt = ModelInput.from_ints([1])
            groups = [await together(policy(prompt, [0]) for _ in range(size)) for size in sizes]
            return groups[-1]

        assert asyncio.run(answers_of(2, 1)) == asyncio.run(answers_of(1, 1, 1))
        assert asyncio.run(answers_of(2, 1)) != asyncio.run(answers_of(1, 1))


class Forgetful(CountingEnv):
    """Shows the same at every turn."""

    async def step(self, action: Action) -> StepResult:
        result = await super().step(action)
        self.shown = [self.seat]
        return replace(result, next_observation=ModelInput.from_ints(self.shown))


def test_the_later_answers_of_a_rollout_do_not_depend_on_how_long_the_others_take(tmp_path: Path):
    with recording.open_service(tmp_path) as service:
        client = service.create_sampling_client(base_model="any/name").result()

        def answers_G_T(*waits_s: float) -> list[list[Sequence[int]]]:
            seats = [Forgetful(1, num_turns=3, waits_s=wait_s) for wait_s in waits_s]
            policy = SamplingPolicy(client, max_tokens=30, seed=0)
            group = asyncio.run(do_group_rollout(Table(lambda seat: seats[seat], len(seats)), policy))
            return [[turn.ac.tokens for turn in trajectory.transitions] for trajectory in group.trajectories_G]

        together_G_T = answers_G_T(0, 0, 0)
        assert answers_G_T(0, 0.02, 0.04) == together_G_T
        assert answers_G_T(0.04, 0.02, 0) == together_G_T
    assert len({tuple(answer) for answers_T in together_G_T for answer in answers_T}) == 9


def test_a_policy_gives_no_more_tokens_than_a_call_asks_for_and_passes_on_the_stop_condition(tmp_path: Path):
    with recording.open_service(tmp_path) as service:
        client = service.create_sampling_client(base_model="any/name").result()
        policy = SamplingPolicy(client, max_tokens=5)
        asyncio.run(policy(ModelInput.from_ints([1]), ["\n"], max_tokens=3))
        asyncio.run(policy(ModelInput.from_ints([1]), [7], max_tokens=9))
        params = [call.arguments["sampling_params"] for call in service.calls if call.verb == "sample"]
    assert [(of_one.max_tokens, of_one.stop) for of_one in params] == [(3, ["\n"]), (5, [7])]


def test_a_prompt_that_is_refused_fails_every_rollout_that_shows_it(tmp_path: Path):
    with recording.open_service(tmp_path) as service:
        client = service.create_sampling_client(base_model="any/name").result()
        policy = SamplingPolicy(client, max_tokens=5)
        table = Table(lambda seat: CountingEnv(1_000_000 if seat < 2 else 1), 4)
        rollouts = asyncio.run(do_rollouts([table], policy, MinViableGroup(min_successful=2, max_retries=0)))
    assert rollouts.num_errors == {"InvalidRequest": 2}
    assert rollouts.num_rollouts_dropped == 2


def test_a_policy_that_could_never_sample_is_refused_when_it_is_made(tmp_path: Path):
    with recording.open_service(tmp_path) as service:
        client = service.create_sampling_client(base_model="any/name").result()
        for refused in ({"max_tokens": 0}, {"max_tokens": 5, "temperature": -1.0}, {"max_tokens": 5, "seed": -1}):
            with pytest.raises(InvalidRequest, match=r"SamplingParams\."):
                SamplingPolicy(client, **refused)


# ---- one rollout -------------------------------------------------------------------------------------------------


def test_a_rollout_goes_on_until_the_environment_is_done():
    trajectory = asyncio.run(do_single_rollout(echo, CountingEnv(seat=5, num_turns=3, rewards=[0.0, 0.5, 1.0])))
    assert [turn.ob.to_ints() for turn in trajectory.transitions] == [[5], [5, 5, 101], [5, 5, 101, 101, 102]]
    assert [turn.ac for turn in trajectory.transitions] == [says(5), says(101), says(102)]
    assert [turn.reward for turn in trajectory.transitions] == [0.0, 0.5, 1.0]
    assert [turn.episode_done for turn in trajectory.transitions] == [False, False, True]
    assert [turn.metrics["turn"] for turn in trajectory.transitions] == [1, 2, 3]
    assert trajectory.final_ob.to_ints() == [5, 5, 101, 101, 102, 102, 103]


def test_what_an_environment_raises_names_the_environment_and_the_step():
    with pytest.raises(EnvError, match=r"CountingEnv\.step 1 failed: KeyError\('gone'\)") as raised:
        asyncio.run(do_single_rollout(echo, CountingEnv(0, num_turns=3, fails=failing(1))))
    assert isinstance(raised.value.__cause__, KeyError)


def test_what_the_policy_raises_stays_as_it_is():
    async def broken(
        model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        raise ConnectionError("the sampler is away")

    with pytest.raises(ConnectionError):
        asyncio.run(do_single_rollout(broken, CountingEnv(0)))


# ---- one group ---------------------------------------------------------------------------------------------------


def test_trajectories_are_in_the_order_of_their_environments_whichever_ends_first():
    table = Table(lambda seat: CountingEnv(seat, num_turns=2, waits_s=0.002 * (7 - seat)), 8)
    group = run(do_group_rollout(table, echo))
    assert [trajectory.transitions[0].ob.to_ints() for trajectory in group.trajectories_G] == [[i] for i in range(8)]
    assert group.get_total_rewards() == [2.0 * seat for seat in range(8)]


def test_environments_of_a_group_run_at_the_same_time():
    async def seconds() -> float:
        await do_group_rollout(Table(lambda seat: CountingEnv(seat, waits_s=0.1), 20), echo)
        return asyncio.get_running_loop().time()

    assert run(seconds()) == pytest.approx(0.1)  # 20 times that, one by one


def test_the_rewards_of_the_group_are_added():
    table = Table(CountingEnv, 3, score=lambda envs_G: [(10.0 * rank, {"rank": rank}) for rank in range(len(envs_G))])
    group = asyncio.run(do_group_rollout(table, echo))
    assert group.get_total_rewards() == [0.0, 11.0, 22.0]
    assert group.metrics_G == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def test_the_first_failure_of_a_group_cancels_the_others_and_is_raised():
    cancelled: list[int] = []

    def seat(index: int) -> Env:
        fails = always(KeyError("gone")) if index == 1 else lambda: None
        return CountingEnv(index, waits_s=0.0 if index == 1 else 60.0, fails=fails, cancelled=cancelled)

    with pytest.raises(EnvError, match="rollout 1 of Table"):
        run(do_group_rollout(Table(seat, 3), echo))
    assert sorted(cancelled) == [0, 2]


def test_cancelling_a_batch_cancels_every_environment():
    cancelled: list[int] = []

    async def cancel_soon() -> None:
        builders = [Table(lambda seat: CountingEnv(seat, waits_s=60.0, cancelled=cancelled), 2)] * 2
        async with asyncio.timeout(0.02):
            await do_rollouts(builders, echo, MinViableGroup())

    with pytest.raises(TimeoutError):
        run(cancel_soon())
    assert sorted(cancelled) == [0, 0, 1, 1]


def test_a_group_without_environments_is_an_error():
    with pytest.raises(EnvError, match=r"Table\.make_envs made no environment"):
        asyncio.run(do_group_rollout(Table(CountingEnv, 0), echo))


# ---- failures ----------------------------------------------------------------------------------------------------


def one_bad_seat(bad: int, error: Exception, num_seats: int = 8) -> Table:
    """Seat `bad` always fails."""
    return Table(lambda seat: CountingEnv(seat, fails=always(error) if seat == bad else lambda: None), num_seats)


def test_fail_fast_is_the_default():
    with pytest.raises(EnvError):
        asyncio.run(do_rollouts([one_bad_seat(0, KeyError())], echo))


def test_a_failed_rollout_is_tried_again_in_a_fresh_environment_and_counted():
    made: list[Env] = []

    def seat(index: int) -> Env:
        made.append(CountingEnv(index, fails=fails))
        return made[-1]

    fails = failing(0, 3)  # steps 0, 1, 2 are those of the three seats; 3 is seat 0 again
    table = Table(seat, 3)
    rollouts = asyncio.run(do_rollouts([table], echo, RetryOnFailure(max_retries=2)))
    [(builder, group)] = rollouts.owned_groups_P
    assert builder is table
    assert group.get_total_rewards() == [0.0, 1.0, 2.0]
    assert [env.turn for env in made if isinstance(env, CountingEnv) and env.seat == 0] == [0, 0, 1]
    assert rollouts.error_metrics() == {
        "rollout_errors/KeyError": 2,
        "rollout_errors/total": 2,
        "rollout_errors/rollouts_dropped": 0,
        "rollout_errors/groups_skipped": 0,
    }


def test_a_rollout_that_fails_more_often_than_it_may_be_retried_is_raised():
    attempts: list[int] = []

    def seat(index: int) -> Env:
        attempts.append(index)
        return CountingEnv(index, fails=always(KeyError("gone")))

    with pytest.raises(EnvError, match="rollout 0 of Table"):
        asyncio.run(do_rollouts([Table(seat, 1)], echo, RetryOnFailure(max_retries=2)))
    assert len(attempts) == 3


def test_a_nan_reward_is_an_error_that_names_the_rollout_and_the_others_stay_finite():
    table = Table(lambda seat: CountingEnv(seat, rewards=[math.nan if seat == 3 else float(seat)]), 8)
    with pytest.raises(EnvError, match=r"rollout 3 of Table: CountingEnv\.step 0 .*finite number: nan"):
        asyncio.run(do_rollouts([table], echo))
    rollouts = asyncio.run(do_rollouts([table], echo, MinViableGroup(max_retries=0)))
    [(_, group)] = rollouts.owned_groups_P
    assert group.get_total_rewards() == [0, 1, 2, 4, 5, 6, 7]
    assert rollouts.error_metrics() == {
        "rollout_errors/GradeError": 1,
        "rollout_errors/total": 1,
        "rollout_errors/rollouts_dropped": 1,
        "rollout_errors/groups_skipped": 0,
    }


@pytest.mark.parametrize(("min_successful", "num_kept"), [(None, 1), (6, 1), (7, 0)])
def test_a_group_is_kept_while_enough_of_it_is_left(min_successful: int | None, num_kept: int):
    table = Table(lambda seat: CountingEnv(seat, fails=always(KeyError()) if seat < 2 else lambda: None), 8)
    rollouts = asyncio.run(do_rollouts([table], echo, MinViableGroup(min_successful, max_retries=0)))
    assert len(rollouts.owned_groups_P) == num_kept
    assert rollouts.num_rollouts_dropped == 2 * num_kept
    assert rollouts.num_groups_skipped == 1 - num_kept
    assert rollouts.num_errors == {"KeyError": 2}


def test_the_group_reward_sees_the_environments_that_succeeded():
    def score(envs_G: Sequence[Env]) -> Scores:
        return [(100.0 * env.seat, {}) for env in envs_G if isinstance(env, CountingEnv) and env.turn == 1]

    fails = failing(0, 2)  # seats 0 and 2, once each
    table = Table(lambda seat: CountingEnv(seat, fails=fails), 4, score=score)
    [(_, group)] = asyncio.run(do_rollouts([table], echo, MinViableGroup(max_retries=1))).owned_groups_P
    assert group.get_total_rewards() == [101.0 * seat for seat in range(4)]


def test_a_broken_group_grader_is_never_a_reward():
    broken = Table(CountingEnv, 2, score=lambda envs_G: [(0.0, {}), (math.nan, {})])
    with pytest.raises(GradeError, match=r"Table\.compute_group_rewards .* rollout 1 must be a finite number: nan"):
        asyncio.run(do_rollouts([broken], echo, RetryOnFailure()))
    rollouts = asyncio.run(do_rollouts([broken, Table(CountingEnv, 2)], echo, MinViableGroup()))
    assert len(rollouts.owned_groups_P) == 1
    assert rollouts.error_metrics()["rollout_errors/groups_skipped"] == 1
    assert rollouts.num_errors == {"GradeError": 1}


def test_a_rollout_that_hangs_is_cut_off_and_tried_again():
    waits = itertools.chain([60.0], itertools.repeat(0.0))
    table = Table(lambda seat: CountingEnv(seat, waits_s=next(waits)), 1)
    rollouts = run(do_rollouts([table], echo, RetryOnFailure(timeout_s=0.02)))
    assert rollouts.num_errors == {"TimeoutError": 1}
    hung = Table(lambda seat: CountingEnv(seat, waits_s=60.0), 1)
    with pytest.raises(EnvError, match=r"rollout 0 of Table: CountingEnv did not finish within 0\.02 s"):
        run(do_rollouts([hung], echo, RetryOnFailure(max_retries=0, timeout_s=0.02)))


def test_a_group_whose_environments_are_not_made_in_time_is_skipped_and_does_not_hold_up_the_batch():
    class Slow(Table):
        num_made = 0
        hangs: tuple[int, ...] = ()

        async def make_envs(self) -> Sequence[Env]:
            self.num_made += 1
            await asyncio.sleep(60.0 if self.num_made in self.hangs else 0.0)
            return [CountingEnv(seat, fails=always(KeyError()) if seat == 1 else lambda: None) for seat in range(2)]

    never, again = Slow(CountingEnv, 2), Slow(CountingEnv, 2)
    never.hangs, again.hangs = (1,), (2,)
    on_error = MinViableGroup(min_successful=1, max_retries=1, timeout_s=0.05)
    rollouts = run(do_rollouts([never, Table(CountingEnv, 1), again], echo, on_error))
    assert [len(group.trajectories_G) for _, group in rollouts.owned_groups_P] == [1, 1]
    assert rollouts.num_errors == {"TimeoutError": 2, "KeyError": 1}
    assert (rollouts.num_groups_skipped, rollouts.num_rollouts_dropped) == (1, 1)


async def cancel_themselves(*_: object, **__: object) -> NoReturn:
    raise asyncio.CancelledError("of what it waited for")


def test_a_cancellation_that_nobody_asked_for_is_a_failure_wherever_it_comes_from():
    class Cancelled(CountingEnv):
        step = cancel_themselves

    class Grader(Table):
        compute_group_rewards = cancel_themselves

    on_error = MinViableGroup(max_retries=1)
    for builder in (Table(Cancelled, 1), Grader(CountingEnv, 1)):
        rollouts = asyncio.run(do_rollouts([builder, Table(CountingEnv, 1)], echo, on_error))
        assert (len(rollouts.owned_groups_P), rollouts.num_groups_skipped) == (1, 1)
    with pytest.raises(EnvError, match="what it waited for was cancelled"):
        asyncio.run(do_rollouts([Table(Cancelled, 1)], echo))
    with pytest.raises(RuntimeError, match="what it waited for was cancelled"):
        asyncio.run(do_rollouts([Table(CountingEnv, 1)], cancel_themselves))


class FailingPolicy:
    """Raises always, or for the first `num_failures` calls, and counts them."""

    def __init__(self, error: Exception, num_failures: int = 10**9) -> None:
        self.error = error
        self.num_failures = num_failures
        self.num_calls = 0

    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        self.num_calls += 1
        if self.num_calls <= self.num_failures:
            raise self.error
        return await echo(model_input, stop)


@pytest.mark.parametrize(
    "error",
    [
        RequestFailedError("sample failed: the engine is gone"),
        RequestFailedError("sample failed: its weights are not finite", "user"),
        ConnectionError("the sampler is away"),
        ServiceClosed("sample: this client's service is closed"),
        TypeError("a policy of our own, with a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failure_of_the_policy_is_raised_and_no_group_is_skipped_for_it(error: Exception):
    policy = FailingPolicy(error)
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(do_rollouts([Table(CountingEnv, 1)], policy, MinViableGroup(max_retries=2)))
    assert policy.num_calls == 3
    [(_, group)] = asyncio.run(
        do_rollouts([Table(CountingEnv, 2)], FailingPolicy(error, num_failures=1), MinViableGroup(max_retries=1))
    ).owned_groups_P
    assert group.get_total_rewards() == [0, 1]


def test_a_closed_service_is_raised_under_every_error_policy(tmp_path: Path):
    with recording.open_service(tmp_path) as service:
        policy = SamplingPolicy(service.create_sampling_client(base_model="any/name").result(), max_tokens=5)
    for on_error in (FailFast(), RetryOnFailure(), MinViableGroup()):
        with pytest.raises(ServiceClosed, match="this client's service is closed"):
            asyncio.run(do_rollouts([Table(CountingEnv, 2)], policy, on_error))


def test_a_service_that_an_environment_or_a_grader_asks_is_not_the_groups_own_either():
    judge_is_gone = RequestFailedError("sample failed: the judge's engine is gone")

    def score(envs_G: Sequence[Env]) -> Scores:
        raise judge_is_gone

    for builder, kind in ((one_bad_seat(0, judge_is_gone), EnvError), (Table(CountingEnv, 2, score=score), GradeError)):
        with pytest.raises(kind, match="the judge's engine is gone"):
            asyncio.run(do_rollouts([builder], echo, MinViableGroup(max_retries=0)))


@pytest.mark.parametrize(("max_retries", "num_tries"), [(0, 1), (1, 2), (3, 4)])
@pytest.mark.parametrize("make", [RetryOnFailure, MinViableGroup])
def test_a_rollout_has_one_try_and_so_many_retries(make: type[RetryOnFailure], max_retries: int, num_tries: int):
    def failed_tries(num_failures: int) -> Counter[str]:
        table = Table(lambda seat: CountingEnv(seat, fails=fails), 1)
        fails = failing(*range(num_failures))
        return Counter(asyncio.run(do_rollouts([table], echo, make(max_retries=max_retries))).num_errors)

    assert failed_tries(num_tries - 1) == Counter(KeyError=num_tries - 1)
    if make is RetryOnFailure:
        with pytest.raises(EnvError):
            failed_tries(num_tries)
    else:
        assert failed_tries(num_tries + 9) == Counter(KeyError=num_tries)


def test_three_retries_are_the_default_and_none_may_be_negative():
    assert RetryOnFailure().max_retries == MinViableGroup().max_retries == 3
    for make in (RetryOnFailure, MinViableGroup):
        with pytest.raises(InvalidRequest, match=f"{make.__name__}.max_retries must be an integer of at least 0: -1"):
            make(max_retries=-1)


@pytest.mark.parametrize(
    "on_error",
    [FailFast(), RetryOnFailure(max_retries=0), MinViableGroup(min_successful=1)],
    ids=lambda p: type(p).__name__,
)
def test_without_failures_every_policy_gives_the_same(on_error: ErrorPolicy):
    builders = [Table(CountingEnv, 3), Table(CountingEnv, 2)]
    rollouts = asyncio.run(do_rollouts(builders, echo, on_error))
    assert [group.get_total_rewards() for _, group in rollouts.owned_groups_P] == [[0, 1, 2], [0, 1]]
    assert rollouts.error_metrics() == {
        "rollout_errors/total": 0,
        "rollout_errors/rollouts_dropped": 0,
        "rollout_errors/groups_skipped": 0,
    }


def test_a_group_cannot_be_viable_without_a_rollout():
    with pytest.raises(InvalidRequest, match="min_successful must be an integer of at least 1, or None: 0"):
        MinViableGroup(min_successful=0)


def test_a_run_over_flaky_environments_finishes_and_its_counters_add_up():
    failed: list[Exception] = []
    draws = random.Random(0)

    def flaky() -> Exception | None:
        if draws.random() > 0.2:
            return None
        failed.append(OSError("flaky"))
        return failed[-1]

    tables = [Table(lambda seat: CountingEnv(seat, fails=flaky), 8)] * 80
    rollouts = asyncio.run(do_rollouts(tables, echo, MinViableGroup(min_successful=8, max_retries=1)))
    assert 0 < rollouts.num_groups_skipped < 80
    assert len(rollouts.owned_groups_P) + rollouts.num_groups_skipped == 80
    assert rollouts.num_errors == {"OSError": len(failed)}

    rollouts = asyncio.run(do_rollouts(tables, echo, MinViableGroup(min_successful=1, max_retries=1)))
    num_kept = sum(len(group.trajectories_G) for _, group in rollouts.owned_groups_P)
    assert 0 < rollouts.num_rollouts_dropped == 80 * 8 - num_kept


def test_a_batch_over_environments_that_raise_hang_and_return_nothing_finishes_with_exact_counters():
    """Of the tries a fifth raise, one in twenty hangs and one in twenty shows an observation of no tokens."""
    draws = random.Random(0)
    expected = {"OSError": 0, "TimeoutError": 0, "InvalidRequest": 0}

    @dataclass
    class Flaky:
        env: CountingEnv

        async def initial_observation(self) -> tuple[Observation, StopCondition]:
            draw = draws.random()
            if draw < 0.2:
                expected["OSError"] += 1
                raise OSError("flaky")
            if draw < 0.25:
                expected["TimeoutError"] += 1
                await asyncio.sleep(60.0)
            if draw < 0.3:
                expected["InvalidRequest"] += 1
                return ModelInput.empty(), [0]
            return await self.env.initial_observation()

        async def step(self, action: Action) -> StepResult:
            return await self.env.step(action)

    tables = [Table(lambda seat: Flaky(CountingEnv(seat)), 8)] * 100
    on_error = MinViableGroup(min_successful=7, max_retries=1, timeout_s=0.3)

    async def silent_on_nothing(model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None):
        return await echo(model_input if model_input.length else ModelInput.from_ints([1]), stop)

    rollouts = run(do_rollouts(tables, silent_on_nothing, on_error))
    assert rollouts.num_errors == expected
    assert all(expected.values())
    sizes = [len(group.trajectories_G) for _, group in rollouts.owned_groups_P]
    assert set(sizes) == {7, 8}
    assert rollouts.num_rollouts_dropped == sizes.count(7)
    assert rollouts.num_groups_skipped == 100 - len(sizes) > 0


def test_metrics_of_a_tag_are_those_of_its_groups_after_skipping_and_filtering():
    def constant(seat: int) -> Env:
        return CountingEnv(seat, rewards=[0.0])

    builders = [
        Table(constant, 2, tags=["easy"]),
        one_bad_seat(0, KeyError(), num_seats=1),
        Table(lambda seat: CountingEnv(seat, rewards=[10.0 + seat]), 2, tags=["hard"]),
        Table(lambda seat: CountingEnv(seat, rewards=[20.0 + seat]), 2, tags=["mid"]),
    ]
    rollouts = asyncio.run(do_rollouts(builders, echo, MinViableGroup(max_retries=0)))
    owned = remove_constant_reward_groups(rollouts.owned_groups_P)
    metrics = compute_trajectory_metrics(
        [group for _, group in owned], [builder.logging_tags() for builder, _ in owned]
    )
    assert metrics["env/hard/reward/total"] == 10.5
    assert metrics["env/mid/reward/total"] == 20.5
    assert not any(name.startswith("env/easy/") for name in metrics)
