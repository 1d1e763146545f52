# pyright: basic
"""The two arithmetics a model can run on. They are the same mathematics; only rounding differs.

    Fast       the library's own kernels. A row's last bits may change with the rows beside it
    RowExact   float32 or bfloat16 on the CPU. A row's bits depend on that row alone: not on the number of rows, their
               order, the batch, or the number of threads. So the logprob of a token is the same, to the bit, from
               cached decoding in any company and from a packed training forward

A kernel is free to choose how it sums by the shape of its input, and sums in another order round otherwise. RowExact
therefore gives every kernel shapes in which it does not choose: linears through oneDNN with rows padded to a multiple
of four; attention with query rows padded to a multiple of eight and keys in blocks that start where the sequence
starts, whose results are added from left to right. `exactness.py` checks on the machine at hand that this is so.

Shapes: `N` rows, `I` inputs, `O` outputs; `S` calls, `H` query heads, `G` key/value heads, `Q` query rows, `L` key
rows, `D` head size.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stovetop.engine.kernels.block_attention import KEY_BLOCK, row_exact, row_exact_after_prefix, single_rows
from stovetop.engine.kernels.precision import precise
from stovetop.engine.kernels.shared_prefix import SharedRows
from stovetop.engine.kernels.sight import How, Seen


@dataclass(frozen=True, slots=True, eq=False)
class FrozenLinear:
    """A linear of the base model, or several that read the same input, one below the other."""

    weight_OI: Tensor
    bias_O: Tensor | None = None
    layout: Tensor | None = None  # the weight once more, as oneDNN wants it for few rows


class Arithmetic(Protocol):
    """The operations in which rows meet."""

    @property
    def key_multiple(self) -> int:
        """Attention wants its keys in a multiple of this many."""
        ...

    @property
    def row_multiple(self) -> int:
        """Linears want their rows in a multiple of this many; others cost a copy."""
        ...

    @property
    def can_stack(self) -> bool:
        """Several adapters may run as one batched product. Where rows must not depend on their neighbours they may not,
        and for the same reason a pass that trains holds the data of one adapter only."""
        ...

    def prepacked(self, linear: FrozenLinear) -> FrozenLinear:
        """With its weight a second time in oneDNN's own layout, where that saves time: passes of few rows would spend
        theirs on bringing weights into it."""
        ...

    def linear(self, x_NI: Tensor, linear: FrozenLinear, residual_NO: Tensor | None = None) -> Tensor:
        """A fresh tensor (N, O), with `residual_NO` added. Not differentiable: see `low_rank.adapted`."""
        ...

    def product(self, x_NI: Tensor, factor_OI: Tensor) -> Tensor:
        """x·Fᵀ (N, O), for a factor of an adapter."""
        ...

    def add_product(self, out_NO: Tensor, x_NI: Tensor, factor_OI: Tensor) -> None:
        """Adds x·Fᵀ to `out_NO`, in place. All have one dtype."""
        ...

    def silu(self, x: Tensor) -> Tensor:
        """x / (1 + exp(-x)), elementwise."""
        ...

    def attends_in_runs(self, device: torch.device) -> bool:
        """Whether plain causal attention of a run of tokens on its own may be computed by `causal_run`."""
        ...

    def attention(self, query_SHQD: Tensor, own: Seen, how: How) -> Tensor:
        """(S, H, Q, D). Not differentiable: see `block_attention.attention_gradients`."""
        ...

    def attention_after_prefix(
        self, query_SHQD: Tensor, own: Seen, prefix: Seen, shared: SharedRows, how: How
    ) -> Tensor:
        """The same for one row a call, which sees its prefix before its own keys. `how` is plain."""
        ...


# ---- fast ------------------------------------------------------------------------------------------------------------


# not cuDNN's, which makes a plan for every new shape: decoding has a new one every few steps
CUDA_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LAYOUT_ROWS = 256  # for which oneDNN's own layout is used; half and double: 0.98, 1.00 (benchmarks/constants.py)


@dataclass(frozen=True, slots=True)
class Fast:
    key_multiple: int = 1
    row_multiple: int = 1
    can_stack: bool = True

    def prepacked(self, linear: FrozenLinear) -> FrozenLinear:
        weight_OI = linear.weight_OI
        is_worth_it = weight_OI.device.type == "cpu" and _has_fast_layout(weight_OI.dtype)
        return replace(linear, layout=_onednn_layout(weight_OI)) if is_worth_it else linear

    def linear(self, x_NI: Tensor, linear: FrozenLinear, residual_NO: Tensor | None = None) -> Tensor:
        if linear.layout is not None and _is_few(x_NI):
            return _onednn_linear(x_NI, linear.layout, linear.bias_O, residual_NO)
        if residual_NO is None:
            return F.linear(x_NI, linear.weight_OI, linear.bias_O)
        out_NO = torch.addmm(residual_NO, x_NI, linear.weight_OI.t())
        return out_NO if linear.bias_O is None else out_NO.add_(linear.bias_O)

    def product(self, x_NI: Tensor, factor_OI: Tensor) -> Tensor:
        return F.linear(x_NI, factor_OI)

    def add_product(self, out_NO: Tensor, x_NI: Tensor, factor_OI: Tensor) -> None:
        out_NO.addmm_(x_NI, factor_OI.t())

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def attends_in_runs(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def attention(self, query_SHQD: Tensor, own: Seen, how: How) -> Tensor:
        key_SGLD, value_SGLD, sight = own
        num_queries, num_keys = query_SHQD.shape[2], key_SGLD.shape[2]
        if how.softcap is not None or how.sinks_H is not None:
            return _spelled_out(query_SHQD, own, how)
        starts_at_zero = sight.position_SQ.shape[0] == 1 and num_queries == num_keys
        if starts_at_zero and (how.window is None or how.window >= num_keys):
            return _sdpa(query_SHQD, key_SGLD, value_SGLD, None, how.scale, is_causal=True)
        penalty = sight.penalty(num_keys, how.window, query_SHQD.dtype)
        if num_queries == 1:
            query_SGRD = single_rows(query_SHQD, key_SGLD)
            out_SGRD = _sdpa(query_SGRD, key_SGLD, value_SGLD, penalty, how.scale, is_causal=False)
            return out_SGRD.flatten(1, 2)[:, :, None]
        return _sdpa(query_SHQD, key_SGLD, value_SGLD, penalty, how.scale, is_causal=False)

    def attention_after_prefix(
        self, query_SHQD: Tensor, own: Seen, prefix: Seen, shared: SharedRows, how: How
    ) -> Tensor:
        """Two softmaxes, over the prefix and over what follows, weighted by the sums of their exponentials."""
        query_SGRD = single_rows(query_SHQD, own.key_SGLD)
        first, first_sum = _with_log_sum(shared.gathered(query_SGRD), prefix, how.scale)
        last_SGRD, last_sum_SGR1 = _with_log_sum(query_SGRD, own, how.scale)
        repeats = query_SGRD.shape[2]
        first_SGRD = shared.scattered(first, repeats, missing=0.0)
        first_sum_SGR1 = shared.scattered(first_sum, repeats, missing=-math.inf)
        weight_SGR1 = (first_sum_SGR1 - last_sum_SGR1).sigmoid_().to(last_SGRD.dtype)
        return torch.lerp(last_SGRD, first_SGRD, weight_SGR1).flatten(1, 2)[:, :, None]


def _has_fast_layout(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _is_few(x_NI: Tensor) -> bool:
    """Few enough rows for oneDNN's own layout. One row in float32 is a product with a vector, which BLAS does best."""
    return len(x_NI) <= LAYOUT_ROWS and (len(x_NI) > 1 or x_NI.dtype != torch.float32)


def _onednn_layout(weight_OI: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI, ROW_MULTIPLE)


def _onednn_linear(x_NI: Tensor, layout: Tensor, bias_O: Tensor | None, residual_NO: Tensor | None) -> Tensor:
    if residual_NO is None:
        return torch.ops.mkldnn._linear_pointwise(x_NI, layout, bias_O, "none", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x_NI, residual_NO, layout, bias_O, "add")


def _sdpa(
    query_SHQD: Tensor, key_SGLD: Tensor, value_SGLD: Tensor, mask: Tensor | None, scale: float, is_causal: bool
) -> Tensor:
    repeats = query_SHQD.shape[1] // key_SGLD.shape[1]
    if query_SHQD.device.type != "cuda":
        return F.scaled_dot_product_attention(
            query_SHQD, key_SGLD, value_SGLD, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=repeats > 1
        )
    if mask is not None and repeats > 1:  # with a mask only the slowest kernel takes grouped heads
        key_SGLD, value_SGLD = (t.repeat_interleave(repeats, 1) for t in (key_SGLD, value_SGLD))
    with sdpa_kernel(CUDA_KERNELS):
        return F.scaled_dot_product_attention(
            query_SHQD,
            key_SGLD,
            value_SGLD,
            attn_mask=mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=query_SHQD.shape[1] != key_SGLD.shape[1],
        )


def _with_log_sum(query_SGRD: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
    """The weighted values (S, G, R, D), and the logarithm of the sum of the exponentials of the scores (S, G, R, 1)."""
    penalty = seen.sight.penalty(seen.key_SGLD.shape[2], None, query_SGRD.dtype)
    same_size = query_SGRD.shape[-1] == seen.value_SGLD.shape[-1]
    # what the library's attention runs on a CPU, which keeps the sums to itself
    if query_SGRD.device.type == "cpu" and same_size:
        out_SGRD, sum_SGR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query_SGRD, seen.key_SGLD, seen.value_SGLD, 0.0, False, attn_mask=penalty, scale=scale
        )
        return out_SGRD, sum_SGR[..., None]
    scores_SGRL = (query_SGRD @ seen.key_SGLD.transpose(-1, -2)).float() * scale + penalty
    sum_SGR1 = scores_SGRL.logsumexp(-1, keepdim=True)
    return (scores_SGRL - sum_SGR1).exp().to(seen.value_SGLD.dtype) @ seen.value_SGLD, sum_SGR1


def _spelled_out(query_SHQD: Tensor, own: Seen, how: How) -> Tensor:
    """For what the fused kernels cannot do: soft-capped scores (Gemma 2) and sinks (gpt-oss)."""
    repeats = query_SHQD.shape[1] // own.key_SGLD.shape[1]
    key_SHLD = own.key_SGLD.repeat_interleave(repeats, 1)
    value_SHLD = own.value_SGLD.repeat_interleave(repeats, 1)
    scores_SHQL = (query_SHQD @ key_SHLD.transpose(-1, -2)) * how.scale
    if how.softcap is not None:
        scores_SHQL = how.softcap * torch.tanh(scores_SHQL / how.softcap)
    scores_SHQL = scores_SHQL.float().masked_fill(own.sight.hidden(key_SHLD.shape[2], how.window), -math.inf)
    if how.sinks_H is not None:
        sinks_SHQ1 = how.sinks_H.float().view(1, -1, 1, 1).expand(*scores_SHQL.shape[:-1], 1)
        scores_SHQL = torch.cat([scores_SHQL, sinks_SHQ1], -1)
    weights_SHQL = scores_SHQL.softmax(-1)[..., : key_SHLD.shape[2]]
    return weights_SHQL.to(value_SHLD.dtype) @ value_SHLD


# ---- row-exact -------------------------------------------------------------------------------------------------------

ROW_MULTIPLE = 4  # of a linear


@dataclass(frozen=True, slots=True)
class RowExact:
    key_multiple: int = KEY_BLOCK
    row_multiple: int = ROW_MULTIPLE
    can_stack: bool = False

    def prepacked(self, linear: FrozenLinear) -> FrozenLinear:
        """The same bits, less work a call."""
        return replace(linear, layout=_onednn_layout(linear.weight_OI))

    def linear(self, x_NI: Tensor, linear: FrozenLinear, residual_NO: Tensor | None = None) -> Tensor:
        out_NO = self.product(x_NI, linear.weight_OI if linear.layout is None else linear.layout)
        if linear.bias_O is not None:
            out_NO += linear.bias_O
        return out_NO if residual_NO is None else out_NO.add_(residual_NO)

    def product(self, x_NI: Tensor, factor_OI: Tensor) -> Tensor:
        padding = -x_NI.shape[0] % ROW_MULTIPLE
        padded_NI = F.pad(x_NI, (0, 0, 0, padding)) if padding else x_NI.contiguous()
        return _onednn_linear(padded_NI, factor_OI, None, None)[: x_NI.shape[0]]

    def add_product(self, out_NO: Tensor, x_NI: Tensor, factor_OI: Tensor) -> None:
        out_NO += self.product(x_NI, factor_OI)

    def silu(self, x: Tensor) -> Tensor:
        """Written out: the library's own takes another path for the last elements of a buffer."""
        wide = precise(x)
        return (wide / torch.neg(wide).exp_().add_(1)).to(x.dtype)

    def attends_in_runs(self, device: torch.device) -> bool:
        return False

    def attention(self, query_SHQD: Tensor, own: Seen, how: How) -> Tensor:
        return row_exact(query_SHQD, own, how)

    def attention_after_prefix(
        self, query_SHQD: Tensor, own: Seen, prefix: Seen, shared: SharedRows, how: How
    ) -> Tensor:
        return row_exact_after_prefix(query_SHQD, own, prefix, shared, how)


class RowExactSiLU(nn.Module):
    """`RowExact.silu`, for a model of the library."""

    def forward(self, x: Tensor) -> Tensor:
        return _SiLU.apply(x)


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return RowExact().silu(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(gradients[0], x)


class RotaryTable(nn.Module):
    """Cosines and sines of every position, computed once, in one pass, by the model's own module."""

    def __init__(self, rotary: nn.Module, num_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = getattr(rotary, "config", None)  # some models read it
        with torch.no_grad():
            cos_1TD, sin_1TD = rotary(torch.empty(0, dtype=dtype), torch.arange(num_positions)[None])
        self.cos_TD, self.sin_TD = cos_1TD[0], sin_1TD[0]

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos_TD[position_ids], self.sin_TD[position_ids]
