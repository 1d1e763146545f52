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
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stovetop.engine.kernels.precision import precise
from stovetop.engine.kernels.shared_prefix import SharedRows
from stovetop.engine.kernels.sight import How, Seen, Sight

QUERY_MULTIPLE = 8  # of query rows
KEY_BLOCK = 64
# of the scores that exist at one time; training at half and double of it: 1.02, 0.99 (benchmarks/constants.py)
SCORE_BYTES = {"cpu": 32 * 2**20, "cuda": 2**30}


def row_exact(query_SHQD: Tensor, own: Seen, how: How) -> Tensor:
    """Softmax over whole rows of scores that were computed in blocks of keys; the results of the blocks are added from
    left to right. What a row does not see it meets as weights of exactly zero. Soft caps and sinks have no form here: a
    model that asks for them differs from the library when it is loaded, and runs on the fast arithmetic."""
    key_SGLD, value_SGLD, sight = own
    groups, out_SHQD = key_SGLD.shape[1], query_SHQD.new_empty(*query_SHQD.shape[:3], value_SGLD.shape[-1])
    for rows, num_keys in _query_chunks(query_SHQD, sight, key_SGLD.shape[2]):
        key, value = (t[:, :, :num_keys].flatten(0, 1) for t in (key_SGLD, value_SGLD))
        scores = _scores(_by_group(query_SHQD[:, :, rows], groups), key, how.scale)
        _hide(scores, sight.hidden(num_keys, how.window, rows), groups)
        out = _weighted(scores.softmax(-1), value)
        out_SHQD[:, :, rows] = out.reshape(out_SHQD[:, :, rows].shape)
    return out_SHQD


def row_exact_after_prefix(query_SHQD: Tensor, own: Seen, prefix: Seen, shared: SharedRows, how: How) -> Tensor:
    """The same bits for rows, one per call, that see a prefix before their own keys, where rows that share one meet it
    together. A prefix is a whole number of blocks, so blocks are the same and are added in the same order."""
    groups = own.key_SGLD.shape[1]
    query_SGRD = single_rows(query_SHQD, own.key_SGLD)
    seen_first = _scores(shared.gathered(query_SGRD).flatten(0, 1), prefix.key_SGLD.flatten(0, 1), how.scale)
    _hide(seen_first, prefix.sight.hidden(prefix.key_SGLD.shape[2], None), groups)
    seen_last = _scores(query_SGRD.flatten(0, 1), own.key_SGLD.flatten(0, 1), how.scale)
    _hide(seen_last, own.sight.hidden(own.key_SGLD.shape[2], None), groups)
    repeats = query_SGRD.shape[2]
    first_SGRL = shared.scattered(seen_first.unflatten(0, (-1, groups)), repeats, missing=-math.inf)
    weights_SGRL = torch.cat([first_SGRL, seen_last.unflatten(0, (-1, groups))], -1).softmax(-1)
    first_SGRL, last_SGRL = weights_SGRL.split([first_SGRL.shape[-1], seen_last.shape[-1]], -1)
    out = _weighted(shared.gathered(first_SGRL).flatten(0, 1), prefix.value_SGLD.flatten(0, 1))
    out_SGRD = shared.scattered(out.unflatten(0, (-1, groups)), repeats, missing=0.0)
    out = _weighted(last_SGRL.flatten(0, 1), own.value_SGLD.flatten(0, 1), before=out_SGRD.flatten(0, 1))
    return out.reshape(*query_SHQD.shape[:3], -1).to(query_SHQD.dtype)


def single_rows(query_SHQD: Tensor, key_SGLD: Tensor) -> Tensor:
    """(S, G, R, D): of one query row a call, the heads that share keys become rows of one head, so that keys are read
    once for all of them."""
    return query_SHQD.unflatten(1, (key_SGLD.shape[1], -1)).squeeze(3)


def _scores(query_CRD: Tensor, key_CLD: Tensor, scale: float) -> Tensor:
    """(C, R, L), computed block by block, in at least float32."""
    padded = _padded(precise(query_CRD))
    blocks = [torch.bmm(padded, precise(block).transpose(1, 2)) for block in key_CLD.split(KEY_BLOCK, 1)]
    return torch.cat(blocks, 2)[:, : query_CRD.shape[1]].mul_(scale)


def _weighted(weights_CRL: Tensor, value_CLD: Tensor, before: Tensor | None = None) -> Tensor:
    """(C, R, D): the blocks' weighted values, added to what came `before` from left to right, as precise as these."""
    padded, num_rows = _padded(weights_CRL), weights_CRL.shape[1]
    for weights, value in zip(padded.split(KEY_BLOCK, 2), value_CLD.split(KEY_BLOCK, 1), strict=True):
        block = torch.bmm(weights, precise(value))[:, :num_rows]
        before = block if before is None else before.add_(block)
    assert before is not None, "a row sees itself at least"
    return before


def _padded(x_CRX: Tensor) -> Tensor:
    padding = -x_CRX.shape[1] % QUERY_MULTIPLE
    return F.pad(x_CRX, (0, 0, 0, padding)) if padding else x_CRX


class AttentionGradients(NamedTuple):
    query_SHQD: Tensor
    key_SGLD: Tensor
    value_SGLD: Tensor


def attention_gradients(
    query_SHQD: Tensor,
    key_SGLD: Tensor,
    value_SGLD: Tensor,
    sight: Sight,
    how: How,
    out_SHQD: Tensor,
    d_out_SHQD: Tensor,
) -> AttentionGradients:
    """Of queries, keys and values, from the outputs `out_SHQD` and their gradient. In at least float32 inside."""
    groups = key_SGLD.shape[1]
    d_query_SHQD = torch.empty_like(query_SHQD)
    key_CLD, value_CLD = (precise(t.flatten(0, 1)) for t in (key_SGLD, value_SGLD))
    d_key_CLD, d_value_CLD = torch.zeros_like(key_CLD), torch.zeros_like(value_CLD)
    for rows, num_keys in _query_chunks(query_SHQD, sight, key_SGLD.shape[2]):
        query, out, d_out = (precise(_by_group(t[:, :, rows], groups)) for t in (query_SHQD, out_SHQD, d_out_SHQD))
        key, value, query = key_CLD[:, :num_keys], value_CLD[:, :num_keys], query * how.scale
        scores, slopes = torch.bmm(query, key.transpose(1, 2)), None
        if how.softcap is not None:
            bent = scores.div_(how.softcap).tanh_()
            slopes = 1 - bent.square()
            scores = bent.mul_(how.softcap)
        _hide(scores, sight.hidden(num_keys, how.window, rows), groups)
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


def causal_run(query_HND: Tensor, key_GND: Tensor, value_GND: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Plain causal attention within one run of tokens on a CPU: (H, N, D), and the logarithms of the sums of the
    exponentials of the scores (H, N), from which `causal_run_gradients` has the weights again."""
    out_1HND, log_sum_1HN = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query_HND[None], key_GND[None], value_GND[None], 0.0, True, scale=scale
    )
    return out_1HND[0], log_sum_1HN[0]


def causal_run_gradients(
    query_HND: Tensor,
    key_GND: Tensor,
    value_GND: Tensor,
    scale: float,
    out_HND: Tensor,
    log_sum_HN: Tensor,
    d_out_HND: Tensor,
) -> AttentionGradients:
    """Of the same. Scores and weights are float32; the products with them are in the dtype of the model, and summed in
    float32, as in the forward pass."""
    (heads, num_rows, size), groups = query_HND.shape, key_GND.shape[0]
    dtype, by_group = query_HND.dtype, (groups, -1)
    d_query_HND = torch.empty_like(query_HND)
    key_GDN, value_GDN = (precise(t).transpose(1, 2) for t in (key_GND, value_GND))
    d_key_GND, d_value_GND = torch.zeros_like(key_GND), torch.zeros_like(value_GND)
    along_HN1 = (precise(d_out_HND) * out_HND).sum(-1, keepdim=True)
    for rows in _runs_of_rows(num_rows, SCORE_BYTES["cpu"] // (4 * heads * num_rows)):
        own = lambda t: t[:, rows].reshape(*by_group, t.shape[-1])  # noqa: B023, E731
        query, d_out, keys = own(query_HND), own(d_out_HND), slice(0, rows.stop)
        log_sum, along = own(log_sum_HN[..., None]), own(along_HN1)
        weights = torch.baddbmm(log_sum, precise(query) * scale, key_GDN[..., keys], beta=-1).exp_()
        weights.unflatten(1, (-1, rows.stop - rows.start)).tril_(rows.start)
        d_scores = torch.baddbmm(along, precise(d_out), value_GDN[..., keys], beta=-1).mul_(weights)
        weights, d_scores = weights.to(dtype), d_scores.mul_(scale).to(dtype)
        d_query_HND[:, rows] = torch.bmm(d_scores, key_GND[:, keys]).view(heads, -1, size)
        d_key_GND[:, keys].baddbmm_(d_scores.transpose(1, 2), query)
        d_value_GND[:, keys].baddbmm_(weights.transpose(1, 2), d_out)
    return AttentionGradients(d_query_HND, d_key_GND, d_value_GND)


def _runs_of_rows(num_rows: int, size: int) -> Iterator[slice]:
    """Each of so many rows, of one at least."""
    size = max(1, size)
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


def _softmax(scores_CRL: Tensor, sinks_H: Tensor | None, groups: int) -> Tensor:
    if sinks_H is None:
        return scores_CRL.softmax(-1)
    calls, rows = scores_CRL.shape[0] // groups, scores_CRL.shape[1] * groups // len(sinks_H)
    sinks_CR1 = sinks_H.to(scores_CRL.dtype).repeat_interleave(rows).view(groups, -1, 1).repeat(calls, 1, 1)
    return torch.cat([scores_CRL, sinks_CR1], -1).softmax(-1)[..., :-1]


def _hide(scores_CRL: Tensor, hidden_S1QL: Tensor, groups: int) -> None:
    """In place. The `R` rows are the `Q` of each query head that shares a key head, head after head."""
    scores_SGRQL = scores_CRL.unflatten(1, (-1, hidden_S1QL.shape[2])).unflatten(0, (-1, groups))
    scores_SGRQL.masked_fill_(hidden_S1QL[:, :, None], -math.inf)


def _query_chunks(query_SHQD: Tensor, sight: Sight, num_keys: int) -> Iterator[tuple[slice, int]]:
    """Runs of query rows whose scores fit, and how many keys they reach: whole blocks, where there are several runs."""
    calls, heads, num_rows, _ = query_SHQD.shape
    allowed = SCORE_BYTES.get(query_SHQD.device.type, SCORE_BYTES["cpu"])
    for rows in _runs_of_rows(num_rows, allowed // (4 * calls * heads * num_keys)):
        reach = num_keys
        if rows != slice(0, num_rows):
            last = int(sight.position_SQ[:, rows].max()) + 1
            reach = min(num_keys, last + -last % KEY_BLOCK)
        yield rows, reach


def _by_group(x_SHQD: Tensor, groups: int) -> Tensor:
    """(C, R, D)"""
    calls, _, _, size = x_SHQD.shape
    return x_SHQD.reshape(calls * groups, -1, size)
