# pyright: basic
"""AdamW for one adapter (Loshchilov & Hutter 2019, arXiv:1711.05101): weights and moments go in, new ones come out. The
old weights stay as they are, for others may hold them; the moments, which belong to the optimizer alone, are used up
unless they are to be kept. A refused step changes nothing: one from a gradient that is not finite, or to weights or
moments that would not be.

    m' = b1·m + (1-b1)·g      v' = b2·v + (1-b2)·g²
    w' = w·(1 - lr·decay) - lr · (m'/(1-b1^t)) / (sqrt(v'/(1-b2^t)) + eps)

Weights, gradients and moments are float32. The gradient is clipped by its global norm before anything else. The formula
is the library's; here is what it lacks: values, clipping, the refusal of what is not finite.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw as library_adamw

from stovetop.engine.lora.weights import Moments, Tensors
from stovetop.types import AdamParams

LARGEST = torch.finfo(torch.float32).max
LARGEST_SQUARED = math.sqrt(LARGEST)  # 1.8e19: the square of a larger number is no float32


class MomentsLost(Exception):
    """A step failed after it had begun to change the moments in place. The cause says why."""


class Stepped(NamedTuple):
    weights: Tensors
    moments: Moments
    grad_norm: float  # before clipping
    update_norm: float  # of the change of the weights
    skipped: bool  # something was not finite: weights and moments are the ones that went in


def adamw(
    weights: Tensors, gradients: Tensors, moments: Moments, params: AdamParams, *, keep_moments: bool = False
) -> Stepped:
    """One step. `gradients` has a tensor for every weight. The tensors of `moments` become those of the result, unless
    they are kept; a step that fails while it changes them raises MomentsLost."""
    names = sorted(weights)  # norms are sums, whose last bit depends on the order, and a loaded adapter has another one
    grad_norm = global_norm([gradients[name] for name in names])
    skipped = Stepped(weights, moments, grad_norm, 0.0, skipped=True)
    clipped = _clipped([gradients[name] for name in names], grad_norm, params.grad_clip_norm)
    if clipped is None:
        return skipped
    new = [weights[name].clone() for name in names]
    copied = keep_moments or _may_overflow(params, moments)
    mean, square = (
        [_owned(old.get(name), weight, copied=copied) for name, weight in zip(names, new, strict=True)]
        for old in (moments.mean, moments.square)
    )
    spare, steps = _spare(weights), _steps(moments.step, new)  # from here on nothing large is allocated
    try:
        library_adamw(new, clipped, mean, square, max_exp_avg_sqs=[], state_steps=steps, **_settings(params))
        update_norm = _norm_of_changes([weights[name] for name in names], new, spare)
    except BaseException as error:
        if copied:
            raise
        raise MomentsLost from error
    if not math.isfinite(update_norm):
        return skipped
    named = (dict(zip(names, tensors, strict=True)) for tensors in (new, mean, square))
    return Stepped(next(named), Moments(moments.step + 1, *named), grad_norm, update_norm, skipped=False)


def _clipped(gradients: list[Tensor], norm: float, clip_norm: float) -> list[Tensor] | None:
    """To a norm of at most `clip_norm`, where that is not 0. None where one is not finite, or its square would not
    be."""
    if not math.isfinite(norm):
        return None
    clip = clip_norm / norm if 0 < clip_norm < norm else 1.0
    clipped = gradients if clip == 1.0 else [gradient * clip for gradient in gradients]
    if norm * clip >= LARGEST_SQUARED and max(tensor.abs().max().item() for tensor in clipped) >= LARGEST_SQUARED:
        return None
    return clipped


def _settings(params: AdamParams) -> dict[str, Any]:
    return {
        "lr": params.learning_rate,
        "beta1": params.beta1,
        "beta2": params.beta2,
        "eps": params.eps,
        "weight_decay": params.weight_decay,
        "amsgrad": False,
        "maximize": False,
        "fused": True,  # one pass over memory instead of a dozen
    }


def _may_overflow(params: AdamParams, moments: Moments) -> bool:
    """Whether weights can leave float32 in this step. Not by far where rate and decay are in order: no gradient that
    was accepted, hence no mean of them, is above `LARGEST_SQUARED`."""
    correction = 1 - params.beta1 ** (moments.step + 1)
    if correction <= 0:
        return True
    largest_change = abs(params.learning_rate) * LARGEST_SQUARED / correction / params.eps
    return not (largest_change < LARGEST / 1e6 and abs(params.learning_rate * params.weight_decay) <= 1)


def _owned(moment: Tensor | None, like: Tensor, *, copied: bool) -> Tensor:
    """What a step writes to: the moment itself, or, where it is kept or the step may have to be taken back, a copy."""
    if moment is None:
        return torch.zeros_like(like)
    return moment.clone() if copied else moment


def _steps(step: int, like: list[Tensor]) -> list[Tensor]:
    """One for each tensor, which the library counts up."""
    if not like:
        return []
    return list(torch.full((len(like),), float(step), device=like[0].device, dtype=torch.float32).unbind())


def _spare(weights: Tensors) -> Tensor:
    """Room for any one of them."""
    some = max(weights.values(), key=Tensor.numel)
    return some.new_empty(some.numel())


def _norm_of_changes(old: list[Tensor], new: list[Tensor], spare: Tensor) -> float:
    """Euclidean norm of new - old, over all tensors; `spare` is room for any one of them."""
    pairs = list(zip(old, new, strict=True))
    norm = _norm_of_rows(torch.sub(b, a, out=spare[: a.numel()].view_as(a)) for a, b in pairs)
    return norm if math.isfinite(norm) else _norm_of_rows(b.double() - a.double() for a, b in pairs)


def global_norm(tensors: Iterable[Tensor]) -> float:
    """Euclidean norm over all tensors, in their order."""
    tensors = list(tensors)
    norm = _norm_of_rows(tensors)
    if math.isfinite(norm):
        return norm
    return _norm_of_rows(tensor.double() for tensor in tensors)  # squares beyond float32 are still numbers


def _norm_of_rows(tensors: Iterable[Tensor]) -> float:
    """Of each row first, and of the rows in float64, in a fixed order."""
    rows = [torch.linalg.vector_norm(tensor, dim=-1).flatten() for tensor in tensors]
    return torch.linalg.vector_norm(torch.cat(rows), dtype=torch.float64).item() if rows else 0.0
