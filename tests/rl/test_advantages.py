import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stovetop.errors import InvalidRequest
from stovetop.rl.advantages import (
    GAE,
    Centred,
    Estimator,
    LeaveOneOut,
    Standardised,
    compute_advantages,
    compute_gae,
    discounted_future_sum_vectorized,
    normalize_advantages,
)
from stovetop.rl.types import Trajectory, TrajectoryGroup, Transition
from stovetop.types import ModelInput

from .scripted import group, says, trajectory

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


# ---- other estimators --------------------------------------------------------------------------------------------


def one_per_turn(*rewards_G_U: list[float]) -> TrajectoryGroup:
    """Trajectories whose turns have these rewards."""
    return TrajectoryGroup(
        [
            Trajectory(
                [
                    Transition(ModelInput.from_ints([1]), says(2), reward, turn == len(rewards))
                    for turn, reward in turns
                ],
                ModelInput.empty(),
            )
            for rewards in rewards_G_U
            for turns in [list(enumerate(rewards, start=1))]
        ],
        [0.0] * len(rewards_G_U),
        [{}] * len(rewards_G_U),
    )


def test_standardised_advantages_are_divided_by_the_standard_deviation_of_the_group():
    assert compute_advantages([group(0, 0, 1, 1)], Standardised()) == [[-1, -1, 1, 1]]
    [sample] = compute_advantages([group(0, 0, 1, 1)], Standardised("sample"))
    assert sample == pytest.approx([reward / 0.5773503 for reward in (-0.5, -0.5, 0.5, 0.5)])


@pytest.mark.parametrize("estimator", [Centred(), Standardised(), Standardised("sample"), LeaveOneOut()])
@pytest.mark.parametrize("rewards_G", [[0.1] * 3, [5.0], [-7.25] * 8])
def test_a_group_without_spread_has_no_advantage_under_any_estimator(estimator: Estimator, rewards_G: list[float]):
    assert compute_advantages([group(*rewards_G)], estimator) == [[0.0] * len(rewards_G)]


def test_rewards_that_differ_by_rounding_alone_are_not_blown_up():
    assert compute_advantages([group(0.1 + 0.2, 0.3, 0.3)], Standardised()) == [[0, 0, 0]]


def test_leaving_one_out_compares_with_the_mean_of_the_others():
    [advantages_G] = compute_advantages([group(0, 0, 1, 1)], LeaveOneOut())
    assert advantages_G == pytest.approx([-2 / 3, -2 / 3, 2 / 3, 2 / 3])


@given(rewards.filter(lambda rewards_G: len(rewards_G) > 1))
def test_leaving_one_out_is_what_its_definition_says(rewards_G: list[float]):
    expected = [r - (sum(rewards_G) - r) / (len(rewards_G) - 1) for r in rewards_G]
    assert compute_advantages([group(*rewards_G)], LeaveOneOut())[0] == pytest.approx(expected, abs=1e-8)


# ---- turns -------------------------------------------------------------------------------------------------------


def test_gae_has_the_values_computed_by_hand():
    assert compute_gae([1, 0, 1], [0.5, 0.5, 0.5]) == (
        pytest.approx([1.432567625, 0.46525, 0.5]),
        pytest.approx([1.932567625, 0.96525, 1.0]),
    )
    assert compute_gae([0, 0, 1], [0, 0, 0]).advantages == pytest.approx([0.88454025, 0.9405, 1.0])
    assert compute_gae([0, 0, 1], [0.1, 0.2, 0.3], gamma=1.0).advantages == pytest.approx([0.82675, 0.765, 0.7])
    assert compute_gae([], []) == ([], [])


def test_gae_needs_a_value_for_each_reward():
    with pytest.raises(ValueError, match="zip"):
        compute_gae([1, 0], [0.5])


@given(rewards)
def test_on_episodes_of_one_turn_gae_is_the_centred_advantage(rewards_G: list[float]):
    [of_turns] = compute_advantages([group(*rewards_G)], GAE())
    [centred] = compute_advantages([group(*rewards_G)])
    assert [advantage for [advantage] in of_turns] == pytest.approx(centred, abs=1e-9)


def test_the_baseline_of_a_turn_is_the_mean_return_of_those_who_got_there():
    [[long, short]] = compute_advantages([one_per_turn([0, 2], [1])], GAE(gamma=1.0, lam=0.0))
    assert long == [2 - 1.5, 2 - 2]  # returns of turn 0: 2 and 1; of turn 1: 2 alone
    assert short == [1 - 1.5]


def test_without_a_baseline_gae_discounts_the_rewards_alone():
    [[advantages_U]] = compute_advantages([one_per_turn([0, 0, 1])], GAE(baseline="zero"))
    assert advantages_U == pytest.approx([0.88454025, 0.9405, 1.0])


def test_equal_episodes_of_several_turns_have_no_advantage_although_rewards_are_discounted():
    [advantages_G] = compute_advantages([one_per_turn([0, 1], [0, 1])], GAE())
    assert advantages_G == [pytest.approx([0, 0], abs=1e-12)] * 2


def test_the_final_reward_comes_with_the_last_turn():
    played = TrajectoryGroup([trajectory(([1], [2]), ([1, 2, 3], [4]))], [1.0], [{}])
    [[advantages_U]] = compute_advantages([played], GAE(gamma=0.5, lam=1.0, baseline="zero"))
    assert advantages_U == [0.5, 1.0]


@pytest.mark.parametrize("options", [{"gamma": 1.1}, {"lam": -0.1}, {"gamma": float("nan")}])
def test_a_discount_that_is_none_is_refused_by_name_and_value(options: dict[str, float]):
    [(name, value)] = options.items()
    with pytest.raises(InvalidRequest, match=rf"GAE\.{name}.*{value}"):
        GAE(**options)


# ---- discounting and normalisation ---------------------------------------------------------------------------------


def test_discounted_sums_have_the_values_computed_by_hand():
    assert discounted_future_sum_vectorized([1, 2, 3], 0.5).tolist() == [2.75, 3.5, 3]
    assert discounted_future_sum_vectorized([], 0.5).tolist() == []


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=40), st.floats(0, 1))
def test_a_discounted_sum_is_a_number_and_the_discounted_sum_after_it(numbers: list[float], gamma: float):
    sums = discounted_future_sum_vectorized(numbers, gamma).tolist()
    for number, here, after in zip(numbers, sums, [*sums[1:], 0.0], strict=True):
        assert here == pytest.approx(number + gamma * after, abs=1e-9)


@given(st.lists(st.lists(st.integers(-999, 999).map(float), min_size=1, max_size=9), min_size=1, max_size=4))
def test_normalized_advantages_have_mean_0_and_deviation_1(advantages_P_G: list[list[float]]):
    teaching_P_G = [advantages_G for advantages_G in advantages_P_G if any(advantages_G)]
    numbers = [number for group in normalize_advantages(teaching_P_G) for number in group]
    if len({number for group in teaching_P_G for number in group}) < 2:
        assert set(numbers) <= {0.0}
    else:
        assert np.mean(numbers) == pytest.approx(0, abs=1e-6)
        assert np.std(numbers) == pytest.approx(1)


def test_groups_of_equal_rewards_have_no_part_in_the_deviation():
    assert normalize_advantages(compute_advantages([group(1, 3), group(5, 5, 5)])) == [[-1, 1], [0, 0, 0]]
    assert normalize_advantages(compute_advantages([group(1, 3), group(0.1 + 0.2, 0.3, 0.3)]))[0] == [-1, 1]
    of_turns = compute_advantages([one_per_turn([1], [3]), one_per_turn([0, 1], [0, 1])], GAE())
    assert normalize_advantages(of_turns) == [[[-1], [1]], [[0, 0], [0, 0]]]


@given(st.lists(rewards, min_size=1, max_size=4), st.integers(0, 4), st.sampled_from([Centred(), GAE()]))
def test_normalized_advantages_are_the_same_whether_constant_groups_are_there_or_not(
    rewards_P_G: list[list[float]], place: int, estimator: Estimator
):
    without = normalize_advantages(compute_advantages([group(*rewards_G) for rewards_G in rewards_P_G], estimator))
    place = min(place, len(rewards_P_G))
    beside = [*rewards_P_G[:place], [7.0] * 5, *rewards_P_G[place:]]
    normalized = normalize_advantages(compute_advantages([group(*rewards_G) for rewards_G in beside], estimator))
    assert normalized[:place] + normalized[place + 1 :] == without


def test_turns_and_episodes_are_normalized_alike():
    assert normalize_advantages([[1.0, [1.0, 5.0]], [5.0]]) == [[-1, [-1, 1]], [1]]
    assert normalize_advantages([]) == []
