# pyright: basic
"""Attention within a pack by the library's kernel for sequences of different lengths: one call a layer, forward and
backward, on a GPU in half precision. Where it does not apply, segments of one shape are taken at a time
(`kernels/attention_plans.py`).

Shapes: `N` packed tokens, `M` key rows of all segments, one behind another (a prefix that segments share comes once for
each of them), `C` segments, `H` query heads, `G` key/value heads, `D` head size.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from stovetop.engine.kernels.packing import Segment
from stovetop.engine.kernels.sight import How

log = logging.getLogger(__name__)

NEEDED = {"scale", "window_size"}  # of the kernel's arguments, of which older releases lack some


@dataclass(frozen=True, slots=True, eq=False)
class RaggedLayout:
    """Where segments begin. Segment i attends from queries [query_starts[i], query_starts[i + 1]) to the keys of rows
    key_rows[key_starts[i] : key_starts[i + 1]], causally, the last query to all of them."""

    query_starts_C: Tensor  # one more than there are segments
    key_starts_C: Tensor
    key_rows_M: Tensor | None  # None: every segment sees itself only, so keys are the rows as they are
    max_queries: int
    max_keys: int

    @staticmethod
    def of(segments: Sequence[Segment], device: torch.device) -> "RaggedLayout":
        num_keys = [segment.first_position + segment.length for segment in segments]
        lengths = [segment.length for segment in segments]
        starts = lambda sizes: torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)  # noqa: E731
        shares = any(segment.above for segment in segments)
        rows = [row for segment in segments for row in segment.key_rows] if shares else []
        return RaggedLayout(
            starts(lengths),
            starts(num_keys),
            torch.tensor(rows, device=device) if shares else None,
            max(lengths),
            max(num_keys),
        )


def by_ragged_kernel(
    segments: Sequence[Segment], device: torch.device
) -> Callable[[Tensor, Tensor, Tensor, How], Tensor | None] | None:
    """See `attention_plans.PackKernel`."""
    if device.type != "cuda":
        return None
    layout = RaggedLayout.of(segments, device)

    def attend(query_HND: Tensor, key_GND: Tensor, value_GND: Tensor, how: How) -> Tensor | None:
        if not can_run_ragged(query_HND, value_GND, how):
            return None
        return ragged_attention(layout, query_HND, key_GND, value_GND, how)

    return attend


def can_run_ragged(query_HND: Tensor, value_GND: Tensor, how: How) -> bool:
    """The kernel takes half precision, one head size up to 256, and neither soft-capped scores nor sinks."""
    size = query_HND.shape[-1]
    return (
        query_HND.dtype in (torch.bfloat16, torch.float16)
        and value_GND.shape[-1] == size <= 256
        and how.softcap is None
        and how.sinks_H is None
        and kernel() is not None
    )


def ragged_attention(layout: RaggedLayout, query_HND: Tensor, key_GND: Tensor, value_GND: Tensor, how: How) -> Tensor:
    """(N, H, D). Differentiable."""
    run = kernel()
    assert run is not None, "asked before"
    query_NHD, key_NGD, value_NGD = (t.transpose(0, 1).contiguous() for t in (query_HND, key_GND, value_GND))
    if layout.key_rows_M is not None:
        key_NGD, value_NGD = key_NGD[layout.key_rows_M], value_NGD[layout.key_rows_M]
    repeats = query_NHD.shape[1] // key_NGD.shape[1]
    options: dict[str, Any] = {"enable_gqa": True} if repeats > 1 else {}
    if repeats > 1 and "enable_gqa" not in inspect.signature(run).parameters:  # releases before 2.12
        key_NGD, value_NGD = (t.repeat_interleave(repeats, 1) for t in (key_NGD, value_NGD))
        options = {}
    return run(
        query_NHD,
        key_NGD,
        value_NGD,
        layout.query_starts_C,
        layout.key_starts_C,
        layout.max_queries,
        layout.max_keys,
        scale=how.scale,
        window_size=(-1 if how.window is None else how.window - 1, 0),
        **options,
    )


@functools.cache
def kernel() -> Any:
    """The library's function, or None in a release that lacks it or what we need of it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        found = None
    else:
        found = varlen_attn if set(inspect.signature(varlen_attn).parameters) >= NEEDED else None
    if found is None and torch.cuda.is_available():
        log.warning("torch %s has no varlen_attn that fits: training attends much slower", torch.__version__)
    return found
