"""Linears on both arithmetics, with their weights prepacked and without."""

import pytest
import torch

from stovetop.engine.kernels.arithmetic import Arithmetic, Fast, FrozenLinear, RowExact


@pytest.mark.parametrize(
    ("arithmetic", "dtype"),
    [(Fast(), torch.float32), (Fast(), torch.bfloat16), (RowExact(), torch.float32)],
    ids=["fast", "fast in bfloat16", "exact"],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_prepacked_linear_gives_what_the_plain_one_gives(
    arithmetic: Arithmetic, dtype: torch.dtype, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    linear = FrozenLinear(normal(48, 32), normal(48) if has_bias else None)
    for num_rows in (1, 2, 7, 32, 300):
        x_NI, residual_NO = normal(num_rows, 32), normal(num_rows, 48)
        before = residual_NO.clone()
        for residual in (None, residual_NO):
            wide = [t.double() for t in (x_NI, linear.weight_OI)]
            expected = torch.nn.functional.linear(*wide, linear.bias_O.double() if linear.bias_O is not None else None)
            expected = expected if residual is None else expected + residual.double()
            for own in (linear, arithmetic.prepacked(linear)):
                found = arithmetic.linear(x_NI, own, residual)
                assert (found.dtype, found.shape) == (dtype, (num_rows, 48))
                torch.testing.assert_close(
                    found.double(), expected, atol=0.2 if dtype != torch.float32 else 1e-4, rtol=0.02
                )
        assert torch.equal(residual_NO, before), "the residual stays as it is"
