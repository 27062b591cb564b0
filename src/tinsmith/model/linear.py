"""Frozen linear layers.

On a CPU the weights are also kept in the order in which oneDNN reads them. That is faster for few
rows, and each row then comes out the same, bit for bit, whatever rows are beside it: the library
chooses its kernel by the weights and not by the number of rows, but for a lone row, which it sums
up in another order if there are more than 1,024 inputs. Samples and training passes rest on that.
Without it, products take other kernels where a thread has fewer than `FEWEST_ROWS` rows. So few
rows are padded in either case: packed, four take a fifth less time than one or two. Passes with
gradients do without it in float32: it is slower for many rows. Small weights do so in all passes;
which are small is a matter of their sides alone. Others that lose nothing in sixteen bits have a
faster product for few rows and many (`half_weights.py`), which takes the place of both; and so have
all of bfloat16 where there are compiled kernels for the processor (`kernels/library.py`).

Weights may be held in a narrower type than is computed in: bfloat16 on a machine that multiplies
float32 alone. They are then widened just before each product, block by block in a buffer that
caches hold. For eight rows and more that costs as much as weights that lie there in float32.
"""

# I input, O output, T row of the pack

from __future__ import annotations

import math
import threading

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.model.half_weights import HalfWeights, try_halve
from tinsmith.model.kernels.library import Kernels, product_kernels

FEWEST_ROWS = 4
_PACKED_FOR_ROWS = 64
"""A hint for oneDNN, which has no effect on results."""
BLOCK_BYTES = 4 << 20
"""Of widened weights. Half of it costs a tenth more for 512 rows, as they are read again for each
block; and more is gained nowhere."""
FEWEST_OUTPUTS = 64
"""Of a product that is not packed. One with a single output is of another kind, whose bits follow
from the number of rows; and weights of so few are not worth widening."""
INPUT_STEP = 4
"""Of the inputs of a product that is not packed. With other numbers of them, and with three threads
or more, the bits of a row follow from the number of rows."""
HALF_INPUTS = 256
"""FBGEMM fills up inputs to a multiple of 512: with fewer than these, sixteen bits take more memory
than float32, eight times as much with 32, and more time."""
SMALL_NUMBERS = 1 << 17
"""Weights of no more are not packed in float32: a call of oneDNN takes some 20 µs before it begins,
which is more than the whole product of a few rows with them."""
SMALL_SIDE = 16
"""With fewer inputs or outputs other kernels are chosen by the number of rows, unless packed."""


class Linear:
    """y = x·Wᵀ + bias, with a W that never changes.

    Args:
        weight_OI: In the type that it is held in.
        bias_O: In the type that is computed in.
        dtype: What is computed in; None for what the weight is in.
        is_packed: Whether a second copy is kept, in the order of what multiplies fastest.
    """

    def __init__(
        self,
        weight_OI: Tensor,
        bias_O: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        is_packed: bool = True,
    ) -> None:
        self.dtype = weight_OI.dtype if dtype is None else dtype
        if not _can_go_unpacked(weight_OI.shape):
            weight_OI = weight_OI.to(self.dtype)
        self.weight_OI = weight_OI
        self.bias_O = bias_O
        self._half: HalfWeights | None = None
        self._packed: Tensor | None = None
        self._own: tuple[Kernels, Tensor] | None = None
        """Kernels that multiply, and the weights as they want them."""
        self._blocks: tuple[Tensor, ...] = ()
        if weight_OI.dtype != self.dtype:
            self._blocks = weight_OI.tensor_split(_block_count(weight_OI.shape, self.dtype))
        elif is_packed and weight_OI.numel() > SMALL_NUMBERS and weight_OI.shape[1] >= HALF_INPUTS:
            self._half = try_halve(weight_OI)
        can_be_own = weight_OI.shape[1] % 2 == 0 and weight_OI.stride(1) == 1 and not self._blocks
        kernels = product_kernels(weight_OI.device, weight_OI.dtype) if can_be_own else None
        if is_packed and kernels is not None:
            self._own = kernels, kernels.pack(weight_OI)
        elif is_packed and not self._blocks and self._half is None and can_pack(weight_OI):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _PACKED_FOR_ROWS)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """The outputs, without a way back; `lora_linear.py` has one."""
        if self._half is not None:
            half_TO = self._half(x_TI)
            return half_TO if self.bias_O is None else half_TO.add_(self.bias_O)
        outputs, inputs = self.weight_OI.shape
        # Rows that do not fit are PyTorch's to refuse: kernels would read beyond them.
        if self._own is not None and x_TI.dtype == self.dtype and x_TI.shape[1] == inputs:
            kernels, packed = self._own
            x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
            return kernels.product(x_TI, packed, outputs, self.bias_O)
        if self._packed is not None:
            return self._packed_outputs(x_TI, self._packed)
        return self._unpacked(x_TI)

    def of_many(self, x_TI: Tensor) -> Tensor:
        """The outputs, by what is fastest for many rows: up to rounding those of a call."""
        if self._half is not None or x_TI.dtype != torch.float32:
            return self(x_TI)
        return self._unpacked(x_TI) if _can_go_unpacked(self.weight_OI.shape) else self(x_TI)

    def _packed_outputs(self, x_TI: Tensor, packed: Tensor) -> Tensor:
        rows = x_TI.shape[0]
        if rows == 1:
            x_TI = x_TI.expand(FEWEST_ROWS, -1)
        elif rows < FEWEST_ROWS:
            x_TI = F.pad(x_TI, (0, 0, 0, FEWEST_ROWS - rows))
        y_TO: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x_TI, packed, self.bias_O, "none", [], ""
        )
        return y_TO[:rows]

    def _unpacked(self, x_TI: Tensor) -> Tensor:
        rows, x_TI = x_TI.shape[0], _padded(x_TI)
        if self._blocks:
            return self._widened_outputs(x_TI)[:rows]
        return F.linear(x_TI, self.weight_OI, self.bias_O)[:rows]

    def input_gradient(self, dy_TO: Tensor) -> Tensor:
        """What the inputs' gradient is for one of the outputs."""
        rows, dy_TO = dy_TO.shape[0], _padded(dy_TO)
        if self._blocks:
            return self._widened_gradient(dy_TO)[:rows]
        return (dy_TO @ self.weight_OI)[:rows]

    def _widened_outputs(self, x_TI: Tensor) -> Tensor:
        y_TO = x_TI.new_empty(x_TI.shape[0], self.weight_OI.shape[0])
        start = 0
        for block_OI in self._blocks:
            end = start + block_OI.shape[0]
            torch.mm(x_TI, _widened(block_OI, self.dtype).T, out=y_TO[:, start:end])
            start = end
        return y_TO if self.bias_O is None else y_TO.add_(self.bias_O)

    def _widened_gradient(self, dy_TO: Tensor) -> Tensor:
        dx_TI = dy_TO.new_zeros(dy_TO.shape[0], self.weight_OI.shape[1])
        start = 0
        for block_OI in self._blocks:
            end = start + block_OI.shape[0]
            dx_TI.addmm_(dy_TO[:, start:end], _widened(block_OI, self.dtype))
            start = end
        return dx_TI


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has faster kernels for such weights on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    is_small = weight.numel() <= SMALL_NUMBERS and min(weight.shape) >= SMALL_SIDE
    is_left = is_small and weight.shape[1] % INPUT_STEP == 0
    return weight.dtype == torch.float32 and not is_left


def _can_go_unpacked(shape: torch.Size) -> bool:
    """Whether each row comes out the same without packing, whatever rows are beside it."""
    outputs, inputs = shape
    return outputs >= FEWEST_OUTPUTS and inputs % INPUT_STEP == 0


def _padded(rows: Tensor) -> Tensor:
    """Few rows become more, so that the share of each thread is one that kernels treat alike."""
    step = FEWEST_ROWS * torch.get_num_threads()
    missing = -rows.shape[0] % step if rows.shape[0] < 4 * step else 0
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _block_count(shape: torch.Size, dtype: torch.dtype) -> int:
    outputs, inputs = shape
    most = max(2 * FEWEST_OUTPUTS, BLOCK_BYTES // (inputs * dtype.itemsize))
    return math.ceil(outputs / most)


class _OfThread(threading.local):
    buffer: Tensor | None = None


_OF_THREAD = _OfThread()


def _widened(block_OI: Tensor, dtype: torch.dtype) -> Tensor:
    """In a buffer of this thread, until it widens its next: fresh memory costs more."""
    buffer = _OF_THREAD.buffer
    size, device = block_OI.numel(), block_OI.device
    if buffer is None or (buffer.dtype, buffer.device) != (dtype, device) or len(buffer) < size:
        least = BLOCK_BYTES // dtype.itemsize
        # What is made in a sampler's step could else be written in such steps alone.
        with torch.inference_mode(mode=False):
            buffer = torch.empty(max(size, least), dtype=dtype, device=device)
        _OF_THREAD.buffer = buffer
    return buffer[:size].view(block_OI.shape).copy_(block_OI)
