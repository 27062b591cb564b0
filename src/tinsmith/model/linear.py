"""Frozen linear layers.

On a CPU the weights are also kept in the order in which oneDNN reads them. That is faster for few
rows, and each row then comes out the same, bit for bit, whatever rows are beside it: the library
chooses its kernel by the weights and not by the number of rows. Samples and training passes rest
on that. Without it, products take other kernels where a thread has fewer than `FEWEST_ROWS` rows,
so few rows are padded. Passes with gradients do without it in float32: it is slower for many rows.
"""

# I input, O output, T row of the pack

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FEWEST_ROWS = 4
_PACKED_FOR_ROWS = 64
"""A hint for oneDNN, which has no effect on results."""


class Linear:
    """y = x·Wᵀ + bias, with a W that never changes."""

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None = None, *, is_packed: bool = True
    ) -> None:
        self.weight_OI = weight_OI
        self.bias_O = bias_O
        self._packed: Tensor | None = None
        if is_packed and can_pack(weight_OI):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _PACKED_FOR_ROWS)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """The outputs, without a way back; `lora_linear.py` has one."""
        if self._packed is not None:
            y_TO: Tensor = torch.ops.mkldnn._linear_pointwise.default(
                x_TI, self._packed, self.bias_O, "none", [], ""
            )
            return y_TO
        return self._unpacked(x_TI)

    def of_many(self, x_TI: Tensor) -> Tensor:
        """The outputs, by what is fastest for many rows: up to rounding those of a call."""
        return self._unpacked(x_TI) if x_TI.dtype == torch.float32 else self(x_TI)

    def _unpacked(self, x_TI: Tensor) -> Tensor:
        return F.linear(_padded(x_TI), self.weight_OI, self.bias_O)[: x_TI.shape[0]]

    def input_gradient(self, dy_TO: Tensor) -> Tensor:
        """What the inputs' gradient is for one of the outputs."""
        return (_padded(dy_TO) @ self.weight_OI)[: dy_TO.shape[0]]


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has fast kernels for such weights on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _padded(rows: Tensor) -> Tensor:
    """Few rows become more, so that the share of each thread is one that kernels treat alike."""
    step = FEWEST_ROWS * torch.get_num_threads()
    missing = -rows.shape[0] % step if rows.shape[0] < 4 * step else 0
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows
