"""Weights of sixteen bits that are multiplied in float32, on a CPU.

Most models are published in bfloat16 or float16. Their weights fit in float16, times a power of two
for each matrix, and FBGEMM widens them as it multiplies: half the memory is read, which is most of
the time for few rows, and for many rows it is no slower than float32. What is computed is x·Wᵀ
in float32. Weights below 2⁻²⁹ of their matrix's largest may be off by 2⁻⁴⁰ of that, which is less
than what sums in float32 lose; all others are exact, or the matrix is not taken.

The kernel treats the last rows in another way when one or two are left over. So rows are padded to
the next number where none are: which these are is tried out, once in a process.
"""

# I input, O output, T row of the pack

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

BLOCK_OUTPUTS = 8192
"""Of a product. Those of a whole vocabulary take longer for many rows: rows of results then lie so
far apart that they displace each other from caches. And threads wait for each other at the end of
each block: more of them take longer for few rows, on busy cores most of all."""
_LARGEST = 2.0**15
"""What the largest weight is scaled to, at most."""
_LEAST_STEP = 2.0**-25
"""Half of the smallest number of float16: how far off a weight may be, once it is scaled."""
_CHECKED = 1 << 17
"""Weights that are looked at together."""
_PERIOD = 120
"""The kernel takes so many rows at a time, and then those that are left."""
_MOST_SPARE = 4


class HalfWeights:
    """A matrix as FBGEMM keeps it; made by `try_halve`."""

    def __init__(
        self, blocks: list[torch.ScriptObject], outputs: int, scale: float, spares: list[int]
    ) -> None:
        self._blocks = blocks
        self._outputs = outputs
        self._scale = scale
        self._spares = spares

    def __call__(self, x_TI: Tensor) -> Tensor:
        """x·Wᵀ in float32; each row the same, bit for bit, whatever rows are beside it."""
        rows = x_TI.shape[0]
        spare = self._spares[rows % _PERIOD]
        if spare:  # any row will do, and this is faster than zeros
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
    """None for weights that would lose digits, or where there is no such kernel."""
    if weight_OI.device.type != "cpu" or weight_OI.dtype != torch.float32:
        return None
    # Asked each time: whoever shares this process may choose another, which then packs nothing.
    if torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return None
    spares = _spare_rows()
    power = None if spares is None else _power_for(weight_OI)
    if spares is None or power is None:
        return None
    blocks = [
        torch.ops.quantized.linear_prepack_fp16(block_OI * 2.0**power, None)
        for block_OI in weight_OI.split(BLOCK_OUTPUTS)
    ]
    return HalfWeights(blocks, weight_OI.shape[0], 2.0**-power, spares)


def _power_for(weight_OI: Tensor) -> int | None:
    """Of two, to scale by: none if that is exact, else the largest. None if digits are lost."""
    least, most = weight_OI.aminmax()
    largest = max(-float(least), float(most))
    if not largest < math.inf:  # not a number, too; packing would make another of what is infinite
        return None
    # So many at a time as caches hold: fresh memory for copies takes longer than to look at them.
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
    """How many rows to add to so many, by what is left over of whole periods.

    None if the kernel is not as we know it: rows that come out different for reasons of their own
    would break what is promised of samples.
    """
    chance = torch.Generator().manual_seed(0)
    # More inputs than the kernel takes at a time, and outputs that fill no whole vector.
    weight_OI, x_TI = (torch.randn(size, 530, generator=chance) for size in (19, 3 * _PERIOD))
    with torch.inference_mode(mode=False):
        packed = torch.ops.quantized.linear_prepack_fp16(weight_OI, None)
    multiply = torch.ops.quantized.linear_dynamic_fp16
    y_TO = multiply(x_TI, packed)
    same = [torch.equal(multiply(x_TI[:rows], packed), y_TO[:rows]) for rows in range(len(x_TI))]
    good = same[_PERIOD : 2 * _PERIOD]
    if same[2 * _PERIOD :] != good or not all(a or not b for a, b in zip(same, good, strict=False)):
        return None
    spares = [
        next((more for more in range(_MOST_SPARE) if good[(rows + more) % _PERIOD]), None)
        for rows in range(_PERIOD)
    ]
    return None if None in spares else [one for one in spares if one is not None]
