"""The words of reinforcement learning, as values and Protocols. Nothing here samples, trains or averages.

Glossary. A *policy* is a token completer. An *observation* is the model input that an environment shows, an *action*
the tokens that the policy answered with: their logprobs and how they stopped belong to it. A *transition* is one turn:
observation, action, reward. A *trajectory* is one *episode* as data: its transitions in order, from the first
observation until the environment says it is done. A *rollout* is the running of one. A *group* is the trajectories of
one problem, whose rewards are compared with each other. A *tag* names what a group counts under in the metrics.

Every reward is a finite number: the values below refuse any other when they are made, so none can reach a mean.

Shape suffixes: `G` members of a group.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from stovetop.completers import StopCondition, TokensWithLogprobs
from stovetop.errors import GradeError, InvalidRequest
from stovetop.renderers.messages import Message
from stovetop.tracking.html_tree import Child
from stovetop.types import ModelInput

Action = TokensWithLogprobs
Observation = ModelInput
Logprobs = list[float]
Metrics = Mapping[str, float]
Logs = Mapping[str, str | float]  # words for people: not averaged, not trained on


def _no_metrics() -> Metrics:
    return {}


def _no_logs() -> Logs:
    return {}


def _check_finite(what: str, reward: float) -> None:
    if not math.isfinite(reward):
        raise GradeError(f"{what} must be a finite number: {reward}")


# ---- what happened -----------------------------------------------------------------------------------------------


class StopReason(StrEnum):
    """Why an episode ended."""

    COMPLETED = "completed"  # the environment was done
    TOOL_STOPPED = "tool_stopped"  # a tool said so
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # an answer was cut off by the limit of the whole trajectory, or of the answer
    MAX_SAMPLED_TOKENS = "max_sampled_tokens"  # of all answers together
    MAX_TOOL_CALLS = "max_tool_calls"
    CONTEXT_OVERFLOW = "context_overflow"  # an observation left no room for an answer
    PARSE_ERROR = "parse_error"  # an answer that was no message
    ROLLOUT_TIMEOUT = "rollout_timeout"


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment answers to an action. After the last step the next observation is what it ends on."""

    reward: float
    episode_done: bool
    next_observation: Observation
    next_stop_condition: StopCondition
    metrics: Metrics = field(default_factory=_no_metrics)
    stop_reason: StopReason = StopReason.COMPLETED  # read when the episode is done
    num_tool_calls: int = 0  # that the action made
    trainable: bool = True  # False: the tokens of the action are not trained on, as if they had been observed
    logs: Logs = field(default_factory=_no_logs)  # what became of the action: shown with the rollout

    def __post_init__(self) -> None:
        _check_finite("the reward of a step", self.reward)


@dataclass(frozen=True, slots=True)
class Transition:
    """One turn."""

    ob: Observation
    ac: Action
    reward: float
    episode_done: bool
    metrics: Metrics = field(default_factory=_no_metrics)
    trainable: bool = True  # False: the tokens of the action are not trained on, as if they had been observed
    logs: Logs = field(default_factory=_no_logs)
    # The chat that the observation says, where the environment has logged it as one; for people.
    chat: Sequence[Message] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_finite("the reward of a transition", self.reward)
        if self.ob.length == 0:
            raise InvalidRequest("an observation needs at least one token for the policy to answer to: it has none")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode. `final_ob` is the observation after the last action, which was not answered. Where a limit ended
    the episode, no transition is done."""

    transitions: Sequence[Transition]
    final_ob: Observation
    stop_reason: StopReason = StopReason.COMPLETED
    final_chat: Sequence[Message] | None = field(default=None, compare=False, repr=False)  # with the last answer
    notes: Sequence[Child] = field(default=(), compare=False, repr=False)  # what the environment logged besides

    def __post_init__(self) -> None:
        if not self.transitions:
            raise InvalidRequest("a trajectory needs at least one transition: it has none")


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """The trajectories of one problem, in the order of their environments. `final_rewards_G` and `metrics_G` are what
    the group as a whole said of each (`EnvGroupBuilder.compute_group_rewards`), on top of the rewards of the steps."""

    trajectories_G: Sequence[Trajectory]
    final_rewards_G: Sequence[float]
    metrics_G: Sequence[Metrics]

    def __post_init__(self) -> None:
        lengths = len(self.trajectories_G), len(self.final_rewards_G), len(self.metrics_G)
        if len(set(lengths)) != 1 or lengths[0] == 0:
            raise InvalidRequest(
                "a group needs one final reward and one metrics dict for each of its trajectories, and at least one "
                f"trajectory; trajectories, final rewards, metrics: {', '.join(map(str, lengths))}"
            )
        for index, reward in enumerate(self.final_rewards_G):
            _check_finite(f"the final reward of rollout {index}", reward)

    def get_total_rewards(self) -> list[float]:
        """Per trajectory: the rewards of its steps plus its final reward."""
        return [
            sum(transition.reward for transition in trajectory.transitions) + final_reward
            for trajectory, final_reward in zip(self.trajectories_G, self.final_rewards_G, strict=True)
        ]


# ---- where it happens --------------------------------------------------------------------------------------------


class Env(Protocol):
    """One episode, used once: there is no reset, and no call after the step that is done. Ask the group builder for a
    new one. It holds plain data, so that it pickles."""

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """What the policy sees first, and what stops its answer. Asked once, before any step."""
        ...

    async def step(self, action: Action) -> StepResult:
        """What the policy's answer leads to: its reward, and the next observation unless the episode is done. What it
        raises becomes an EnvError that names the environment and the step."""
        ...


class EnvGroupBuilder(Protocol):
    """One problem, as plain data that pickles: it makes the environments of a group, as often as it is asked.

    Two of the three methods have bodies because most builders have nothing to add to them: derive from this class and
    write `make_envs`. What is inherited is a constant ("no group reward", "no tags"), never behaviour to refine. A
    builder that derives from nothing fits as well, if it has all three.
    """

    async def make_envs(self) -> Sequence[Env]:
        """Fresh environments, equal from call to call: a failed rollout is tried again in the one of the same index."""
        ...

    async def compute_group_rewards(
        self, trajectories_G: Sequence[Trajectory], envs_G: Sequence[Env]
    ) -> Sequence[tuple[float, Metrics]]:
        """A reward and metrics for each trajectory that only the whole group can give, such as a comparison."""
        return [(0.0, {}) for _ in trajectories_G]

    def logging_tags(self) -> Sequence[str]:
        """The names under which the group is counted, besides "all"."""
        return []


class RLDataset(Protocol):
    """Batches of problems. A position in it is one integer, and batch `index` is always the same."""

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """The groups of batch `index`, which is in 0..len - 1. The last batch may be short."""
        ...

    def __len__(self) -> int:
        """How many batches there are."""
        ...


class RLDatasetBuilder(Protocol):
    """The config from which the training set and, where there is one, the test set are made."""

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]: ...
