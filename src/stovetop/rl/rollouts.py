"""Rollouts: a policy plays in environments, for one episode, one group, or all groups of a batch at once; and what
becomes of a rollout that fails. Rewards are gathered here, never judged: that is the environment's part.

Shape suffixes: `P` problems, `G` members of a group.
"""

import asyncio
import hashlib
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, assert_never

from stovetop.client import SamplingClient
from stovetop.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from stovetop.concurrency import map_together, together
from stovetop.errors import EnvError, GradeError, InvalidRequest
from stovetop.futures import APIFuture
from stovetop.rl.types import Env, EnvGroupBuilder, Trajectory, TrajectoryGroup, Transition
from stovetop.types import ModelInput, SampleResponse, SamplingParams

log = logging.getLogger(__name__)

T = TypeVar("T")


# ---- the policy --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Request:
    num_samples: int = 0
    response: APIFuture[SampleResponse] | None = None  # None: others may join


class SamplingPolicy:
    """A TokenCompleter that samples for many rollouts at once. Calls for the same prompt that are made together become
    one request for several samples, so that a model computes the prompt of a group once.

    With a seed, answers depend on it, on the prompt, and on how many answers to that prompt were asked for before.
    """

    def __init__(
        self, sampling_client: SamplingClient, max_tokens: int, temperature: float = 1.0, seed: int | None = None
    ) -> None:
        self._client = sampling_client
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._seed = seed
        # Requests that can still be joined, by prompt, stop condition and budget.
        self._open: dict[tuple[ModelInput, tuple[str | int, ...], int], _Request] = {}
        self._num_asked: Counter[ModelInput] = Counter()

    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        budget = self._max_tokens if max_tokens is None else min(self._max_tokens, max_tokens)
        key = (model_input, tuple(stop), budget)
        request = self._open.setdefault(key, _Request())
        index = request.num_samples
        request.num_samples += 1
        await asyncio.sleep(0)  # every rollout that is ready now gets here before the first goes on
        if request.response is None:
            self._open.pop(key, None)
            params = SamplingParams(budget, self._next_seed(model_input, request.num_samples), stop, self._temperature)
            request.response = self._client.sample(model_input, request.num_samples, params)
        sequence = (await request.response).sequences[index]
        return TokensWithLogprobs(sequence.tokens, sequence.logprobs, sequence.stop_reason)

    def _next_seed(self, prompt: ModelInput, num_samples: int) -> int | None:
        num_before = self._num_asked[prompt]
        self._num_asked[prompt] += num_samples
        if self._seed is None:
            return None
        digest = hashlib.sha256(repr((self._seed, num_before, prompt)).encode()).digest()
        return int.from_bytes(digest[:8]) >> 1  # 63 bits


# ---- what to do about failures -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FailFast:
    """The first failure is raised, and everything beside it is cancelled."""


@dataclass(frozen=True, slots=True)
class RetryOnFailure:
    """A failed rollout is tried again in a fresh environment; what fails after the last retry is raised."""

    max_retries: int = 3  # of each rollout
    timeout_s: float | None = None  # of one try; None: as long as it takes


@dataclass(frozen=True, slots=True)
class MinViableGroup:
    """As RetryOnFailure, but nothing is raised: a rollout that used up its retries is left out of its group, and a
    group with too few left is skipped. Both are counted."""

    min_successful: int | None = None  # rollouts that a group needs; None: three quarters of them, rounded up
    max_retries: int = 3
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.min_successful is not None and self.min_successful < 1:
            raise InvalidRequest(f"MinViableGroup.min_successful must be at least 1: {self.min_successful}")


ErrorPolicy = FailFast | RetryOnFailure | MinViableGroup
FAIL_FAST = FailFast()


# ---- one episode, one group, one batch ---------------------------------------------------------------------------


async def do_single_rollout(policy: TokenCompleter, env: Env, *, name: str = "rollout") -> Trajectory:
    """Plays until the environment says it is done. What the environment raises becomes an EnvError that begins with
    `name` and says where it happened; what the policy raises stays as it is."""
    where = f"{name}: {type(env).__name__}"
    transitions: list[Transition] = []
    observation, stop = await _answer_of(env.initial_observation(), f"{where}.initial_observation")
    while not transitions or not transitions[-1].episode_done:
        action = await policy(observation, stop)
        result = await _answer_of(env.step(action), f"{where}.step {len(transitions)}")
        transitions.append(Transition(observation, action, result.reward, result.episode_done, result.metrics))
        observation, stop = result.next_observation, result.next_stop_condition
    return Trajectory(transitions, observation)


async def do_group_rollout(builder: EnvGroupBuilder, policy: TokenCompleter) -> TrajectoryGroup:
    """All environments of a group at once, then the rewards of the group. Trajectory i is that of environment i. The
    first failure is raised; `do_rollouts` offers other ways."""
    outcome = await _play_group(builder, policy, _limits(FAIL_FAST))
    assert outcome.group is not None  # only MinViableGroup skips
    return outcome.group


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What a batch came to: its groups in order, each with its builder; and every failure, counted."""

    owned_groups_P: Sequence[tuple[EnvGroupBuilder, TrajectoryGroup]]
    num_errors: Mapping[str, int]  # by the name of the exception's type; those that a retry mended are among them
    num_rollouts_dropped: int  # missing from groups that were kept
    num_groups_skipped: int

    def error_metrics(self) -> dict[str, float]:
        return {
            **{f"rollout_errors/{name}": count for name, count in self.num_errors.items()},
            "rollout_errors/total": sum(self.num_errors.values()),
            "rollout_errors/rollouts_dropped": self.num_rollouts_dropped,
            "rollout_errors/groups_skipped": self.num_groups_skipped,
        }


async def do_rollouts(
    builders_P: Sequence[EnvGroupBuilder], policy: TokenCompleter, on_error: ErrorPolicy = FAIL_FAST
) -> Rollouts:
    """All groups of a batch at once. Under MinViableGroup there may be fewer groups than builders, or none at all."""
    limits = _limits(on_error)
    outcomes_P = await map_together(lambda builder: _play_group(builder, policy, limits), builders_P, name="group")
    num_errors: Counter[str] = Counter()
    for outcome in outcomes_P:
        num_errors.update(_kind(error) for error in outcome.errors)
    return Rollouts(
        [
            (builder, outcome.group)
            for builder, outcome in zip(builders_P, outcomes_P, strict=True)
            if outcome.group is not None
        ],
        num_errors,
        sum(outcome.num_dropped for outcome in outcomes_P),
        sum(outcome.group is None for outcome in outcomes_P),
    )


# ---- tries -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Limits:
    """What the three error policies come down to."""

    max_retries: int
    timeout_s: float | None
    raises: bool  # what retries did not mend
    min_successful: int | None = None


@dataclass(frozen=True, slots=True)
class _RolloutOutcome:
    env: Env
    trajectory: Trajectory | None  # None when every try failed
    errors: list[Exception]


@dataclass(frozen=True, slots=True)
class _GroupOutcome:
    group: TrajectoryGroup | None  # None when it was skipped
    errors: list[Exception]
    num_dropped: int = 0


def _limits(on_error: ErrorPolicy) -> _Limits:
    match on_error:
        case FailFast():
            return _Limits(max_retries=0, timeout_s=None, raises=True)
        case RetryOnFailure(max_retries, timeout_s):
            return _Limits(max_retries, timeout_s, raises=True)
        case MinViableGroup(min_successful, max_retries, timeout_s):
            return _Limits(max_retries, timeout_s, raises=False, min_successful=min_successful)
        case _:
            assert_never(on_error)


async def _play_group(builder: EnvGroupBuilder, policy: TokenCompleter, limits: _Limits) -> _GroupOutcome:
    errors: list[Exception] = []
    try:
        envs_G = await _make_envs(builder)
        rollouts_G = await together(
            (_play_with_retries(builder, policy, limits, index, env) for index, env in enumerate(envs_G)),
            name="rollout",
        )
        errors.extend(error for rollout in rollouts_G for error in rollout.errors)
        finished = [(rollout.trajectory, rollout.env) for rollout in rollouts_G if rollout.trajectory is not None]
        min_successful = math.ceil(0.75 * len(envs_G)) if limits.min_successful is None else limits.min_successful
        if len(finished) < min_successful:
            num_rollouts = f"{len(finished)} of {len(envs_G)} rollouts succeeded, {min_successful} are needed"
            log.warning("%s is skipped: %s", type(builder).__name__, num_rollouts)
            return _GroupOutcome(None, errors)
        group = await _reward_group(builder, [trajectory for trajectory, _ in finished], [env for _, env in finished])
        return _GroupOutcome(group, errors, num_dropped=len(envs_G) - len(finished))
    except (EnvError, GradeError) as error:
        if limits.raises:
            raise
        log.warning("%s is skipped: %s", type(builder).__name__, error)
        return _GroupOutcome(None, [*errors, error])


async def _play_with_retries(
    builder: EnvGroupBuilder, policy: TokenCompleter, limits: _Limits, index: int, env: Env
) -> _RolloutOutcome:
    name = f"rollout {index} of {type(builder).__name__}"
    errors: list[Exception] = []
    while True:
        try:
            if errors:
                env = (await _make_envs(builder))[index]
            return _RolloutOutcome(env, await _play_in_time(policy, env, name, limits.timeout_s), errors)
        except Exception as error:
            errors.append(error)
            if len(errors) > limits.max_retries and limits.raises:
                raise
            log.warning("try %d of %d failed: %s", len(errors), 1 + limits.max_retries, error)
            if len(errors) > limits.max_retries:
                return _RolloutOutcome(env, None, errors)


async def _play_in_time(policy: TokenCompleter, env: Env, name: str, timeout_s: float | None) -> Trajectory:
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await do_single_rollout(policy, env, name=name)
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise EnvError(f"{name}: {type(env).__name__} did not finish within {timeout_s} s") from error


# ---- asking the user's code, where failures get their names ------------------------------------------------------


async def _make_envs(builder: EnvGroupBuilder) -> Sequence[Env]:
    envs_G = await _answer_of(builder.make_envs(), f"{type(builder).__name__}.make_envs")
    if not envs_G:
        raise EnvError(f"{type(builder).__name__}.make_envs made no environment; a group needs at least one")
    return envs_G


async def _reward_group(
    builder: EnvGroupBuilder, trajectories_G: Sequence[Trajectory], envs_G: Sequence[Env]
) -> TrajectoryGroup:
    try:
        scores_G = await builder.compute_group_rewards(trajectories_G, envs_G)
        return TrajectoryGroup(trajectories_G, [reward for reward, _ in scores_G], [metrics for _, metrics in scores_G])
    except Exception as error:
        raise GradeError(f"{type(builder).__name__}.compute_group_rewards failed: {error!r}") from error


async def _answer_of(answer: Awaitable[T], what: str) -> T:
    try:
        return await answer
    except Exception as error:
        raise EnvError(f"{what} failed: {error!r}") from error


def _kind(error: Exception) -> str:
    """The type that the environment raised, or that of an error that came from elsewhere."""
    return type(error.__cause__ if isinstance(error, EnvError) and error.__cause__ else error).__name__
