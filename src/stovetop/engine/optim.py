# pyright: basic
"""AdamW for one adapter (Loshchilov & Hutter 2019, arXiv:1711.05101): weights and moments go in, new ones come out. The
old weights stay as they are, for others may hold them; the moments, which belong to the optimizer alone, are used up. A
refused step changes nothing.

    m' = b1·m + (1-b1)·g      v' = b2·v + (1-b2)·g²
    w' = w·(1 - lr·decay) - lr · (m'/(1-b1^t)) / (sqrt(v'/(1-b2^t)) + eps)

Weights, gradients and moments are float32. The gradient is clipped by its global norm before anything else. The formula
is the library's; here is what it lacks: values, clipping, the refusal of what is not finite.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw as library_adamw

from stovetop.types import AdamParams

Tensors = dict[str, Tensor]  # one per trained tensor, by name


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
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
    """One step. `gradients` has a tensor for every weight. The tensors of `moments` become those of the result."""
    grad_norm = global_norm(gradients.values())
    if not math.isfinite(grad_norm):
        return Stepped(weights, moments, grad_norm, 0.0, skipped=True)
    clip = params.grad_clip_norm / grad_norm if 0 < params.grad_clip_norm < grad_norm else 1.0
    new = {name: weight.clone() for name, weight in weights.items()}
    mean, square = (
        {name: old[name] if name in old else torch.zeros_like(new[name]) for name in new}
        for old in (moments.mean, moments.square)
    )
    clipped = [gradients[name] if clip == 1.0 else gradients[name] * clip for name in new]
    spare = _spare(weights)  # from here on nothing large is allocated, so nothing ends halfway
    library_adamw(
        list(new.values()),
        clipped,
        list(mean.values()),
        list(square.values()),
        max_exp_avg_sqs=[],
        state_steps=_steps(moments.step, list(new.values())),
        fused=True,  # one pass over memory instead of a dozen
        amsgrad=False,
        maximize=False,
        lr=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
    changes = (torch.sub(new[name], old, out=spare[: old.numel()].view_as(old)) for name, old in weights.items())
    update_norm = _norm_of_rows(changes)
    return Stepped(new, Moments(moments.step + 1, mean, square), grad_norm, update_norm, skipped=False)


def _steps(step: int, like: list[Tensor]) -> list[Tensor]:
    """One for each tensor, which the library counts up."""
    return list(torch.full((len(like),), float(step), device=like[0].device).unbind()) if like else []


def _spare(weights: Tensors) -> Tensor:
    """Room for any one of them."""
    some = max(weights.values(), key=Tensor.numel)
    return some.new_empty(some.numel())


def global_norm(tensors: Iterable[Tensor]) -> float:
    """Euclidean norm over all tensors."""
    tensors = list(tensors)
    norm = _norm_of_rows(tensors)
    if math.isfinite(norm):
        return norm
    return _norm_of_rows(tensor.double() for tensor in tensors)  # squares beyond float32 are still numbers


def _norm_of_rows(tensors: Iterable[Tensor]) -> float:
    """Of each row first, and of the rows in float64, in a fixed order."""
    rows = [torch.linalg.vector_norm(tensor, dim=-1).flatten() for tensor in tensors]
    return torch.linalg.vector_norm(torch.cat(rows), dtype=torch.float64).item() if rows else 0.0
