# pyright: basic
"""What adapters add to frozen linears: low-rank products on their own rows, forward and backward.

    y = x·Wᵀ + scale·(x·Aᵀ)·Bᵀ        (Hu et al. 2021, arXiv:2106.09685)

W is frozen. Linears that read the same input are *siblings*: their W are one below the other, so are their A, and each
B adds to the columns of its own linear. The factors are float32; the products of a pass run in the dtype of y, as mixed
precision has it, and the gradients of the factors are computed in float32. Rows that no adapter owns meet the linears
as they are.

    LowRank   one adapter, on a slice of the rows or some of them
    Batched   several of about as many rows each, in batched products

Shapes: `N` rows of a pass, `M` rows of one adapter, `K` adapters, `I` inputs, `O` outputs, `R` rank, of all siblings
together where their factors are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stovetop.engine.kernels.arithmetic import Arithmetic, FrozenLinear
from stovetop.engine.kernels.row_groups import RowGroups, product

ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Siblings:
    """Linears that read the same input, and which columns of the outputs are whose."""

    names: tuple[str, ...]
    columns: tuple[slice, ...] = field(default=(ALL,), compare=False)

    @classmethod
    def of(cls, sizes: dict[str, int]) -> "Siblings":
        """From how many outputs each has, in their order."""
        ends = accumulate(sizes.values(), initial=0)
        return cls(tuple(sizes), tuple(slice(start, end) for start, end in pairwise(ends)))


class Factors(NamedTuple):
    """Of one adapter for one linear."""

    a_RI: Tensor
    b_OR: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The factors of one adapter for siblings, and the rows they act on: a slice, or indices (M,)."""

    siblings: Siblings
    by_sibling: Sequence[Factors | None]  # None: it does not train this one
    scale: float
    rows: slice | Tensor = field(default_factory=lambda: ALL)

    @property
    def factors(self) -> list[Tensor]:
        return list(chain.from_iterable(own for own in self.by_sibling if own is not None))

    def add_to(self, out_NO: Tensor, x_NI: Tensor, arithmetic: Arithmetic) -> Tensor:
        """In place; returns what the backward pass needs: the thin product scale·x·Aᵀ."""
        dtype = out_NO.dtype
        thin_MR = arithmetic.product(x_NI[self.rows].to(dtype), self._a(dtype)).mul_(self.scale)
        for (_, b_OR), columns, ranks in self._each():
            if isinstance(self.rows, slice):
                arithmetic.add_product(out_NO[self.rows, columns], thin_MR[:, ranks], b_OR.to(dtype))
            else:
                added_MO = arithmetic.product(thin_MR[:, ranks], b_OR.to(dtype))
                out_NO[:, columns].index_add_(0, self.rows, added_MO)
        return thin_MR

    def gradients(self, dy_NO: Tensor, x_NI: Tensor, thin_MR: Tensor, dx_NI: Tensor | None) -> list[Tensor]:
        """Of the factors; that of x is added to `dx_NI`. `thin_MR` is from `add_to`."""
        factor_dtype = self.factors[0].dtype
        dy_MO, x_MI = dy_NO[self.rows], x_NI[self.rows].to(factor_dtype)
        d_thin_MR = torch.empty_like(thin_MR)
        d_b: list[Tensor] = []
        for (_, b_OR), columns, ranks in self._each():
            d_thin_MR[:, ranks] = dy_MO[:, columns] @ b_OR.to(dy_MO.dtype)
            d_b.append(dy_MO[:, columns].to(factor_dtype).t() @ thin_MR[:, ranks].to(factor_dtype))
        d_thin_MR.mul_(self.scale)
        if dx_NI is not None:
            a_RI = self._a(dx_NI.dtype)
            if isinstance(self.rows, slice):
                dx_NI[self.rows].addmm_(d_thin_MR, a_RI)
            else:
                dx_NI.index_add_(0, self.rows, d_thin_MR @ a_RI)
        d_a_RI = d_thin_MR.to(factor_dtype).t() @ x_MI
        d_a = [d_a_RI[ranks] for _, _, ranks in self._each()]
        return list(chain.from_iterable(zip(d_a, d_b, strict=True)))

    def _a(self, dtype: torch.dtype) -> Tensor:
        each = [own.a_RI for own in self.by_sibling if own is not None]
        return (each[0] if len(each) == 1 else torch.cat(each)).to(dtype)

    def _each(self) -> "list[tuple[Factors, slice, slice]]":
        """Of the siblings that it trains: factors, columns of the outputs, ranks of the thin product."""
        there = [(own, c) for own, c in zip(self.by_sibling, self.siblings.columns, strict=True) if own is not None]
        ends = accumulate((len(own.a_RI) for own, _ in there), initial=0)
        return [(own, c, slice(*ranks)) for (own, c), ranks in zip(there, pairwise(ends), strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class SideBySide:
    """The factors of several adapters for siblings, zeros up to the largest rank and where an adapter has none."""

    a_KRI: Tensor  # of each sibling `rank` rows
    b_KOR: Sequence[Tensor]  # by sibling, with the scale in it
    rank: int

    @classmethod
    def of(cls, adapters_K: Sequence[LowRank | None], rank: int, dtype: torch.dtype) -> "SideBySide | None":
        """None if there is nothing at all."""
        by_sibling = zip(*(own.by_sibling for own in adapters_K if own is not None), strict=True)
        likes = [next((own for own in column if own is not None), None) for column in by_sibling]
        like = next((own for own in likes if own is not None), None)
        if like is None:
            return None
        new = lambda *shape: torch.zeros(len(adapters_K), *shape, dtype=dtype, device=like.a_RI.device)  # noqa: E731
        made = cls(
            new(len(likes) * rank, like.a_RI.shape[1]),
            [new(0 if own is None else len(own.b_OR), rank) for own in likes],
            rank,
        )
        for index, adapter in enumerate(adapters_K):
            if adapter is not None:
                made.put(index, adapter)
        return made

    def ranks(self, sibling: int) -> slice:
        return slice(sibling * self.rank, (sibling + 1) * self.rank)

    def has_room_for(self, adapter: LowRank) -> bool:
        """Whether it was made with all siblings that this one trains."""
        pairs = zip(self.b_KOR, adapter.by_sibling, strict=True)
        return all(own is None or b_KOR.shape[1] > 0 for b_KOR, own in pairs)

    def clear(self, index: int) -> None:
        for stacked in (self.a_KRI, *self.b_KOR):
            stacked[index].zero_()

    def put(self, index: int, adapter: LowRank) -> None:
        """Into room that is zero."""
        for sibling, own in enumerate(adapter.by_sibling):
            if own is not None:
                rank = len(own.a_RI)
                self.a_KRI[index, self.ranks(sibling)][:rank].copy_(own.a_RI.detach())
                torch.mul(own.b_OR.detach(), adapter.scale, out=self.b_KOR[sibling][index, :, :rank])


@dataclass(frozen=True, slots=True, eq=False)
class Batched:
    """Several adapters of about as many rows each, in two batched products."""

    siblings: Siblings
    groups: RowGroups  # one an adapter
    stacked: SideBySide
    adapters_K: Sequence[LowRank | None] = ()  # those that are trained; none in a pass without gradients

    @property
    def factors(self) -> list[Tensor]:
        return [factor for adapter in self.adapters_K if adapter is not None for factor in adapter.factors]

    def add_to(self, out_NO: Tensor, x_NI: Tensor, arithmetic: Arithmetic) -> Tensor:
        a_KRI = self.stacked.a_KRI
        thin_KMR = product(self.groups.gathered(x_NI.to(a_KRI.dtype)), a_KRI.transpose(1, 2))
        for sibling, (b_KOR, columns) in enumerate(zip(self.stacked.b_KOR, self.siblings.columns, strict=True)):
            if b_KOR.shape[1] > 0:
                own_KMR = thin_KMR[..., self.stacked.ranks(sibling)]
                self.groups.add_product(out_NO[:, columns], own_KMR, b_KOR.transpose(1, 2))
        return thin_KMR

    def gradients(self, dy_NO: Tensor, x_NI: Tensor, thin_KMR: Tensor, dx_NI: Tensor | None) -> list[Tensor]:
        assert self.adapters_K, "a stack of adapters is for passes without gradients"
        factor_dtype, d_thin_KMR = self.factors[0].dtype, torch.zeros_like(thin_KMR)
        scales_K11 = self._scales(factor_dtype, thin_KMR.device)
        d_b_KOR: list[Tensor] = []
        for sibling, (b_KOR, columns) in enumerate(zip(self.stacked.b_KOR, self.siblings.columns, strict=True)):
            dy_KMO, ranks = self.groups.gathered(dy_NO[:, columns][:, : b_KOR.shape[1]]), self.stacked.ranks(sibling)
            if self.groups.is_padding_KM is not None:
                dy_KMO = dy_KMO.masked_fill(self.groups.is_padding_KM[:, :, None], 0.0)
            d_thin_KMR[..., ranks] = product(dy_KMO, b_KOR)
            scaled_KMR = thin_KMR[..., ranks].to(factor_dtype) * scales_K11
            d_b_KOR.append(product(dy_KMO.to(factor_dtype).transpose(1, 2), scaled_KMR))
        if dx_NI is not None:
            self.groups.add_product(dx_NI, d_thin_KMR, self.stacked.a_KRI)
        d_a_KRI = product(d_thin_KMR.to(factor_dtype).transpose(1, 2), self.groups.gathered(x_NI).to(factor_dtype))
        found: list[Tensor] = []
        for index, adapter in enumerate(self.adapters_K):
            for sibling, own in enumerate(() if adapter is None else adapter.by_sibling):
                if own is not None:
                    rank = len(own.a_RI)
                    pair = (d_a_KRI[index, self.stacked.ranks(sibling)][:rank], d_b_KOR[sibling][index, :, :rank])
                    found += [gradient.clone() for gradient in pair]  # a view would keep those of all alive
        return found

    def _scales(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        scales = [0.0 if adapter is None else adapter.scale for adapter in self.adapters_K]
        return torch.tensor(scales, dtype=dtype, device=device)[:, None, None]


Product = LowRank | Batched


def adapted(
    x_NI: Tensor,
    linear: FrozenLinear,
    parts: Sequence[Product],
    arithmetic: Arithmetic,
    residual_NO: Tensor | None = None,
) -> Tensor:
    """A frozen linear, or siblings, with what `parts` add, and the residual. Differentiable in x, in the residual and
    in the factors."""
    if torch.is_grad_enabled():
        factors = [factor for part in parts for factor in part.factors]
        return _Adapted.apply(x_NI, residual_NO, linear, parts, arithmetic, *factors)
    out_NO = arithmetic.linear(x_NI, linear, residual_NO)
    for part in parts:
        part.add_to(out_NO, x_NI, arithmetic)
    return out_NO


class _Adapted(torch.autograd.Function):
    """Written out so that x is kept once and as it is, never as a float32 copy, and little beside it."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        residual_NO: Tensor | None,
        linear: FrozenLinear,
        parts: Sequence[Product],
        arithmetic: Arithmetic,
        *factors: Tensor,
    ) -> Tensor:
        out_NO = arithmetic.linear(x_NI, linear, residual_NO)
        kept = [part.add_to(out_NO, x_NI, arithmetic) for part in parts]
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(x_NI if factors else None, linear.weight_OI, *kept)
            ctx.parts = parts
        return out_NO

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI, *kept = ctx.saved_tensors
        dy_NO = gradients[0]
        dx_NI = dy_NO @ weight_OI if ctx.needs_input_grad[0] else None
        d_residual_NO = dy_NO if ctx.needs_input_grad[1] else None
        d_factors = [
            gradient
            for part, thin in zip(ctx.parts, kept, strict=True)
            for gradient in part.gradients(dy_NO, x_NI, thin, dx_NI)
        ]
        return dx_NI, d_residual_NO, None, None, None, *d_factors
