"""What tests of kernels have in common."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]
NEAR = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""Of the largest number: one rounding, at the end."""


def close(found: Tensor, wanted: Tensor) -> None:
    """Up to one rounding of the largest."""
    largest = float(wanted.abs().max())
    error = float((found.double() - wanted.double()).abs().max())
    assert error <= NEAR[found.dtype] * max(largest, 1.0), error


def noise(*shape: int, dtype: torch.dtype, seed: int = 0, size: float = 1.0) -> Tensor:
    """The same for the same seed."""
    chance = torch.Generator().manual_seed(seed)
    return (size * torch.randn(*shape, generator=chance)).to(dtype)


def near(found: Tensor, wanted: Tensor) -> None:
    """Up to two roundings, of what is added and of the sum, on average."""
    error = (found.double() - wanted).square().mean().sqrt()
    bound = 1e-6 + 2 * NEAR[torch.bfloat16] * wanted.square().mean().sqrt()
    assert error <= bound, float(error)
