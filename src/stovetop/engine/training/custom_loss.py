# pyright: basic
"""Calls a user's loss, and checks what it returns before any gradient is added. The recording backend uses this
too."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stovetop.checks import take
from stovetop.errors import InvalidRequest
from stovetop.rules import ANY_NUMBER, DictOf, shown
from stovetop.types import Datum

_METRICS = DictOf(ANY_NUMBER)
_DEPENDS = "a custom loss must return one number that depends on the logprobs it was given, so that they get a gradient"


class Judged(NamedTuple):
    """What a custom loss said."""

    loss: float
    metrics: dict[str, float]
    logprobs: list[Tensor]  # that it was given
    gradients: Sequence[Tensor]  # of the loss, with respect to them


def judge(loss_fn: Callable[..., Any], data: Sequence[Datum], logprobs: Sequence[Tensor]) -> Judged:
    """Calls a user's loss with detached logprobs. It returns a finite number that depends on them, and metrics
    by name; anything else is an InvalidRequest that says what came."""
    seen = [tensor.detach().requires_grad_() for tensor in logprobs]
    try:
        returned = loss_fn(list(data), list(seen))
    except Exception as error:  # a fault of the caller's function, not of ours
        raise InvalidRequest(f"the custom loss raised {error!r}") from error
    if inspect.iscoroutine(returned):
        returned.close()
        raise InvalidRequest("the custom loss must be a plain function, not an async one")
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise InvalidRequest(f"a custom loss must return two values, (loss, metrics): {shown(returned)}")
    loss, metrics = returned
    loss = _checked_loss(loss)
    return Judged(loss.item(), _checked_metrics(metrics), seen, _gradients(loss, seen))


def _checked_loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise InvalidRequest(
            f"the loss that a custom loss returns must be a torch tensor with one number: {_described(loss)}"
        )
    if not loss.requires_grad:
        raise InvalidRequest(f"{_DEPENDS}: {loss!r}")
    if not torch.isfinite(loss):
        raise InvalidRequest(f"the loss that a custom loss returns must be finite: {loss.item()}")
    return loss


def _described(loss: Any) -> str:
    return f"a tensor of shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else shown(loss)


def _checked_metrics(metrics: Any) -> dict[str, float]:
    """Numbers by name; a tensor with one number is one too."""
    if isinstance(metrics, dict):
        single = {k: v.item() for k, v in metrics.items() if isinstance(v, Tensor) and v.numel() == 1}
        metrics = {**metrics, **single}
    return take(_METRICS, metrics, "the metrics that a custom loss returns")


def _gradients(loss: Tensor, seen: list[Tensor]) -> list[Tensor]:
    try:
        gradients = torch.autograd.grad(loss, seen, allow_unused=True)
    except RuntimeError as error:  # such as a tensor that the function changed in place
        raise InvalidRequest(f"the custom loss has no gradient: {error}") from error
    if all(gradient is None for gradient in gradients):
        raise InvalidRequest(f"{_DEPENDS}: {loss!r}")
    for index, gradient in enumerate(gradients):
        if gradient is not None and not torch.isfinite(gradient).all():
            raise InvalidRequest(
                "the gradient of the custom loss must be finite; with respect to the logprobs of "
                f"data[{index}] it is: {gradient}"
            )
    return [torch.zeros_like(p) if g is None else g for p, g in zip(seen, gradients, strict=True)]
