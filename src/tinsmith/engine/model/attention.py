"""Attention over a packed batch: many sequences in one dimension, each seeing only itself.

This module has what the two kinds share: `packed_attention.py` for training, and `kv_cache.py` for
sampling from a KV cache.

Both split what a query sees into a *past*, which it sees in full, and its own segment, which it
sees causally. Each part is one call of PyTorch's flash attention; the results are merged by their
log-sum-exps.

No mask is built for this, and the cost follows the lengths of the segments. What flash attention
does not support (sequences longer than a sliding window, softcaps, other devices) goes to
`masked_attention`, segment by segment.

**Masked attention** is slower. Supports sliding windows, softcaps and any device. Queries are
processed in blocks, so memory grows with the length of a sequence and not with its square.

**Compiled kernels** (`kernels/attention.c`) serve sampling and training. One call per layer stores
the new keys and values and computes the attention of every row, with or without a sliding window. A
row's result is bit-identical whatever rows are beside it and however its sequence is split into
chunks, so sampling and training agree.
"""

# H query head, G key head, D dimension of a head, T row of the batch, N segment, L token of one

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tinsmith.engine.model.kernels.library import (
    MOST_HEAD_SIZE,
    MOST_QUERIES,
    AttentionRows,
    AttentionShape,
    Kernels,
    is_bfloat16,
    is_dense,
    kernels_for,
    matmul_kernels,
    row_pointer,
)


class AttentionRule(NamedTuple):
    """The attention parameters of a layer."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class Attention(Protocol):
    """What the transformer needs of either kind."""

    def attend(
        self, layer: int, rule: AttentionRule, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor
    ) -> Tensor:
        """The attention output: rows × heads × dimensions."""

    def done(self) -> None:
        """Called after the last layer."""


def flash_limit(rule: AttentionRule, device: torch.device) -> int:
    """The longest sequence for which flash attention implements the rule."""
    if rule.softcap is not None or device.type != "cpu":
        return 0
    return sys.maxsize if rule.window is None else rule.window


flash_kernel = torch._scaled_dot_product_flash_attention_for_cpu
"""Supports fewer key heads than query heads."""


def flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """From N × heads × L × D to the output and the log-sum-exp of each row."""
    out, lse = flash_kernel(q, k, v, 0.0, is_causal, scale=scale)
    return out, lse


def merge_attention(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Merge the attention over two disjoint sets of keys."""
    lse = torch.logaddexp(first[1], second[1])
    weight = (first[1] - lse).exp().unsqueeze(-1)
    other = (second[1] - lse).exp().unsqueeze(-1)
    out = first[0].float() * weight + second[0].float() * other
    return out.to(first[0].dtype), lse


def heads_first(rows: Tensor, segments: int = 1) -> Tensor:
    """Rows × heads … as N × heads × L …, for N segments of equal length; a view."""
    made: Tensor = rows.unflatten(0, (segments, -1)).transpose(1, 2)
    return made


def rows_first(parts: Tensor) -> Tensor:
    """The inverse of `heads_first`."""
    return parts.transpose(1, 2).flatten(0, 1)


QUERIES = 128
"""Queries per block."""


def masked_attention(
    q_LHD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention; the queries belong to the last keys."""
    queries, before = q_LHD.shape[0], k_SGD.shape[0] - q_LHD.shape[0]
    parts: list[Tensor] = []
    for start in range(0, queries, QUERIES):
        end = min(start + QUERIES, queries)
        seen = slice(0 if window is None else max(0, before + start + 1 - window), before + end)
        given = q_LHD[start:end], k_SGD[seen], v_SGD[seen], scale, window
        if softcap is None:
            parts.append(_plain(*given))
        elif (
            torch.is_grad_enabled()
        ):  # saving all scores for the backward would take too much memory
            parts.append(checkpoint(_capped, *given, softcap, use_reentrant=False))
        else:
            parts.append(_capped(*given, softcap))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _plain(q_LHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, scale: float, window: int | None) -> Tensor:
    q, k, v = _heads_first(q_LHD, k_SGD, v_SGD)
    mask_LS = _seen(q.shape[1], k.shape[1], window, q.device)
    out: Tensor = F.scaled_dot_product_attention(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), mask_LS, scale=scale
    )[0]
    return out.transpose(0, 1)


def _capped(
    q_LHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, scale: float, window: int | None, softcap: float
) -> Tensor:
    q, k, v = _heads_first(q_LHD, k_SGD, v_SGD)
    mask_LS = _seen(q.shape[1], k.shape[1], window, q.device)
    scores_HLS = softcap * torch.tanh((q @ k.transpose(1, 2)).float() * (scale / softcap))
    weights_HLS = scores_HLS.masked_fill(~mask_LS, float("-inf")).softmax(-1).to(v.dtype)
    return (weights_HLS @ v).transpose(0, 1)


def _heads_first(q_LHD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads first, with keys and values repeated to the number of query heads."""
    times = q_LHD.shape[1] // k_SGD.shape[1]
    k, v = (rows.transpose(0, 1).repeat_interleave(times, 0) for rows in (k_SGD, v_SGD))
    return q_LHD.transpose(0, 1), k, v


def _seen(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    place_L1 = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    key_S = torch.arange(keys, device=device)
    seen_LS = key_S <= place_L1
    return seen_LS if window is None else seen_LS & (key_S > place_L1 - window)


class KernelSegment(NamedTuple):
    """`segment` of `attention.c`: consecutive rows, and the addresses of their KV buffers."""

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
    """The kernels, if they support this attention."""
    _, heads, size = q_THD.shape
    is_small = size <= MOST_HEAD_SIZE and heads // k_TGD.shape[1] <= MOST_QUERIES
    is_alike = all((one.dtype, one.shape[2]) == (q_THD.dtype, size) for one in (k_TGD, v_TGD))
    if rule.softcap is not None or not is_small or not is_alike:
        return None
    # The stride between heads is ignored: it may depend on the batch.
    return kernels_for(q_THD[:0, 0])


class KernelAttention:
    """The forward calls for one packed batch.

    Args:
        segments: All rows of the batch. Segments with the same shared buffer should be adjacent:
            its keys are then read once for several.
        most_rows: Rows per work unit; see the function of that name.
    """

    def __init__(self, segments: Sequence[KernelSegment], most_rows: int) -> None:
        units = [part for one in segments for part in _work_units(one, most_rows)]
        starts: list[int] = []
        rows = 0
        for index, one in enumerate(units):
            is_beside = bool(starts) and one.shared and one.shared == units[index - 1].shared
            if not is_beside or rows + one.rows > most_rows:
                starts.append(index)
                rows = 0
            rows += one.rows
        self._segments = np.array(units, np.int64)
        self._starts = np.array([*starts, len(units)], np.int64)

    def attend(
        self,
        kernels: Kernels,
        layer: int,
        rule: AttentionRule,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        lse_TH: Tensor | None = None,
    ) -> Tensor:
        """`Attention.attend`; writes the log-sum-exps to `lse_TH` if given."""
        _, heads, size = q_THD.shape
        shape = AttentionShape(
            *(heads, k_TGD.shape[1], size, is_bfloat16(q_THD), torch.get_num_threads()),
            *(rule.window or 0, rule.scale),
        )
        return kernels.attend(
            *(shape, layer, self._segments.ctypes.data, self._starts.ctypes.data),
            *(len(self._starts) - 1, _dense(q_THD), _dense(k_TGD), _dense(v_TGD)),
            lse_TH,
        )


class KernelAttentionBackward:
    """The backward calls for one packed batch, in bfloat16 (`kernels/attention_backward.c`).

    Args:
        kernels: With bfloat16 support.
        segments: For each: its start and length, and those of its prefix.
    """

    def __init__(self, kernels: Kernels, segments: npt.NDArray[np.int64]) -> None:
        self._kernels = kernels
        self._segments = segments

    def gradients(
        self,
        rule: AttentionRule,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        dout_THD: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv, given the gradient of the output."""
        made = tuple(torch.empty(one.shape, dtype=one.dtype) for one in (q_THD, k_TGD, v_TGD))
        given = [_dense(one) for one in (q_THD, k_TGD, v_TGD, out_THD, dout_THD)]
        rows, heads, size = q_THD.shape
        units = AttentionRows(
            *(rows, heads, k_TGD.shape[1], size, torch.get_num_threads()),
            *(rule.window or 0, rule.scale),
            *map(row_pointer, given),
            lse_TH.data_ptr(),
            *map(row_pointer, made),
        )
        longest = int(self._segments[:, 1].max(initial=0))
        place, count = self._segments.ctypes.data, len(self._segments)
        self._kernels.attend_backward(units, place, count, longest)
        dq_THD, dk_TGD, dv_TGD = made
        return dq_THD, dk_TGD, dv_TGD


def backward_kernels(q_THD: Tensor) -> Kernels | None:
    """The kernels, if they also compute the backward."""
    return matmul_kernels(q_THD.device, q_THD.dtype)


def most_rows(heads: int, key_heads: int) -> int:
    """Rows per work unit."""
    return MOST_QUERIES // (heads // key_heads)


def _work_units(segment: KernelSegment, most_rows: int) -> list[KernelSegment]:
    """The segment in work units."""
    return [
        segment._replace(
            row=segment.row + before,
            rows=min(most_rows, segment.rows - before),
            place=segment.place + before,
        )
        for before in range(0, segment.rows, most_rows)
    ]


def _dense(rows: Tensor) -> Tensor:
    """With the heads of a row contiguous."""
    return rows if is_dense(rows) else rows.contiguous()
