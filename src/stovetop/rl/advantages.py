"""Advantages: by how much a trajectory did better than could be expected. An estimator is a function from the groups of
a batch to one number per trajectory; which tokens that number goes to is decided in data_processing.

Shape suffixes: `P` problems, `G` members of a group.
"""

from collections.abc import Sequence

from stovetop.rl.types import TrajectoryGroup


def compute_advantages(groups_P: Sequence[TrajectoryGroup]) -> list[list[float]]:
    """advantages_P_G: each total reward minus the mean of its group.

    It is not divided by the group's standard deviation, which would weigh problems by how seldom they are mixed
    (Liu et al. 2025, arXiv:2503.20783). Rewards [1, 0, 0, 1] give [0.5, -0.5, -0.5, 0.5].
    """
    return [_centred(group.get_total_rewards()) for group in groups_P]


def _centred(rewards_G: Sequence[float]) -> list[float]:
    # Measured from the first reward, so that equal rewards give exactly zero and no gradient, whatever their value.
    offsets_G = [reward - rewards_G[0] for reward in rewards_G]
    mean = sum(offsets_G) / len(offsets_G)
    return [offset - mean for offset in offsets_G]
