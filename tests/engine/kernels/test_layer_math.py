"""Norm, rotation and gate: what Llama computes, and the gradients that autograd gives for it."""

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from stovetop.engine.kernels.arithmetic import Fast, RowExact
from stovetop.engine.kernels.layer_math import gated, rms_norm, rotated


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype)


def angles(num_rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    half_NX = normal(num_rows, size // 2)
    angle_N1D = torch.cat([half_NX, half_NX], -1)[:, None]
    return angle_N1D.cos(), angle_N1D.sin()


def test_the_norm_is_that_of_llama_to_the_bit_and_has_autograds_gradient() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        theirs = LlamaRMSNorm(48, 1e-5).to(dtype)
        theirs.weight.data = normal(48, dtype=torch.float32).to(dtype)
        x_NE = (3 * normal(7, 48, dtype=torch.float32)).to(dtype)
        assert torch.equal(rms_norm(x_NE, theirs.weight.detach(), 1e-5), theirs(x_NE))
    weight_E = normal(6)
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, weight_E, 1e-5), [normal(5, 6).requires_grad_()])
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, weight_E, 1e-5), [normal(4, 2, 6).requires_grad_()])


def test_heads_are_rotated_as_llama_rotates_them_and_back() -> None:
    x_NHD, (cos_N1D, sin_N1D) = normal(5, 3, 8), angles(5, 8)
    theirs, _ = apply_rotary_pos_emb(x_NHD, x_NHD, cos_N1D[:, 0], sin_N1D[:, 0], unsqueeze_dim=1)
    torch.testing.assert_close(rotated(x_NHD, cos_N1D, sin_N1D), theirs)
    assert torch.autograd.gradcheck(lambda x: rotated(x, cos_N1D, sin_N1D), [x_NHD.requires_grad_()])


def test_the_gate_has_autograds_gradient_in_either_arithmetic() -> None:
    gate_up_NX = normal(5, 12).requires_grad_()
    for arithmetic in (Fast(), RowExact()):
        expected = torch.nn.functional.silu(gate_up_NX[:, :6]) * gate_up_NX[:, 6:]
        torch.testing.assert_close(gated(gate_up_NX, arithmetic.silu), expected)
        assert torch.autograd.gradcheck(lambda x, own=arithmetic: gated(x, own.silu), [gate_up_NX])
