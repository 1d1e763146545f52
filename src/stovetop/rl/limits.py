"""How long an episode may go on, what it is worth when a limit ended it, and what an answer that cannot be read leads
to. These are values; rollouts and message environments act on them.
"""

from dataclasses import dataclass
from typing import NamedTuple

from stovetop.errors import InvalidRequest
from stovetop.rl.types import StopReason


def _check_positive(owner: str, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:
            raise InvalidRequest(f"{owner}.{name} must be positive, or None for no limit: {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminationRewardPolicy:
    """What becomes of the rewards of an episode that a limit ended, while its environment was not done."""

    zero_reward_on_limit: bool = False  # each of its rewards, of a step or of the group, is at most 0
    skip_grading_on_timeout: bool = False  # one that ran out of time is not shown to the group's grader, and gets 0
    grader_timeout_s: float | None = None  # of the rewards of any group; past it they are a GradeError

    def __post_init__(self) -> None:
        _check_positive("TerminationRewardPolicy", grader_timeout_s=self.grader_timeout_s)

    def on_limit(self, reward: float) -> float:
        """What a reward of an episode that a limit ended is worth."""
        return min(reward, 0.0) if self.zero_reward_on_limit else reward


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """Of one episode; None is no limit. An answer is cut off where a limit of tokens is reached. The others are looked
    at after each turn, which is played to its end. Time, of the episode or of an answer, may run out in the middle of a
    turn: then the episode ends without that turn, and one without any other fails.
    """

    max_turns: int | None = None
    max_trajectory_tokens: int | None = None  # an observation with its answer
    max_sampled_tokens: int | None = None  # all answers together
    max_tool_calls: int | None = None  # as environments report them
    max_turn_tokens: int | None = None  # one answer
    rollout_timeout_s: float | None = None
    sampling_turn_timeout_s: float | None = None  # of one answer
    rewards: TerminationRewardPolicy = TerminationRewardPolicy()

    def __post_init__(self) -> None:
        _check_positive(
            "RolloutLimits",
            max_turns=self.max_turns,
            max_trajectory_tokens=self.max_trajectory_tokens,
            max_sampled_tokens=self.max_sampled_tokens,
            max_tool_calls=self.max_tool_calls,
            max_turn_tokens=self.max_turn_tokens,
            rollout_timeout_s=self.rollout_timeout_s,
            sampling_turn_timeout_s=self.sampling_turn_timeout_s,
        )

    def answer_budget(self, played: "Played") -> int | None:
        """How many tokens the next answer may have."""
        budgets = [
            self.max_turn_tokens,
            _minus(self.max_trajectory_tokens, played.num_observed),
            _minus(self.max_sampled_tokens, played.num_sampled),
        ]
        return min((budget for budget in budgets if budget is not None), default=None)

    def reached(self, played: "Played") -> StopReason | None:
        """Which limit ends an episode that has played so far, if any. A policy may have gone past one: it is asked for
        so many tokens, not made to keep to them."""
        left = {
            StopReason.MAX_TURNS: _minus(self.max_turns, played.num_turns),
            StopReason.MAX_TOOL_CALLS: _minus(self.max_tool_calls, played.num_tool_calls),
            StopReason.MAX_SAMPLED_TOKENS: _minus(self.max_sampled_tokens, played.num_sampled),
            StopReason.MAX_TOKENS: _minus(self.max_trajectory_tokens, played.num_in_last_turn),
            StopReason.CONTEXT_OVERFLOW: _minus(self.max_trajectory_tokens, played.num_observed),
        }
        return next((reason for reason, number in left.items() if number is not None and number < 1), None)


NO_LIMITS = RolloutLimits()


class Played(NamedTuple):
    """What of an episode the limits count."""

    num_turns: int
    num_tool_calls: int
    num_sampled: int  # tokens of all answers
    num_in_last_turn: int  # tokens of the last observation and its answer
    num_observed: int  # tokens of the observation that comes next


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseErrorPolicy:
    """What happens when an answer cannot be read, in environments that do not end there."""

    max_consecutive: int = 0  # in a row that are forgiven; the next one ends the episode with failed_parse_reward
    penalty: float = 0.0  # added to the rewards for each that is forgiven
    reply: str = "That answer could not be read. Please answer again, in the right form."  # what the policy then sees
    mask_error_turns: bool = False  # leave their tokens out of training

    def __post_init__(self) -> None:
        if self.max_consecutive < 0:
            raise InvalidRequest(f"ParseErrorPolicy.max_consecutive must not be negative: {self.max_consecutive}")


# ---- presets -----------------------------------------------------------------------------------------------------


class Termination(NamedTuple):
    """How episodes end: `limits` is for rollouts, `parse_errors` for the environments."""

    limits: RolloutLimits
    parse_errors: ParseErrorPolicy


def simple() -> Termination:
    """The environment decides, and the first answer that cannot be read is the last."""
    return Termination(NO_LIMITS, ParseErrorPolicy(max_consecutive=0))


def agentic() -> Termination:
    """For long episodes with tools: an agent that does not come to an end earns nothing."""
    rewards = TerminationRewardPolicy(zero_reward_on_limit=True, skip_grading_on_timeout=True, grader_timeout_s=900.0)
    limits = RolloutLimits(max_turns=10, max_trajectory_tokens=65_536, max_tool_calls=30, rewards=rewards)
    return Termination(limits, ParseErrorPolicy(max_consecutive=2))


def _minus(limit: int | None, used: int) -> int | None:
    return None if limit is None else limit - used
