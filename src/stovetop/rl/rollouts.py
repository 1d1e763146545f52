"""Rollouts: a policy plays in environments, for one episode, one group, or all groups of a batch at once; and what
becomes of a rollout that fails. Rewards are gathered here, never judged: that is the environment's part.

Shape suffixes: `P` problems, `G` members of a group.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeVar, assert_never, get_args

from stovetop.checks import check
from stovetop.completers import TokenCompleter
from stovetop.concurrency import map_together, together
from stovetop.errors import EnvError, GradeError, InvalidRequest, RequestFailedError, ServiceClosed, UnknownName
from stovetop.renderers.messages import Message
from stovetop.rl.limits import NO_LIMITS, Played, RolloutLimits, TerminationRewardPolicy
from stovetop.rl.sampling_policy import SamplingPolicy
from stovetop.rl.types import (
    Env,
    EnvGroupBuilder,
    Metrics,
    Observation,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Transition,
)
from stovetop.rules import Whole, number
from stovetop.tracking import logtree
from stovetop.tracking.chats import ConversationFormatter
from stovetop.tracking.html_tree import Child
from stovetop.tracking.waiting import waiting_for
from stovetop.types import ModelInput

log = logging.getLogger(__name__)

T = TypeVar("T")


# ---- what to do about failures -----------------------------------------------------------------------------------


NumRetries = Annotated[int, Whole(0)]
Seconds = Annotated[float, number(above=0)]


@dataclass(frozen=True, slots=True)
class FailFast:
    """The first failure is raised, and everything beside it is cancelled."""


@dataclass(frozen=True, slots=True)
class RetryOnFailure:
    """A failed rollout is tried again in a fresh environment; what fails after the last retry is raised."""

    max_retries: NumRetries = 3  # of each rollout, on top of its first try
    timeout_s: Seconds | None = None  # of one try; None: as long as it takes

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class MinViableGroup:
    """As RetryOnFailure, but a rollout that used up its retries is left out of its group, and a group with too few left
    is skipped. Both are counted.

    That holds for failures of environments and graders (EnvError, GradeError), for what ran out of time, and for an
    observation that the policy refuses (InvalidRequest), because it is too long, say. What fails beyond these is not
    the group's: a policy that raises anything else, and a service that fails or is closed, be it that of the policy or
    of a judge in the environment, or a closed pool of worker processes, is raised after the retries. Else a batch would
    come out empty and look like one of bad environments.
    """

    # rollouts that a group needs; None: three quarters of them, rounded up
    min_successful: Annotated[int, Whole(1)] | None = None
    max_retries: NumRetries = 3
    timeout_s: Seconds | None = None

    def __post_init__(self) -> None:
        check(self)


ErrorPolicy = FailFast | RetryOnFailure | MinViableGroup
OnRolloutError = Literal["raise", "retry", "skip"]


def error_policy(on_rollout_error: OnRolloutError, timeout_s: float | None = None) -> ErrorPolicy:
    """As a config names them: what fails, or takes longer than `timeout_s`, is raised at once, is raised after three
    retries, or is then left out of its group and counted."""
    match on_rollout_error:
        case "raise":
            return RetryOnFailure(max_retries=0, timeout_s=timeout_s)
        case "retry":
            return RetryOnFailure(timeout_s=timeout_s)
        case "skip":
            return MinViableGroup(timeout_s=timeout_s)
        case _:
            raise UnknownName("on_rollout_error", on_rollout_error, get_args(OnRolloutError))


FAIL_FAST = FailFast()


# ---- one episode, one group, one batch ---------------------------------------------------------------------------


async def do_single_rollout(
    policy: TokenCompleter, env: Env, *, limits: RolloutLimits = NO_LIMITS, name: str = "rollout"
) -> Trajectory:
    """Plays until the environment says it is done, or a limit is reached. What the environment raises becomes an
    EnvError that begins with `name` and says where it happened; what the policy raises stays as it is."""
    episode = _Episode(f"{name}: {type(env).__name__}")
    if isinstance(policy, SamplingPolicy):
        policy = policy.of_one_rollout()
    with logtree.collected() as notes:
        episode.notes = notes
        stop_reason = await _or_none_in(limits.rollout_timeout_s, _play(policy, env, episode, limits))
    if stop_reason is None:
        stop_reason = StopReason.ROLLOUT_TIMEOUT
    if not episode.transitions:
        times = (
            f"rollout_timeout_s={limits.rollout_timeout_s}, sampling_turn_timeout_s={limits.sampling_turn_timeout_s}"
        )
        raise EnvError(f"{episode.where} had no turn in time: {times}") from TimeoutError(times)
    if not episode.transitions[-1].episode_done:
        episode.transitions = [
            replace(turn, reward=limits.rewards.on_limit(turn.reward)) for turn in episode.transitions
        ]
    others = [each for each in episode.notes if not isinstance(each, ConversationFormatter)]
    return Trajectory(episode.transitions, episode.observation, stop_reason, episode.chat, others)


@dataclass(slots=True)
class _Episode:
    """So far."""

    where: str
    observation: Observation = field(default_factory=ModelInput.empty)
    transitions: list[Transition] = field(default_factory=list[Transition])
    num_tool_calls: int = 0
    num_sampled: int = 0
    notes: list[Child] = field(default_factory=list[Child])  # logged by the environment
    num_notes_seen: int = 0
    chat: Sequence[Message] | None = None  # what it shows, where it has logged that

    def take_chat(self) -> None:
        """The chat that the environment has logged since this was called before, if it has."""
        chats = [each for each in self.notes[self.num_notes_seen :] if isinstance(each, ConversationFormatter)]
        self.chat = chats[-1].messages if chats else None
        self.num_notes_seen = len(self.notes)

    def played(self) -> Played:
        last = self.transitions[-1] if self.transitions else None
        return Played(
            len(self.transitions),
            self.num_tool_calls,
            self.num_sampled,
            last.ob.length + len(last.ac.tokens) if last is not None else 0,
            self.observation.length,
        )


async def _play(policy: TokenCompleter, env: Env, episode: _Episode, limits: RolloutLimits) -> StopReason:
    where = episode.where
    episode.observation, stop = await _answer_of(env.initial_observation(), f"{where}.initial_observation")
    episode.take_chat()
    if limits.reached(episode.played()) is not None:
        raise EnvError(
            f"{where}: the first observation leaves no room for an answer; it has {episode.observation.length} tokens, "
            f"and max_trajectory_tokens is {limits.max_trajectory_tokens}"
        )
    while True:
        observation = episode.observation
        answer = policy(observation, stop, max_tokens=limits.answer_budget(episode.played()))
        with waiting_for("%s: an answer of the policy", where):
            action = await _or_none_in(limits.sampling_turn_timeout_s, _or_error(answer))
        if action is None:
            return StopReason.ROLLOUT_TIMEOUT
        result = await _answer_of(env.step(action), f"{where}.step {len(episode.transitions)}")
        episode.transitions.append(
            Transition(
                observation,
                action,
                result.reward,
                result.episode_done,
                result.metrics,
                result.trainable,
                result.logs,
                episode.chat,
            )
        )
        episode.take_chat()
        episode.num_tool_calls += result.num_tool_calls
        episode.num_sampled += len(action.tokens)
        episode.observation, stop = result.next_observation, result.next_stop_condition
        if result.episode_done:
            return result.stop_reason
        if (reached := limits.reached(episode.played())) is not None:
            return reached


async def do_group_rollout(
    builder: EnvGroupBuilder, policy: TokenCompleter, *, limits: RolloutLimits = NO_LIMITS
) -> TrajectoryGroup:
    """All environments of a group at once, then the rewards of the group. Trajectory i is that of environment i. The
    first failure is raised; `do_rollouts` offers other ways."""
    outcome = await _play_group(builder, policy, _rules(FAIL_FAST, limits))
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
        """`rollout_errors/<type>`, `/total`, `/rollouts_dropped` and `/groups_skipped`: counts, not shares."""
        return {
            **{f"rollout_errors/{name}": count for name, count in self.num_errors.items()},
            "rollout_errors/total": sum(self.num_errors.values()),
            "rollout_errors/rollouts_dropped": self.num_rollouts_dropped,
            "rollout_errors/groups_skipped": self.num_groups_skipped,
        }


async def do_rollouts(
    builders_P: Sequence[EnvGroupBuilder],
    policy: TokenCompleter,
    on_error: ErrorPolicy = FAIL_FAST,
    *,
    limits: RolloutLimits = NO_LIMITS,
) -> Rollouts:
    """All groups of a batch at once. Under MinViableGroup there may be fewer groups than builders, or none at all."""
    rules = _rules(on_error, limits)

    async def play(numbered: tuple[int, EnvGroupBuilder]) -> _GroupOutcome:
        index, builder = numbered
        with waiting_for("group %s of %s, %s", index, len(builders_P), builder):
            return await _play_group(builder, policy, rules)

    outcomes_P = await map_together(play, enumerate(builders_P), name="group")
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
class _Rules:
    """What the limits and the three error policies come down to."""

    limits: RolloutLimits

    max_retries: int
    timeout_s: float | None
    raises: bool  # whatever retries did not mend; False: what is not the group's own failure
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


def _rules(on_error: ErrorPolicy, limits: RolloutLimits) -> _Rules:
    match on_error:
        case FailFast():
            return _Rules(limits, max_retries=0, timeout_s=None, raises=True)
        case RetryOnFailure(max_retries, timeout_s):
            return _Rules(limits, max_retries, timeout_s, raises=True)
        case MinViableGroup(min_successful, max_retries, timeout_s):
            return _Rules(limits, max_retries, timeout_s, raises=False, min_successful=min_successful)
        case _:
            assert_never(on_error)


async def _play_group(builder: EnvGroupBuilder, policy: TokenCompleter, rules: _Rules) -> _GroupOutcome:
    errors: list[Exception] = []
    try:
        async with _in_time(rules.timeout_s, f"{type(builder).__name__}.make_envs"):
            envs_G = await _make_envs(builder)
        rollouts_G = await together(
            (_play_with_retries(builder, policy, rules, index, env) for index, env in enumerate(envs_G)),
            name="rollout",
        )
        errors.extend(error for rollout in rollouts_G for error in rollout.errors)
        finished = [(rollout.trajectory, rollout.env) for rollout in rollouts_G if rollout.trajectory is not None]
        min_successful = math.ceil(0.75 * len(envs_G)) if rules.min_successful is None else rules.min_successful
        if len(finished) < min_successful:
            num_rollouts = f"{len(finished)} of {len(envs_G)} rollouts succeeded, {min_successful} are needed"
            log.warning("%s is skipped: %s", type(builder).__name__, num_rollouts)
            return _GroupOutcome(None, errors)
        with waiting_for("compute_group_rewards"):
            group = await _reward_group(builder, finished, rules.limits.rewards)
        return _GroupOutcome(group, errors, num_dropped=len(envs_G) - len(finished))
    except (EnvError, GradeError) as error:
        if rules.raises or not _is_of_the_group(error):
            raise
        log.warning("%s is skipped: %s", type(builder).__name__, error)
        return _GroupOutcome(None, [*errors, error])


async def _play_with_retries(
    builder: EnvGroupBuilder, policy: TokenCompleter, rules: _Rules, index: int, env: Env
) -> _RolloutOutcome:
    name = f"rollout {index} of {type(builder).__name__}"
    errors: list[Exception] = []
    while True:
        try:
            async with _in_time(rules.timeout_s, f"{name}: {type(env).__name__}"):
                if errors:
                    env = (await _make_envs(builder))[index]
                trajectory = await do_single_rollout(policy, env, limits=rules.limits, name=name)
            return _RolloutOutcome(env, trajectory, errors)
        except Exception as error:
            errors.append(error)
            if len(errors) > rules.max_retries and (rules.raises or not _is_of_the_group(error)):
                raise
            log.warning("try %d of %d failed: %s", len(errors), 1 + rules.max_retries, error)
            if len(errors) > rules.max_retries:
                return _RolloutOutcome(env, None, errors)


async def _or_none_in(timeout_s: float | None, answer: Awaitable[T]) -> T | None:
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await answer
    except TimeoutError:
        if not deadline.expired():
            raise
        return None


@asynccontextmanager
async def _in_time(timeout_s: float | None, what: str) -> AsyncGenerator[None]:
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            yield
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise EnvError(f"{what} did not finish within {timeout_s} s") from error


# ---- asking the user's code, where failures get their names ------------------------------------------------------


async def _make_envs(builder: EnvGroupBuilder) -> Sequence[Env]:
    envs_G = await _answer_of(builder.make_envs(), f"{type(builder).__name__}.make_envs")
    if not envs_G:
        raise EnvError(f"{type(builder).__name__}.make_envs made no environment; a group needs at least one")
    return envs_G


async def _reward_group(
    builder: EnvGroupBuilder, played_G: Sequence[tuple[Trajectory, Env]], policy: TerminationRewardPolicy
) -> TrajectoryGroup:
    trajectories_G = [trajectory for trajectory, _ in played_G]
    rewards_G = [0.0] * len(played_G)
    metrics_G: list[Metrics] = [{} for _ in played_G]
    graded = [
        index
        for index, trajectory in enumerate(trajectories_G)
        if not (policy.skip_grading_on_timeout and trajectory.stop_reason is StopReason.ROLLOUT_TIMEOUT)
    ]
    try:
        async with _in_time(policy.grader_timeout_s, "it"):
            answer = builder.compute_group_rewards(
                [trajectories_G[index] for index in graded], [played_G[index][1] for index in graded]
            )
            scores = await _or_error(answer)
        for index, (reward, metrics) in zip(graded, scores, strict=True):
            done = trajectories_G[index].transitions[-1].episode_done
            rewards_G[index] = reward if done else policy.on_limit(reward)
            metrics_G[index] = metrics
        return TrajectoryGroup(trajectories_G, rewards_G, metrics_G)
    except Exception as error:
        raise GradeError(f"{type(builder).__name__}.compute_group_rewards failed: {error!r}") from error


async def _answer_of(answer: Awaitable[T], what: str) -> T:
    try:
        with waiting_for("%s", what):
            return await _or_error(answer)
    except Exception as error:
        raise EnvError(f"{what} failed: {error!r}") from error


async def _or_error(answer: Awaitable[T]) -> T:
    """Where the user's code waited for something that was cancelled, and the rollout was not, that is a
    failure like any other. As a cancellation it would end the batch without a word."""
    try:
        return await answer
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        raise RuntimeError("what it waited for was cancelled") from error


def _is_of_the_group(error: Exception) -> bool:
    """Whether MinViableGroup may leave out what failed, as its docstring says."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, ServiceClosed | RequestFailedError):
            return False
        link = link.__cause__
    return isinstance(error, EnvError | GradeError | InvalidRequest)


def _kind(error: Exception) -> str:
    """The type that the environment raised, or that of an error that came from elsewhere."""
    return type(error.__cause__ if isinstance(error, EnvError) and error.__cause__ else error).__name__
