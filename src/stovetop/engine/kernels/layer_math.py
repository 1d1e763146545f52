# pyright: basic
"""What a decoder layer computes beside its linears and its attention: the norm, the rotation by position and the gate,
each with its backward pass written out, so that little is kept for it.

Shapes: `N` rows, `E` hidden size, `H` heads, `D` head size, `I` size of the gate.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stovetop.engine.kernels.precision import precise

Elementwise = Callable[[Tensor], Tensor]


def rms_norm(x_NE: Tensor, weight_E: Tensor, epsilon: float) -> Tensor:
    """weight·x / sqrt(mean(x²) + epsilon) over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467), rounded
    to the dtype of x before it meets the weight, as Llama does. The weight is frozen."""
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x_NE, weight_E, epsilon)
    return _normed(x_NE, weight_E, epsilon)[0]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NE: Tensor, weight_E: Tensor, epsilon: float) -> Tensor:
        out_NE, inverse_N1 = _normed(x_NE, weight_E, epsilon)
        ctx.save_for_backward(x_NE, weight_E, inverse_N1)
        return out_NE

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NE, weight_E, inverse_N1 = ctx.saved_tensors
        direction_NE = precise(x_NE) * inverse_N1
        d_direction_NE = precise(gradients[0]) * weight_E
        along_N1 = (d_direction_NE * direction_NE).mean(-1, keepdim=True)
        d_x_NE = d_direction_NE.sub_(direction_NE.mul_(along_N1)).mul_(inverse_N1)
        return d_x_NE.to(x_NE.dtype), None, None


def _normed(x_NE: Tensor, weight_E: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """And the inverse of the root of the mean square (N, 1)."""
    precise_NE = precise(x_NE)
    inverse_N1 = precise_NE.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
    return (precise_NE * inverse_N1).to(x_NE.dtype).mul_(weight_E), inverse_N1


def rotated(x_NHD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    """Each head rotated by its position, its first half against its second (Su et al. 2021, arXiv:2104.09864)."""
    if torch.is_grad_enabled():
        return _Rotated.apply(x_NHD, cos_N1D, sin_N1D)
    return _turned(x_NHD, cos_N1D, sin_N1D, 1)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NHD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
        ctx.save_for_backward(cos_N1D, sin_N1D)
        return _turned(x_NHD, cos_N1D, sin_N1D, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos_N1D, sin_N1D = ctx.saved_tensors
        return _turned(gradients[0], cos_N1D, sin_N1D, -1), None, None


def _turned(x_NHD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor, direction: int) -> Tensor:
    """By the angles, or back. Both halves of cosines and sines are the same."""
    half = x_NHD.shape[-1] // 2
    out_NHD = x_NHD * cos_N1D
    out_NHD[..., :half].addcmul_(x_NHD[..., half:], sin_N1D[..., :half], value=-direction)
    out_NHD[..., half:].addcmul_(x_NHD[..., :half], sin_N1D[..., half:], value=direction)
    return out_NHD


def gated(gate_up_NX: Tensor, silu: Elementwise) -> Tensor:
    """silu(gate)·up (N, I) (Shazeer 2020, arXiv:2002.05202), of gates and values side by side (N, 2·I)."""
    if torch.is_grad_enabled():
        return _Gated.apply(gate_up_NX, silu)
    gate_NI, up_NI = gate_up_NX.chunk(2, -1)
    return silu(gate_NI).mul_(up_NI)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_NX: Tensor, silu: Elementwise) -> Tensor:
        ctx.save_for_backward(gate_up_NX)
        ctx.silu = silu
        gate_NI, up_NI = gate_up_NX.chunk(2, -1)
        return silu(gate_NI).mul_(up_NI)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up_NX,) = ctx.saved_tensors
        gate_NI, up_NI = gate_up_NX.chunk(2, -1)
        d_gate_up_NX = torch.empty_like(gate_up_NX)
        d_gate_NI, d_up_NI = d_gate_up_NX.chunk(2, -1)
        d_gate_NI.copy_(torch.ops.aten.silu_backward(gradients[0] * up_NI, gate_NI))
        torch.mul(gradients[0], ctx.silu(gate_NI), out=d_up_NI)
        return d_gate_up_NX, None
