# pyright: basic
"""Which row of a pass sees which, and how they attend. Segments of equal shape run as one call.

    PackedAttention    training: segments of a pack see the segments above them and themselves
    PrefillAttention   prompts: a chunk of a sequence enters a cache of its own and sees what is there
    CachedAttention    decoding: one new token per slot sees its slot of the cache

Shapes: `N` packed tokens, `H` query heads, `G` key/value heads, `D` head size, `S` segments or slots of one call,
`Q` query rows, `L` key rows.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from stovetop.engine.kernels.arithmetic import Arithmetic
from stovetop.engine.kernels.block_attention import attention_gradients, causal_run, causal_run_gradients
from stovetop.engine.kernels.kv_cache import KVCache
from stovetop.engine.kernels.packing import Pack, Segment
from stovetop.engine.kernels.shared_prefix import PrefixPass
from stovetop.engine.kernels.sight import How, Seen, Sight


class AttentionPlan(Protocol):
    def attend(self, layer: int, query_HND: Tensor, key_GND: Tensor, value_GND: Tensor, how: How) -> Tensor:
        """(N, H, D): for each row the weighted values."""
        ...


class PackKernel(Protocol):
    """Another way to attend within a pack, where it applies: `untried/ragged_attention.py` has one."""

    def __call__(
        self, segments: Sequence[Segment], device: torch.device
    ) -> "Callable[[Tensor, Tensor, Tensor, How], Tensor | None] | None":
        """For one pack: what attends like `AttentionPlan.attend`, or returns None for a call that it cannot do. None
        on a device that it does not run on."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """Segments of one shape: `query_SQ` their rows, `key_SL` the rows that they see, `sight` where the former stand
    among the latter."""

    query_SQ: Tensor
    key_SL: Tensor
    sight: Sight


class _Layout(NamedTuple):
    """How the segments of a pack attend: each of `runs` to itself, where it lies; those of a bucket together."""

    runs: list[slice]
    buckets: list[_Bucket]


class PackedAttention:
    """Attention within a pack. Differentiable."""

    def __init__(
        self, packed: Pack, arithmetic: Arithmetic, device: torch.device, kernel: PackKernel | None = None
    ) -> None:
        self._arithmetic = arithmetic
        self._segments = packed.segments
        self._device = device
        self._by_kernel = None if kernel is None else kernel(packed.segments, device)

    def attend(self, layer: int, query_HND: Tensor, key_GND: Tensor, value_GND: Tensor, how: How) -> Tensor:
        if self._by_kernel is not None:
            out_NHD = self._by_kernel(query_HND, key_GND, value_GND, how)
            if out_NHD is not None:
                return out_NHD
        same_size = query_HND.shape[-1] == value_GND.shape[-1]
        has_runs = how.is_plain and same_size and self._arithmetic.attends_in_runs(self._device)
        layout = self._in_runs if has_runs else self._in_buckets
        return _PackedAttention.apply(query_HND, key_GND, value_GND, layout, how, self._arithmetic)

    @functools.cached_property
    def _in_runs(self) -> "_Layout":
        """Segments that see only themselves are attended where they lie."""
        alone = [segment for segment in self._segments if not segment.above]
        others = [segment for segment in self._segments if segment.above]
        runs = [slice(segment.start, segment.start + segment.length) for segment in alone]
        return _Layout(runs, _buckets(others, self._device))

    @functools.cached_property
    def _in_buckets(self) -> "_Layout":
        return _Layout([], _buckets(self._segments, self._device))


class _PackedAttention(torch.autograd.Function):
    """One function over all buckets: each writes its own rows of the gradients, where autograd would add up a tensor of
    the size of the pack for every one of them."""

    @staticmethod
    def forward(
        ctx: Any,
        query_HND: Tensor,
        key_GND: Tensor,
        value_GND: Tensor,
        layout: _Layout,
        how: How,
        arithmetic: Arithmetic,
    ) -> Tensor:
        num_heads, num_rows, _ = query_HND.shape
        out_NHD = query_HND.new_empty(num_rows, num_heads, value_GND.shape[-1])
        log_sums: list[Tensor] = []
        for run in layout.runs:
            out_HND, log_sum_HN = causal_run(query_HND[:, run], key_GND[:, run], value_GND[:, run], how.scale)
            out_NHD[run] = out_HND.transpose(0, 1)
            log_sums.append(log_sum_HN)
        for bucket in layout.buckets:
            query_SHQD, key_SGLD, value_SGLD = _of_bucket(bucket, query_HND, key_GND, value_GND)
            padding = (0, 0, 0, -bucket.key_SL.shape[1] % arithmetic.key_multiple)
            if padding[-1]:
                key_SGLD, value_SGLD = F.pad(key_SGLD, padding), F.pad(value_SGLD, padding)
            out_SHQD = arithmetic.attention(query_SHQD, Seen(key_SGLD, value_SGLD, bucket.sight), how)
            out_NHD[bucket.query_SQ] = out_SHQD.transpose(1, 2)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(query_HND, key_GND, value_GND, out_NHD, *log_sums)
            ctx.layout, ctx.how = layout, how
        return out_NHD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query_HND, key_GND, value_GND, out_NHD, *log_sums = ctx.saved_tensors
        d_query_HND = torch.empty_like(query_HND)
        d_key_GND, d_value_GND = torch.zeros_like(key_GND), torch.zeros_like(value_GND)
        out_HND, d_out_HND = out_NHD.transpose(0, 1), gradients[0].transpose(0, 1)
        for run, log_sum_HN in zip(ctx.layout.runs, log_sums, strict=True):
            query, key, value, out, d_out = (t[:, run] for t in (query_HND, key_GND, value_GND, out_HND, d_out_HND))
            own = causal_run_gradients(query, key, value, ctx.how.scale, out, log_sum_HN, d_out)
            d_query_HND[:, run], d_key_GND[:, run], d_value_GND[:, run] = own
        for bucket in ctx.layout.buckets:
            query_SHQD, key_SGLD, value_SGLD = _of_bucket(bucket, query_HND, key_GND, value_GND)
            out_SHQD, d_out_SHQD = (t[bucket.query_SQ].transpose(1, 2) for t in (out_NHD, gradients[0]))
            d_query_SHQD, d_key_SGLD, d_value_SGLD = attention_gradients(
                query_SHQD, key_SGLD, value_SGLD, bucket.sight, ctx.how, out_SHQD, d_out_SHQD
            )
            d_query_HND[:, bucket.query_SQ] = d_query_SHQD.transpose(0, 1)
            for d_own_SGLD, d_GND in ((d_key_SGLD, d_key_GND), (d_value_SGLD, d_value_GND)):
                d_GND.index_add_(1, bucket.key_SL.flatten(), d_own_SGLD.transpose(0, 1).flatten(1, 2))
        return d_query_HND, d_key_GND, d_value_GND, None, None, None


def _of_bucket(bucket: _Bucket, query_HND: Tensor, key_GND: Tensor, value_GND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(S, H, Q, D), (S, G, L, D) twice."""
    rows = (bucket.query_SQ, bucket.key_SL, bucket.key_SL)
    query_SHQD, key_SGLD, value_SGLD = (
        t[:, own].transpose(0, 1) for t, own in zip((query_HND, key_GND, value_GND), rows, strict=True)
    )
    return query_SHQD, key_SGLD, value_SGLD


@dataclass(frozen=True, slots=True, eq=False)
class PrefillChunk:
    """Tokens [start, start + length) of a sequence, at rows [first_row, ...) of the pass. Its keys and values go into
    slot 0 of `cache`, where those of the tokens before it are."""

    cache: KVCache
    start: int
    length: int
    first_row: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.length)


def pack_of_chunks(chunks: Sequence[PrefillChunk], tokens: Sequence[Sequence[int]]) -> Pack:
    """The pass in which they are computed: chunk i has the tokens `tokens[i]`."""
    segments = [Segment(chunk.first_row, chunk.length) for chunk in chunks]
    positions_N = [position for chunk in chunks for position in range(chunk.start, chunk.end)]
    return Pack(list(chain.from_iterable(tokens)), positions_N, segments, segments)


class PrefillAttention:
    """Rows of a chunk see their cache, to which they add themselves first. Chunks of one shape run as one call."""

    def __init__(self, chunks: Sequence[PrefillChunk], arithmetic: Arithmetic, device: torch.device) -> None:
        self._arithmetic = arithmetic
        self._device = device
        by_shape: dict[tuple[int, int], list[PrefillChunk]] = defaultdict(list)
        for chunk in chunks:
            by_shape[chunk.start, chunk.length].append(chunk)
        self._alike = list(by_shape.values())

    def attend(self, layer: int, query_HND: Tensor, key_GND: Tensor, value_GND: Tensor, how: How) -> Tensor:
        num_heads, num_rows, _ = query_HND.shape
        out_NHD = query_HND.new_empty(num_rows, num_heads, value_GND.shape[-1])
        for alike in self._alike:
            start, end = alike[0].start, alike[0].end
            sight = Sight(torch.arange(start, end, device=self._device)[None])
            for chunk in alike:
                chunk.cache.write_run(layer, 0, start, key_GND[:, chunk.rows], value_GND[:, chunk.rows])
            num_keys = end + -end % self._arithmetic.key_multiple
            caches = [chunk.cache.read(layer, 1, num_keys) for chunk in alike]
            key_SGLD, value_SGLD = (torch.cat([cache[i] for cache in caches]) for i in (0, 1))
            query_SHQD = torch.stack([query_HND[:, chunk.rows] for chunk in alike])
            out_SHQD = self._arithmetic.attention(query_SHQD, Seen(key_SGLD, value_SGLD, sight), how)
            for chunk, out_HQD in zip(alike, out_SHQD, strict=True):
                out_NHD[chunk.rows] = out_HQD.transpose(0, 1)
        return out_NHD


class CachedAttention:
    """One new token in each of `S` slots, from `first_slot` on: its key and value enter the cache at `places_S`, which
    are below `num_keys`; its query sees the slot, and before it the prefix that the slot goes on from. Row i belongs to
    slot i of these, or to slot `slots_S[i]`; `prefixes` go by slot."""

    def __init__(
        self,
        cache: KVCache,
        arithmetic: Arithmetic,
        places_S: Tensor,
        num_keys: int,
        prefixes: PrefixPass | None = None,
        slots_S: Tensor | None = None,
        first_slot: int = 0,
    ) -> None:
        self._arithmetic = arithmetic
        self._cache = cache
        self._first_slot = first_slot
        self._places_S = places_S
        self._prefixes = prefixes
        self._rows_S = None if slots_S is None else slots_S.argsort()  # of the slots
        self._slots_S = torch.arange(len(places_S), device=places_S.device) if slots_S is None else slots_S
        self._into_S = self._slots_S + first_slot if first_slot else self._slots_S
        self._sight = Sight((places_S if self._rows_S is None else places_S[self._rows_S])[:, None])
        self._num_keys = num_keys + -num_keys % arithmetic.key_multiple

    def attend(self, layer: int, query_HND: Tensor, key_GND: Tensor, value_GND: Tensor, how: How) -> Tensor:
        self._cache.write(layer, self._into_S, self._places_S, key_GND, value_GND)
        query_SHD = query_HND.transpose(0, 1)
        if self._rows_S is None:
            return self._by_slot(layer, query_SHD, how)
        return self._by_slot(layer, query_SHD.index_select(0, self._rows_S), how).index_select(0, self._slots_S)

    def _by_slot(self, layer: int, query_SHD: Tensor, how: How) -> Tensor:
        keys_and_values = self._cache.read(layer, len(self._slots_S), self._num_keys, self._first_slot)
        own = Seen(*keys_and_values, self._sight)
        query_SHQD = query_SHD[:, :, None]
        if self._prefixes is None:
            return self._arithmetic.attention(query_SHQD, own, how)[:, :, 0]
        prefix, shared = self._prefixes.read(layer), self._prefixes.shared
        return self._arithmetic.attention_after_prefix(query_SHQD, own, prefix, shared, how)[:, :, 0]


def _buckets(segments: list[Segment], device: torch.device) -> list[_Bucket]:
    by_shape: dict[tuple[int, int], list[Segment]] = defaultdict(list)
    for segment in segments:
        by_shape[segment.length, segment.first_position + segment.length].append(segment)
    return [
        _Bucket(
            torch.tensor([list(segment.rows) for segment in alike], device=device),
            torch.tensor([segment.key_rows for segment in alike], device=device),
            Sight(torch.arange(num_keys - length, num_keys, device=device)[None]),
        )
        for (length, num_keys), alike in by_shape.items()
    ]
