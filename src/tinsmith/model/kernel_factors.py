"""An adapter's factors of one layer, computed by compiled kernels (`kernels/factors.c`).

What they add is, to the last bit, what factors add that were frozen for samples. One call goes all
the way in, and one all the way back, from the numbers that the optimizer steps to those that it
reads: nothing is cast, stacked or copied in between, which for few rows takes more than to multiply.
"""

# I input, O output, R rank, T row of the pack

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinsmith.model.kernels.library import MOST_PARTS, FactorsOfLayer, Kernels, product_kernels


def factor_kernels(held: Sequence[Tensor], dtype: torch.dtype) -> Kernels | None:
    """The kernels, if they compute with factors that are held so, in such a type."""
    _, *bs_OR = held
    are_known = len(bs_OR) <= MOST_PARTS and all(one.is_contiguous() for one in held)
    are_known &= all(one.dtype == torch.float32 for one in held)
    found = [product_kernels(one, dtype) for one in held]
    return found[0] if are_known and all(found) else None


class KernelFactors:
    """The calls for one layer.

    Args:
        kernels: As `factor_kernels` gave them.
        held: A, and B of each part. They stay where they are.
        gradients: Where those of each are gathered; empty if they are not trained.
        scale: ALPHA / rank.
    """

    def __init__(
        self, kernels: Kernels, held: Sequence[Tensor], gradients: Sequence[Tensor], scale: float
    ) -> None:
        a_RI, *bs_OR = held
        self._kernels = kernels
        self._inner = a_RI.shape[0]
        self._factors = FactorsOfLayer(
            inputs=a_RI.shape[1],
            rank=bs_OR[0].shape[1],
            parts=len(bs_OR),
            outputs=tuple(b_OR.shape[0] for b_OR in bs_OR),
            scale=scale,
            factors=tuple(one.data_ptr() for one in held),
            slopes=tuple(one.data_ptr() for one in gradients),
        )
        self.goes_back = all(b_OR.shape[0] % 2 == 0 for b_OR in bs_OR)
        """Whether there is a way back: outputs are taken in pairs there."""

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """`Factors.add_to`."""
        t_TR = torch.empty((len(x_TI), self._inner), dtype=torch.bfloat16)
        self._kernels.add_factors(self._factors, _across(x_TI), y_TO, t_TR)
        return t_TR

    def backward(
        self, dx_TI: Tensor, dy_TO: Tensor, x_TI: Tensor, t_TR: Tensor, *, is_added: bool
    ) -> None:
        """`Factors.backward`; gradients are written over what is there unless `is_added`."""
        given = _across(dy_TO), _across(x_TI), t_TR
        self._kernels.factors_back(self._factors, *given, dx_TI, is_added=is_added)


def _across(rows: Tensor) -> Tensor:
    """With a row's numbers one behind the other."""
    return rows if rows.stride(1) == 1 else rows.contiguous()
