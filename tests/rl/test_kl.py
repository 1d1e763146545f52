import asyncio
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stovetop.backends import recording
from stovetop.errors import InvalidRequest
from stovetop.rl.data_processing import trajectory_to_data
from stovetop.rl.kl import add_to_advantages, compute_post_kl, estimate_kl, incorporate_kl_penalty, kl_penalty
from stovetop.types import AdamParams, Datum, ModelInput

from .scripted import trajectory

SAMPLED = [[0.0, -1.0, -2.0], [0.0, -3.0]]
BASE = [[0.0, -1.5, -1.5], [0.0, -2.0]]
MASK = [[0, 1, 1], [0, 1]]
DIFFERENCES = [np.subtract(sampled, base) for sampled, base in zip(SAMPLED, BASE, strict=True)]

data_of_numbers = st.lists(
    st.lists(st.tuples(st.floats(-9, 9), st.booleans()), min_size=1, max_size=6), min_size=1, max_size=4
)


def test_the_penalty_has_the_values_computed_by_hand():
    penalty = kl_penalty(DIFFERENCES, MASK, 0.5)
    assert penalty.mean_difference == pytest.approx(-1 / 3)
    assert penalty.advantages_D[0].tolist() == pytest.approx([0, -0.4166666667, 0.0833333333])
    assert penalty.advantages_D[1].tolist() == pytest.approx([0, 0.3333333333])


def test_a_penalty_that_is_not_centred_is_the_difference_itself():
    penalty = kl_penalty(DIFFERENCES, MASK, 0.5, centred=False)
    assert [advantages.tolist() for advantages in penalty.advantages_D] == [[0, -0.25, 0.25], [0, 0.5]]
    assert penalty.mean_difference == pytest.approx(-1 / 3)


@given(data_of_numbers, st.floats(0, 3))
def test_a_centred_penalty_sums_to_zero_and_touches_masked_tokens_only(
    data: list[list[tuple[float, bool]]], coefficient: float
):
    masks = [[mask for _, mask in datum] for datum in data]
    penalty = kl_penalty([[number for number, _ in datum] for datum in data], masks, coefficient)
    assert sum(float(advantages.sum()) for advantages in penalty.advantages_D) == pytest.approx(0, abs=1e-6)
    for advantages, mask in zip(penalty.advantages_D, masks, strict=True):
        assert not advantages[~np.array(mask)].any()


def test_a_discount_gives_a_token_the_penalties_after_it_and_none_to_what_was_observed():
    penalty = kl_penalty([[1.0, 2.0, 0.0, 3.0]], [[1, 1, 0, 1]], -1.0, discount=0.5, centred=False)
    assert penalty.advantages_D[0].tolist() == [1 + 2 / 2 + 3 / 8, 2 + 3 / 4, 0, 3]


def test_what_is_masked_out_may_be_anything():
    penalty = kl_penalty([[np.nan, -np.inf, 1.0]], [[0, 0, 1]], 1.0, centred=False)
    assert penalty == ([pytest.approx([0, 0, -1])], 1.0)


def test_without_a_masked_token_there_is_no_penalty_and_no_mean():
    penalty = kl_penalty([[1.0, 2.0]], [[0, 0]], 1.0)
    assert penalty.advantages_D[0].tolist() == [0, 0]
    assert np.isnan(penalty.mean_difference)


def test_numbers_that_do_not_fit_are_refused_with_the_datum_and_never_repeated():
    with pytest.raises(InvalidRequest, match=r"datum 1 .*'differences': \(2,\), 'mask': \(1,\)"):
        kl_penalty([[1.0], [1.0, 2.0]], [[1], [1]], 1.0)
    [datum] = trajectory_to_data(trajectory(([1], [2, 3])), 1.0)
    with pytest.raises(InvalidRequest, match=r"datum 0 .*'advantages': \(2,\), 'added': \(1,\)"):
        add_to_advantages([datum], [[1.0]])


def test_adding_to_advantages_leaves_the_data_as_it_was():
    [datum] = trajectory_to_data(trajectory(([1, 2], [3, 4])), 2.0)
    [changed] = add_to_advantages([datum], [[0.0, 0.5, -0.5]])
    assert changed.loss_fn_inputs["advantages"].tolist() == [0, 2.5, 1.5]
    assert datum.loss_fn_inputs["advantages"].tolist() == [0, 2, 2]
    assert sorted(changed.loss_fn_inputs) == sorted(datum.loss_fn_inputs)


# ---- estimates ---------------------------------------------------------------------------------------------------


def test_the_three_estimates_have_the_values_computed_by_hand():
    assert estimate_kl([-1.0], [-1.3]) == pytest.approx((0.3, 0.045, 0.0408182), abs=1e-7)
    assert all(np.isnan(estimate) for estimate in estimate_kl([], []))


@given(st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0)), min_size=1))
def test_the_second_and_third_estimate_are_never_negative(pairs: list[tuple[float, float]]):
    estimates = estimate_kl([policy for policy, _ in pairs], [reference for _, reference in pairs])
    assert estimates.k2 >= 0
    assert estimates.k3 >= 0


# ---- with a model ------------------------------------------------------------------------------------------------


def sampled(*, text: bytes, logprobs: list[float]) -> Datum:
    """One action after the first token of the text."""
    return Datum(
        ModelInput.from_ints(text[:-1]),
        {
            "target_tokens": list(text[1:]),
            "logprobs": [0.0, *logprobs],
            "advantages": [0.0] + [1.0] * len(logprobs),
            "mask": [0.0] + [1.0] * len(logprobs),
        },
    )


def test_each_sampled_token_is_compared_with_what_the_reference_says_of_it(tmp_path: Path):
    with recording.open_service(tmp_path) as service:
        base = service.create_sampling_client(base_model="any/name").result()
        expected = base.compute_logprobs(ModelInput.from_ints(b"abcd")).result()
        datum = sampled(text=b"abcd", logprobs=[expected[2] + 0.5, expected[3] + 1.5])
        [penalised], metrics = asyncio.run(incorporate_kl_penalty([datum], base, 0.5))
    assert metrics == {"kl_policy_base": pytest.approx(1.0, abs=1e-6)}
    assert penalised.loss_fn_inputs["advantages"].tolist() == pytest.approx([0, 1.25, 0.75], abs=1e-6)
    assert penalised.loss_fn_inputs["mask"] == datum.loss_fn_inputs["mask"]


def test_data_without_an_action_is_neither_changed_nor_measured(tmp_path: Path):
    [datum] = add_to_advantages([sampled(text=b"ab", logprobs=[])], [[0.0]])
    with recording.open_service(tmp_path) as service:
        base = service.create_sampling_client(base_model="any/name").result()
        assert asyncio.run(incorporate_kl_penalty([datum], base, 0.5)) == ([datum], {})
        assert asyncio.run(compute_post_kl([datum], base)) == {}


def test_the_same_weights_have_moved_nowhere_and_trained_ones_have(tmp_path: Path):
    with recording.open_service(tmp_path) as service:
        trainer = service.create_lora_training_client("any/name").result()
        before = trainer.save_weights_and_get_sampling_client().result()
        own = before.compute_logprobs(ModelInput.from_ints(b"abcd")).result()
        datum = sampled(text=b"abcd", logprobs=own[2:])
        assert asyncio.run(compute_post_kl([datum], before)) == pytest.approx(
            {"kl_pre_post_v1": 0, "kl_pre_post_v2": 0}, abs=1e-6
        )
        weights = {"target_tokens": list(b"bcd"), "weights": [1.0] * 3}
        trainer.forward_backward([Datum(ModelInput.from_ints(b"abc"), weights)], "cross_entropy")
        trainer.optim_step(AdamParams(0.3)).result()
        after = trainer.save_weights_and_get_sampling_client().result()
        moved = after.compute_logprobs(ModelInput.from_ints(b"abcd")).result()
        metrics = asyncio.run(compute_post_kl([datum], after))
    gaps = np.subtract(own[2:], moved[2:])  # not that of the masked b
    assert metrics == pytest.approx({"kl_pre_post_v1": gaps.mean(), "kl_pre_post_v2": (gaps**2).mean() / 2}, abs=1e-6)
    assert metrics["kl_pre_post_v2"] > 1e-4
