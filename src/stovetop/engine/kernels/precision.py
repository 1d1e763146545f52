# pyright: basic
"""In which precision sums are computed: at least float32, whatever the dtype of the model."""

import torch
from torch import Tensor


def precise_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for all others."""
    return torch.promote_types(dtype, torch.float32)


def precise(x: Tensor) -> Tensor:
    """The same numbers in that precision: no copy where they have it."""
    return x.to(precise_dtype(x.dtype))
