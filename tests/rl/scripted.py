"""A policy and an environment that do as they are told: real implementations of the Protocols, without a model."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from stovetop.completers import StopCondition, TokensWithLogprobs
from stovetop.rl.types import (
    Action,
    Env,
    Metrics,
    Observation,
    StepResult,
    Trajectory,
    TrajectoryGroup,
    Transition,
)
from stovetop.types import ModelInput

STOP: StopCondition = [0]


def says(*tokens: int, logprob: float = -1.0) -> Action:
    return TokensWithLogprobs(list(tokens), [logprob] * len(tokens), "stop")


async def echo(model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None) -> TokensWithLogprobs:
    """A policy that repeats the last token of the observation."""
    return says(model_input.to_ints()[-1])


@dataclass
class CountingEnv:
    """Shows [seat], and after each turn what it showed before, the answer and 100 + turn; done after `num_turns`. A
    step takes `waits_s` and raises what `fails` returns, if anything."""

    seat: int
    num_turns: int = 1
    waits_s: float = 0.0
    fails: Callable[[], Exception | None] = lambda: None
    rewards: Sequence[float] | None = None
    cancelled: list[int] = field(default_factory=list)
    shown: list[int] = field(default_factory=list)
    turn: int = 0

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        self.shown = [self.seat]
        return ModelInput.from_ints(self.shown), STOP

    async def step(self, action: Action) -> StepResult:
        try:
            await asyncio.sleep(self.waits_s)
        except asyncio.CancelledError:
            self.cancelled.append(self.seat)
            raise
        if (error := self.fails()) is not None:
            raise error
        reward = float(self.seat) if self.rewards is None else self.rewards[self.turn]
        self.turn += 1
        self.shown = [*self.shown, *action.tokens, 100 + self.turn]
        return StepResult(
            reward, self.turn == self.num_turns, ModelInput.from_ints(self.shown), STOP, {"turn": self.turn}
        )


Scores = Sequence[tuple[float, Metrics]]


def no_scores(envs_G: Sequence[Env]) -> Scores:
    return [(0.0, {}) for _ in envs_G]


@dataclass
class Table:
    """A group whose environments `seat(i)` makes, for i below `num_seats`, and `score` rewards in the end."""

    seat: Callable[[int], Env]
    num_seats: int
    tags: Sequence[str] = ()
    score: Callable[[Sequence[Env]], Scores] = no_scores

    async def make_envs(self) -> Sequence[Env]:
        return [self.seat(index) for index in range(self.num_seats)]

    async def compute_group_rewards(self, trajectories_G: Sequence[Trajectory], envs_G: Sequence[Env]) -> Scores:
        assert len(trajectories_G) == len(envs_G)
        return self.score(envs_G)

    def logging_tags(self) -> Sequence[str]:
        return self.tags


def trajectory(*turns: tuple[Sequence[int], Sequence[int]], reward: float = 0.0) -> Trajectory:
    """From pairs of observed and answered tokens; the reward comes with the last."""
    transitions = [
        Transition(
            ModelInput.from_ints(observed),
            says(*answered),
            reward if turn == len(turns) else 0.0,
            episode_done=turn == len(turns),
        )
        for turn, (observed, answered) in enumerate(turns, start=1)
    ]
    return Trajectory(transitions, ModelInput.empty())


def group(*rewards_G: float, metrics: Mapping[str, float] | None = None) -> TrajectoryGroup:
    """One-turn trajectories of these rewards: observation [1, 2], action [3]."""
    return TrajectoryGroup(
        [trajectory(([1, 2], [3]), reward=reward) for reward in rewards_G],
        [0.0] * len(rewards_G),
        [metrics or {}] * len(rewards_G),
    )
