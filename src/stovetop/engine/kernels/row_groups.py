# pyright: basic
"""Rows of a pass in groups, each of which meets something of its own (an adapter, a prefix), as one batched product.

Shapes: `N` rows of the pass, `K` groups, `M` rows of one of them, at most; `R` and `X` anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RowGroups:
    rows_KM: Tensor  # a group with fewer rows is padded with a row of its own
    place_N: Tensor  # where each row is among these K·M; anywhere, if it is in no group
    without_N: Tensor | None  # whether it is in none; None: all are in one
    is_padding_KM: Tensor | None = None  # None: there is no padding
    is_dense: bool = False  # all rows are there, in their order, and nothing else

    @property
    def num_rows(self) -> int:
        return len(self.place_N)

    @property
    def is_one(self) -> bool:
        """One group has all rows."""
        return self.is_dense and len(self.rows_KM) == 1

    def gathered(self, x_NX: Tensor) -> Tensor:
        """(K, M, X)"""
        if self.is_dense:
            return x_NX.unflatten(0, self.rows_KM.shape)
        return x_NX.index_select(0, self.rows_KM.flatten()).unflatten(0, self.rows_KM.shape)

    def scattered(self, x_KMX: Tensor) -> Tensor:
        """(N, X); zeros for rows of no group."""
        if self.is_dense:
            return x_KMX.flatten(0, 1)
        x_NX = x_KMX.flatten(0, 1).index_select(0, self.place_N)
        return x_NX if self.without_N is None else x_NX.masked_fill_(self.without_N[:, None], 0.0)

    def add_product(self, out_NX: Tensor, left_KMR: Tensor, right_KRX: Tensor) -> None:
        """Adds left·right to the rows of each group, in place."""
        if self.is_one and out_NX.dtype == left_KMR.dtype:
            out_NX.addmm_(left_KMR[0], right_KRX[0])
        elif self.is_dense and out_NX.dtype == left_KMR.dtype:
            out_NX.unflatten(0, self.rows_KM.shape).baddbmm_(left_KMR, right_KRX)
        else:
            out_NX += self.scattered(product(left_KMR, right_KRX))


def product(left_KMX: Tensor, right_KXR: Tensor) -> Tensor:
    """Batched. One alone is computed as such, on all threads."""
    if len(left_KMX) == 1:
        return (left_KMX[0] @ right_KXR[0])[None]
    return torch.bmm(left_KMX, right_KXR)


def row_groups(rows_K: Sequence[Sequence[int]], num_rows: int, device: torch.device) -> RowGroups:
    """`rows_K` are the rows of each group, ascending; a group may be empty, but not all of them."""
    most = max(map(len, rows_K))
    places = [-1] * num_rows
    for group, rows in enumerate(rows_K):
        for index, row in enumerate(rows):
            places[row] = group * most + index
    without = [place < 0 for place in places]
    is_padding = [[False] * len(rows) + [True] * (most - len(rows)) for rows in rows_K]
    has_padding = any(map(any, is_padding))
    tensor = lambda values: torch.tensor(values, device=device)  # noqa: E731
    return RowGroups(
        tensor([[*rows, *[rows[0] if rows else 0] * (most - len(rows))] for rows in rows_K]),
        tensor([max(0, place) for place in places]),
        tensor(without) if any(without) else None,
        tensor(is_padding) if has_padding else None,
        is_dense=not has_padding and list(chain.from_iterable(rows_K)) == list(range(num_rows)),
    )
