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

from stovetop.engine.kv_cache import KVCache
from stovetop.engine.packing import Pack, Segment

NAME = "stovetop"


@dataclass(frozen=True, slots=True)
class How:
    """What one layer's attention asks for besides causality."""

    scale: float
    window: int | None = None  # a row sees this many rows, itself included
    softcap: float | None = None  # scores s become softcap·tanh(s / softcap)
    sinks_H: Tensor | None = None  # one more logit per head, which takes weight and brings nothing


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

    def __init__(self, packed: Pack, device: torch.device, store: "CacheWrite | None" = None) -> None:
        self._buckets = _buckets(packed.segments, device)
        self._num_tokens = packed.num_tokens
        self._store = store

    def attend(self, layer: int, query_HND: Tensor, key_GND: Tensor, value_GND: Tensor, how: How) -> Tensor:
        if self._store is not None:
            self._store.write(layer, key_GND, value_GND)
        pieces, rows = [], []
        for bucket in self._buckets:
            query_SHQD = query_HND[:, bucket.query_SQ].transpose(0, 1)
            key_SGLD = key_GND[:, bucket.key_SL].transpose(0, 1)
            value_SGLD = value_GND[:, bucket.key_SL].transpose(0, 1)
            num_queries, num_keys = bucket.query_SQ.shape[1], bucket.key_SL.shape[1]
            position_Q = torch.arange(num_keys - num_queries, num_keys, device=query_HND.device)
            out_SHQD = _attention(query_SHQD, key_SGLD, value_SGLD, position_Q[None], how)
            pieces.append(out_SHQD.transpose(1, 2).flatten(0, 1))
            rows.append(bucket.query_SQ.flatten())
        if len(pieces) == 1:
            return pieces[0]
        out_NHD = torch.cat(pieces)
        return torch.empty_like(out_NHD).index_copy(0, torch.cat(rows), out_NHD)


class CachedAttention:
    """One new token in each of the first `S` slots: its key and value enter the cache, its query sees the slot."""

    def __init__(self, cache: KVCache, positions_S: Tensor) -> None:
        self._cache = cache
        self._positions_S = positions_S
        self._slots_S = torch.arange(len(positions_S), device=positions_S.device)
        self._num_keys = int(positions_S.max()) + 1

    def attend(self, layer: int, query_HND: Tensor, key_GND: Tensor, value_GND: Tensor, how: How) -> Tensor:
        self._cache.write(layer, self._slots_S, self._positions_S, key_GND, value_GND)
        key_SGLD, value_SGLD = self._cache.read(layer, len(self._slots_S), self._num_keys)
        query_SHQD = query_HND.transpose(0, 1)[:, :, None]
        return _attention(query_SHQD, key_SGLD, value_SGLD, self._positions_S[:, None], how)[:, :, 0]


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


# ---- the arithmetic --------------------------------------------------------------------------------------------------


def _attention(query_SHQD: Tensor, key_SGLD: Tensor, value_SGLD: Tensor, position_SQ: Tensor, how: How) -> Tensor:
    """Row q of call s sees keys 0..position_SQ[s, q], or as many of the last of them as the window lets it.

    `position_SQ` may have a first dimension of 1."""
    num_queries, num_keys = query_SHQD.shape[2], key_SGLD.shape[2]
    plain = how.softcap is None and how.sinks_H is None
    starts_at_zero = position_SQ.shape[0] == 1 and num_queries == num_keys
    if plain and starts_at_zero and (how.window is None or how.window >= num_keys):
        return _sdpa(query_SHQD, key_SGLD, value_SGLD, None, how.scale, is_causal=True)
    seen_SQL = _seen(position_SQ, num_keys, how.window)
    if plain:
        return _sdpa(query_SHQD, key_SGLD, value_SGLD, seen_SQL[:, None], how.scale, is_causal=False)
    return _spelled_out(query_SHQD, key_SGLD, value_SGLD, seen_SQL[:, None], how)


def _seen(position_SQ: Tensor, num_keys: int, window: int | None) -> Tensor:
    key_L = torch.arange(num_keys, device=position_SQ.device)
    seen_SQL = key_L <= position_SQ[..., None]
    return seen_SQL if window is None else seen_SQL & (key_L > position_SQ[..., None] - window)


def _sdpa(
    query_SHQD: Tensor, key_SGLD: Tensor, value_SGLD: Tensor, mask: Tensor | None, scale: float, is_causal: bool
) -> Tensor:
    grouped = query_SHQD.shape[1] != key_SGLD.shape[1]
    return F.scaled_dot_product_attention(
        query_SHQD, key_SGLD, value_SGLD, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )


def _spelled_out(query_SHQD: Tensor, key_SGLD: Tensor, value_SGLD: Tensor, seen_S1QL: Tensor, how: How) -> Tensor:
    """For what the fused kernels cannot do: soft-capped scores (Gemma 2) and sinks (gpt-oss)."""
    repeats = query_SHQD.shape[1] // key_SGLD.shape[1]
    key_SHLD = key_SGLD.repeat_interleave(repeats, 1)
    value_SHLD = value_SGLD.repeat_interleave(repeats, 1)
    scores_SHQL = (query_SHQD @ key_SHLD.transpose(-1, -2)) * how.scale
    if how.softcap is not None:
        scores_SHQL = how.softcap * torch.tanh(scores_SHQL / how.softcap)
    scores_SHQL = scores_SHQL.float().masked_fill(~seen_S1QL, float("-inf"))
    if how.sinks_H is not None:
        sinks_SHQ1 = how.sinks_H.float().view(1, -1, 1, 1).expand(*scores_SHQL.shape[:-1], 1)
        scores_SHQL = torch.cat([scores_SHQL, sinks_SHQ1], -1)
    weights_SHQL = scores_SHQL.softmax(-1)[..., : key_SHLD.shape[2]]
    return weights_SHQL.to(value_SHLD.dtype) @ value_SHLD
