# pyright: basic
"""Rows of a pass in groups, each of which meets something of its own (an adapter, a prefix), as one batched product.

Shapes: `N` rows of the pass, `K` groups, `M` rows of one of them, at most; `X` anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RowGroups:
    rows_KM: Tensor  # filled up with any row where a group has fewer
    place_N: Tensor  # where each row is among these K·M; anywhere, if it is in no group
    without_N: Tensor | None  # whether it is in none; None: all are in one

    @property
    def num_rows(self) -> int:
        return len(self.place_N)

    @property
    def is_one(self) -> bool:
        """One group has all rows, in their order."""
        return self.rows_KM.shape == (1, self.num_rows) and self.without_N is None

    def gathered(self, x_NX: Tensor) -> Tensor:
        """(K, M, X)"""
        return x_NX.index_select(0, self.rows_KM.flatten()).unflatten(0, self.rows_KM.shape)

    def scattered(self, x_KMX: Tensor) -> Tensor:
        """(N, X); zeros for rows of no group."""
        x_NX = x_KMX.flatten(0, 1).index_select(0, self.place_N)
        return x_NX if self.without_N is None else x_NX.masked_fill_(self.without_N[:, None], 0.0)


def row_groups(rows_K: Sequence[Sequence[int]], num_rows: int, device: torch.device) -> RowGroups:
    """`rows_K` are the rows of each group, ascending; a group may be empty, but not all of them."""
    most = max(map(len, rows_K))
    places = [-1] * num_rows
    for group, rows in enumerate(rows_K):
        for index, row in enumerate(rows):
            places[row] = group * most + index
    without = [place < 0 for place in places]
    tensor = lambda values: torch.tensor(values, device=device)  # noqa: E731
    return RowGroups(
        tensor([[*rows, *[0] * (most - len(rows))] for rows in rows_K]),
        tensor([max(0, place) for place in places]),
        tensor(without) if any(without) else None,
    )
