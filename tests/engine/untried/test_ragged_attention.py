"""The layout that is handed to the library's kernel for ragged sequences. The kernel itself runs on a GPU only, so what
it is documented to compute is spelled out here."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import tiny
from stovetop.engine.kernels.arithmetic import Fast
from stovetop.engine.kernels.attention_plans import PackedAttention
from stovetop.engine.kernels.packing import pack
from stovetop.engine.kernels.sight import How
from stovetop.engine.untried import ragged_attention
from stovetop.engine.untried.ragged_attention import RaggedLayout, can_run_ragged

HEADS, GROUPS, SIZE = 4, 2, 8
PREFIX = tiny.tokens(12, 0)
SEQUENCES = [tiny.tokens(5, 1, PREFIX), tiny.tokens(9, 2, PREFIX), tiny.tokens(7, 3), tiny.tokens(3, 4)]


def documented(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Sequence i: causal from its end, each query seeing `window_size[0]` keys before its own."""
    assert enable_gqa
    assert window_size[1] == 0
    outs = []
    for i in range(len(cu_seq_q) - 1):
        q, k, v = query[cu_seq_q[i] : cu_seq_q[i + 1]], key[cu_seq_k[i] : cu_seq_k[i + 1]], value[cu_seq_k[i] :]
        assert len(q) <= max_q
        assert len(k) <= max_k
        position = torch.arange(len(k) - len(q), len(k))[:, None]
        hidden = torch.arange(len(k)) > position
        if window_size[0] >= 0:
            hidden |= torch.arange(len(k)) < position - window_size[0]
        k, v = (t[: len(k)].repeat_interleave(HEADS // GROUPS, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v))
    return torch.cat(outs)


def without_groups(query: Tensor, key: Tensor, value: Tensor, *sizes: Any, scale: float, window_size: Any) -> Tensor:
    """As of a release that wants as many key heads as query heads."""
    assert key.shape[1] == query.shape[1]
    spread = [t[:, :: HEADS // GROUPS] for t in (key, value)]
    return documented(query, *spread, *sizes, scale=scale, window_size=window_size, enable_gqa=True)


@pytest.mark.parametrize("kernel", [documented, without_groups])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("share", [True, False])
def test_one_call_attends_as_the_segments_do_one_shape_at_a_time(
    share: bool, window: int | None, kernel: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ragged_attention, "kernel", lambda: kernel)
    packed, cpu, how = pack(SEQUENCES, share_prefixes=share), torch.device("cpu"), How(0.3, window)
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, GROUPS, GROUPS)
    qkv = [torch.randn(h, packed.num_tokens, SIZE, generator=generator).requires_grad_() for h in heads]
    ours = ragged_attention.ragged_attention(RaggedLayout.of(packed.segments, cpu), qkv[0], qkv[1], qkv[2], how)
    expected = PackedAttention(packed, Fast(), cpu).attend(0, qkv[0], qkv[1], qkv[2], how)
    torch.testing.assert_close(ours, expected)
    d_out = torch.randn(ours.shape, generator=generator)
    for one, other in zip(
        torch.autograd.grad(ours, qkv, d_out), torch.autograd.grad(expected, qkv, d_out), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_it_is_used_only_for_what_the_kernel_does() -> None:
    half, full = torch.zeros(4, 3, 8, dtype=torch.bfloat16), torch.zeros(4, 3, 8)
    assert can_run_ragged(half, half, How(1.0, window=3))
    assert not can_run_ragged(full, full, How(1.0))
    assert not can_run_ragged(half, half[..., :6], How(1.0))
    assert not can_run_ragged(half, half, How(1.0, softcap=30.0))
    assert not can_run_ragged(half, half, How(1.0, sinks_H=torch.zeros(4)))
