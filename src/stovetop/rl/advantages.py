"""Advantages: by how much an episode, or one of its turns, did better than could be expected. An estimator is a value;
`compute_advantages` is the one function that reads it. Which tokens a number goes to is decided in data_processing.

Shape suffixes: `P` problems, `G` members of a group, `U` turns of one episode, `N` steps of any series.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple, assert_never

import numpy as np
import numpy.typing as npt

from stovetop.errors import InvalidRequest
from stovetop.rl.types import Trajectory, TrajectoryGroup

Advantage = float | Sequence[float]
"""Of a whole episode, or of each of its turns."""

Floats = npt.NDArray[np.float64]

_ROUNDING = 1e-12  # rewards whose spread is below this share of their size differ by rounding only


# ---- estimators --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Centred:
    """Each total reward minus the mean of its group: [1, 0, 0, 1] gives [½, -½, -½, ½].

    It is not divided by the group's standard deviation, which would weigh problems by how seldom they are mixed
    (Liu et al. 2025, arXiv:2503.20783).
    """


@dataclass(frozen=True, slots=True)
class Standardised:
    """Centred, divided by the group's standard deviation (GRPO, Shao et al. 2024, arXiv:2402.03300): [1, 0, 0, 1] gives
    [1, -1, -1, 1]. Where all rewards are equal there is no spread to divide by, and every advantage is zero."""

    std: Literal["population", "sample"] = "population"  # of n rewards: √(Σ/n), ½ here, or √(Σ/(n-1)), 0.577


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """Each total reward minus the mean of the others (RLOO, Ahmadian et al. 2024, arXiv:2402.14740): [0, 0, 1, 1] gives
    [-⅔, -⅔, ⅔, ⅔]. A group of one has no others, and its advantage is zero."""


@dataclass(frozen=True, slots=True)
class GAE:
    """One advantage per turn, by `compute_gae` over the turns of an episode. The final reward comes with the last turn.

    No model of values exists here, so they are a stated baseline. "group_mean": the value of turn u is the mean, over
    the members of the group that have a turn u, of the rewards from there on, discounted; an episode of one turn then
    has its centred advantage. "zero": every value is 0.
    """

    gamma: float = 0.99  # discount of a turn
    lam: float = 0.95  # 0: rewards of one turn and the values; 1: rewards alone
    baseline: Literal["group_mean", "zero"] = "group_mean"

    def __post_init__(self) -> None:
        for name, value in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0 <= value <= 1:
                raise InvalidRequest(f"GAE.{name} must be in [0, 1]: {value}")


Estimator = Centred | Standardised | LeaveOneOut | GAE
CENTRED = Centred()


def compute_advantages(groups_P: Sequence[TrajectoryGroup], estimator: Estimator = CENTRED) -> list[list[Advantage]]:
    """advantages_P_G: of each episode, or of each of its turns, as the estimator says."""
    return [_of_group(group, estimator) for group in groups_P]


def normalize_advantages(advantages_P_G: Sequence[Sequence[Advantage]]) -> list[list[Advantage]]:
    """Shifted and scaled so that all numbers of the batch, whether of episodes or of turns, have mean 0 and standard
    deviation 1 (that of the population). Where all are equal, all become 0.

    A group whose numbers are all 0, as those of equal rewards are, has no part in mean and deviation, and keeps its
    zeros: the others are worth the same whether it is there or was filtered out before. Rewards [1, 3] beside
    [5, 5, 5] become [-1, 1] and [0, 0, 0].
    """
    numbers_P = [list(chain.from_iterable(map(_numbers, advantages_G))) for advantages_G in advantages_P_G]
    least = _ROUNDING * max(map(abs, chain.from_iterable(numbers_P)), default=0.0)
    teaches_P = [any(abs(number) > least for number in numbers) for numbers in numbers_P]
    numbers = list(
        chain.from_iterable(numbers for numbers, teaches in zip(numbers_P, teaches_P, strict=True) if teaches)
    )
    mean, spread = (_mean(numbers), _spread(numbers, "population")) if numbers else (0.0, 0.0)

    def normal(number: float) -> float:
        return (number - mean) / spread if spread else 0.0

    def normal_of(advantage: Advantage) -> Advantage:
        return [normal(number) for number in advantage] if isinstance(advantage, Sequence) else normal(advantage)

    return [
        [normal_of(advantage) if teaches else _zero(advantage) for advantage in advantages_G]
        for advantages_G, teaches in zip(advantages_P_G, teaches_P, strict=True)
    ]


def _of_group(group: TrajectoryGroup, estimator: Estimator) -> list[Advantage]:
    rewards_G = group.get_total_rewards()
    match estimator:
        case Centred():
            return [*_centred(rewards_G)]
        case Standardised(std):
            spread = _spread(rewards_G, std)
            return [advantage / spread if spread else 0.0 for advantage in _centred(rewards_G)]
        case LeaveOneOut():
            others = len(rewards_G) - 1
            return [advantage * len(rewards_G) / others if others else 0.0 for advantage in _centred(rewards_G)]
        case GAE(gamma, lam, baseline):
            rewards_G_U = [
                _rewards_of_turns(trajectory, final_reward)
                for trajectory, final_reward in zip(group.trajectories_G, group.final_rewards_G, strict=True)
            ]
            values_U = _mean_returns(rewards_G_U, gamma) if baseline == "group_mean" else [0.0] * _longest(rewards_G_U)
            return [compute_gae(rewards, values_U[: len(rewards)], gamma, lam).advantages for rewards in rewards_G_U]
        case _:
            assert_never(estimator)


# ---- series of rewards -------------------------------------------------------------------------------------------


class AdvantagesAndReturns(NamedTuple):
    """What `compute_gae` makes of a series of rewards: one number of each kind for each step, (U,)."""

    advantages: list[float]
    returns: list[float]  # what a model of values would be trained to predict


def compute_gae(
    rewards_U: Sequence[float], values_U: Sequence[float], gamma: float = 0.99, lam: float = 0.95
) -> AdvantagesAndReturns:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438): A_u = δ_u + γλ·A_(u+1), where
    δ_u = r_u + γ·V_(u+1) - V_u; after the last step the value is 0. Returns are A + V."""
    advantages_U: list[float] = []
    advantage = next_value = 0.0
    for reward, value in zip(reversed(rewards_U), reversed(values_U), strict=True):
        advantage = reward + gamma * next_value - value + gamma * lam * advantage
        advantages_U.append(advantage)
        next_value = value
    advantages_U.reverse()
    return AdvantagesAndReturns(advantages_U, [a + v for a, v in zip(advantages_U, values_U, strict=True)])


def discounted_future_sum_vectorized(x_N: Sequence[float] | Floats, gamma: float) -> Floats:
    """y_t = x_t + γ·y_(t+1): [1, 2, 3] at ½ gives [2.75, 3.5, 3].

    Sums of 1 step become sums of 2, of 4, and so on: each round adds to a sum the one that begins where it ends.
    """
    y_N = np.array(x_N, np.float64)
    steps = 1
    while steps < len(y_N):
        y_N[:-steps] = y_N[:-steps] + gamma**steps * y_N[steps:]
        steps *= 2
    return y_N


def _rewards_of_turns(trajectory: Trajectory, final_reward: float) -> list[float]:
    *before, last = [transition.reward for transition in trajectory.transitions]
    return [*before, last + final_reward]


def _mean_returns(rewards_G_U: Sequence[Sequence[float]], gamma: float) -> list[float]:
    returns_G_U = [discounted_future_sum_vectorized(rewards_U, gamma).tolist() for rewards_U in rewards_G_U]
    return [
        _mean([returns_U[turn] for returns_U in returns_G_U if turn < len(returns_U)])
        for turn in range(_longest(rewards_G_U))
    ]


def _longest(rewards_G_U: Sequence[Sequence[float]]) -> int:
    return max(len(rewards_U) for rewards_U in rewards_G_U)


# ---- numbers -----------------------------------------------------------------------------------------------------


def _centred(rewards_G: Sequence[float]) -> list[float]:
    mean = _mean(rewards_G)
    return [reward - mean for reward in rewards_G]


def _mean(numbers: Sequence[float]) -> float:
    """Measured from the first, so that equal numbers have exactly themselves as mean: no gradient comes of rounding."""
    return numbers[0] + sum(number - numbers[0] for number in numbers) / len(numbers)


def _spread(numbers: Sequence[float], std: Literal["population", "sample"]) -> float:
    """The standard deviation; 0 where there is none but for rounding, or none can be told from a single number."""
    squares = sum(offset**2 for offset in _centred(numbers))
    degrees = len(numbers) if std == "population" else len(numbers) - 1
    spread = (squares / degrees) ** 0.5 if degrees else 0.0
    return spread if spread > _ROUNDING * max(map(abs, numbers)) else 0.0


def _zero(advantage: Advantage) -> Advantage:
    return [0.0] * len(advantage) if isinstance(advantage, Sequence) else 0.0


def _numbers(advantage: Advantage) -> Sequence[float]:
    return advantage if isinstance(advantage, Sequence) else [advantage]
