"""Attention for sampling, to tokens whose keys and values are kept (`kv_cache.py`)."""

# T row of the pack, H query head, G key head, D dimension of a head, N row among some, L of one

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith.model.attention import (
    AttentionRule,
    flash,
    flash_kernel,
    heads_first,
    joined,
    reach_of,
    rows_first,
)
from tinsmith.model.kernel_attention import (
    KernelAttention,
    KernelStretch,
    attention_kernels,
    most_rows,
)
from tinsmith.model.kv_cache import CachedStretch, LayerKeys, Run
from tinsmith.model.masked_attention import masked_attention

FEWEST_QUERIES = 4
"""With fewer the kernel computes a row in another way than it would among others."""


class _Singles:
    """Rows that see all of their own run up to themselves, each in one call."""

    def __init__(self, rows: Sequence[int], seen: Sequence[LayerKeys]) -> None:
        self.rows_N = torch.tensor(rows)
        self._keys = list(zip(*(keys for keys, _ in seen), strict=True))
        self._values = list(zip(*(values for _, values in seen), strict=True))
        # Queries of all layers are put in one place, so that views of it are made once.
        self._place_NGQD: Tensor | None = None
        self._queries: Sequence[Tensor] = ()

    def __len__(self) -> int:
        return len(self.rows_N)

    def attend(
        self, layer: int, scale: float, q_NHD: Tensor, key_heads: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What each row takes, and its sums; `_rows_of` makes rows of either."""
        # The heads that have one key head, as several queries of it: it is then read once.
        q_NGQD = q_NHD.unflatten(1, (key_heads, -1))
        if self._place_NGQD is None:
            self._place_NGQD = self._placed(q_NGQD)
        self._place_NGQD.copy_(q_NGQD)
        outs: list[Tensor] = []
        sums: list[Tensor] = []
        for q, k, v in zip(self._queries, self._keys[layer], self._values[layer], strict=True):
            out, some = flash_kernel(q, k, v, 0.0, False, scale=scale)
            outs.append(out)
            sums.append(some)
        return outs, sums

    def _placed(self, q_NGQD: Tensor) -> Tensor:
        rows, key_heads, queries, size = q_NGQD.shape
        # One short of a multiple of four takes the kernel a third longer than the multiple, and in
        # bfloat16 a lone query more than twice as long as two.
        is_slow = queries % 4 == 3 or (queries == 1 and q_NGQD.dtype == torch.bfloat16)
        spare = 1 if is_slow else 0
        place = q_NGQD.new_zeros(rows, 1, key_heads, queries + spare, size)
        self._queries = place.unbind(0)
        return place[:, 0, :, :queries]


def _rows_of(parts: Sequence[Tensor], heads: int) -> Tensor:
    """Rows × heads (× dimensions), of what there is for each: 1 × key heads × queries (× …)."""
    whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    made: Tensor = whole[:, :, : heads // whole.shape[1]].flatten(1, 2)
    return made


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

    singles: _Singles
    severals: list[_Several]
    shared: list[_Shared]
    masked: list[CachedStretch]


def _parted(stretches: Sequence[CachedStretch], reach: int) -> _Parted:
    rows: list[int] = []
    seen_by_row: list[LayerKeys] = []
    severals: list[_Several] = []
    masked: list[CachedStretch] = []
    sharing: dict[int, tuple[Run, list[int]]] = {}
    for one in stretches:
        start, end, keys, place = one
        if one.sequence_length > reach:
            masked.append(one)
            continue
        if end - start == 1:
            rows.append(start)
            seen_by_row.append(keys.own.read(0, place + 1))
        else:
            seen = keys.own.read(0, place) if place else None
            severals.append(_Several(start, end, seen, keys.own.read(place, one.own_end)))
        if keys.shared is not None:
            sharing.setdefault(id(keys.shared), (keys.shared, []))[1].extend(range(start, end))
    shared = [
        _Shared(torch.tensor(some), run.read(0, run.length)) for run, some in sharing.values()
    ]
    return _Parted(_Singles(rows, seen_by_row), severals, shared, masked)


class CachedAttention:
    """Attention to tokens that were read before, without a way back; see `attention.py`."""

    def __init__(self, stretches: Sequence[CachedStretch]) -> None:
        self._stretches = stretches
        self._dtype = stretches[0].keys.own.dtype
        for one in stretches:
            one.keys.own.reserve(one.own_end)
        # Only now: a run that has grown lies elsewhere.
        self._by_kernel: KernelAttention | None = None
        self._places: list[tuple[Tensor, ...]] = []
        self._parted: dict[int, _Parted] = {}
        """By how long a sequence may be for the flash kernel."""

    def attend(
        self, layer: int, rule: AttentionRule, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor
    ) -> Tensor:
        """`Attention.attend`."""
        kernels = attention_kernels(rule, q_THD, k_TGD, v_TGD)
        if kernels is not None and k_TGD.dtype == self._dtype:
            if self._by_kernel is None:
                ordered = sorted(self._stretches, key=_shared_run)
                most = most_rows(q_THD.shape[1], k_TGD.shape[1])
                self._by_kernel = KernelAttention(list(map(_for_kernel, ordered)), most)
            return self._by_kernel.attend(kernels, layer, rule, q_THD, k_TGD, v_TGD)
        self._keep(layer, k_TGD, v_TGD)
        reach = reach_of(rule, q_THD.device)
        if reach not in self._parted:
            self._parted[reach] = _parted(self._stretches, reach)
        parted = self._parted[reach]
        if len(parted.singles) == len(self._stretches) and not parted.shared:
            outs, _ = parted.singles.attend(layer, rule.scale, q_THD, k_TGD.shape[1])
            return _rows_of(outs, q_THD.shape[1])
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        _fill(layer, rule.scale, q_THD, k_TGD.shape[1], parted, out_THD)
        for one in parted.masked:
            rows = slice(one.start, one.end)
            out_THD[rows] = _masked_step(layer, rule, q_THD[rows], one)
        return out_THD

    def _keep(self, layer: int, k_TGD: Tensor, v_TGD: Tensor) -> None:
        if not self._places:
            places = (one.keys.own.places(one.place, one.own_end) for one in self._stretches)
            self._places = list(zip(*places, strict=True))
        sizes = [one.end - one.start for one in self._stretches]
        kept_TGD = torch.cat((k_TGD, v_TGD), 1)
        torch._foreach_copy_(self._places[layer], kept_TGD.split_with_sizes(sizes))

    def done(self) -> None:
        """The rows now count as read."""
        for one in self._stretches:
            one.keys.own.length = one.own_end


def _shared_run(stretch: CachedStretch) -> int:
    return 0 if stretch.keys.shared is None else id(stretch.keys.shared)


def _for_kernel(stretch: CachedStretch) -> KernelStretch:
    shared = stretch.keys.shared
    past = () if shared is None else (*shared.address(), shared.length)
    rows, own = stretch.end - stretch.start, stretch.keys.own.address()
    return KernelStretch(stretch.start, rows, stretch.place, *own, *past)


def _fill(
    layer: int, scale: float, q_THD: Tensor, key_heads: int, parted: _Parted, out_THD: Tensor
) -> None:
    """Put in the rows of the stretches that the kernel reaches."""
    heads = q_THD.shape[1]
    sums_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
    if len(parted.singles):
        rows_N = parted.singles.rows_N
        outs, sums_of_rows = parted.singles.attend(layer, scale, q_THD[rows_N], key_heads)
        out_THD[rows_N] = _rows_of(outs, heads)
        if parted.shared:
            sums_TH[rows_N] = _rows_of(sums_of_rows, heads)
    for start, end, seen, itself in parted.severals:
        out, sums = _several_rows(layer, scale, q_THD[start:end], seen, itself)
        out_THD[start:end], sums_TH[start:end] = rows_first(out), rows_first(sums)
    for rows_N, (keys, values) in parted.shared:
        out, sums = _seen_whole(q_THD[rows_N], keys[layer], values[layer], scale)
        past = rows_first(out), rows_first(sums)
        out_THD[rows_N], _ = joined(past, (out_THD[rows_N], sums_TH[rows_N]))


def _several_rows(
    layer: int, scale: float, q_LHD: Tensor, seen: LayerKeys | None, itself: LayerKeys
) -> tuple[Tensor, Tensor]:
    """What rows take from their own run: what was in it, and themselves."""
    found = flash(heads_first(q_LHD), itself[0][layer], itself[1][layer], scale, is_causal=True)
    if seen is None:
        return found
    return joined(_seen_whole(q_LHD, seen[0][layer], seen[1][layer], scale), found)


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
    if groups == 1 and torch.get_num_threads() > 1:
        # They would share the products of few queries, which gives other bits.
        q, k, v = (one.expand(2, -1, -1, -1) for one in (q, k, v))
    out, sums = flash(q, k, v, scale, is_causal=False)
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
