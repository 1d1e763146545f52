# pyright: basic
"""The two arithmetics a model can run on. They are the same mathematics; only rounding differs.

    Fast       the library's own kernels. A row's last bits may change with the rows beside it
    RowExact   float32 on the CPU. A row's bits depend on that row alone: not on the number of rows, their order, the
               batch, or the number of threads. So the logprob of a token is the same, to the bit, from cached decoding
               in any company and from a packed training forward

A kernel is free to choose how it sums by the shape of its input, and sums in another order round otherwise. RowExact
therefore gives every kernel shapes in which it does not choose: linears through oneDNN with rows padded to a multiple
of four; attention with query rows padded to a multiple of eight and keys in blocks that start where the sequence
starts, whose results are added from left to right. `exactness.py` checks on the machine at hand that this is so.

Shapes: `N` rows, `I` inputs, `O` outputs; `S` calls, `H` query heads, `G` key/value heads, `Q` query rows, `L` key
rows, `D` head size, `R` query rows of all heads that share a key head.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class How:
    """What one layer's attention asks for besides causality."""

    scale: float
    window: int | None = None  # a row sees this many rows, itself included
    softcap: float | None = None  # scores s become softcap·tanh(s / softcap)
    sinks_H: Tensor | None = None  # one more logit per head, which takes weight and brings nothing


class Arithmetic(Protocol):
    """The operations in which rows meet."""

    @property
    def key_multiple(self) -> int:
        """Attention wants its keys in a multiple of this many."""
        ...

    def linear(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor: ...

    def attention(
        self, query_SHQD: Tensor, key_SGLD: Tensor, value_SGLD: Tensor, position_SQ: Tensor, how: How
    ) -> Tensor:
        """(S, H, Q, D). Row q of call s sees keys 0..position_SQ[s, q], or as many of the last of them as the window
        lets it. `position_SQ` may have a first dimension of 1. Keys that nobody sees are finite."""
        ...


# ---- fast ------------------------------------------------------------------------------------------------------------


class Fast:
    key_multiple = 1

    def linear(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        return F.linear(x, weight_OI, bias_O)

    def attention(
        self, query_SHQD: Tensor, key_SGLD: Tensor, value_SGLD: Tensor, position_SQ: Tensor, how: How
    ) -> Tensor:
        num_queries, num_keys = query_SHQD.shape[2], key_SGLD.shape[2]
        fused = how.softcap is None and how.sinks_H is None
        starts_at_zero = position_SQ.shape[0] == 1 and num_queries == num_keys
        if fused and starts_at_zero and (how.window is None or how.window >= num_keys):
            return _sdpa(query_SHQD, key_SGLD, value_SGLD, None, how.scale, is_causal=True)
        seen_S1QL = _seen(position_SQ, num_keys, how.window)[:, None]
        if fused:
            return _sdpa(query_SHQD, key_SGLD, value_SGLD, seen_S1QL, how.scale, is_causal=False)
        return _spelled_out(query_SHQD, key_SGLD, value_SGLD, seen_S1QL, how)


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
    scores_SHQL = scores_SHQL.float().masked_fill(~seen_S1QL, -math.inf)
    if how.sinks_H is not None:
        sinks_SHQ1 = how.sinks_H.float().view(1, -1, 1, 1).expand(*scores_SHQL.shape[:-1], 1)
        scores_SHQL = torch.cat([scores_SHQL, sinks_SHQ1], -1)
    weights_SHQL = scores_SHQL.softmax(-1)[..., : key_SHLD.shape[2]]
    return weights_SHQL.to(value_SHLD.dtype) @ value_SHLD


# ---- row-exact -------------------------------------------------------------------------------------------------------

ROW_MULTIPLE = 4  # of a linear
QUERY_MULTIPLE = 8  # of query rows
KEY_BLOCK = 64


@dataclass(slots=True, eq=False)
class RowExact:
    """Frozen weights are kept a second time in oneDNN's own layout (`prepack`): the same bits, less work per call."""

    key_multiple: int = KEY_BLOCK
    _packed: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by id; the weight is kept alive beside it

    def prepack(self, weight_OI: Tensor) -> None:
        layout = torch.ops.mkldnn._reorder_linear_weight(weight_OI, ROW_MULTIPLE)
        self._packed[id(weight_OI)] = (weight_OI, layout)

    def linear(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        packed = self._packed.get(id(weight_OI))
        out = _RowExactLinear.apply(x, weight_OI, weight_OI if packed is None else packed[1])
        return out if bias_O is None else out + bias_O

    def attention(
        self, query_SHQD: Tensor, key_SGLD: Tensor, value_SGLD: Tensor, position_SQ: Tensor, how: How
    ) -> Tensor:
        num_calls, num_heads, num_queries, size = query_SHQD.shape
        num_groups = key_SGLD.shape[1]
        repeats = num_heads // num_groups
        query_SGRD = query_SHQD.reshape(num_calls, num_groups, repeats * num_queries, size)
        hidden_SQL = ~_seen(position_SQ, key_SGLD.shape[2], how.window)
        hidden_SRL = hidden_SQL.repeat(1, repeats, 1)
        out_SGRD = _BlockAttention.apply(query_SGRD, key_SGLD, value_SGLD, hidden_SRL[:, None], how.scale)
        return out_SGRD.reshape(num_calls, num_heads, num_queries, -1)


class _RowExactLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, layout: Tensor) -> Tensor:
        ctx.save_for_backward(x if weight_OI.requires_grad else None, weight_OI)
        x_NI = x.reshape(-1, x.shape[-1])
        padding = -x_NI.shape[0] % ROW_MULTIPLE
        padded_NI = F.pad(x_NI, (0, 0, 0, padding)) if padding else x_NI.contiguous()
        out_NO = torch.ops.mkldnn._linear_pointwise(padded_NI, layout, None, "none", [], "")
        return out_NO[: x_NI.shape[0]].view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        d_out = gradients[0]
        d_x = d_out @ weight_OI if ctx.needs_input_grad[0] else None
        d_weight_OI = d_out.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return d_x, d_weight_OI, None


class _BlockAttention(torch.autograd.Function):
    """Softmax over whole rows of scores that were computed in blocks of keys. The backward pass computes the weights
    again, so that only queries, keys and values are kept."""

    @staticmethod
    def forward(
        ctx: Any, query_SGRD: Tensor, key_SGLD: Tensor, value_SGLD: Tensor, hidden_S1RL: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(query_SGRD, key_SGLD, value_SGLD, hidden_S1RL)
        ctx.scale = scale
        num_calls, num_groups, num_rows, _ = query_SGRD.shape
        padding = -num_rows % QUERY_MULTIPLE
        query, hidden = query_SGRD, hidden_S1RL
        if padding:
            query, hidden = F.pad(query, (0, 0, 0, padding)), F.pad(hidden, (0, 0, 0, padding))
        query, key, value = (t.flatten(0, 1) for t in (query, key_SGLD, value_SGLD))
        blocks = range(0, key.shape[1], KEY_BLOCK)
        scores = torch.cat([torch.bmm(query, key[:, b : b + KEY_BLOCK].transpose(1, 2)) for b in blocks], 2) * scale
        scores = scores.view(num_calls, num_groups, -1, key.shape[1]).masked_fill(hidden, -math.inf)
        weights = scores.softmax(-1).view(num_calls * num_groups, -1, key.shape[1])
        out = torch.bmm(weights[:, :, :KEY_BLOCK], value[:, :KEY_BLOCK])
        for block in blocks[1:]:
            out = out + torch.bmm(weights[:, :, block : block + KEY_BLOCK], value[:, block : block + KEY_BLOCK])
        return out.unflatten(0, (num_calls, num_groups))[:, :, :num_rows]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, hidden = ctx.saved_tensors
        d_out = gradients[0]
        weights = ((query @ key.transpose(-1, -2)) * ctx.scale).masked_fill(hidden, -math.inf).softmax(-1)
        d_weights = d_out @ value.transpose(-1, -2)
        d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True)) * ctx.scale
        return d_scores @ key, d_scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ d_out, None, None


class WrittenOutSiLU(torch.nn.Module):
    """x / (1 + exp(-x)). The library's own takes another path for the last elements of a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))


class RotaryTable(torch.nn.Module):
    """Cosines and sines of every position, computed once, in one pass, by the model's own module."""

    def __init__(self, rotary: torch.nn.Module, num_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        with torch.no_grad():
            cos_1TD, sin_1TD = rotary(torch.empty(0, dtype=dtype), torch.arange(num_positions)[None])
        self.cos_TD, self.sin_TD = cos_1TD[0], sin_1TD[0]

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos_TD[position_ids], self.sin_TD[position_ids]
