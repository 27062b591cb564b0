"""An adapter's factors of one layer, computed by compiled kernels (`kernels/factors.c`).

What they add is, to the last bit, what factors add that were frozen for samples. One call goes all
the way in, and one all the way back, from the numbers that the optimizer steps to those that it
reads. Nothing is cast, stacked or copied in between: for few rows that takes more than to multiply.
"""

# I input, O output, R rank, T row of the pack, N number of the vector

from __future__ import annotations

import torch
from torch import Tensor

from tinsmith.model.factor_place import FactorPlace
from tinsmith.model.kernels.library import MOST_PARTS, Kernels, product_kernels


def factor_kernels(place: FactorPlace, flat_N: Tensor, dtype: torch.dtype) -> Kernels | None:
    """The kernels, if they compute with factors in such a vector, in such a type."""
    are_pairs = place.inputs % 2 == 0 and place.rank % 2 == 0
    is_known = flat_N.dtype == torch.float32 and flat_N.is_contiguous()
    if not are_pairs or not is_known or len(place.outputs) > MOST_PARTS:
        return None
    return product_kernels(flat_N.device, dtype)


class KernelFactors:
    """The calls for one layer.

    Args:
        kernels: As `factor_kernels` gave them.
        place: Where the factors are.
        flat_N: In this vector.
        gradients_N: Where those of each are gathered; None if they are not trained.
    """

    def __init__(
        self, kernels: Kernels, place: FactorPlace, flat_N: Tensor, gradients_N: Tensor | None
    ) -> None:
        self._kernels = kernels
        self._place = place
        self._flat_N = flat_N
        self._gradients_N = gradients_N
        self.goes_back = all(outputs % 2 == 0 for outputs in place.outputs)
        """Whether there is a way back: outputs are taken in pairs there."""

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """`Factors.add_to`."""
        t_TR = torch.empty((len(x_TI), self._place.inner), dtype=torch.bfloat16)
        self._kernels.add_factors(self._place.for_kernels, self._flat_N, _across(x_TI), y_TO, t_TR)
        return t_TR

    def backward(
        self, dx_TI: Tensor, dy_TO: Tensor, x_TI: Tensor, t_TR: Tensor, *, is_added: bool
    ) -> None:
        """`Factors.backward`; gradients are written over what is there unless `is_added`."""
        self._kernels.factors_back(
            *(self._place.for_kernels, self._flat_N, self._gradients_N),
            *(_across(dy_TO), _across(x_TI), t_TR, dx_TI),
            is_added=is_added,
        )


def _across(rows: Tensor) -> Tensor:
    """With a row's numbers one behind the other."""
    return rows if rows.stride(1) == 1 else rows.contiguous()
