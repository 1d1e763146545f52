# pyright: basic
"""What running samples of one prompt share: its keys and values lie in memory once, and a decoding pass reads them once
for all of these samples. A sample's own slot of the cache holds only what comes after.

This is the split of attention at a shared prefix of Juravsky et al. 2024 (Hydragen, arXiv:2402.05099).

Shapes: `S` rows of a pass, one a sample; `P` prefixes; `M` rows of one of them, at most; `G` key/value heads; `R` query
heads that share one; `X` anything.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stovetop.engine.kernels.kv_cache import KVCache, rounded_up
from stovetop.engine.kernels.row_groups import RowGroups, row_groups
from stovetop.engine.kernels.sight import Seen, Sight

# rough bounds: a pass may compute so many times the rows that share a prefix, and so many more; a shorter prefix is not
# worth a product of its own
MAX_PADDING, FREE_PADDED_ROWS, MIN_PREFIX_TOKENS = 3, 64, 64


@dataclass(frozen=True, slots=True, eq=False)
class SharedRows:
    """Which rows of a pass go on from which prefix; for tensors of attention, where heads stand before rows."""

    groups: RowGroups
    _made: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)  # by what, G and R

    def gathered(self, x_SGRX: Tensor) -> Tensor:
        """(P, G, M·R, X)"""
        _, key_heads, repeats, size = x_SGRX.shape
        index = self._once("gather", key_heads, repeats, self._gather_index)
        return x_SGRX.reshape(-1, size).index_select(0, index).view(len(self.groups.rows_KM), key_heads, -1, size)

    def scattered(self, x_PGNX: Tensor, repeats: int, missing: float) -> Tensor:
        """(S, G, R, X) from (P, G, M·R, X); rows without a prefix get `missing`."""
        _, key_heads, _, size = x_PGNX.shape
        index, without_S = self._once("scatter", key_heads, repeats, self._scatter_index), self.groups.without_N
        x_SGRX = x_PGNX.transpose(1, 2).reshape(-1, size).index_select(0, index).view(-1, key_heads, repeats, size)
        return x_SGRX if without_S is None else x_SGRX.masked_fill_(without_S[:, None, None, None], missing)

    def _once(self, what: str, key_heads: int, repeats: int, make: Callable[[int, int], Tensor]) -> Tensor:
        """The layers of a pass ask for the same."""
        key = (what, key_heads, repeats)
        if key not in self._made:
            self._made[key] = make(key_heads, repeats)
        return self._made[key]

    def _gather_index(self, key_heads: int, repeats: int) -> Tensor:
        """Among S·G·R, for each of P·G·M·R."""
        within_GR = torch.arange(key_heads * repeats, device=self.groups.rows_KM.device).view(key_heads, repeats)
        index_PMGR = self.groups.rows_KM[:, :, None, None] * (key_heads * repeats) + within_GR
        return index_PMGR.transpose(1, 2).flatten()

    def _scatter_index(self, key_heads: int, repeats: int) -> Tensor:
        """Among P·M·R·G, for each of S·G·R."""
        within_GR = torch.arange(key_heads * repeats, device=self.groups.place_N.device).view(repeats, key_heads).t()
        return (self.groups.place_N[:, None, None] * (key_heads * repeats) + within_GR).flatten()


@dataclass(slots=True, eq=False)
class Prefix:
    """The first `length` tokens of the prompt that `source` holds, for as many samples as use it."""

    source: "weakref.ref[KVCache]"  # once it is gone, no further sample can share it
    length: int
    num_users: int = 0


class SharedPrefixes:
    """The prefixes of the samples that run."""

    def __init__(self, num_layers: int, max_tokens: int | None = None) -> None:
        self._cache = KVCache(num_layers, max_tokens)
        self._prefixes: list[Prefix] = []  # in the order of their slots

    def num_tokens(self, source: KVCache | None = None, length: int = 0) -> int:
        """That are kept: slots times positions. With a source and a length, after a sample of it would have joined."""
        lengths = self._lengths
        if source is not None and self.find(source) is None:
            lengths.append(length)
        return len(lengths) * rounded_up(max(lengths, default=0))

    @property
    def _lengths(self) -> list[int]:
        return [prefix.length for prefix in self._prefixes]

    @property
    def num_allocated(self) -> int:
        """Slots times positions that there is room for."""
        return self._cache.num_tokens

    def shrink(self) -> bool:
        """Gives back room that no prefix needs any more; whether there was any."""
        return self._cache.shrink(len(self._prefixes), max(self._lengths, default=0))

    def would_balance(self, own: Prefix | None) -> bool:
        """Whether, with one more sample of it (None: of a new one), the rows that a pass computes are not many times
        those that it has."""
        users = [prefix.num_users for prefix in self._prefixes]
        most = max([*users, 1 if own is None else own.num_users + 1])
        return (len(users) + (own is None)) * most <= MAX_PADDING * (sum(users) + 1) + FREE_PADDED_ROWS

    def find(self, source: KVCache) -> Prefix | None:
        return next((prefix for prefix in self._prefixes if prefix.source() is source), None)

    def join(self, source: KVCache, length: int) -> Prefix:
        """One more sample goes on from there."""
        prefix = self.find(source)
        if prefix is None:
            prefix = Prefix(weakref.ref(source), length)
            self._cache.reserve(len(self._prefixes) + 1, max([length, *self._lengths]))
            self._cache.copy_from(source, 0, [len(self._prefixes)], length)
            self._prefixes.append(prefix)
        prefix.num_users += 1
        return prefix

    def has(self, prefix: Prefix) -> bool:
        return any(own is prefix for own in self._prefixes)

    def rejoin(self, prefix: Prefix) -> None:
        """A sample that had left it comes back; it is still there."""
        prefix.num_users += 1

    def leave(self, prefix: Prefix) -> None:
        prefix.num_users -= 1
        if prefix.num_users > 0:
            return
        slot, last = self._prefixes.index(prefix), self._prefixes[-1]
        if last is not prefix:
            self._cache.copy_from(self._cache, len(self._prefixes) - 1, [slot], last.length)
            self._prefixes[slot] = last
        self._prefixes.pop()
        if not self._prefixes:
            self._cache.clear()

    def clear(self) -> None:
        self._cache.clear()
        self._prefixes = []

    def of(self, prefixes: Sequence[Prefix | None], device: torch.device) -> "PrefixPass | None":
        """For a pass whose row i goes on from `prefixes[i]`; None if no row does."""
        slots = {id(prefix): slot for slot, prefix in enumerate(self._prefixes)}
        rows: list[list[int]] = [[] for _ in self._prefixes]
        for row, prefix in enumerate(prefixes):
            if prefix is not None:
                rows[slots[id(prefix)]].append(row)
        if not any(rows):
            return None
        shared = SharedRows(row_groups(rows, len(prefixes), device))
        last = torch.tensor([[length - 1] for length in self._lengths], device=device)
        return PrefixPass(shared, self._cache, Sight(last), max(self._lengths))


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPass:
    """The prefixes as one pass sees them."""

    shared: SharedRows
    cache: KVCache
    sight: Sight
    num_keys: int

    def read(self, layer: int) -> Seen:
        return Seen(*self.cache.read(layer, len(self.sight.position_SQ), self.num_keys), self.sight)
