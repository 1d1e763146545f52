# pyright: basic
"""What adapters add to a linear: low-rank products on their own rows, forward and backward.

    y = x·Wᵀ + scale·(x·Aᵀ)·Bᵀ        (Hu et al. 2021, arXiv:2106.09685)

W is frozen. The factors are float32; the products of a pass run in the dtype of y, as mixed precision has it, and the
gradients of the factors are computed in float32. Rows that no adapter owns meet the linear as it is.

Shapes: `N` rows of a pass, `M` rows of one adapter, `K` adapters, `I` inputs, `O` outputs, `R` rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stovetop.engine.arithmetic import Arithmetic
from stovetop.engine.row_groups import RowGroups

ALL = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The factors of one adapter for one linear, and the rows they act on: a slice, or indices (M,)."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    rows: slice | Tensor = field(default_factory=lambda: ALL)

    def add_to(self, out_NO: Tensor, x_NI: Tensor, arithmetic: Arithmetic) -> Tensor:
        """In place; the thin product scale·x·Aᵀ, which the backward pass needs."""
        a_RI, b_OR = self.a_RI.to(out_NO.dtype), self.b_OR.to(out_NO.dtype)
        thin_MR = arithmetic.linear(x_NI[self.rows].to(out_NO.dtype), a_RI).mul_(self.scale)
        if isinstance(self.rows, slice):
            arithmetic.add_linear(out_NO[self.rows], thin_MR, b_OR)
        else:
            out_NO.index_add_(0, self.rows, arithmetic.linear(thin_MR, b_OR))
        return thin_MR


@dataclass(frozen=True, slots=True, eq=False)
class Stacked:
    """Several adapters of about as many rows each, in two batched products. For passes without gradients."""

    groups: RowGroups  # one an adapter
    a_KRI: Tensor
    b_KOR: Tensor  # with the scale in it

    def add_to(self, out_NO: Tensor, x_NI: Tensor, arithmetic: Arithmetic) -> None:
        x_NI = x_NI.to(self.a_KRI.dtype)
        if self.groups.is_one and out_NO.dtype == x_NI.dtype:
            out_NO.addmm_(x_NI @ self.a_KRI[0].t(), self.b_KOR[0].t())
        elif self.groups.is_one:
            out_NO += (x_NI @ self.a_KRI[0].t() @ self.b_KOR[0].t()).to(out_NO.dtype)
        else:
            thin_KMR = torch.bmm(self.groups.gathered(x_NI), self.a_KRI.transpose(1, 2))
            out_NO += self.groups.scattered(torch.bmm(thin_KMR, self.b_KOR.transpose(1, 2)))


def adapted_linear(
    x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, parts: Sequence[LowRank | Stacked], arithmetic: Arithmetic
) -> Tensor:
    """A frozen linear with what `parts` add. Differentiable in x and in the factors of each `LowRank`."""
    if not torch.is_grad_enabled():
        out_NO = arithmetic.linear(x.flatten(0, -2), weight_OI, bias_O)
        for part in parts:
            part.add_to(out_NO, x.flatten(0, -2), arithmetic)
        return out_NO.view(*x.shape[:-1], -1)
    factors = [factor for part in parts if isinstance(part, LowRank) for factor in (part.a_RI, part.b_OR)]
    out_NO = _AdaptedLinear.apply(x.flatten(0, -2), weight_OI, bias_O, parts, arithmetic, *factors)
    return out_NO.view(*x.shape[:-1], -1)


class _AdaptedLinear(torch.autograd.Function):
    """Written out so that x is kept once and as it is, never as a float32 copy, and nothing but the thin products
    beside it."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        parts: Sequence[LowRank | Stacked],
        arithmetic: Arithmetic,
        *factors: Tensor,
    ) -> Tensor:
        out_NO = arithmetic.linear(x_NI, weight_OI, bias_O)
        own = [part for part in parts if isinstance(part, LowRank)]
        assert len(own) == len(parts), "stacked adapters are for passes without gradients"
        thin = [part.add_to(out_NO, x_NI, arithmetic) for part in own]
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(x_NI if factors else None, weight_OI, *factors, *thin)
            ctx.rows, ctx.scales = [part.rows for part in own], [part.scale for part in own]
        return out_NO

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI, *saved = ctx.saved_tensors
        count = len(ctx.rows)
        factors, thin = saved[: 2 * count], saved[2 * count :]
        dy_NO = gradients[0]
        dx_NI = dy_NO @ weight_OI if ctx.needs_input_grad[0] else None
        d_factors: list[Tensor | None] = []
        for index, (rows, scale, thin_MR) in enumerate(zip(ctx.rows, ctx.scales, thin, strict=True)):
            a_RI, b_OR = factors[2 * index : 2 * index + 2]
            need_a, need_b = ctx.needs_input_grad[5 + 2 * index : 7 + 2 * index]
            dy_MO = dy_NO[rows]
            d_thin_MR = (dy_MO @ b_OR.to(dy_MO.dtype)).mul_(scale)
            d_factors.append(_product(d_thin_MR, x_NI[rows], a_RI) if need_a else None)
            d_factors.append(_product(dy_MO, thin_MR, b_OR) if need_b else None)
            if dx_NI is None:
                continue
            if isinstance(rows, slice):
                dx_NI[rows].addmm_(d_thin_MR, a_RI.to(dx_NI.dtype))
            else:
                dx_NI.index_add_(0, rows, d_thin_MR @ a_RI.to(dx_NI.dtype))
        return dx_NI, None, None, None, None, *d_factors


def _product(left_MX: Tensor, right_MY: Tensor, like: Tensor) -> Tensor:
    """leftᵀ·right, computed in the dtype of `like`: the gradient of a factor."""
    return left_MX.to(like.dtype).t() @ right_MY.to(like.dtype)
