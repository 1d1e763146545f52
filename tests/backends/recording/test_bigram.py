"""The arithmetic of the recording backend, against golden numbers and autograd."""

import numpy as np
import pytest
import torch

from stovetop.backends.recording import bigram
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.losses import CISPO, DRO, GSPO, LOSSES, PPO, CrossEntropy, ImportanceSampling, Loss, parse_loss
from stovetop.types import AdamParams, Datum, ModelInput, SamplingParams

P = np.array([-1.0, -2.0, -0.5])  # current, sampled, advantages: one example for every policy loss
Q = np.array([-1.5, -1.0, -0.5])
A = np.array([1.0, 1.0, -1.0])


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (ImportanceSampling(), -1.0166007119),
        (PPO(), -0.5678794412),
        (PPO(clip_low_threshold=0.9, clip_high_threshold=1.1), -0.4678794412),
        (CISPO(clip_low_threshold=0.8, clip_high_threshold=1.2), 2.3),
        (DRO(beta=0.05), 2.53125),
    ],
)
def test_losses_give_the_golden_numbers(loss: Loss, expected: float) -> None:
    inputs = {"logprobs": Q, "advantages": A}
    assert bigram.loss_and_slope(loss, P, inputs).loss == pytest.approx(expected, abs=1e-9)


def test_gspo_weighs_by_the_exponential_of_the_mean_log_ratio() -> None:
    inputs = {"logprobs": np.zeros(2), "advantages": np.ones(2), "sequence_ratio_mask": np.ones(2)}
    loss = bigram.loss_and_slope(GSPO(), np.array([0.4, -0.2]), inputs).loss
    assert loss == pytest.approx(-2 * 1.1051709181, abs=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_the_slope_of_every_loss_of_the_table_is_that_of_autograd(name: str) -> None:
    generator = np.random.default_rng(0)
    p, q, advantages, weights = generator.normal(size=(4, 40))
    mask = (generator.random(40) < 0.7).astype(float)
    given = {"weights": weights, "logprobs": q, "advantages": advantages, "sequence_ratio_mask": mask}
    loss = parse_loss(name)
    value, slope = bigram.loss_and_slope(loss, p, {key: given[key] for key in loss.inputs if key in given})
    leaf = torch.tensor(p, requires_grad=True)
    expected = _in_torch(loss, leaf, {key: torch.tensor(array) for key, array in given.items()})
    expected.backward()
    assert value == pytest.approx(expected.item(), rel=1e-12)
    np.testing.assert_allclose(slope, leaf.grad.numpy(), rtol=1e-12)


def _in_torch(loss: Loss, p: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    if isinstance(loss, CrossEntropy):
        return -(p * inputs["weights"]).sum()
    q, advantages, mask = inputs["logprobs"], inputs["advantages"], inputs["sequence_ratio_mask"]
    ratio = (p - q).exp()
    if isinstance(loss, ImportanceSampling):
        return -(ratio * advantages).sum()
    if isinstance(loss, DRO):
        return -(p * advantages - loss.beta / 2 * (p - q).square()).sum()
    low, high = loss.clip_low_threshold, loss.clip_high_threshold
    if isinstance(loss, CISPO):
        return -(ratio.detach().clamp(low, high) * p * advantages).sum()
    if isinstance(loss, GSPO):
        ratio = (((p - q) * mask).sum() / mask.sum()).exp().detach() * (p - p.detach()).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_gradient_in_the_table_is_that_of_autograd(temperature: float) -> None:
    generator = np.random.default_rng(1)
    table_VV = generator.normal(size=(8, 8)).astype(np.float32)
    targets = generator.integers(0, 8, size=(5, 2))
    example = Datum(ModelInput.from_ints([1, 2, 1, 7, 2]), {"target_tokens": targets})
    slope = generator.normal(size=(5, 2))
    leaf_VV = torch.tensor(table_VV, dtype=torch.float64, requires_grad=True)
    scored = (leaf_VV[example.model_input.to_ints()] / temperature).log_softmax(-1).gather(1, torch.tensor(targets))
    (scored * torch.tensor(slope)).sum().backward()
    computed = bigram.score(table_VV, example, temperature)
    np.testing.assert_allclose(computed.logprobs, scored.detach().numpy(), rtol=1e-12)
    gradient_VV = bigram.gradient(computed, example, slope, temperature)
    np.testing.assert_allclose(gradient_VV, leaf_VV.grad.numpy(), rtol=1e-9, atol=1e-12)


def test_the_optimizer_is_the_adamw_of_torch() -> None:
    params = AdamParams(learning_rate=0.1, weight_decay=0.2, eps=1e-6, grad_clip_norm=1.0)
    leaf_VV = torch.zeros(6, 6, requires_grad=True)
    optimizer = torch.optim.AdamW([leaf_VV], lr=0.1, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.2)
    delta_VV = np.zeros((6, 6), np.float32)
    moments = bigram.Moments(0, delta_VV, delta_VV)
    for step in range(5):
        gradient_VV = np.random.default_rng(step).normal(size=(6, 6))
        leaf_VV.grad = torch.tensor(gradient_VV / max(1.0, float(np.linalg.norm(gradient_VV))), dtype=torch.float32)
        optimizer.step()
        delta_VV, moments, _ = bigram.adamw(delta_VV, moments, gradient_VV, params)
        np.testing.assert_allclose(delta_VV, leaf_VV.detach().numpy(), rtol=1e-5, atol=1e-7)


def test_samples_follow_the_distribution() -> None:
    table_VV = np.log(np.array([[0.6652, 0.2447, 0.0900]] * 3, dtype=np.float32))
    params = SamplingParams(max_tokens=1, seed=0, stop=[])
    drawn = [s.tokens[0] for s in bigram.draw(table_VV, [0], 4000, params, ByteTokenizer())]
    np.testing.assert_allclose(np.bincount(drawn) / 4000, [0.6652, 0.2447, 0.0900], atol=0.02)
