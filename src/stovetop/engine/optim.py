# pyright: basic
"""AdamW for one adapter (Loshchilov & Hutter 2019, arXiv:1711.05101) as a pure function: weights and moments go in,
new ones come out. Nothing is changed in place: whoever holds the old weights keeps them, and a refused step costs
nothing.

    m' = b1·m + (1-b1)·g      v' = b2·v + (1-b2)·g²
    w' = w·(1 - lr·decay) - lr · (m'/(1-b1^t)) / (sqrt(v'/(1-b2^t)) + eps)

Weights, gradients and moments are float32. The gradient is clipped by its global norm before anything else.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from stovetop.types import AdamParams

Tensors = dict[str, Tensor]  # one per trained tensor, by name


@dataclass(frozen=True, slots=True)
class Moments:
    """Running means of gradient and squared gradient; empty before the first step."""

    step: int = 0
    mean: Tensors = field(default_factory=dict)
    square: Tensors = field(default_factory=dict)


class Stepped(NamedTuple):
    weights: Tensors
    moments: Moments
    grad_norm: float  # before clipping
    update_norm: float  # of the change of the weights
    skipped: bool  # the gradient was not finite: weights and moments are the ones that went in


def adamw(weights: Tensors, gradients: Tensors, moments: Moments, params: AdamParams) -> Stepped:
    """One step. `gradients` has a tensor for every weight."""
    grad_norm = global_norm(gradients)
    if not torch.isfinite(torch.tensor(grad_norm)):
        return Stepped(weights, moments, grad_norm, 0.0, skipped=True)
    clip = 1.0
    if 0 < params.grad_clip_norm < grad_norm:
        clip = params.grad_clip_norm / grad_norm
    step = moments.step + 1
    new, mean, square = {}, {}, {}
    for name, weight in weights.items():
        gradient = gradients[name] * clip if clip != 1.0 else gradients[name]
        old_mean = moments.mean.get(name, torch.zeros_like(weight))
        old_square = moments.square.get(name, torch.zeros_like(weight))
        mean[name] = old_mean * params.beta1 + gradient * (1 - params.beta1)
        square[name] = old_square * params.beta2 + gradient.square() * (1 - params.beta2)
        unbiased_mean = mean[name] / (1 - params.beta1**step)
        denominator = (square[name] / (1 - params.beta2**step)).sqrt() + params.eps
        decayed = weight * (1 - params.learning_rate * params.weight_decay)
        new[name] = decayed - params.learning_rate * unbiased_mean / denominator
    update_norm = global_norm({name: new[name] - weights[name] for name in new})
    return Stepped(new, Moments(step, mean, square), grad_norm, update_norm, skipped=False)


def global_norm(tensors: Tensors) -> float:
    """Euclidean norm over all tensors, gathered in float64 in a fixed order."""
    return sum(tensor.double().square().sum().item() for tensor in tensors.values()) ** 0.5
