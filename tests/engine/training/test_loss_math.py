"""Golden numbers of every loss, and gradients by formula. The numbers come from the formulas, worked out by hand."""

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from stovetop.engine.training.loss_math import (
    can_train,
    cispo,
    cross_entropy,
    dro,
    importance_sampling,
    loss_sum,
    sequence_ratio,
)
from stovetop.losses import CISPO, DRO, GSPO, LOSSES, PPO, CrossEntropy, ImportanceSampling, Loss, parse_loss

LOGPROBS, SAMPLED, ADVANTAGES = [-1.0, -2.0, -0.5], [-1.5, -1.0, -0.5], [1.0, 1.0, -1.0]


def double(values: list[float], requires_grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=requires_grad)


def inputs(**more: list[float]) -> dict[str, Tensor]:
    named = {"logprobs": SAMPLED, "advantages": ADVANTAGES} | more
    return {name: double(values) for name, values in named.items()}


def value_and_gradient(loss: Loss, logprobs: list[float], given: dict[str, Tensor]) -> tuple[float, list[float]]:
    leaf = double(logprobs, requires_grad=True)
    total = loss_sum(loss, leaf, given)
    total.backward()
    assert leaf.grad is not None
    return total.item(), leaf.grad.tolist()


def test_every_loss_of_the_table_has_its_arithmetic() -> None:
    given = inputs(weights=[1.0, 1.0, 1.0], sequence_ratio_mask=[1.0, 1.0, 1.0])
    for name in LOSSES:
        assert math.isfinite(loss_sum(parse_loss(name), double(LOGPROBS), given).item())
    assert {loss.name for loss in get_args(Loss)} == set(LOSSES)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (ImportanceSampling(), -1.0166007119),
        (PPO(), -0.5678794412),
        (CISPO(clip_low_threshold=0.8, clip_high_threshold=1.2), 2.3),
        (DRO(beta=0.05), 2.53125),
    ],
)
def test_losses_have_their_golden_values(loss: Loss, expected: float) -> None:
    assert value_and_gradient(loss, LOGPROBS, inputs())[0] == pytest.approx(expected, abs=1e-9)


def test_cross_entropy_is_a_sum_weighted_by_the_weights() -> None:
    a = cross_entropy(double([-1.0, -3.0]), double([1.0, 1.0]))
    b = cross_entropy(double([-0.5] * 6), double([1.0] * 6))
    assert (a + b).item() == 7.0
    assert cross_entropy(double([-1.0, -3.0]), double([0.5, -2.0])).item() == -5.5
    soft = cross_entropy(torch.tensor([[-1.0, -2.0]]), torch.tensor([[0.25, 0.75]]))
    assert soft.item() == pytest.approx(1.75)


def test_importance_sampling_weighs_by_the_ratio() -> None:
    value = importance_sampling(double([-1.0]), double([-1.2]), double([1.0])).item()
    assert value == pytest.approx(-1.2214028, abs=1e-7)


def test_ppo_stops_earning_outside_the_clip_but_still_costs() -> None:
    given = {"logprobs": double([-1.2]), "advantages": double([1.0])}
    assert value_and_gradient(PPO(), [-1.0], given) == (pytest.approx(-1.2), [0.0])
    given["advantages"] = double([-1.0])
    value, gradient = value_and_gradient(PPO(), [-1.0], given)
    assert value == pytest.approx(1.2214028, abs=1e-7)
    assert gradient == [pytest.approx(1.2214028, abs=1e-7)]


def test_ppo_thresholds_are_absolute_ratios() -> None:
    given = {"logprobs": double([-1.2]), "advantages": double([1.0])}
    loss = parse_loss("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1})
    assert value_and_gradient(loss, [-1.0], given)[0] == pytest.approx(-1.1)


def test_the_coefficient_of_cispo_has_no_gradient() -> None:
    value = cispo(double([-1.0]), double([-1.2]), double([1.0]), 0.0, 1.2).item()
    assert value == pytest.approx(1.2)
    loss = CISPO(clip_low_threshold=0.0, clip_high_threshold=4.0)
    given = {"logprobs": double([-1.2]), "advantages": double([2.0])}
    assert value_and_gradient(loss, [-1.0], given)[1] == [pytest.approx(-2.0 * math.exp(0.2))]


def test_dro_pulls_towards_the_sampling_policy() -> None:
    logprobs = double([-1.0], requires_grad=True)
    dro(logprobs, double([-3.0]), double([0.0]), 0.5).backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.5 * 2.0)


def test_the_ratio_of_gspo_is_the_exponential_of_the_mean() -> None:
    ratio = sequence_ratio(double([0.4, -0.2, 5.0]), double([0.0, 0.0, 0.0]), double([1.0, 1.0, 0.0]))
    assert ratio.tolist() == [pytest.approx(1.10517, abs=1e-5)] * 3


def test_each_token_of_gspo_has_its_own_gradient() -> None:
    given = inputs(logprobs=[0.0, 0.0], advantages=[1.0, -3.0], sequence_ratio_mask=[1.0, 1.0])
    loss = GSPO(clip_low_threshold=0.0, clip_high_threshold=10.0)
    _, gradient = value_and_gradient(loss, [0.4, -0.2], given)
    assert gradient == [pytest.approx(-math.exp(0.1)), pytest.approx(3 * math.exp(0.1))]


@pytest.mark.parametrize("loss", [ImportanceSampling(), PPO(), CISPO(), DRO(), GSPO()])
def test_on_policy_every_rl_loss_has_the_gradient_of_reinforce(loss: Loss) -> None:
    given = inputs(logprobs=LOGPROBS, sequence_ratio_mask=[1.0, 1.0, 1.0])
    assert value_and_gradient(loss, LOGPROBS, given)[1] == pytest.approx([-a for a in ADVANTAGES])


def test_cross_entropy_has_no_temperature() -> None:
    assert not hasattr(CrossEntropy(), "temperature")


@pytest.mark.parametrize("loss", [each() for each in LOSSES.values()], ids=list(LOSSES))
def test_what_is_said_not_to_train_has_no_gradient(loss: Loss) -> None:
    """And what is said to can have one."""
    logprobs_N = torch.tensor([-0.5, -1.0, -1.5, -0.1]).requires_grad_()
    coefficients_N = torch.tensor([1.0, 0.0, -2.0, 0.0])
    inputs = {
        "weights": coefficients_N,
        "logprobs": torch.tensor([-0.6, -0.9, -1.5, -0.4]),
        "advantages": coefficients_N,
        "sequence_ratio_mask": torch.ones(4),
    }
    (gradient_N,) = torch.autograd.grad(loss_sum(loss, logprobs_N, inputs), logprobs_N)
    assert torch.equal(can_train(loss, inputs), gradient_N != 0)
