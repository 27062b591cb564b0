"""Attention by compiled kernels: for samples, and for passes (`kernels/attention.c`) and back.

One call for each layer keeps the new rows' keys and values and lets every row attend to what it
sees, with a window or without. A row's result does not depend on rows beside it, to the last bit,
nor on how many of its sequence are read together: samples and passes get the same.
"""

# T row of the pack, H query head, G key head, D dimension of a head

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinsmith.model.attention import AttentionRule
from tinsmith.model.kernels.library import (
    MOST_HEAD_SIZE,
    MOST_QUERIES,
    AttentionRows,
    AttentionShape,
    Kernels,
    is_dense,
    is_half,
    kernels_for,
    product_kernels,
    rows_of,
)


class KernelStretch(NamedTuple):
    """`stretch` of `attention.c`: rows behind each other, and where their keys and values are."""

    row: int
    rows: int
    place: int
    own: int
    own_head_bytes: int
    shared: int = 0
    shared_head_bytes: int = 0
    shared_length: int = 0


def attention_kernels(
    rule: AttentionRule, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor
) -> Kernels | None:
    """The kernels, if they compute such an attention."""
    _, heads, size = q_THD.shape
    is_small = size <= MOST_HEAD_SIZE and heads // k_TGD.shape[1] <= MOST_QUERIES
    is_alike = all((one.dtype, one.shape[2]) == (q_THD.dtype, size) for one in (k_TGD, v_TGD))
    if rule.softcap is not None or not is_small or not is_alike:
        return None
    # How heads lie does not count: that may follow from what rows are beside each other.
    return kernels_for(q_THD[:0, 0])


class KernelAttention:
    """The calls for the layers of one pack.

    Args:
        stretches: All rows of the pack, those of a shared run beside each other: its keys are then
            read once for several.
        most_rows: As `most_rows` says.
    """

    def __init__(self, stretches: Sequence[KernelStretch], most_rows: int) -> None:
        told = [part for one in stretches for part in _parts(one, most_rows)]
        starts: list[int] = []
        rows = 0
        for index, one in enumerate(told):
            is_beside = bool(starts) and one.shared and one.shared == told[index - 1].shared
            if not is_beside or rows + one.rows > most_rows:
                starts.append(index)
                rows = 0
            rows += one.rows
        self._stretches = np.array(told, np.int64)
        self._starts = np.array([*starts, len(told)], np.int64)

    def attend(
        self,
        kernels: Kernels,
        layer: int,
        rule: AttentionRule,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        sums_TH: Tensor | None = None,
    ) -> Tensor:
        """`Attention.attend`; `sums_TH` is told the logarithms of the sums of rows' weights."""
        _, heads, size = q_THD.shape
        shape = AttentionShape(
            *(heads, k_TGD.shape[1], size, is_half(q_THD), torch.get_num_threads()),
            *(rule.window or 0, rule.scale),
        )
        return kernels.attend(
            *(shape, layer, self._stretches.ctypes.data, self._starts.ctypes.data),
            *(len(self._starts) - 1, _dense(q_THD), _dense(k_TGD), _dense(v_TGD)),
            sums_TH,
        )


class KernelWayBack:
    """The way back through the layers of a pack, in bfloat16 (`kernels/attention_back.c`).

    Args:
        kernels: Those that multiply.
        stretches: Of each, in a row: where it begins and how many rows it has, and the same of what
            it follows, which is another of them.
    """

    def __init__(self, kernels: Kernels, stretches: npt.NDArray[np.int64]) -> None:
        self._kernels = kernels
        self._stretches = stretches

    def slopes(
        self,
        rule: AttentionRule,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        out_THD: Tensor,
        sums_TH: Tensor,
        dout_THD: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Those of queries, keys and values, given those of what rows took."""
        made = tuple(torch.empty(one.shape, dtype=one.dtype) for one in (q_THD, k_TGD, v_TGD))
        given = [_dense(one) for one in (q_THD, k_TGD, v_TGD, out_THD, dout_THD)]
        rows, heads, size = q_THD.shape
        told = AttentionRows(
            *(rows, heads, k_TGD.shape[1], size, torch.get_num_threads()),
            *(rule.window or 0, rule.scale),
            *map(rows_of, given),
            sums_TH.data_ptr(),
            *map(rows_of, made),
        )
        longest = int(self._stretches[:, 1].max(initial=0))
        place, count = self._stretches.ctypes.data, len(self._stretches)
        self._kernels.attend_back(told, place, count, longest)
        dq_THD, dk_TGD, dv_TGD = made
        return dq_THD, dk_TGD, dv_TGD


def way_back_kernels(q_THD: Tensor) -> Kernels | None:
    """The kernels, if they also go back through what they computed on the way in."""
    return product_kernels(q_THD.device, q_THD.dtype)


def most_rows(heads: int, key_heads: int) -> int:
    """How many rows a thread takes at a time."""
    return MOST_QUERIES // (heads // key_heads)


def _parts(stretch: KernelStretch, most_rows: int) -> list[KernelStretch]:
    """What one thread takes at a time."""
    return [
        stretch._replace(
            row=stretch.row + before,
            rows=min(most_rows, stretch.rows - before),
            place=stretch.place + before,
        )
        for before in range(0, stretch.rows, most_rows)
    ]


def _dense(rows: Tensor) -> Tensor:
    """With a row's heads one behind the other."""
    return rows if is_dense(rows) else rows.contiguous()
