"""Attention for sampling by a compiled kernel (`kernels/attention.c`).

One call for each layer keeps the new rows' keys and values and lets every row attend to what it
sees, with a window or without. A row's result does not depend on rows beside it, to the last bit,
nor on how many of its sequence are read together.
"""

# T row of the pack, H query head, G key head, D dimension of a head

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith.model.attention import AttentionRule
from tinsmith.model.kernels.library import (
    MOST_HEAD_SIZE,
    MOST_QUERIES,
    AttentionShape,
    Kernels,
    is_dense,
    is_half,
    kernels_for,
)
from tinsmith.model.kv_cache import CachedStretch


class _Stretch(NamedTuple):
    """`stretch` of `attention.c`."""

    row: int
    rows: int
    place: int
    own: int
    own_head_bytes: int
    shared: int = 0
    shared_head_bytes: int = 0
    shared_length: int = 0


def attention_kernels(
    rule: AttentionRule, dtype: torch.dtype, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor
) -> Kernels | None:
    """The kernels, if they compute such an attention to runs of this type."""
    _, heads, size = q_THD.shape
    is_small = size <= MOST_HEAD_SIZE and heads // k_TGD.shape[1] <= MOST_QUERIES
    is_alike = q_THD.dtype == k_TGD.dtype == v_TGD.dtype == dtype
    if rule.softcap is not None or not is_small or not is_alike:
        return None
    # How heads lie does not count: that may follow from what rows are beside each other.
    return kernels_for(q_THD[:0, 0])


class KernelAttention:
    """The calls for the layers of one pack, whose runs have room for its rows.

    Args:
        stretches: All rows of the pack.
        group: How many query heads have one key head.
    """

    def __init__(self, stretches: Sequence[CachedStretch], group: int) -> None:
        most_rows = MOST_QUERIES // group
        # Those of a shared run beside each other: its keys are then read once for several.
        ordered = sorted(stretches, key=_shared_run)
        told = [part for one in ordered for part in _parts(one, most_rows)]
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
    ) -> Tensor:
        """`Attention.attend`."""
        _, heads, size = q_THD.shape
        shape = AttentionShape(
            *(heads, k_TGD.shape[1], size, is_half(q_THD), torch.get_num_threads()),
            *(rule.window or 0, rule.scale),
        )
        return kernels.attend(
            *(shape, layer, self._stretches.ctypes.data, self._starts.ctypes.data),
            *(len(self._starts) - 1, _dense(q_THD), _dense(k_TGD), _dense(v_TGD)),
        )


def _shared_run(stretch: CachedStretch) -> int:
    return 0 if stretch.keys.shared is None else id(stretch.keys.shared)


def _parts(stretch: CachedStretch, most_rows: int) -> list[_Stretch]:
    """As the kernel has it, in parts that one thread takes at a time."""
    own, shared = stretch.keys.own, stretch.keys.shared
    past = () if shared is None else (*shared.address(), shared.length)
    parts: list[_Stretch] = []
    for row in range(stretch.start, stretch.end, most_rows):
        rows = min(most_rows, stretch.end - row)
        place = stretch.place + row - stretch.start
        parts.append(_Stretch(row, rows, place, *own.address(), *past))
    return parts


def _dense(rows: Tensor) -> Tensor:
    """With a row's heads one behind the other."""
    return rows if is_dense(rows) else rows.contiguous()
