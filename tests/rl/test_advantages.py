import pytest
from hypothesis import given
from hypothesis import strategies as st

from stovetop.rl.advantages import compute_advantages

from .scripted import group

rewards = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=9)


def test_an_advantage_is_the_reward_minus_the_mean_of_its_own_group():
    assert compute_advantages([group(1, 0, 0, 1), group(3, 5)]) == [[0.5, -0.5, -0.5, 0.5], [-1.0, 1.0]]


@given(rewards)
def test_advantages_of_a_group_sum_to_zero(rewards_G: list[float]):
    assert sum(compute_advantages([group(*rewards_G)])[0]) == pytest.approx(0, abs=1e-9)


@given(st.floats(-1e3, 1e3), st.integers(1, 9))
def test_equal_rewards_give_exactly_no_advantage(reward: float, size: int):
    assert compute_advantages([group(*[reward] * size)]) == [[0.0] * size]


@given(rewards, st.sampled_from([-8.0, 0.5, 2.0]))
def test_advantages_are_not_divided_by_the_spread(rewards_G: list[float], factor: float):
    [advantages_G], [scaled_G] = (
        compute_advantages([group(*(scale * reward for reward in rewards_G))]) for scale in (1.0, factor)
    )
    assert scaled_G == pytest.approx([factor * advantage for advantage in advantages_G], abs=1e-9)
