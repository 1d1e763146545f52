import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stovetop.errors import InvalidRequest
from stovetop.evaluation.estimates import (
    Estimate,
    mean_of_examples,
    paired_difference,
    pass_at_k,
    ratio_of_examples,
)


def test_a_mean_has_the_standard_error_computed_by_hand():
    # deviations .5, -.5, 0: squares sum to .5; √(.5 / (3·2)) = .2887
    assert mean_of_examples([1, 0, 0.5]) == pytest.approx((0.5, math.sqrt(0.5 / 6)))


def test_one_example_has_no_standard_error_and_none_no_mean():
    assert mean_of_examples([1.0]) == (1.0, None)
    assert mean_of_examples([1.0]).interval() is None
    with pytest.raises(InvalidRequest, match="at least one example"):
        mean_of_examples([])


def test_an_interval_is_two_standard_errors_to_each_side():
    assert Estimate(0.5, 0.1).interval() == pytest.approx((0.304, 0.696))


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 1)), min_size=2, max_size=12))
def test_the_standard_error_of_several_samples_an_example_is_the_clustered_one(scores: list[tuple[int, int, int]]):
    """Miller 2024, section 2.2: √(SE² + Σ over clusters Σ over i≠j (sᵢ - s̄)(sⱼ - s̄) / N²), whose sums divide by N where
    a sample variance divides by N - 1."""
    all_scores = np.array(scores, float)
    deviations, num, num_clusters = all_scores - all_scores.mean(), all_scores.size, len(scores)
    within = sum(row.sum() ** 2 - (row**2).sum() for row in deviations)
    clustered = math.sqrt(max(0.0, (deviations**2).sum() / num**2 + within / num**2))
    estimate = mean_of_examples([float(np.mean(row)) for row in scores])
    assert estimate.stderr == pytest.approx(clustered * math.sqrt(num_clusters / (num_clusters - 1)))


def test_copies_of_each_sample_do_not_make_the_standard_error_smaller():
    means = [1.0, 0.0, 0.0, 1.0]
    once = mean_of_examples(means)
    thrice = mean_of_examples([sum([mean] * 3) / 3 for mean in means])
    assert thrice == once


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_draws_of_k_samples_with_a_correct_one(num: int, data: st.DataObject):
    num_correct, k = data.draw(st.integers(0, num)), data.draw(st.integers(1, num))
    samples = [True] * num_correct + [False] * (num - num_correct)
    draws = [any(draw) for draw in combinations(samples, k)]
    assert pass_at_k(num, num_correct, k) == pytest.approx(sum(draws) / len(draws))


def test_pass_at_k_is_exact_where_factorials_are_large():
    assert pass_at_k(1000, 1, 1000) == 1
    assert pass_at_k(1000, 1, 1) == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [((4, 1, 5), r"k in 1\.\.4"), ((4, 1, 0), r"k in 1\.\.4"), ((4, 5, 1), r"0\.\.4 can be correct: 5")],
)
def test_a_k_above_the_number_of_samples_is_refused(arguments: tuple[int, int, int], why: str):
    with pytest.raises(InvalidRequest, match=why):
        pass_at_k(*arguments)


def test_a_ratio_weighs_examples_by_their_size_and_has_the_standard_error_computed_by_hand():
    # 12 nats over 6 tokens: r = 2; residuals 2 - 2·2 = -2 and 10 - 2·4 = 2; √(2/1·8)/6
    assert ratio_of_examples([2, 10], [2, 4]) == pytest.approx((2.0, math.sqrt(16) / 6))
    assert ratio_of_examples([2], [4]) == (0.5, None)


def test_a_ratio_of_equal_sizes_is_a_mean():
    values = [0.2, 0.5, 0.9, 0.1]
    assert ratio_of_examples([3 * value for value in values], [3.0] * 4) == pytest.approx(mean_of_examples(values))


def test_a_ratio_without_size_is_refused():
    with pytest.raises(InvalidRequest, match="do not sum to 0"):
        ratio_of_examples([1.0], [0.0])


def test_the_standard_error_of_a_paired_difference_is_small_where_both_fail_at_the_same_examples():
    first, second = [1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 1.0]
    assert paired_difference(first, second) == pytest.approx((0.25, 0.25))
    assert paired_difference(first, first) == (0.0, 0.0)
    with pytest.raises(InvalidRequest, match="the same examples twice: 4, 1"):
        paired_difference(first, [1.0])
