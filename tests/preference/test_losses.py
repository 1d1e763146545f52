import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stovetop.errors import InvalidRequest
from stovetop.preference.loss_values import (
    DPO,
    IPO,
    KTO,
    ORPO,
    PREFERENCE_LOSSES,
    ConservativeDPO,
    Hinge,
    RobustDPO,
    SimPO,
    needs_reference,
)
from stovetop.preference.losses import (
    PairLogprobs,
    Sides,
    compute_dpo_loss,
    compute_preference_loss,
    preference_loss_fn,
)
from stovetop.types import Datum, ModelInput


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pairs_of_margin(margin: torch.Tensor, length: float = 1.0) -> PairLogprobs:
    """One pair whose chosen answer gained `margin` over the reference, and whose rejected one nothing."""
    zero = torch.zeros_like(margin)
    return PairLogprobs(
        Sides(margin - 9, zero - 9), Sides(zero - 9, zero - 9), Sides(zero + length, zero + length), zero
    )


def average(chosen: float, rejected: float) -> PairLogprobs:
    """One pair of answers of four tokens with these mean logprobs."""
    return PairLogprobs(Sides(row(4 * chosen), row(4 * rejected)), lengths=Sides(row(4), row(4)))


# ---- golden numbers ------------------------------------------------------------------------------------------


def test_dpo_of_two_pairs():
    loss, metrics = compute_dpo_loss(row(-10, -20), row(-12, -15), row(-11, -19), row(-11, -18), beta=0.1)
    assert loss.item() == pytest.approx(0.7555770609, abs=1e-9)
    assert metrics == pytest.approx(
        {
            "dpo_loss": 0.7555770609,
            "accuracy": 0.5,
            "margin": -0.1,
            "chosen_reward": 0.0,
            "rejected_reward": 0.1,
            "num_pairs": 2,
        },
        abs=1e-9,
    )


@pytest.mark.parametrize(
    ("loss", "value", "slope"),
    [
        (DPO(beta=0.1), 0.4374880, -0.0354344),
        (Hinge(beta=0.1), 0.4, -0.1),
        (IPO(beta=0.1), 1.0, 2.0),
        (RobustDPO(beta=0.1, label_smoothing=0.1), 0.3624880, None),
        (ConservativeDPO(beta=0.1, label_smoothing=0.1), 0.4974880, None),
    ],
)
def test_losses_on_a_margin_of_six_all_differ(loss, value, slope):
    margin = row(6).requires_grad_()
    computed, _ = compute_preference_loss(loss, pairs_of_margin(margin))
    computed.backward()
    assert computed.item() == pytest.approx(value, abs=1e-7)
    if slope is not None:
        assert margin.grad.item() == pytest.approx(slope, abs=1e-7)


@pytest.mark.parametrize(("gamma", "value"), [(1.0, 0.7981389), (0.5, 0.5543552)])
def test_simpo_compares_mean_logprobs_with_a_margin_after_beta(gamma, value):
    loss, metrics = compute_preference_loss(SimPO(beta=2.0, gamma=gamma), average(-0.5, -0.9))
    assert loss.item() == pytest.approx(value, abs=1e-7)
    assert metrics["margin"] == pytest.approx(0.8)


def test_orpo_adds_the_odds_to_the_likelihood():
    loss, _ = compute_preference_loss(ORPO(lam=0.1), average(-0.5, -0.9))
    likelihood, _ = compute_preference_loss(ORPO(lam=0.0), average(-0.5, -0.9))
    assert likelihood.item() == pytest.approx(0.5)
    assert (loss - likelihood).item() == pytest.approx(0.0367729, abs=1e-7)
    log_odds = -math.log(math.expm1((loss - likelihood).item() / 0.1))
    assert log_odds == pytest.approx(0.8109167, abs=1e-6)
    assert loss.item() == pytest.approx(0.5367729, abs=1e-7)


def test_orpo_is_finite_for_an_answer_that_is_certain():
    chosen = row(0.0).requires_grad_()
    loss, _ = compute_preference_loss(ORPO(), PairLogprobs(Sides(chosen, row(-4)), lengths=Sides(row(4), row(4))))
    loss.backward()
    assert math.isfinite(loss.item())
    assert math.isfinite(chosen.grad.item())


def test_kto_judges_each_answer_against_the_kl():
    pairs = PairLogprobs(Sides(row(-8), row(-9)), Sides(row(-10), row(-10)), mismatched_logratios=row(0.25, 0.75))
    loss, metrics = compute_preference_loss(KTO(beta=0.1), pairs)
    assert loss.item() == pytest.approx((0.4625702 + 0.5124974) / 2, abs=1e-7)
    assert metrics["chosen_reward"] == pytest.approx(0.2)


def test_the_kl_of_kto_is_never_negative_and_has_no_gradient():
    mismatched = row(-1, -3).requires_grad_()
    policy = row(-8).requires_grad_()
    pairs = PairLogprobs(Sides(policy, row(-9)), Sides(row(-10), row(-10)), mismatched_logratios=mismatched)
    loss, _ = compute_preference_loss(KTO(beta=0.1), pairs)
    loss.backward()
    assert loss.item() == pytest.approx((2 - torch.sigmoid(row(0.2)) - torch.sigmoid(row(-0.1))).item() / 2)
    assert mismatched.grad is None
    assert policy.grad is not None


# ---- what holds for all --------------------------------------------------------------------------------------


def test_a_policy_that_is_its_reference_has_ln_2_and_no_accuracy():
    loss, metrics = compute_dpo_loss(row(-5, -7), row(-6, -1), row(-5, -7), row(-6, -1))
    assert loss.item() == pytest.approx(math.log(2))
    assert (metrics["accuracy"], metrics["margin"]) == (0, 0)


@given(st.lists(st.floats(-50, 0), min_size=4, max_size=4), st.floats(0.01, 2))
def test_both_ways_to_write_the_dpo_margin_are_the_same(logprobs, beta):
    c, r, ref_c, ref_r = logprobs
    loss, metrics = compute_dpo_loss(row(c), row(r), row(ref_c), row(ref_r), beta)
    other_way = c - r - ref_c + ref_r
    assert metrics["margin"] == pytest.approx(beta * other_way, abs=1e-9)  # β exactly once
    assert loss.item() == pytest.approx(math.log1p(math.exp(-beta * other_way)), abs=1e-9)


@pytest.mark.parametrize("loss", [one() for one in PREFERENCE_LOSSES.values()], ids=lambda loss: loss.name)
@pytest.mark.parametrize("margin", [-1e4, 1e4])
def test_every_loss_and_its_gradient_are_finite_far_out(loss, margin):
    gained = torch.tensor([margin], requires_grad=True)
    computed, metrics = compute_preference_loss(loss, pairs_of_margin(gained, length=10.0))
    computed.backward()
    assert torch.isfinite(computed)
    assert torch.isfinite(gained.grad).all()
    assert metrics[f"{loss.name}_loss"] == computed.item()
    assert metrics["num_pairs"] == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPO(beta=0.0), "DPO.beta must be a finite number above 0: 0.0"),
        (
            lambda: RobustDPO(label_smoothing=0.5),
            "label_smoothing must be .* at least 0 and below 0.5: 0.5",
        ),
        (lambda: ORPO(lam=-1.0), "ORPO.lam must be a finite number at least 0: -1.0"),
        (lambda: compute_preference_loss(SimPO(), PairLogprobs(Sides(row(1), row(1)))), "simpo needs the lengths"),
        (lambda: compute_preference_loss(DPO(), PairLogprobs(Sides(row(1), row(1)))), "dpo needs the reference"),
        (lambda: preference_loss_fn(IPO()), "ipo needs the logprobs of a reference"),
        (lambda: compute_dpo_loss(row(1, 2), row(1), row(1, 2), row(1)), r"shapes are: \[\(1,\), \(2,\)\]"),
        (lambda: compute_dpo_loss(row(1, 2), row(1, 2), row(1), row(1)), r"shapes are: \[\(1,\), \(2,\)\]"),
        (lambda: compute_dpo_loss(row(), row(), row(), row()), "at least one pair"),
    ],
)
def test_what_a_loss_lacks_is_named(make, message):
    with pytest.raises(InvalidRequest, match=message):
        make()


# ---- from datums ---------------------------------------------------------------------------------------------


def datum(weights: list[float]) -> Datum:
    length = len(weights)
    return Datum(ModelInput.from_ints(range(length)), {"target_tokens": range(1, length + 1), "weights": weights})


def test_means_are_over_the_tokens_of_the_answer_with_its_end():
    data = [datum([0, 0, 1, 1]), datum([0, 0, 1, 1])]
    logprobs = [torch.tensor([-math.inf, -9, -1, -2.0]), torch.tensor([-9, -9, -4, -4.0])]
    _, metrics = preference_loss_fn(SimPO(beta=1.0, gamma=0.0))(data, logprobs)
    assert metrics["chosen_reward"] == -1.5
    assert metrics["rejected_reward"] == -4.0


def test_ipo_compares_means_where_dpo_compares_sums():
    data = [datum([0, 1, 1]), datum([0, 1, 1])]
    logprobs = [torch.tensor([0, -1, -2.0]), torch.tensor([0, -4, -4.0])]
    reference = [torch.zeros(3).numpy()] * 2
    assert preference_loss_fn(IPO(beta=1.0), reference)(data, logprobs)[1]["margin"] == pytest.approx(2.5)
    assert preference_loss_fn(DPO(beta=1.0), reference)(data, logprobs)[1]["margin"] == pytest.approx(5.0)


def test_prompt_tokens_do_not_count_and_get_no_gradient():
    chosen, rejected = torch.tensor([-7, -1, -2.0], requires_grad=True), torch.tensor([-7, -4.0], requires_grad=True)
    reference = [torch.tensor([3, 0, 0.0]).numpy(), torch.tensor([-8, 0.0]).numpy()]
    loss, metrics = preference_loss_fn(DPO(beta=1.0), reference)([datum([0, 1, 1]), datum([0, 1])], [chosen, rejected])
    loss.backward()
    assert (metrics["chosen_reward"], metrics["rejected_reward"]) == (-3, -4)
    assert chosen.grad[0] == rejected.grad[0] == 0
    assert chosen.grad[1] == chosen.grad[2] == -rejected.grad[1] < 0


def test_a_batch_that_is_not_pairs_is_refused():
    one = datum([0, 1])
    with pytest.raises(InvalidRequest, match="dpo takes pairs of a chosen and a rejected answer; these are 3 datums"):
        preference_loss_fn(DPO(), [torch.zeros(2).numpy()] * 3)([one] * 3, [torch.zeros(2)] * 3)
    with pytest.raises(InvalidRequest, match="then as many mismatched ones; these are 2 datums"):
        preference_loss_fn(KTO(), [torch.zeros(2).numpy()] * 2)([one] * 2, [torch.zeros(2)] * 2)


def test_an_answer_without_a_token_is_refused_with_the_number_of_its_datum():
    data = [datum([0, 1]), datum([0, 0])]
    for loss in (DPO(), SimPO()):
        with pytest.raises(InvalidRequest, match=r"needs a token with a weight; these datums have none: \[1\]"):
            preference_loss_fn(loss, [torch.zeros(2).numpy()] * 2)(data, [torch.zeros(2)] * 2)


def test_logprobs_of_another_number_of_datums_are_refused():
    data = [datum([0, 1])] * 2
    with pytest.raises(InvalidRequest, match="2 datums need logprobs of each; there are those of 4"):
        preference_loss_fn(DPO(), [torch.zeros(2).numpy()] * 4)(data, [torch.zeros(2)] * 2)


def test_logprobs_of_another_length_are_refused():
    with pytest.raises(InvalidRequest, match=r"differ in shape: \(3,\), \(2,\)"):
        preference_loss_fn(SimPO())([datum([0, 1])] * 2, [torch.zeros(2), torch.zeros(3)])


def test_defaults_are_the_published_ones():
    assert {name: loss() for name, loss in PREFERENCE_LOSSES.items()} == {
        "dpo": DPO(beta=0.1),
        "ipo": IPO(beta=0.1),
        "hinge": Hinge(beta=0.1),
        "robust": RobustDPO(beta=0.1, label_smoothing=0.1),
        "cdpo": ConservativeDPO(beta=0.1, label_smoothing=0.1),
        "simpo": SimPO(beta=2.0, gamma=1.0),
        "orpo": ORPO(lam=0.1),
        "kto": KTO(beta=0.1),
    }
    explicit = compute_dpo_loss(row(-1), row(-3), row(-2), row(-2), beta=0.1)
    assert compute_dpo_loss(row(-1), row(-3), row(-2), row(-2)) == explicit


@pytest.mark.parametrize("loss", [DPO, IPO, Hinge, RobustDPO, ConservativeDPO, SimPO, KTO])
def test_beta_must_be_above_zero(loss):
    with pytest.raises(InvalidRequest, match=f"{loss.__name__}.beta must be a finite number above 0: 0"):
        loss(beta=0)


def test_the_table_holds_every_loss_and_two_need_no_reference():
    assert sorted(PREFERENCE_LOSSES) == ["cdpo", "dpo", "hinge", "ipo", "kto", "orpo", "robust", "simpo"]
    assert [name for name, loss in PREFERENCE_LOSSES.items() if not needs_reference(loss())] == ["simpo", "orpo"]
