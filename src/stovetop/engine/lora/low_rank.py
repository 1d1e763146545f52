# pyright: basic
"""What adapters add to a linear: low-rank products on their own rows, forward and backward.

    y = x·Wᵀ + scale·(x·Aᵀ)·Bᵀ        (Hu et al. 2021, arXiv:2106.09685)

W is frozen. The factors are float32; the products of a pass run in the dtype of y, as mixed precision has it, and the
gradients of the factors are computed in float32. Rows that no adapter owns meet the linear as it is.

Shapes: `N` rows of a pass, `M` rows of one adapter, `K` adapters, `I` inputs, `O` outputs, `R` rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from stovetop.engine.kernels.arithmetic import Arithmetic
from stovetop.engine.kernels.row_groups import RowGroups, product

ALL = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The factors of one adapter for one linear, and the rows they act on: a slice, or indices (M,)."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    rows: slice | Tensor = field(default_factory=lambda: ALL)

    @property
    def factors(self) -> list[Tensor]:
        return [self.a_RI, self.b_OR]

    def add_to(self, out_NO: Tensor, x_NI: Tensor, arithmetic: Arithmetic) -> list[Tensor]:
        """In place; what the backward pass needs: the thin product scale·x·Aᵀ."""
        a_RI, b_OR = self.a_RI.to(out_NO.dtype), self.b_OR.to(out_NO.dtype)
        thin_MR = arithmetic.linear(x_NI[self.rows].to(out_NO.dtype), a_RI).mul_(self.scale)
        if isinstance(self.rows, slice):
            arithmetic.add_linear(out_NO[self.rows], thin_MR, b_OR)
        else:
            out_NO.index_add_(0, self.rows, arithmetic.linear(thin_MR, b_OR))
        return [thin_MR]

    def gradients(self, dy_NO: Tensor, x_NI: Tensor, kept: Sequence[Tensor], dx_NI: Tensor | None) -> list[Tensor]:
        """Of the factors; that of x is added to `dx_NI`. `kept` is from `add_to`."""
        (thin_MR,) = kept
        dy_MO = dy_NO[self.rows]
        d_thin_MR = (dy_MO @ self.b_OR.to(dy_MO.dtype)).mul_(self.scale)
        if dx_NI is not None:
            a_RI = self.a_RI.to(dx_NI.dtype)
            if isinstance(self.rows, slice):
                dx_NI[self.rows].addmm_(d_thin_MR, a_RI)
            else:
                dx_NI.index_add_(0, self.rows, d_thin_MR @ a_RI)
        precise = self.a_RI.dtype
        return [
            d_thin_MR.to(precise).t() @ x_NI[self.rows].to(precise),
            dy_MO.to(precise).t() @ thin_MR.to(precise),
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Stacked:
    """Several adapters of about as many rows each, in two batched products. For passes without gradients."""

    groups: RowGroups  # one an adapter
    a_KRI: Tensor
    b_KOR: Tensor  # with the scale in it

    def add_to(self, out_NO: Tensor, x_NI: Tensor, arithmetic: Arithmetic) -> None:
        x_KMI = self.groups.gathered(x_NI.to(self.a_KRI.dtype))
        self.groups.add_product(out_NO, product(x_KMI, self.a_KRI.transpose(1, 2)), self.b_KOR.transpose(1, 2))


@dataclass(frozen=True, slots=True, eq=False)
class Batched:
    """The same for adapters that are trained: their factors are put side by side on the way there and, unless most of
    that is padding, kept for the way back."""

    groups: RowGroups
    adapters_K: Sequence[LowRank | None]  # None: it does not train this linear

    @property
    def factors(self) -> list[Tensor]:
        return [factor for adapter in self.adapters_K if adapter is not None for factor in adapter.factors]

    def add_to(self, out_NO: Tensor, x_NI: Tensor, arithmetic: Arithmetic) -> list[Tensor]:
        a_KRI, b_KOR = self._side_by_side(out_NO.dtype)
        thin_KMR = product(self.groups.gathered(x_NI.to(out_NO.dtype)), a_KRI.transpose(1, 2))
        self.groups.add_product(out_NO, thin_KMR, b_KOR.transpose(1, 2))
        is_mostly_padding = a_KRI.numel() + b_KOR.numel() > 2 * sum(factor.numel() for factor in self.factors)
        return [thin_KMR] if is_mostly_padding else [thin_KMR, a_KRI, b_KOR]

    def gradients(self, dy_NO: Tensor, x_NI: Tensor, kept: Sequence[Tensor], dx_NI: Tensor | None) -> list[Tensor]:
        thin_KMR, *stacked = kept
        a_KRI, b_KOR = stacked or self._side_by_side(dy_NO.dtype)
        dy_KMO = self.groups.gathered(dy_NO)
        if self.groups.is_padding_KM is not None:
            dy_KMO = dy_KMO.masked_fill(self.groups.is_padding_KM[:, :, None], 0.0)
        d_thin_KMR = product(dy_KMO, b_KOR)
        if dx_NI is not None:
            self.groups.add_product(dx_NI, d_thin_KMR, a_KRI)
        precise = self.factors[0].dtype
        x_KMI = self.groups.gathered(x_NI).to(precise)
        d_a_KRI = product(d_thin_KMR.to(precise).transpose(1, 2), x_KMI)
        d_b_KOR = product(dy_KMO.to(precise).transpose(1, 2), self._scaled(thin_KMR.to(precise)))
        own = [
            (d_a_RI[: len(adapter.a_RI)], d_b_OR[:, : len(adapter.a_RI)])
            for adapter, d_a_RI, d_b_OR in zip(self.adapters_K, d_a_KRI, d_b_KOR, strict=True)
            if adapter is not None
        ]
        return [gradient.clone() for pair in own for gradient in pair]  # a view would keep those of all alive

    def _scaled(self, thin_KMR: Tensor) -> Tensor:
        scales = [0.0 if adapter is None else adapter.scale for adapter in self.adapters_K]
        if len(set(scales)) == 1:
            return thin_KMR * scales[0]
        return thin_KMR * torch.tensor(scales, dtype=thin_KMR.dtype, device=thin_KMR.device)[:, None, None]

    def _side_by_side(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rank = max(len(adapter.a_RI) for adapter in self.adapters_K if adapter is not None)
        stacked = side_by_side(self.adapters_K, rank, dtype)
        assert stacked is not None, "at least one adapter trains this linear"
        return stacked


def side_by_side(adapters_K: Sequence[LowRank | None], rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """A (K, R, I) and B (K, O, R), the second with the scales in it; zeros up to this rank and where there is nothing.
    None if there is nothing at all."""
    some = next((adapter for adapter in adapters_K if adapter is not None), None)
    if some is None:
        return None
    is_full = all(adapter is not None and len(adapter.a_RI) == rank for adapter in adapters_K)
    made = torch.empty if is_full else torch.zeros
    a_KRI = made(len(adapters_K), rank, some.a_RI.shape[1], dtype=dtype, device=some.a_RI.device)
    b_KOR = made(len(adapters_K), len(some.b_OR), rank, dtype=dtype, device=some.b_OR.device)
    for adapter, a_RI, b_OR in zip(adapters_K, a_KRI, b_KOR, strict=True):
        if adapter is not None:
            put(adapter, a_RI, b_OR)
    return a_KRI, b_KOR


def put(adapter: LowRank, a_RI: Tensor, b_OR: Tensor) -> None:
    """Factors into room for them, which may have another dtype and a larger rank; the scale into the second."""
    rank = len(adapter.a_RI)
    a_RI[:rank].copy_(adapter.a_RI.detach())
    if adapter.scale == 1:
        b_OR[:, :rank].copy_(adapter.b_OR.detach())
    else:
        torch.mul(adapter.b_OR.detach(), adapter.scale, out=b_OR[:, :rank])


Part = LowRank | Stacked | Batched


def adapted_linear(
    x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, parts: Sequence[Part], arithmetic: Arithmetic
) -> Tensor:
    """A frozen linear with what `parts` add. Differentiable in x and in the factors, but for those of `Stacked`."""
    if not torch.is_grad_enabled():
        out_NO = arithmetic.linear(x.flatten(0, -2), weight_OI, bias_O)
        for part in parts:
            part.add_to(out_NO, x.flatten(0, -2), arithmetic)
        return out_NO.view(*x.shape[:-1], -1)
    trained = [part for part in parts if not isinstance(part, Stacked)]
    assert len(trained) == len(parts), "stacked adapters are for passes without gradients"
    factors = [factor for part in trained for factor in part.factors]
    out_NO = _AdaptedLinear.apply(x.flatten(0, -2), weight_OI, bias_O, trained, arithmetic, *factors)
    return out_NO.view(*x.shape[:-1], -1)


class _AdaptedLinear(torch.autograd.Function):
    """Written out so that x is kept once and as it is, never as a float32 copy, and little beside it."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        parts: Sequence[LowRank | Batched],
        arithmetic: Arithmetic,
        *factors: Tensor,
    ) -> Tensor:
        out_NO = arithmetic.linear(x_NI, weight_OI, bias_O)
        kept = [part.add_to(out_NO, x_NI, arithmetic) for part in parts]
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(x_NI if factors else None, weight_OI, *chain.from_iterable(kept))
            ctx.parts, ctx.num_kept = parts, [len(own) for own in kept]
        return out_NO

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI, *rest = ctx.saved_tensors
        in_order = iter(rest)
        kept = [list(islice(in_order, number)) for number in ctx.num_kept]
        dy_NO = gradients[0]
        dx_NI = dy_NO @ weight_OI if ctx.needs_input_grad[0] else None
        d_factors = [
            gradient
            for part, own in zip(ctx.parts, kept, strict=True)
            for gradient in part.gradients(dy_NO, x_NI, own, dx_NI)
        ]
        return dx_NI, None, None, None, None, *d_factors
