"""How far a student's distribution is from its teacher's. Where a teacher's distributions come from, and how they
become data, is in off_policy; the reverse KL of sampled tokens is in on_policy.

In the formulas p is the teacher's distribution over the next token and q the student's.

Shape suffixes: `D` datums, `N` positions of one datum, `K` alternatives at a position, `V` vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, assert_never

import torch

from stovetop.checks import check
from stovetop.errors import InvalidRequest
from stovetop.rules import number
from stovetop.types import Datum

if TYPE_CHECKING:
    from stovetop.arguments import CustomLossFn


# ---- divergences of distributions --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForwardKL:
    """KL(p ‖ q) = Σ p·log(p/q): the student covers whatever the teacher may say."""


@dataclass(frozen=True, slots=True)
class ReverseKL:
    """KL(q ‖ p): the student keeps to what the teacher would say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneralizedJSD:
    """β·KL(p ‖ m) + (1 - β)·KL(q ‖ m), where m = β·p + (1 - β)·q (Agarwal et al. 2023, arXiv:2306.13649).

    Divided by β it tends to KL(p ‖ q) as β goes to 0, and divided by 1 - β to KL(q ‖ p) as β goes to 1; at 0 and 1
    themselves, where the formula gives 0, it is defined as these two."""

    beta: Annotated[float, number(at_least=0, at_most=1)] = 0.5  # the teacher's share of the mixture

    def __post_init__(self) -> None:
        check(self)


Divergence = ForwardKL | ReverseKL | GeneralizedJSD


def compute_divergence(
    divergence: Divergence, teacher_logits_NV: torch.Tensor, student_logits_NV: torch.Tensor
) -> torch.Tensor:
    """One value for each position, never below 0. Both arguments are logits or logprobs of any dtype, normalised here
    in float32: logprobs that were rounded to bfloat16 are no distributions, and between such it can be negative."""
    if teacher_logits_NV.shape != student_logits_NV.shape:
        shapes = tuple(teacher_logits_NV.shape), tuple(student_logits_NV.shape)
        raise InvalidRequest(f"teacher and student need logits of the same positions and tokens; shapes: {shapes}")
    teacher_NV = torch.log_softmax(teacher_logits_NV.float(), dim=-1)
    student_NV = torch.log_softmax(student_logits_NV.float(), dim=-1)
    match divergence:
        case ForwardKL() | GeneralizedJSD(beta=0):
            return _kl(teacher_NV, student_NV)
        case ReverseKL() | GeneralizedJSD(beta=1):
            return _kl(student_NV, teacher_NV)
        case GeneralizedJSD(beta=beta):
            mixed_NV = torch.logaddexp(teacher_NV + math.log(beta), student_NV + math.log(1 - beta))
            return beta * _kl(teacher_NV, mixed_NV) + (1 - beta) * _kl(student_NV, mixed_NV)
        case _:
            assert_never(divergence)


def _kl(first_NV: torch.Tensor, second_NV: torch.Tensor) -> torch.Tensor:
    """KL(first ‖ second) of logprobs. What the first excludes counts nothing; rounding below zero is cut."""
    possible_NV = first_NV > -math.inf
    gap_NV = torch.where(possible_NV, first_NV - second_NV, 0.0)
    return (first_NV.exp() * gap_NV).sum(dim=-1).clamp(min=0)


# ---- as a loss of training ---------------------------------------------------------------------------------------


def divergence_loss_fn(divergence: Divergence) -> "CustomLossFn":
    """What `forward_backward_custom` takes, with data of `off_policy.topk_divergence_datum`: the **sum over positions**
    of weight times divergence, and `divergence`, its mean by weight.

    Of the distributions it sees K tokens and, as one more outcome, all the others together; so it is 0 just where
    student and teacher agree on these, and a student cannot hide probability outside them."""

    def loss_fn(data_D: Sequence[Datum], logprobs_D: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        losses: list[torch.Tensor] = []
        weight = 0.0
        for datum, student_NK in zip(data_D, logprobs_D, strict=True):
            weights_N = datum.loss_fn_inputs["weights"].to_torch()
            teacher_NK = datum.loss_fn_inputs["teacher_logprobs"].to_torch()
            values_N = compute_divergence(divergence, _with_rest(teacher_NK), _with_rest(student_NK))
            losses.append((weights_N * values_N).sum())
            weight += weights_N.sum().item()
        if weight == 0:
            raise InvalidRequest(f"none of these {len(data_D)} datums has a weight, so there is no position to learn")
        loss = torch.stack(losses).sum()
        return loss, {"divergence": loss.item() / weight}

    return loss_fn


_LEAST_REST = 1e-6  # of probability beyond the top K; below, float32 cannot tell it from rounding


def _with_rest(logprobs_NK: torch.Tensor) -> torch.Tensor:
    """One more column: the logprob of all other tokens together."""
    rest_N1 = 1 - logprobs_NK.exp().sum(dim=-1, keepdim=True)
    return torch.cat([logprobs_NK, rest_N1.clamp(min=_LEAST_REST).log()], dim=-1)
