"""Attention over a pack: many sequences in one row of tokens, and each sees itself alone.

`PackAttention` is for training. Its stretches are sequences, or what is left of them behind a
prefix that several share and that is computed once. `CachedAttention` is for sampling: its
stretches follow tokens whose keys and values are kept.

Either splits what a query sees into parts: a *past* that it sees whole, and the stretch itself, of
which it sees what is not after it. Each part is one call of the flash kernel; the results are
joined by the weights that their logarithms of sums give. The way back needs no more: given the
joined result and its logarithm, the kernel's own gradient of a part is that part's share.

No mask is ever built, and the cost follows the lengths of the stretches. Where the kernel does not
reach (sequences longer than a window, capped scores, other devices) `masked_attention.py` stands
in, for each stretch by itself: what is beside it has no part in that.
"""

# T row of the pack, H query head, G key head, D dimension of a head, N stretch, L token of one

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tinsmith.model.kv_cache import LayerKeys, Run, SequenceKeys
from tinsmith.model.masked_attention import masked_attention

FEWEST_QUERIES = 4
"""With fewer the kernel computes a row in another way than it would among others."""


class AttentionRule(NamedTuple):
    """What a layer's attention is computed with."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class Attention(Protocol):
    """What the transformer asks of either kind."""

    def attend(
        self, layer: int, rule: AttentionRule, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor
    ) -> Tensor:
        """What each row takes from the rows that it sees: rows × heads × dimensions."""

    def done(self) -> None:
        """All layers have been through it."""


def _reach(rule: AttentionRule, device: torch.device) -> int:
    """How long a sequence may be for the flash kernel to give what the rule says."""
    if rule.softcap is not None or device.type != "cpu":
        return 0
    return sys.maxsize if rule.window is None else rule.window


_flash_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """N × heads × L × D in, out the result and the logarithm of the sum of each row's weights."""
    out, sums = _flash_kernel(q, k, v, 0.0, is_causal, scale=scale)
    return out, sums


def _joined(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two parts as if they had been one."""
    sums = torch.logaddexp(first[1], second[1])
    weight = (first[1] - sums).exp().unsqueeze(-1)
    other = (second[1] - sums).exp().unsqueeze(-1)
    out = first[0].float() * weight + second[0].float() * other
    return out.to(first[0].dtype), sums


def _heads_first(rows: Tensor, stretches: int = 1) -> Tensor:
    """Rows × heads … as N × heads × L …, for N stretches of one length; a view."""
    made: Tensor = rows.unflatten(0, (stretches, -1)).transpose(1, 2)
    return made


def _rows_first(parts: Tensor) -> Tensor:
    """The way back from `_heads_first`."""
    return parts.transpose(1, 2).flatten(0, 1)


# Training


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
    masked: list[int]
    """The numbers of the stretches that are left to masks."""


class PackAttention:
    """Attention with exact gradients; see the top of the module."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._stretches = tuple(stretches)
        self._lengths = [one.end - one.start for one in stretches]
        self._plans: dict[int, _Plan] = {}
        """By how long a sequence may be for the flash kernel."""

    def attend(
        self, layer: int, rule: AttentionRule, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor
    ) -> Tensor:
        """`Attention.attend`."""
        del layer
        plan = self._plan(_reach(rule, q_THD.device))
        out_THD: Tensor = _FlashPack.apply(q_THD, k_TGD, v_TGD, plan, rule.scale)  # type: ignore[no-untyped-call]
        if not plan.masked:
            return out_THD
        parts = list(out_THD.split(self._lengths))
        for number in plan.masked:
            start, end, prefix = self._stretches[number]
            k, v = k_TGD[start:end], v_TGD[start:end]
            if prefix is not None:
                k = torch.cat((k_TGD[slice(*prefix)], k))
                v = torch.cat((v_TGD[slice(*prefix)], v))
            parts[number] = masked_attention(q_THD[start:end], k, v, *rule)
        return torch.cat(parts)

    def _plan(self, reach: int) -> _Plan:
        if reach not in self._plans:
            whole = [one for one in self._stretches if one.sequence_length <= reach]
            masked = [
                number for number, one in enumerate(self._stretches) if one.sequence_length > reach
            ]
            self._plans[reach] = _Plan(_blocks(whole), _pasts(whole), masked)
        return self._plans[reach]

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


class _FlashPack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, plan: _Plan, scale: float
    ) -> Tensor:
        out_THD = _room_for(q_THD, plan)
        sums_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
        for start, end, count in plan.blocks:
            q, k, v = (_heads_first(rows[start:end], count) for rows in (q_THD, k_TGD, v_TGD))
            out, sums = _flash(q, k, v, scale, is_causal=True)
            out_THD[start:end] = _rows_first(out)
            sums_TH[start:end] = _rows_first(sums)
        for start, end, prefix in plan.pasts:
            q, k, v = _past_of(q_THD[start:end], k_TGD, v_TGD, prefix)
            out, sums = _flash(q, k, v, scale, is_causal=False)
            past = _rows_first(out), _rows_first(sums)
            both = _joined(past, (out_THD[start:end], sums_TH[start:end]))
            out_THD[start:end], sums_TH[start:end] = both
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, out_THD, sums_TH)
        ctx.plan, ctx.scale = plan, scale
        return out_THD

    @staticmethod
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_THD, k_TGD, v_TGD, out_THD, sums_TH = ctx.saved_tensors
        dq_THD, dk_TGD, dv_TGD = (_room_for(rows, ctx.plan) for rows in (q_THD, k_TGD, v_TGD))
        for start, end, count in ctx.plan.blocks:
            dout, q, k, v, out, sums = (
                _heads_first(rows[start:end], count)
                for rows in (dout_THD, q_THD, k_TGD, v_TGD, out_THD, sums_TH)
            )
            parts = _flash_backward(dout, q, k, v, out, sums, ctx.scale, is_causal=True)
            for gradient, part in zip((dq_THD, dk_TGD, dv_TGD), parts, strict=True):
                gradient[start:end] = _rows_first(part)
        for start, end, prefix in ctx.plan.pasts:
            dout, out, sums = (
                _heads_first(rows[start:end]) for rows in (dout_THD, out_THD, sums_TH)
            )
            q, k, v = _past_of(q_THD[start:end], k_TGD, v_TGD, prefix)
            dq, dk, dv = _flash_backward(dout, q, k, v, out, sums, ctx.scale, is_causal=False)
            dq_THD[start:end] += _rows_first(dq)
            dk_TGD[prefix] += _rows_first(dk)
            dv_TGD[prefix] += _rows_first(dv)
        return dq_THD, dk_TGD, dv_TGD, None, None


def _room_for(rows: Tensor, plan: _Plan) -> Tensor:
    """What a plan fills; zeros where it leaves rows out."""
    return torch.zeros_like(rows) if plan.masked else torch.empty_like(rows)


def _past_of(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, prefix: slice
) -> tuple[Tensor, Tensor, Tensor]:
    return _heads_first(q_THD), _heads_first(k_TGD[prefix]), _heads_first(v_TGD[prefix])


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
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, sums, 0.0, is_causal, scale=scale
    )
    return dq, dk, dv


# Sampling


class CachedStretch(NamedTuple):
    """Rows that are added to `keys.own` at a place, and see what is before them in `keys`.

    Several stretches may be of one sequence, one behind the other: each row is then computed as it
    is when it comes alone, which is not to the last bit how it is among others.
    """

    start: int
    end: int
    keys: SequenceKeys
    place: int
    """How many tokens of `keys.own` are before it."""

    @property
    def own_end(self) -> int:
        """How many there are with it."""
        return self.place + self.end - self.start

    @property
    def sequence_length(self) -> int:
        """Of the sequence up to its end."""
        shared = self.keys.shared
        return self.own_end + (0 if shared is None else shared.length)


class _Single(NamedTuple):
    """A row that sees all of its own run up to itself, in one call."""

    row: int
    seen: LayerKeys


class _Several(NamedTuple):
    """Rows that see what was in their own run, and of themselves what is before."""

    start: int
    end: int
    seen: LayerKeys | None
    itself: LayerKeys


class _Shared(NamedTuple):
    """Rows that see all of a run that is not their own."""

    rows_N: Tensor
    seen: LayerKeys


class _Parted(NamedTuple):
    """Which calls there are to make in each layer."""

    singles: list[_Single]
    severals: list[_Several]
    shared: list[_Shared]
    masked: list[CachedStretch]


def _parted(stretches: Sequence[CachedStretch], reach: int) -> _Parted:
    parted = _Parted([], [], [], [])
    sharing: dict[int, tuple[Run, list[int]]] = {}
    for one in stretches:
        start, end, keys, place = one
        if one.sequence_length > reach:
            parted.masked.append(one)
            continue
        if end - start == 1:
            parted.singles.append(_Single(start, keys.own.read(0, place + 1)))
        else:
            seen = keys.own.read(0, place) if place else None
            itself = keys.own.read(place, one.own_end)
            parted.severals.append(_Several(start, end, seen, itself))
        if keys.shared is not None:
            sharing.setdefault(id(keys.shared), (keys.shared, []))[1].extend(range(start, end))
    for run, rows in sharing.values():
        parted.shared.append(_Shared(torch.tensor(rows), run.read(0, run.length)))
    return parted


class CachedAttention:
    """Attention to tokens that were read before, without a way back; see the top of the module."""

    def __init__(self, stretches: Sequence[CachedStretch]) -> None:
        self._stretches = stretches
        for one in stretches:
            one.keys.own.reserve(one.own_end)
        # Only now: a run that has grown lies elsewhere.
        self._places = [one.keys.own.places(one.place, one.own_end) for one in stretches]
        self._sizes = [one.end - one.start for one in stretches]
        self._parted: dict[int, _Parted] = {}
        """By how long a sequence may be for the flash kernel."""

    def attend(
        self, layer: int, rule: AttentionRule, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor
    ) -> Tensor:
        """`Attention.attend`."""
        kept_2GTD = torch.stack((k_TGD.transpose(0, 1), v_TGD.transpose(0, 1)))
        places = [layers[layer] for layers in self._places]
        torch._foreach_copy_(places, kept_2GTD.split(self._sizes, 2))
        reach = _reach(rule, q_THD.device)
        if reach not in self._parted:
            self._parted[reach] = _parted(self._stretches, reach)
        parted = self._parted[reach]
        if len(parted.singles) == len(self._stretches) and not parted.shared:
            return _single_rows(layer, rule.scale, q_THD, k_TGD.shape[1], parted.singles)[0]
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        _fill(layer, rule.scale, q_THD, k_TGD.shape[1], parted, out_THD)
        for one in parted.masked:
            rows = slice(one.start, one.end)
            out_THD[rows] = _masked_step(layer, rule, q_THD[rows], one)
        return out_THD

    def done(self) -> None:
        """The rows now count as read."""
        for one in self._stretches:
            one.keys.own.length = one.own_end


def _fill(
    layer: int, scale: float, q_THD: Tensor, key_heads: int, parted: _Parted, out_THD: Tensor
) -> None:
    """Put in the rows of the stretches that the kernel reaches."""
    sums_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
    if parted.singles:
        rows = [one.row for one in parted.singles]
        out, sums = _single_rows(layer, scale, q_THD[rows], key_heads, parted.singles)
        out_THD[rows], sums_TH[rows] = out, sums
    for start, end, seen, itself in parted.severals:
        out, sums = _several_rows(layer, scale, q_THD[start:end], seen, itself)
        out_THD[start:end], sums_TH[start:end] = _rows_first(out), _rows_first(sums)
    for rows_N, (keys, values) in parted.shared:
        out, sums = _seen_whole(q_THD[rows_N], keys[layer], values[layer], scale)
        past = _rows_first(out), _rows_first(sums)
        out_THD[rows_N], _ = _joined(past, (out_THD[rows_N], sums_TH[rows_N]))


def _single_rows(
    layer: int, scale: float, q_NHD: Tensor, key_heads: int, singles: Sequence[_Single]
) -> tuple[Tensor, Tensor]:
    """What each row takes from its own run."""
    rows, heads, size = q_NHD.shape
    # The heads that have one key head, as several queries of it: it is then read once.
    q_NGHD = q_NHD.reshape(rows, key_heads, heads // key_heads, size)
    parts = [
        _flash_kernel(q, seen[0][layer], seen[1][layer], 0.0, False, scale=scale)
        for q, (_, seen) in zip(q_NGHD.split(1), singles, strict=True)
    ]
    if rows == 1:
        out, sums = parts[0]
    else:
        out, sums = (torch.cat(some) for some in zip(*parts, strict=True))
    return out.reshape(rows, heads, size), sums.reshape(rows, heads)


def _several_rows(
    layer: int, scale: float, q_LHD: Tensor, seen: LayerKeys | None, itself: LayerKeys
) -> tuple[Tensor, Tensor]:
    """What rows take from their own run: what was in it, and themselves."""
    found = _flash(_heads_first(q_LHD), itself[0][layer], itself[1][layer], scale, is_causal=True)
    if seen is None:
        return found
    return _joined(_seen_whole(q_LHD, seen[0][layer], seen[1][layer], scale), found)


def _seen_whole(q_LHD: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Every query sees every key. 1 × heads × L × D, and 1 × heads × L.

    The queries of the heads that have one key head become more queries of it: the keys are then
    read once for all of them.
    """
    rows, heads, size = q_LHD.shape
    groups = k.shape[1]
    q_GLD = q_LHD.reshape(rows, groups, heads // groups, size).transpose(0, 1)
    q = q_GLD.reshape(1, groups, -1, size)
    queries = q.shape[2]
    spare = -queries % FEWEST_QUERIES
    if spare:
        q = torch.nn.functional.pad(q, (0, 0, 0, spare))
    out, sums = _flash(q, k, v, scale, is_causal=False)
    out = out[0, :, :queries].unflatten(1, (rows, -1)).transpose(1, 2)
    sums = sums[0, :, :queries].unflatten(1, (rows, -1)).transpose(1, 2)
    return out.reshape(1, heads, rows, size), sums.reshape(1, heads, rows)


def _masked_step(layer: int, rule: AttentionRule, q_LHD: Tensor, one: CachedStretch) -> Tensor:
    keys = one.keys
    k, v = (both[layer] for both in keys.own.read(0, one.own_end))
    if keys.shared is not None:
        past_k, past_v = (both[layer] for both in keys.shared.read(0, keys.shared.length))
        k, v = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)
    return masked_attention(q_LHD, k[0].transpose(0, 1), v[0].transpose(0, 1), *rule)
