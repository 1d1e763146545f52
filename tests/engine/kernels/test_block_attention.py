"""Attention with a backward pass of its own, against autograd's."""

import math

import pytest
import torch
from torch import Tensor

from stovetop.engine.kernels import block_attention
from stovetop.engine.kernels.arithmetic import Fast, RowExact
from stovetop.engine.kernels.block_attention import attention_gradients, causal_run, causal_run_gradients
from stovetop.engine.kernels.sight import How, Seen, Sight

HEADS, GROUPS, SIZE, VALUE_SIZE = 4, 2, 8, 6
SINKS = torch.linspace(-1, 1, HEADS)
KINDS = {
    "plain": How(0.3),
    "window": How(0.3, window=5),
    "softcap": How(2.0, softcap=3.0),
    "sinks": How(0.3, window=40, sinks_H=SINKS),
}


def inputs(num_queries: int, num_keys: int, value_size: int = VALUE_SIZE) -> tuple[list[Tensor], Sight]:
    """Queries, keys and values of two calls, and the positions of the queries, the last ones."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, HEADS, num_queries, SIZE), (2, GROUPS, num_keys, SIZE), (2, GROUPS, num_keys, value_size)]
    leaves = [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]
    return leaves, Sight(torch.arange(num_keys - num_queries, num_keys)[None])


def plain(leaves: list[Tensor], sight: Sight, how: How) -> Tensor:
    query, key, value = leaves
    key, value = (t.repeat_interleave(HEADS // GROUPS, 1) for t in (key, value))
    scores = (query @ key.transpose(-1, -2)) * how.scale
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    scores = scores.masked_fill(sight.hidden(key.shape[2], how.window), -math.inf)
    if how.sinks_H is not None:
        sinks = how.sinks_H[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ value
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("score_bytes", [32 * 2**20, 4 * HEADS * 50 * 7])  # whole, and 7 query rows at a time
def test_a_run_that_attends_where_it_lies_has_the_gradients_of_plain_attention(
    score_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(block_attention.SCORE_BYTES, "cpu", score_bytes)
    leaves, sight = inputs(50, 50, SIZE)
    out = plain(leaves, sight, KINDS["plain"])
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(out, leaves, d_out)
    for call in range(2):
        own = [leaf.detach()[call] for leaf in leaves]
        out_HND, log_sum_HN = causal_run(own[0], own[1], own[2], 0.3)
        torch.testing.assert_close(out_HND, out[call].detach(), atol=1e-5, rtol=1e-4)
        ours = causal_run_gradients(own[0], own[1], own[2], 0.3, out_HND, log_sum_HN, d_out[call])
        for one, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(one, other[call], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("score_bytes", [32 * 2**20, 4 * 2 * HEADS * 128 * 7])  # whole, and 7 query rows at a time
@pytest.mark.parametrize("num_queries", [128, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_plain_attention(
    kind: str, num_queries: int, score_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(block_attention.SCORE_BYTES, "cpu", score_bytes)
    leaves, sight = inputs(num_queries, 128)
    how = KINDS[kind]
    out = plain(leaves, sight, how)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(out, leaves, d_out)
    with torch.no_grad():
        ours = attention_gradients(leaves[0], leaves[1], leaves[2], sight, how, out, d_out)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("score_bytes", [32 * 2**20, 4 * 2 * HEADS * 128 * 7])
@pytest.mark.parametrize("num_queries", [128, 30])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_outputs_are_those_of_plain_attention(
    kind: str, num_queries: int, score_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(block_attention.SCORE_BYTES, "cpu", score_bytes)
    leaves, sight = inputs(num_queries, 128)
    how = KINDS[kind]
    expected = plain(leaves, sight, how)
    torch.testing.assert_close(Fast().attention(leaves[0], Seen(leaves[1], leaves[2], sight), how), expected)
    if kind in ("plain", "window"):
        torch.testing.assert_close(RowExact().attention(leaves[0], Seen(leaves[1], leaves[2], sight), how), expected)


@torch.no_grad()
def test_row_exact_attention_has_the_same_bits_however_its_queries_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    # of a size that models have: with 6 the library rounds otherwise on some processors
    leaves, sight = inputs(192, 192, value_size=SIZE)
    outs = []
    for rows in (192, 50, 1):
        monkeypatch.setitem(block_attention.SCORE_BYTES, "cpu", 4 * 2 * HEADS * 192 * rows)
        outs.append(RowExact().attention(leaves[0], Seen(leaves[1], leaves[2], sight), How(0.3)))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@torch.no_grad()
def test_scores_never_take_more_than_their_share_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(block_attention.SCORE_BYTES, "cpu", 4 * 2 * HEADS * 192 * 16)
    sizes: list[int] = []
    original = torch.bmm

    def counted(left: Tensor, right: Tensor) -> Tensor:
        out = original(left, right)
        sizes.append(out.numel() * 4)
        return out

    monkeypatch.setattr(torch, "bmm", counted)
    leaves, sight = inputs(192, 192)
    out = RowExact().attention(leaves[0], Seen(leaves[1], leaves[2], sight), How(0.3))
    attention_gradients(leaves[0], leaves[1], leaves[2], sight, How(0.3), out, out)
    assert len(sizes) > 12
    assert max(sizes) <= block_attention.SCORE_BYTES["cpu"]
