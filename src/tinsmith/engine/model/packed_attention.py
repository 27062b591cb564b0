"""Attention for training, with exact gradients.

Segments are sequences, or what follows a prefix that several sequences share and that is computed
once. The backward works part by part as in `attention.py`: given the merged output and log-sum-exp,
flash attention's own backward yields each part's contribution. With compiled kernels the forward is
one call, the same as in sampling; sequences that flash attention does not support then use masked
attention in the backward only. With bfloat16 kernels the backward is one call too.
"""

# T row of the batch, H query head, G key head, D dimension of a head

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinsmith.engine.model.attention import (
    AttentionRule,
    KernelAttention,
    KernelAttentionBackward,
    KernelSegment,
    attention_kernels,
    backward_kernels,
    flash,
    flash_limit,
    heads_first,
    masked_attention,
    merge_attention,
    most_rows,
    rows_first,
)
from tinsmith.engine.model.kernels.library import Kernels

WIDENED_BELOW = 512
"""With fewer keys flash attention's backward is slower in bfloat16 than in float32: 14 times with
16 keys, more than twice with 128."""


class PackedSegment(NamedTuple):
    """Consecutive rows of one sequence, and the rows of the shared prefix before them."""

    start: int
    end: int
    prefix: tuple[int, int] | None = None
    """Another segment of the batch, which it follows."""

    @property
    def sequence_length(self) -> int:
        """Length of the sequence up to the end of this segment."""
        shared = 0 if self.prefix is None else self.prefix[1] - self.prefix[0]
        return self.end - self.start + shared


class _EqualLengths(NamedTuple):
    """Adjacent segments of equal length: one call for all."""

    start: int
    end: int
    segments: int


class _PrefixGroup(NamedTuple):
    """Adjacent segments behind one prefix, which all of them see in full: one call."""

    start: int
    end: int
    prefix: slice


class _Plan(NamedTuple):
    """The flash calls to make, and the segments left to masked attention."""

    blocks: list[_EqualLengths]
    prefixes: list[_PrefixGroup]
    masked: dict[int, PackedSegment]
    """By index."""


class PackedAttention:
    """Attention over a packed batch, forward and backward."""

    def __init__(self, segments: Sequence[PackedSegment]) -> None:
        self._segments = tuple(segments)
        self._lengths = [one.end - one.start for one in segments]
        self._segment_rows = _segment_rows(segments)
        self._plans: dict[tuple[int, bool], _Plan] = {}
        """By the longest sequence that flash attention supports; whether there is one key head."""
        self._kernel_forwards: dict[tuple[torch.Size, torch.Size, torch.dtype], _KernelForward] = {}
        """By the shapes of queries and keys, which may differ between layers."""

    def attend(
        self, layer: int, rule: AttentionRule, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor
    ) -> Tensor:
        """`Attention.attend`."""
        del layer
        plan = self._plan(flash_limit(rule, q_THD.device), has_one_key_head=k_TGD.shape[1] == 1)
        kernel_forward = self._kernel_forward(rule, q_THD, k_TGD, v_TGD)
        kernel_backward = None if kernel_forward is None else self._kernel_backward(q_THD)
        given = q_THD, k_TGD, v_TGD, plan, rule, kernel_forward, kernel_backward
        out_THD: Tensor = _PackedFlash.apply(*given)  # type: ignore[no-untyped-call]
        if kernel_forward is not None or not plan.masked:
            return out_THD
        parts = list(out_THD.split(self._lengths))
        for number, one in plan.masked.items():
            parts[number] = _masked(one, rule, q_THD, k_TGD, v_TGD)
        return torch.cat(parts)

    def _kernel_forward(
        self, rule: AttentionRule, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor
    ) -> _KernelForward | None:
        kernels = attention_kernels(rule, q_THD, k_TGD, v_TGD)
        if kernels is None:
            return None
        kind = q_THD.shape, k_TGD.shape, k_TGD.dtype
        if kind not in self._kernel_forwards:
            self._kernel_forwards[kind] = _KernelForward(kernels, self._segments, q_THD, k_TGD)
        return self._kernel_forwards[kind]

    def _kernel_backward(self, q_THD: Tensor) -> KernelAttentionBackward | None:
        kernels = backward_kernels(q_THD)
        return None if kernels is None else KernelAttentionBackward(kernels, self._segment_rows)

    def _plan(self, limit: int, *, has_one_key_head: bool) -> _Plan:
        kind = limit, has_one_key_head
        if kind not in self._plans:
            whole = [one for one in self._segments if one.sequence_length <= limit]
            masked = {
                number: one
                for number, one in enumerate(self._segments)
                if one.sequence_length > limit
            }
            # A call with one sequence and one key head would be split among threads by products,
            # which gives other bits; so such sequences are never grouped.
            blocks = (
                [_EqualLengths(*one[:2], 1) for one in whole]
                if has_one_key_head
                else _equal_lengths(whole)
            )
            self._plans[kind] = _Plan(blocks, _prefix_groups(whole), masked)
        return self._plans[kind]

    def done(self) -> None:
        """`Attention.done`."""


def _equal_lengths(segments: Sequence[PackedSegment]) -> list[_EqualLengths]:
    groups = _neighbours(segments, lambda one: one.end - one.start)
    return [_EqualLengths(group[0].start, group[-1].end, len(group)) for group in groups]


def _prefix_groups(segments: Sequence[PackedSegment]) -> list[_PrefixGroup]:
    groups = _neighbours(segments, lambda one: one.prefix)
    return [
        _PrefixGroup(group[0].start, group[-1].end, slice(*group[0].prefix))
        for group in groups
        if group[0].prefix is not None
    ]


def _segment_rows(segments: Sequence[PackedSegment]) -> npt.NDArray[np.int64]:
    """Start and length of each segment and of its prefix, for `KernelAttentionBackward`."""
    rows: list[tuple[int, int, int, int]] = []
    for start, end, prefix in segments:
        first, last = prefix or (0, 0)
        rows.append((start, end - start, first, last - first))
    return np.array(rows, np.int64).reshape(-1, 4)


def _neighbours(
    segments: Sequence[PackedSegment], kind: Callable[[PackedSegment], object]
) -> list[list[PackedSegment]]:
    """Groups of adjacent segments of one kind."""
    groups: list[list[PackedSegment]] = []
    for one in segments:
        last = groups[-1][-1] if groups else None
        if last is not None and last.end == one.start and kind(last) == kind(one):
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


class _KernelForward:
    """The forward of all segments by the compiled kernel."""

    def __init__(
        self, kernels: Kernels, segments: Sequence[PackedSegment], q_THD: Tensor, k_TGD: Tensor
    ) -> None:
        self._kernels = kernels
        rows, groups, size = k_TGD.shape
        self._kept_2GTD = k_TGD.new_empty(2, groups, rows, size)
        row_bytes = size * k_TGD.itemsize
        start, head_bytes = self._kept_2GTD.data_ptr(), rows * row_bytes
        placed: list[KernelSegment] = []
        for one in segments:
            own = start + one.start * row_bytes
            made = KernelSegment(one.start, one.end - one.start, 0, own, head_bytes)
            if one.prefix is not None:
                first, last = one.prefix
                past = start + first * row_bytes, head_bytes, last - first
                made = KernelSegment(*made[:5], *past)
            placed.append(made)
        self._attention = KernelAttention(placed, most_rows(q_THD.shape[1], groups))

    def attend(
        self, rule: AttentionRule, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exps."""
        lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
        given = q_THD, k_TGD, v_TGD, lse_TH
        return self._attention.attend(self._kernels, 0, rule, *given), lse_TH


class _PackedFlash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        plan: _Plan,
        rule: AttentionRule,
        kernel_forward: _KernelForward | None,
        kernel_backward: KernelAttentionBackward | None,
    ) -> Tensor:
        if kernel_forward is not None:
            out_THD, lse_TH = kernel_forward.attend(rule, q_THD, k_TGD, v_TGD)
        else:
            out_THD, lse_TH = _by_flash(q_THD, k_TGD, v_TGD, plan, rule.scale)
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, out_THD, lse_TH)
        ctx.plan, ctx.rule, ctx.has_kernel_forward = plan, rule, kernel_forward is not None
        ctx.kernel_backward = kernel_backward
        return out_THD

    @staticmethod
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TGD, v_TGD, out_THD, lse_TH = ctx.saved_tensors
        if ctx.kernel_backward is not None:
            taken = out_THD, lse_TH, dout_THD
            return *ctx.kernel_backward.gradients(ctx.rule, q_THD, k_TGD, v_TGD, *taken), *[
                None
            ] * 4
        scale = ctx.rule.scale
        dq_THD, dk_TGD, dv_TGD = (_output_for(rows, ctx.plan) for rows in (q_THD, k_TGD, v_TGD))
        for start, end, count in ctx.plan.blocks:
            dout, q, k, v, out, lse = (
                heads_first(rows[start:end], count)
                for rows in (dout_THD, q_THD, k_TGD, v_TGD, out_THD, lse_TH)
            )
            parts = _flash_backward(dout, q, k, v, out, lse, scale, is_causal=True)
            for gradient, part in zip((dq_THD, dk_TGD, dv_TGD), parts, strict=True):
                gradient[start:end] = rows_first(part)
        for start, end, prefix in ctx.plan.prefixes:
            dout, out, lse = (heads_first(rows[start:end]) for rows in (dout_THD, out_THD, lse_TH))
            q, k, v = _past_of(q_THD[start:end], k_TGD, v_TGD, prefix)
            dq, dk, dv = _flash_backward(dout, q, k, v, out, lse, scale, is_causal=False)
            dq_THD[start:end] += rows_first(dq)
            dk_TGD[prefix] += rows_first(dk)
            dv_TGD[prefix] += rows_first(dv)
        if ctx.has_kernel_forward:
            given, gradients = (dout_THD, q_THD, k_TGD, v_TGD), (dq_THD, dk_TGD, dv_TGD)
            for one in ctx.plan.masked.values():
                _add_masked_backward(one, ctx.rule, *given, *gradients)
        return dq_THD, dk_TGD, dv_TGD, None, None, None, None


def _masked(
    segment: PackedSegment, rule: AttentionRule, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor
) -> Tensor:
    k, v = _seen_by(segment, k_TGD), _seen_by(segment, v_TGD)
    return masked_attention(q_THD[segment.start : segment.end], k, v, *rule)


def _seen_by(segment: PackedSegment, rows: Tensor) -> Tensor:
    start, end, prefix = segment
    own = rows[start:end]
    return own if prefix is None else torch.cat((rows[slice(*prefix)], own))


def _add_masked_backward(
    segment: PackedSegment,
    rule: AttentionRule,
    dout_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    dq_THD: Tensor,
    dk_TGD: Tensor,
    dv_TGD: Tensor,
) -> None:
    """Add the backward of a segment whose forward the compiled kernel computed."""
    start, end, prefix = segment
    seen = q_THD[start:end], _seen_by(segment, k_TGD), _seen_by(segment, v_TGD)
    q, k, v = (one.detach().requires_grad_() for one in seen)
    with torch.enable_grad():
        out = masked_attention(q, k, v, *rule)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout_THD[start:end])
    dq_THD[start:end] = dq
    for gradient, part in ((dk_TGD, dk), (dv_TGD, dv)):
        before = len(part) - (end - start)
        # Added, as segments behind it may have contributed before.
        gradient[start:end] += part[before:]
        if prefix is not None:
            gradient[slice(*prefix)] += part[:before]


def _by_flash(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, plan: _Plan, scale: float
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exps; rows left to masked attention are not set."""
    out_THD = _output_for(q_THD, plan)
    lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
    for start, end, count in plan.blocks:
        q, k, v = (heads_first(rows[start:end], count) for rows in (q_THD, k_TGD, v_TGD))
        out, lse = flash(q, k, v, scale, is_causal=True)
        out_THD[start:end] = rows_first(out)
        lse_TH[start:end] = rows_first(lse)
    for start, end, prefix in plan.prefixes:
        q, k, v = _past_of(q_THD[start:end], k_TGD, v_TGD, prefix)
        out, lse = flash(q, k, v, scale, is_causal=False)
        past = rows_first(out), rows_first(lse)
        both = merge_attention(past, (out_THD[start:end], lse_TH[start:end]))
        out_THD[start:end], lse_TH[start:end] = both
    return out_THD, lse_TH


def _output_for(rows: Tensor, plan: _Plan) -> Tensor:
    """An output for a plan; zeros where the plan leaves rows out."""
    output = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    return output.zero_() if plan.masked else output


def _past_of(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, prefix: slice
) -> tuple[Tensor, Tensor, Tensor]:
    return heads_first(q_THD), heads_first(k_TGD[prefix]), heads_first(v_TGD[prefix])


def _flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if k.shape[2] < WIDENED_BELOW:
        dout, q, k, v, out = (one.float() for one in (dout, q, k, v, out))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, is_causal, scale=scale
    )
    return dq, dk, dv
