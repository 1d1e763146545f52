"""AdamW against PyTorch's, and what it refuses."""

import math

import pytest
import torch

from stovetop.engine.lora.weights import Moments
from stovetop.engine.training.optimizer import adamw, global_norm
from stovetop.types import AdamParams


def made(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(3, 4, generator=generator), "b": torch.randn(5, generator=generator)}


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_are_those_of_pytorch(decay: float) -> None:
    params = AdamParams(learning_rate=0.01, eps=1e-8, weight_decay=decay)
    weights, moments = made(0), Moments()
    theirs = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    optimizer = torch.optim.AdamW(theirs.values(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)
    for step in range(1, 5):
        gradients = made(step)
        stepped = adamw(weights, gradients, moments, params)
        weights, moments = stepped.weights, stepped.moments
        for name, tensor in theirs.items():
            tensor.grad = gradients[name]
        optimizer.step()
        for name in weights:
            torch.testing.assert_close(weights[name], theirs[name].detach(), rtol=1e-5, atol=1e-6)


def test_old_weights_and_gradients_are_not_changed() -> None:
    weights, gradients = made(0), made(1)
    moments = adamw(weights, gradients, Moments(), AdamParams()).moments
    before = [tensor.clone() for tensor in (*weights.values(), *gradients.values())]
    adamw(weights, gradients, moments, AdamParams(weight_decay=0.1, grad_clip_norm=0.1))
    after = [*weights.values(), *gradients.values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_refused_and_nothing_moves(bad: float) -> None:
    weights, gradients = made(0), made(1)
    gradients["b"][2] = bad
    moments = Moments(3, made(2), made(3))
    stepped = adamw(weights, gradients, moments, AdamParams())
    assert stepped.skipped
    assert stepped.weights is weights
    assert stepped.moments is moments
    for found, given in ((moments.mean, made(2)), (moments.square, made(3))):
        assert all(torch.equal(found[name], given[name]) for name in given)


@pytest.mark.parametrize(
    ("params", "size"),
    [
        (AdamParams(learning_rate=1e38), 1.0),  # weights beyond float32
        (AdamParams(learning_rate=1e38, grad_clip_norm=1.0), 1.0),
        (AdamParams(learning_rate=1e4, weight_decay=1e36), 1.0),
        (AdamParams(eps=1e-60), 0.0),  # 0 / 0 in float32
        (AdamParams(), 1e25),  # squares beyond float32, which would stay in the moments for ever
    ],
)
def test_a_step_to_numbers_that_are_not_finite_is_refused_and_nothing_moves(params: AdamParams, size: float) -> None:
    weights, gradients = made(0), {name: gradient * size for name, gradient in made(1).items()}
    if size == 0.0:
        moments = Moments(3, *({name: torch.zeros_like(t) for name, t in weights.items()} for _ in range(2)))
    else:
        moments = adamw(weights, made(2), Moments(), AdamParams()).moments
    before = [t.clone() for t in (*weights.values(), *moments.mean.values(), *moments.square.values())]
    stepped = adamw(weights, gradients, moments, params)
    assert (stepped.skipped, stepped.update_norm) == (True, 0.0)
    assert math.isfinite(stepped.grad_norm)
    assert stepped.weights is weights
    assert stepped.moments is moments
    after = [*weights.values(), *moments.mean.values(), *moments.square.values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert not adamw(weights, made(3), moments, AdamParams()).skipped


def test_a_huge_step_to_finite_weights_is_taken_and_its_norm_is_a_number() -> None:
    stepped = adamw(made(0), made(1), Moments(), AdamParams(learning_rate=1e30))
    assert not stepped.skipped
    assert stepped.update_norm == pytest.approx(1e30 * math.sqrt(17), rel=1e-4)


def test_norms_do_not_depend_on_the_order_of_the_tensors() -> None:
    """To the last bit: a loaded adapter has another order than one that was made."""
    generator = torch.Generator().manual_seed(0)
    sizes = {f"t{index}": 10.0 ** (index % 5) for index in range(40)}
    weights, gradients = ({n: s * torch.randn(7, generator=generator) for n, s in sizes.items()} for _ in range(2))
    found = set()
    for order in (list(weights), list(reversed(weights)), sorted(weights, key=lambda name: name[::-1])):
        stepped = adamw(
            {name: weights[name] for name in order},
            {name: gradients[name] for name in reversed(order)},
            Moments(),
            AdamParams(grad_clip_norm=1.0, learning_rate=0.1),
        )
        found.add((stepped.grad_norm, stepped.update_norm, *(stepped.weights[name].sum().item() for name in weights)))
    assert len(found) == 1


def test_a_gradient_whose_squares_are_beyond_float32_is_clipped_and_not_refused() -> None:
    weights, gradients = made(0), {name: gradient * 1e25 for name, gradient in made(1).items()}
    stepped = adamw(weights, gradients, Moments(), AdamParams(grad_clip_norm=1.0))
    assert not stepped.skipped
    assert stepped.grad_norm == pytest.approx(1e25 * global_norm(made(1).values()))


def test_clipping_bounds_the_global_norm() -> None:
    weights, gradients = made(0), made(1)
    norm = global_norm(gradients.values())
    clipped = adamw(weights, gradients, Moments(), AdamParams(grad_clip_norm=norm / 4))
    quarter = adamw(weights, {n: g / 4 for n, g in gradients.items()}, Moments(), AdamParams())
    assert clipped.grad_norm == pytest.approx(norm)
    for name in weights:
        torch.testing.assert_close(clipped.moments.mean[name], quarter.moments.mean[name])
    loose = adamw(weights, gradients, Moments(), AdamParams(grad_clip_norm=norm * 2))
    assert torch.equal(loose.weights["a"], adamw(weights, gradients, Moments(), AdamParams()).weights["a"])


def test_the_update_norm_is_that_of_the_change() -> None:
    weights = made(0)
    stepped = adamw(weights, made(1), Moments(), AdamParams(learning_rate=0.01))
    assert stepped.update_norm == pytest.approx(0.01 * math.sqrt(17), rel=1e-4)
