"""Frozen linear layers, with a row's result bit-identical whatever rows are beside it.

Sampling and training rely on that. There are four ways to multiply, chosen per layer:

- *Compiled kernels* (`kernels/library.py`) for bfloat16, where the CPU supports them.
- *fp16 weights* (`HalfWeights`) for float32 weights that fp16 represents without loss.
- *Pre-packed weights*, a second copy in oneDNN's own layout. This is faster for few rows, and
  oneDNN then selects its kernel by the weights and not by the number of rows; only a single row
  with more than 1,024 inputs is summed differently.
- *Plain weights* for small layers, and in float32 for training, where many rows are faster so.

The last two would use other kernels where a thread has fewer than `FEWEST_ROWS` rows, so few rows
are padded. Pre-packed, four rows even take a fifth less time than one or two.

Weights may be stored in a narrower dtype than the compute dtype: bfloat16 on a CPU that multiplies
float32 only. They are widened before each product, block by block in a buffer that fits in cache.
From eight rows on that costs no more than float32 weights.

**fp16 weights** are multiplied in float32 on the CPU, by FBGEMM. Most models are published in
bfloat16 or float16. Their weights fit into float16 times a power of two per matrix, and FBGEMM
widens them as it multiplies. That halves the memory traffic, which dominates for few rows, and is
no slower than float32 for many. Weights below 2⁻²⁹ of the largest of their matrix may be off by
2⁻⁴⁰ of it, less than float32 sums lose. All others are exact, or the matrix is not converted.

The kernel treats one or two left-over rows differently, so rows are padded to a number that leaves
none. Which numbers these are is determined by trial, once per process.
"""

# I input, O output, T row of the batch

from __future__ import annotations

import functools
import math
import threading

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.model.kernels.library import Kernels, matmul_kernels

BLOCK_OUTPUTS = 8192
"""Outputs per product. A whole vocabulary at once is slower for many rows, as result rows are so
far apart that they evict each other from cache. Smaller blocks are slower for few rows, as threads
wait for each other after each block."""
_LARGEST = 2.0**15
"""Upper bound for the scaled weights."""
_LEAST_STEP = 2.0**-25
"""Maximum error of a scaled weight: half of the smallest float16."""
_CHECKED = 1 << 17
"""Weights checked at a time."""
_PERIOD = 120
"""Rows that the kernel processes at a time."""
_MOST_SPARE = 4


class HalfWeights:
    """A matrix in FBGEMM's layout; made by `try_halve`."""

    def __init__(
        self, blocks: list[torch.ScriptObject], outputs: int, scale: float, pool: list[int]
    ) -> None:
        self._blocks = blocks
        self._outputs = outputs
        self._scale = scale
        self._pool = pool

    def __call__(self, x_TI: Tensor) -> Tensor:
        """x·Wᵀ in float32; each row is bit-identical whatever rows are beside it."""
        rows = x_TI.shape[0]
        spare = self._pool[rows % _PERIOD]
        if spare:  # faster than zeros
            x_TI = torch.cat((x_TI, x_TI[:1].expand(spare, -1)))
        multiply = torch.ops.quantized.linear_dynamic_fp16.default
        if len(self._blocks) == 1:
            y_TO: Tensor = multiply(x_TI, self._blocks[0])[:rows]
        else:
            y_TO = x_TI.new_empty(rows, self._outputs)
            for place_TO, one in zip(y_TO.split(BLOCK_OUTPUTS, 1), self._blocks, strict=True):
                place_TO.copy_(multiply(x_TI, one)[:rows])
        return y_TO if self._scale == 1.0 else y_TO.mul_(self._scale)


def try_halve(weight_OI: Tensor) -> HalfWeights | None:
    """fp16 weights; None if they would lose precision or FBGEMM is not available."""
    if weight_OI.device.type != "cpu" or weight_OI.dtype != torch.float32:
        return None
    # Checked each time: other code in this process may select another engine.
    if torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return None
    pool = _spare_rows()
    power = None if pool is None else _power_for(weight_OI)
    if pool is None or power is None:
        return None
    blocks = [
        torch.ops.quantized.linear_prepack_fp16(block_OI * 2.0**power, None)
        for block_OI in weight_OI.split(BLOCK_OUTPUTS)
    ]
    return HalfWeights(blocks, weight_OI.shape[0], 2.0**-power, pool)


def _power_for(weight_OI: Tensor) -> int | None:
    """The power of two to scale by: 0 if exact, else the largest; None if precision is lost."""
    least, most = weight_OI.aminmax()
    largest = max(-float(least), float(most))
    if not largest < math.inf:  # NaN too; FBGEMM would change infinities
        return None
    # In blocks that fit in cache: fresh memory for copies would take longer than the check.
    blocks = weight_OI.split(max(1, _CHECKED // weight_OI.shape[1]))
    if all(torch.equal(one.half().float(), one) for one in blocks):
        return 0
    power = math.floor(math.log2(_LARGEST / largest))
    if abs(power) > 64 or any(_loss(one * 2.0**power) > _LEAST_STEP for one in blocks):
        return None
    return power


def _loss(scaled_OI: Tensor) -> float:
    return float((scaled_OI.half().float() - scaled_OI).abs().max())


@functools.cache
def _spare_rows() -> list[int] | None:
    """How many rows to pad with, by the number of rows modulo the period.

    None if the kernel behaves otherwise than expected: rows would not be bit-identical.
    """
    chance = torch.Generator().manual_seed(0)
    # More inputs than the kernel takes at a time, and outputs that do not fill a vector.
    weight_OI, x_TI = (torch.randn(size, 530, generator=chance) for size in (19, 3 * _PERIOD))
    with torch.inference_mode(mode=False):
        prepacked = torch.ops.quantized.linear_prepack_fp16(weight_OI, None)
    multiply = torch.ops.quantized.linear_dynamic_fp16
    y_TO = multiply(x_TI, prepacked)
    same = [torch.equal(multiply(x_TI[:rows], prepacked), y_TO[:rows]) for rows in range(len(x_TI))]
    good = same[_PERIOD : 2 * _PERIOD]
    if same[2 * _PERIOD :] != good or not all(a or not b for a, b in zip(same, good, strict=False)):
        return None
    pool = [
        next((more for more in range(_MOST_SPARE) if good[(rows + more) % _PERIOD]), None)
        for rows in range(_PERIOD)
    ]
    return None if None in pool else [one for one in pool if one is not None]


FEWEST_ROWS = 4
_PREPACKED_FOR_ROWS = 64
"""A hint for oneDNN, without effect on results."""
BLOCK_BYTES = 4 << 20
"""Size of a block of widened weights. Half of it costs a tenth more with 512 rows, which are read
again for each block; more gains nothing."""
FEWEST_OUTPUTS = 64
"""Minimum outputs of a plain product. With a single output its bits depend on the number of rows,
and so few weights are not worth widening."""
INPUT_STEP = 4
"""The inputs of a plain product must be a multiple of it. Otherwise, with three threads or more,
the bits of a row depend on the number of rows."""
HALF_INPUTS = 256
"""Minimum inputs for fp16 weights. FBGEMM pads inputs to a multiple of 512: with fewer, fp16 takes
more memory than float32 (eight times as much with 32 inputs) and more time."""
SMALL_NUMBERS = 1 << 17
"""Float32 weights up to this size are not pre-packed: a oneDNN call has some 20 µs of overhead,
more than the whole product of a few rows with them."""
SMALL_SIDE = 16
"""With fewer inputs or outputs the kernel depends on the number of rows, unless pre-packed."""


class Linear:
    """y = x·Wᵀ + bias, with a W that never changes.

    Args:
        weight_OI: In the dtype that it is stored in.
        bias_O: In the compute dtype.
        dtype: The compute dtype; None for that of the weight.
        is_prepacked: Whether a second copy is kept in the layout that multiplies fastest.
    """

    def __init__(
        self,
        weight_OI: Tensor,
        bias_O: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        is_prepacked: bool = True,
    ) -> None:
        self.dtype = weight_OI.dtype if dtype is None else dtype
        if not _can_skip_prepacking(weight_OI.shape):
            weight_OI = weight_OI.to(self.dtype)
        self.weight_OI = weight_OI
        self.bias_O = bias_O
        self._half: HalfWeights | None = None
        self._prepacked: Tensor | None = None
        self._kernel_weights: tuple[Kernels, Tensor] | None = None
        """The compiled kernels, and the weights in their layout."""
        self._blocks: tuple[Tensor, ...] = ()
        if weight_OI.dtype != self.dtype:
            self._blocks = weight_OI.tensor_split(_block_count(weight_OI.shape, self.dtype))
        elif (
            is_prepacked and weight_OI.numel() > SMALL_NUMBERS and weight_OI.shape[1] >= HALF_INPUTS
        ):
            self._half = try_halve(weight_OI)
        fits_kernels = weight_OI.shape[1] % 2 == 0 and weight_OI.stride(1) == 1 and not self._blocks
        kernels = matmul_kernels(weight_OI.device, weight_OI.dtype) if fits_kernels else None
        if is_prepacked and kernels is not None:
            self._kernel_weights = kernels, kernels.prepack(weight_OI)
        elif is_prepacked and not self._blocks and self._half is None and can_prepack(weight_OI):
            self._prepacked = torch.ops.mkldnn._reorder_linear_weight(
                weight_OI, _PREPACKED_FOR_ROWS
            )

    def __call__(self, x_TI: Tensor) -> Tensor:
        """The outputs, forward only; `layers.py` has the backward."""
        if self._half is not None:
            half_TO = self._half(x_TI)
            return half_TO if self.bias_O is None else half_TO.add_(self.bias_O)
        outputs, inputs = self.weight_OI.shape
        # PyTorch rejects rows of the wrong size; kernels would read beyond them.
        if (
            self._kernel_weights is not None
            and x_TI.dtype == self.dtype
            and x_TI.shape[1] == inputs
        ):
            kernels, prepacked = self._kernel_weights
            x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
            return kernels.matmul(x_TI, prepacked, outputs, self.bias_O)
        if self._prepacked is not None:
            return self._prepacked_outputs(x_TI, self._prepacked)
        return self._plain_outputs(x_TI)

    def for_many_rows(self, x_TI: Tensor) -> Tensor:
        """The outputs, by the fastest way for many rows; equal to a call up to rounding."""
        if self._half is not None or x_TI.dtype != torch.float32:
            return self(x_TI)
        return (
            self._plain_outputs(x_TI) if _can_skip_prepacking(self.weight_OI.shape) else self(x_TI)
        )

    def _prepacked_outputs(self, x_TI: Tensor, prepacked: Tensor) -> Tensor:
        rows = x_TI.shape[0]
        if rows == 1:
            x_TI = x_TI.expand(FEWEST_ROWS, -1)
        elif rows < FEWEST_ROWS:
            x_TI = F.pad(x_TI, (0, 0, 0, FEWEST_ROWS - rows))
        y_TO: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x_TI, prepacked, self.bias_O, "none", [], ""
        )
        return y_TO[:rows]

    def _plain_outputs(self, x_TI: Tensor) -> Tensor:
        rows, x_TI = x_TI.shape[0], _padded(x_TI)
        if self._blocks:
            return self._widened_outputs(x_TI)[:rows]
        return F.linear(x_TI, self.weight_OI, self.bias_O)[:rows]

    def input_gradient(self, dy_TO: Tensor) -> Tensor:
        """The gradient of the inputs, given that of the outputs."""
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


def can_prepack(weight: Tensor) -> bool:
    """Whether oneDNN has faster kernels for such weights on this CPU."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    is_small = weight.numel() <= SMALL_NUMBERS and min(weight.shape) >= SMALL_SIDE
    is_left = is_small and weight.shape[1] % INPUT_STEP == 0
    return weight.dtype == torch.float32 and not is_left


def _can_skip_prepacking(shape: torch.Size) -> bool:
    """Whether each row is bit-identical without pre-packing, whatever rows are beside it."""
    outputs, inputs = shape
    return outputs >= FEWEST_OUTPUTS and inputs % INPUT_STEP == 0


def _padded(rows: Tensor) -> Tensor:
    """Pad few rows, so that every thread's share is computed by the same kernel."""
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
    """The block in `dtype`, in a buffer of this thread that the next call reuses."""
    buffer = _OF_THREAD.buffer
    size, device = block_OI.numel(), block_OI.device
    if buffer is None or (buffer.dtype, buffer.device) != (dtype, device) or len(buffer) < size:
        least = BLOCK_BYTES // dtype.itemsize
        # A tensor made in inference mode could be written in inference mode only.
        with torch.inference_mode(mode=False):
            buffer = torch.empty(max(size, least), dtype=dtype, device=device)
        _OF_THREAD.buffer = buffer
    return buffer[:size].view(block_OI.shape).copy_(block_OI)
