# pyright: basic
"""Our attention function, registered with transformers under the name `stovetop`, and the two ways it attends.

A model of the library projects and rotates queries, keys and values of one packed row `[1, N]` and calls `attend`;
which row sees which is the *plan* of the pass, handed through the model's forward as `attention_plan`:

    PackedAttention   training and prompts: segments of a pack see the segments above them and themselves
    CachedAttention   decoding: one new token per slot sees its slot of the cache

Segments of equal shape run as one call. Sliding windows, soft-capped scores and attention sinks, which some models pass
as arguments, are honoured; a model whose attention asks for something else is refused when it is loaded (`model.py`).

Shapes: `N` packed tokens, `H` query heads, `G` key/value heads, `D` head size, `S` segments or slots of one call,
`Q` query rows, `L` key rows.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from stovetop.engine.arithmetic import Arithmetic, How
from stovetop.engine.kv_cache import KVCache
from stovetop.engine.packing import Pack, Segment

NAME = "stovetop"


class AttentionPlan(Protocol):
    def attend(self, layer: int, query_HND: Tensor, key_GND: Tensor, value_GND: Tensor, how: How) -> Tensor:
        """(N, H, D): for each row the weighted values."""
        ...


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    attention_plan: AttentionPlan,
    **_: Any,
) -> tuple[Tensor, None]:
    """What the library calls in every layer, with queries (1, H, N, D) and keys and values (1, G, N, D)."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    how = How(scale, sliding_window, softcap, s_aux)
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]  every attention of the library has one
    return attention_plan.attend(layer, query[0], key[0], value[0], how)[None], None


AttentionInterface.register(NAME, attend)


# ---- plans -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """Segments of one shape: `query_SQ` their rows, `key_SL` the rows they see."""

    query_SQ: Tensor
    key_SL: Tensor


class PackedAttention:
    """Attention within a pack. With a cache, keys and values are also kept, for the decoding that follows."""

    def __init__(
        self, packed: Pack, arithmetic: Arithmetic, device: torch.device, store: "CacheWrite | None" = None
    ) -> None:
        self._arithmetic = arithmetic
        self._buckets = _buckets(packed.segments, device)
        self._num_tokens = packed.num_tokens
        self._store = store

    def attend(self, layer: int, query_HND: Tensor, key_GND: Tensor, value_GND: Tensor, how: How) -> Tensor:
        if self._store is not None:
            self._store.write(layer, key_GND, value_GND)
        pieces, rows = [], []
        for bucket in self._buckets:
            query_SHQD = query_HND[:, bucket.query_SQ].transpose(0, 1)
            num_queries, num_keys = bucket.query_SQ.shape[1], bucket.key_SL.shape[1]
            padding = (0, 0, 0, -num_keys % self._arithmetic.key_multiple)
            key_SGLD = F.pad(key_GND[:, bucket.key_SL].transpose(0, 1), padding)
            value_SGLD = F.pad(value_GND[:, bucket.key_SL].transpose(0, 1), padding)
            position_Q = torch.arange(num_keys - num_queries, num_keys, device=query_HND.device)
            out_SHQD = self._arithmetic.attention(query_SHQD, key_SGLD, value_SGLD, position_Q[None], how)
            pieces.append(out_SHQD.transpose(1, 2).flatten(0, 1))
            rows.append(bucket.query_SQ.flatten())
        if len(pieces) == 1:
            return pieces[0]
        out_NHD = torch.cat(pieces)
        return torch.empty_like(out_NHD).index_copy(0, torch.cat(rows), out_NHD)


class CachedAttention:
    """One new token in each of the first `S` slots: its key and value enter the cache, its query sees the slot."""

    def __init__(self, cache: KVCache, arithmetic: Arithmetic, positions_S: Tensor) -> None:
        self._arithmetic = arithmetic
        self._cache = cache
        self._positions_S = positions_S
        self._slots_S = torch.arange(len(positions_S), device=positions_S.device)
        num_keys = int(positions_S.max()) + 1
        self._num_keys = num_keys + -num_keys % arithmetic.key_multiple

    def attend(self, layer: int, query_HND: Tensor, key_GND: Tensor, value_GND: Tensor, how: How) -> Tensor:
        self._cache.write(layer, self._slots_S, self._positions_S, key_GND, value_GND)
        key_SGLD, value_SGLD = self._cache.read(layer, len(self._slots_S), self._num_keys)
        query_SHQD = query_HND.transpose(0, 1)[:, :, None]
        out_SHQD = self._arithmetic.attention(query_SHQD, key_SGLD, value_SGLD, self._positions_S[:, None], how)
        return out_SHQD[:, :, 0]


@dataclass(frozen=True, slots=True, eq=False)
class CacheWrite:
    """Where the rows of a pack go in a cache: row `rows_M[i]` to position `positions_M[i]` of slot `slots_M[i]`."""

    cache: KVCache
    rows_M: Tensor
    slots_M: Tensor
    positions_M: Tensor

    def write(self, layer: int, key_GND: Tensor, value_GND: Tensor) -> None:
        self.cache.write(layer, self.slots_M, self.positions_M, key_GND[:, self.rows_M], value_GND[:, self.rows_M])


def _buckets(segments: list[Segment], device: torch.device) -> list[_Bucket]:
    by_shape: dict[tuple[int, int], list[Segment]] = defaultdict(list)
    for segment in segments:
        by_shape[segment.length, segment.first_position + segment.length].append(segment)
    return [
        _Bucket(
            torch.tensor([list(segment.rows) for segment in alike], device=device),
            torch.tensor([segment.key_rows for segment in alike], device=device),
        )
        for alike in by_shape.values()
    ]
