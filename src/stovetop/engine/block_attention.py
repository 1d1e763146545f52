# pyright: basic
"""Softmax attention in bounded memory: a row-exact forward pass (see `arithmetic.py`) and a backward pass for every
kind of attention that is honoured. Rows of scores exist for a few query rows at a time, and reach no further than the
last key that these rows see.

    Z = scale·Q·Kᵀ    S = Z, or c·tanh(Z/c)    P = softmax(S)    O = P·V
    dV = Pᵀ·dO    dS = P ∘ (dO·Vᵀ - rowsum(dO ∘ O))    dZ = scale·dS, or scale·dS ∘ (1 - (S/c)²)
    dQ = dZ·K     dK = dZᵀ·Q

P is computed again on the way back, so that only Q, K, V and O are kept.

Shapes: `S` calls, `H` query heads, `G` key/value heads, `Q` query rows, `L` key rows, `D` head size, `R` query rows of
all heads that share a key head, `C` calls times key heads.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_MULTIPLE = 8  # of query rows
KEY_BLOCK = 64
SCORE_BYTES = 32 * 2**20  # of the scores that exist at one time


@dataclass(frozen=True, slots=True)
class How:
    """What one layer's attention asks for besides causality."""

    scale: float
    window: int | None = None  # a row sees this many rows, itself included
    softcap: float | None = None  # scores s become softcap·tanh(s / softcap)
    sinks_H: Tensor | None = None  # one more logit per head, which takes weight and brings nothing


def row_exact(query_SHQD: Tensor, key_SGLD: Tensor, value_SGLD: Tensor, position_SQ: Tensor, how: How) -> Tensor:
    """Softmax over whole rows of scores that were computed in blocks of keys; the results of the blocks are added from
    left to right. What a row does not see it meets as weights of exactly zero."""
    groups, out_SHQD = key_SGLD.shape[1], query_SHQD.new_empty(*query_SHQD.shape[:3], value_SGLD.shape[-1])
    for rows, num_keys in _query_chunks(query_SHQD, position_SQ, key_SGLD.shape[2]):
        query = _by_group(query_SHQD[:, :, rows], groups)
        hidden = _hidden(position_SQ[:, rows], num_keys, how.window, query_SHQD.shape[1] // groups)
        num_rows = query.shape[1]
        padding = -num_rows % QUERY_MULTIPLE
        if padding:
            query, hidden = F.pad(query, (0, 0, 0, padding)), F.pad(hidden, (0, 0, 0, padding))
        key, value = (t[:, :, :num_keys].flatten(0, 1) for t in (key_SGLD, value_SGLD))
        blocks = [slice(start, start + KEY_BLOCK) for start in range(0, num_keys, KEY_BLOCK)]
        scores = torch.cat([torch.bmm(query, key[:, block].transpose(1, 2)) for block in blocks], 2).mul_(how.scale)
        scores.unflatten(0, (-1, groups)).masked_fill_(hidden, -math.inf)
        weights = scores.softmax(-1)
        out = torch.bmm(weights[:, :, blocks[0]], value[:, blocks[0]])
        for block in blocks[1:]:
            out += torch.bmm(weights[:, :, block], value[:, block])
        out_SHQD[:, :, rows] = out[:, :num_rows].reshape(out_SHQD[:, :, rows].shape)
    return out_SHQD


class AttentionGradients(NamedTuple):
    query_SHQD: Tensor
    key_SGLD: Tensor
    value_SGLD: Tensor


def attention_gradients(
    query_SHQD: Tensor,
    key_SGLD: Tensor,
    value_SGLD: Tensor,
    position_SQ: Tensor,
    how: How,
    out_SHQD: Tensor,
    d_out_SHQD: Tensor,
) -> AttentionGradients:
    """Of queries, keys and values, from the outputs `out_SHQD` and their gradient. In at least float32 inside."""
    groups = key_SGLD.shape[1]
    d_query_SHQD = torch.empty_like(query_SHQD)
    key_CLD, value_CLD = (_precise(t.flatten(0, 1)) for t in (key_SGLD, value_SGLD))
    d_key_CLD, d_value_CLD = torch.zeros_like(key_CLD), torch.zeros_like(value_CLD)
    for rows, num_keys in _query_chunks(query_SHQD, position_SQ, key_SGLD.shape[2]):
        query, out, d_out = (_precise(_by_group(t[:, :, rows], groups)) for t in (query_SHQD, out_SHQD, d_out_SHQD))
        key, value, query = key_CLD[:, :num_keys], value_CLD[:, :num_keys], query * how.scale
        scores, slopes = torch.bmm(query, key.transpose(1, 2)), None
        if how.softcap is not None:
            bent = scores.div_(how.softcap).tanh_()
            slopes = 1 - bent.square()
            scores = bent.mul_(how.softcap)
        hidden = _hidden(position_SQ[:, rows], num_keys, how.window, query_SHQD.shape[1] // groups)
        scores.unflatten(0, (-1, groups)).masked_fill_(hidden, -math.inf)
        weights = _softmax(scores, how.sinks_H, groups)
        d_value_CLD[:, :num_keys] += torch.bmm(weights.transpose(1, 2), d_out)
        along = (d_out * out).sum(-1, keepdim=True)
        d_scores = torch.bmm(d_out, value.transpose(1, 2)).sub_(along).mul_(weights)
        if slopes is not None:
            d_scores.mul_(slopes)
        d_query = torch.bmm(d_scores, key).mul_(how.scale)
        d_query_SHQD[:, :, rows] = d_query.view(d_query_SHQD[:, :, rows].shape).to(d_query_SHQD.dtype)
        d_key_CLD[:, :num_keys] += torch.bmm(d_scores.transpose(1, 2), query)
    d_key_SGLD, d_value_SGLD = (
        d.view(like.shape).to(like.dtype) for d, like in ((d_key_CLD, key_SGLD), (d_value_CLD, value_SGLD))
    )
    return AttentionGradients(d_query_SHQD, d_key_SGLD, d_value_SGLD)


def _softmax(scores_CRL: Tensor, sinks_H: Tensor | None, groups: int) -> Tensor:
    if sinks_H is None:
        return scores_CRL.softmax(-1)
    calls, rows = scores_CRL.shape[0] // groups, scores_CRL.shape[1] * groups // len(sinks_H)
    sinks_CR1 = sinks_H.to(scores_CRL.dtype).repeat_interleave(rows).view(groups, -1, 1).repeat(calls, 1, 1)
    return torch.cat([scores_CRL, sinks_CR1], -1).softmax(-1)[..., :-1]


def seen(position_SQ: Tensor, num_keys: int, window: int | None) -> Tensor:
    """(S, Q, L): whether a row sees a key."""
    key_L = torch.arange(num_keys, device=position_SQ.device)
    seen_SQL = key_L <= position_SQ[..., None]
    return seen_SQL if window is None else seen_SQL & (key_L > position_SQ[..., None] - window)


def _query_chunks(query_SHQD: Tensor, position_SQ: Tensor, num_keys: int) -> Iterator[tuple[slice, int]]:
    """Runs of query rows whose scores fit, and how many keys they reach: whole blocks, where there are several runs."""
    calls, heads, num_rows, _ = query_SHQD.shape
    size = max(1, SCORE_BYTES // (4 * calls * heads * num_keys))
    for start in range(0, num_rows, size):
        rows = slice(start, min(start + size, num_rows))
        reach = num_keys
        if size < num_rows:
            last = int(position_SQ[:, rows].max()) + 1
            reach = min(num_keys, last + -last % KEY_BLOCK)
        yield rows, reach


def _precise(x: Tensor) -> Tensor:
    """In at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _by_group(x_SHQD: Tensor, groups: int) -> Tensor:
    """(C, R, D)"""
    calls, _, _, size = x_SHQD.shape
    return x_SHQD.reshape(calls * groups, -1, size)


def _hidden(position_SQ: Tensor, num_keys: int, window: int | None, repeats: int) -> Tensor:
    """(S, 1, R, L)"""
    return ~seen(position_SQ, num_keys, window).repeat(1, repeats, 1)[:, None]
