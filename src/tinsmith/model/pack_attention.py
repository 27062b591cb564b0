"""Attention for training, with exact gradients.

Its stretches are sequences, or what is left of them behind a prefix that several share and that is
computed once. The way back needs no more than the parts that `attention.py` tells of: given the
joined result and its logarithm, the kernel's own gradient of a part is that part's share. Where
there is a compiled kernel, the way in is one call of it, the same that samples make: of sequences
too that the other does not reach, whose attention is written out for the way back alone. Where
kernels multiply in bfloat16, the way back is one call too.
"""

# T row of the pack, H query head, G key head, D dimension of a head

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinsmith.model.attention import (
    AttentionRule,
    flash,
    heads_first,
    joined,
    reach_of,
    rows_first,
)
from tinsmith.model.kernel_attention import (
    KernelAttention,
    KernelStretch,
    KernelWayBack,
    attention_kernels,
    most_rows,
    way_back_kernels,
)
from tinsmith.model.kernels.library import Kernels
from tinsmith.model.masked_attention import masked_attention

WIDENED_BELOW = 512
"""With fewer keys the kernel's way back is slower in bfloat16 than in float32: with 16 of them it
took 14 times as long, with 128 more than twice."""


class Stretch(NamedTuple):
    """Rows that follow each other in one sequence, and the rows before them that others share."""

    start: int
    end: int
    prefix: tuple[int, int] | None = None
    """Another stretch of the pack, which it follows."""

    @property
    def sequence_length(self) -> int:
        """Of the sequence up to its end."""
        shared = 0 if self.prefix is None else self.prefix[1] - self.prefix[0]
        return self.end - self.start + shared


class _Block(NamedTuple):
    """Stretches of one length that lie beside each other: one call for all."""

    start: int
    end: int
    stretches: int


class _Past(NamedTuple):
    """Stretches behind one prefix that lie beside each other: all see all of it, in one call."""

    start: int
    end: int
    prefix: slice


class _Plan(NamedTuple):
    """Which calls there are to make. A stretch that has flash calls has them for its prefix too."""

    blocks: list[_Block]
    pasts: list[_Past]
    masked: dict[int, Stretch]
    """By their numbers, the stretches that are left to masks."""


class PackAttention:
    """Attention with exact gradients; see the top of the module."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._stretches = tuple(stretches)
        self._lengths = [one.end - one.start for one in stretches]
        self._told = _told(stretches)
        self._plans: dict[tuple[int, bool], _Plan] = {}
        """By how long a sequence may be for the flash kernel, and whether there is one key head."""
        self._ways_in: dict[tuple[torch.Size, torch.Size, torch.dtype], _WayIn] = {}
        """By the shapes of queries and keys, which layers may have of several kinds."""

    def attend(
        self, layer: int, rule: AttentionRule, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor
    ) -> Tensor:
        """`Attention.attend`."""
        del layer
        plan = self._plan(reach_of(rule, q_THD.device), has_one_key_head=k_TGD.shape[1] == 1)
        way_in = self._way_in(rule, q_THD, k_TGD, v_TGD)
        way_back = None if way_in is None else self._way_back(q_THD)
        given = q_THD, k_TGD, v_TGD, plan, rule, way_in, way_back
        out_THD: Tensor = _FlashPack.apply(*given)  # type: ignore[no-untyped-call]
        if way_in is not None or not plan.masked:
            return out_THD
        parts = list(out_THD.split(self._lengths))
        for number, one in plan.masked.items():
            parts[number] = _masked(one, rule, q_THD, k_TGD, v_TGD)
        return torch.cat(parts)

    def _way_in(
        self, rule: AttentionRule, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor
    ) -> _WayIn | None:
        kernels = attention_kernels(rule, q_THD, k_TGD, v_TGD)
        if kernels is None:
            return None
        kind = q_THD.shape, k_TGD.shape, k_TGD.dtype
        if kind not in self._ways_in:
            self._ways_in[kind] = _WayIn(kernels, self._stretches, q_THD, k_TGD)
        return self._ways_in[kind]

    def _way_back(self, q_THD: Tensor) -> KernelWayBack | None:
        kernels = way_back_kernels(q_THD)
        return None if kernels is None else KernelWayBack(kernels, self._told)

    def _plan(self, reach: int, *, has_one_key_head: bool) -> _Plan:
        kind = reach, has_one_key_head
        if kind not in self._plans:
            whole = [one for one in self._stretches if one.sequence_length <= reach]
            masked = {
                number: one
                for number, one in enumerate(self._stretches)
                if one.sequence_length > reach
            }
            # One sequence with one key head is all that a call has to do, and threads then share
            # its products, which gives other bits: it may not matter who lies beside it.
            blocks = [_Block(*one[:2], 1) for one in whole] if has_one_key_head else _blocks(whole)
            self._plans[kind] = _Plan(blocks, _pasts(whole), masked)
        return self._plans[kind]

    def done(self) -> None:
        """`Attention.done`."""


def _blocks(stretches: Sequence[Stretch]) -> list[_Block]:
    groups = _neighbours(stretches, lambda one: one.end - one.start)
    return [_Block(group[0].start, group[-1].end, len(group)) for group in groups]


def _pasts(stretches: Sequence[Stretch]) -> list[_Past]:
    groups = _neighbours(stretches, lambda one: one.prefix)
    return [
        _Past(group[0].start, group[-1].end, slice(*group[0].prefix))
        for group in groups
        if group[0].prefix is not None
    ]


def _told(stretches: Sequence[Stretch]) -> npt.NDArray[np.int64]:
    """Starts and numbers of rows, as `KernelWayBack` wants them."""
    told: list[tuple[int, int, int, int]] = []
    for start, end, prefix in stretches:
        first, last = prefix or (0, 0)
        told.append((start, end - start, first, last - first))
    return np.array(told, np.int64).reshape(-1, 4)


def _neighbours(
    stretches: Sequence[Stretch], kind: Callable[[Stretch], object]
) -> list[list[Stretch]]:
    """Those of one kind that lie beside each other, without a gap."""
    groups: list[list[Stretch]] = []
    for one in stretches:
        last = groups[-1][-1] if groups else None
        if last is not None and last.end == one.start and kind(last) == kind(one):
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


class _WayIn:
    """All stretches by the compiled kernel, whose keys and values it wants heads first."""

    def __init__(
        self, kernels: Kernels, stretches: Sequence[Stretch], q_THD: Tensor, k_TGD: Tensor
    ) -> None:
        self._kernels = kernels
        rows, groups, size = k_TGD.shape
        self._kept_2GTD = k_TGD.new_empty(2, groups, rows, size)
        row_bytes = size * k_TGD.itemsize
        start, head_bytes = self._kept_2GTD.data_ptr(), rows * row_bytes
        told: list[KernelStretch] = []
        for one in stretches:
            own = start + one.start * row_bytes
            made = KernelStretch(one.start, one.end - one.start, 0, own, head_bytes)
            if one.prefix is not None:
                first, last = one.prefix
                past = start + first * row_bytes, head_bytes, last - first
                made = KernelStretch(*made[:5], *past)
            told.append(made)
        self._attention = KernelAttention(told, most_rows(q_THD.shape[1], groups))

    def attend(
        self, rule: AttentionRule, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What rows take, and the logarithms of their sums."""
        sums_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
        given = q_THD, k_TGD, v_TGD, sums_TH
        return self._attention.attend(self._kernels, 0, rule, *given), sums_TH


class _FlashPack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        plan: _Plan,
        rule: AttentionRule,
        way_in: _WayIn | None,
        way_back: KernelWayBack | None,
    ) -> Tensor:
        if way_in is not None:
            out_THD, sums_TH = way_in.attend(rule, q_THD, k_TGD, v_TGD)
        else:
            out_THD, sums_TH = _by_flash(q_THD, k_TGD, v_TGD, plan, rule.scale)
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, out_THD, sums_TH)
        ctx.plan, ctx.rule, ctx.has_way_in = plan, rule, way_in is not None
        ctx.way_back = way_back
        return out_THD

    @staticmethod
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TGD, v_TGD, out_THD, sums_TH = ctx.saved_tensors
        if ctx.way_back is not None:
            taken = out_THD, sums_TH, dout_THD
            return *ctx.way_back.slopes(ctx.rule, q_THD, k_TGD, v_TGD, *taken), *[None] * 4
        scale = ctx.rule.scale
        dq_THD, dk_TGD, dv_TGD = (_room_for(rows, ctx.plan) for rows in (q_THD, k_TGD, v_TGD))
        for start, end, count in ctx.plan.blocks:
            dout, q, k, v, out, sums = (
                heads_first(rows[start:end], count)
                for rows in (dout_THD, q_THD, k_TGD, v_TGD, out_THD, sums_TH)
            )
            parts = _flash_backward(dout, q, k, v, out, sums, scale, is_causal=True)
            for gradient, part in zip((dq_THD, dk_TGD, dv_TGD), parts, strict=True):
                gradient[start:end] = rows_first(part)
        for start, end, prefix in ctx.plan.pasts:
            dout, out, sums = (
                heads_first(rows[start:end]) for rows in (dout_THD, out_THD, sums_TH)
            )
            q, k, v = _past_of(q_THD[start:end], k_TGD, v_TGD, prefix)
            dq, dk, dv = _flash_backward(dout, q, k, v, out, sums, scale, is_causal=False)
            dq_THD[start:end] += rows_first(dq)
            dk_TGD[prefix] += rows_first(dk)
            dv_TGD[prefix] += rows_first(dv)
        if ctx.has_way_in:
            given, gradients = (dout_THD, q_THD, k_TGD, v_TGD), (dq_THD, dk_TGD, dv_TGD)
            for one in ctx.plan.masked.values():
                _add_masked_backward(one, ctx.rule, *given, *gradients)
        return dq_THD, dk_TGD, dv_TGD, None, None, None, None


def _masked(
    stretch: Stretch, rule: AttentionRule, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor
) -> Tensor:
    k, v = _seen_by(stretch, k_TGD), _seen_by(stretch, v_TGD)
    return masked_attention(q_THD[stretch.start : stretch.end], k, v, *rule)


def _seen_by(stretch: Stretch, rows: Tensor) -> Tensor:
    start, end, prefix = stretch
    own = rows[start:end]
    return own if prefix is None else torch.cat((rows[slice(*prefix)], own))


def _add_masked_backward(
    stretch: Stretch,
    rule: AttentionRule,
    dout_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    dq_THD: Tensor,
    dk_TGD: Tensor,
    dv_TGD: Tensor,
) -> None:
    """The way back of a stretch that the kernel let attend: it is written out only now."""
    start, end, prefix = stretch
    seen = q_THD[start:end], _seen_by(stretch, k_TGD), _seen_by(stretch, v_TGD)
    q, k, v = (one.detach().requires_grad_() for one in seen)
    with torch.enable_grad():
        out = masked_attention(q, k, v, *rule)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout_THD[start:end])
    dq_THD[start:end] = dq
    for gradient, part in ((dk_TGD, dk), (dv_TGD, dv)):
        before = len(part) - (end - start)
        # Added, as stretches behind it may have been here before.
        gradient[start:end] += part[before:]
        if prefix is not None:
            gradient[slice(*prefix)] += part[:before]


def _by_flash(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, plan: _Plan, scale: float
) -> tuple[Tensor, Tensor]:
    """What rows take, and the logarithms of their sums; nothing in rows that are left to masks."""
    out_THD = _room_for(q_THD, plan)
    sums_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
    for start, end, count in plan.blocks:
        q, k, v = (heads_first(rows[start:end], count) for rows in (q_THD, k_TGD, v_TGD))
        out, sums = flash(q, k, v, scale, is_causal=True)
        out_THD[start:end] = rows_first(out)
        sums_TH[start:end] = rows_first(sums)
    for start, end, prefix in plan.pasts:
        q, k, v = _past_of(q_THD[start:end], k_TGD, v_TGD, prefix)
        out, sums = flash(q, k, v, scale, is_causal=False)
        past = rows_first(out), rows_first(sums)
        both = joined(past, (out_THD[start:end], sums_TH[start:end]))
        out_THD[start:end], sums_TH[start:end] = both
    return out_THD, sums_TH


def _room_for(rows: Tensor, plan: _Plan) -> Tensor:
    """What a plan fills; zeros where it leaves rows out."""
    room = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    return room.zero_() if plan.masked else room


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
    sums: Tensor,
    scale: float,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if k.shape[2] < WIDENED_BELOW:
        dout, q, k, v, out = (one.float() for one in (dout, q, k, v, out))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, sums, 0.0, is_causal, scale=scale
    )
    return dq, dk, dv
