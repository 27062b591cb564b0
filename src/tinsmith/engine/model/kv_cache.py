"""The KV cache: keys and values of earlier tokens, and the attention to them for sampling.

A *buffer* holds those of consecutive tokens in all layers, contiguously, so that attention reads
them in place. It grows by pages, so a sequence takes memory for the tokens it has and not for those
it may get. A sequence sees a shared buffer, which is immutable and may be used by others, and then
a buffer of its own.

Unlike the paged KV caches of GPUs, buffers are contiguous: without a kernel that follows page
tables, pages would have to be gathered for every token, which costs several times the attention.
"""

# G key head, D dimension of a head, P position in the buffer, T row of the batch

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tinsmith.engine.model.architecture import Architecture
from tinsmith.engine.model.attention import (
    AttentionRule,
    KernelAttention,
    KernelSegment,
    attention_kernels,
    flash,
    flash_kernel,
    flash_limit,
    heads_first,
    masked_attention,
    merge_attention,
    most_rows,
    rows_first,
)

PAGE_TOKENS = 64


def whole_pages(tokens: int) -> int:
    """The number of tokens, rounded up to whole pages."""
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS


LayerKv: TypeAlias = tuple[Sequence[Tensor], Sequence[Tensor]]
"""The keys of each layer, and the values of each layer."""


class KvBuffer:
    """Keys and values of consecutive tokens in all layers."""

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, device: torch.device
    ) -> None:
        sizes = (len(architecture.layers), 2, architecture.kv_heads, 0, architecture.head_size)
        self._keep(torch.empty(sizes, dtype=dtype, device=device), 0)

    def _keep(self, kept_L2GPD: Tensor, length: int) -> None:
        """L layers, 2 for keys and values."""
        self.length = length
        self.room = kept_L2GPD.shape[3]
        """Capacity in tokens."""
        self._kept_L2GPD = kept_L2GPD
        # Views that the views of single calls are derived from, made once.
        self._views_L1GPD = kept_L2GPD.flatten(0, 1).unsqueeze(1)
        self._places_LPGD = kept_L2GPD.flatten(1, 2).transpose(1, 2)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self._kept_L2GPD.dtype

    @property
    def bytes(self) -> int:
        """Allocated memory."""
        return self._kept_L2GPD.nbytes

    @property
    def is_full(self) -> bool:
        """Whether another token needs more memory."""
        return self.length >= self.room

    def room_for(self, length: int) -> int:
        """The capacity after `reserve(length)`."""
        if length <= self.room:
            return self.room
        # By an eighth at least: long buffers would otherwise be copied for every page.
        return whole_pages(max(length, self.room + self.room // 8))

    def reserve(self, length: int) -> None:
        """Grow the capacity to at least `length` tokens."""
        if length > self.room:
            self._keep(self._resized(self.room_for(length), self.length), self.length)

    def places(self, start: int, end: int) -> Sequence[Tensor]:
        """Writable views per layer: positions × 2 · key heads × dimensions."""
        return self._places_LPGD.narrow(1, start, end - start).unbind(0)

    def read(self, start: int, end: int) -> LayerKv:
        """Views of all layers' keys and values: 1 × key heads × positions × dimensions.

        All layers at once, as making views one by one takes longer than attention to a short
        sequence.
        """
        views = self._views_L1GPD.narrow(3, start, end - start).unbind(0)
        return views[::2], views[1::2]

    def address(self) -> tuple[int, int]:
        """Its address and the stride between heads in bytes, for kernels."""
        return self._kept_L2GPD.data_ptr(), self._kept_L2GPD.stride(2) * self._kept_L2GPD.itemsize

    def copy(self, length: int, room: int) -> KvBuffer:
        """A copy of its first `length` tokens, with capacity for `room`."""
        made = object.__new__(KvBuffer)
        made._keep(self._resized(whole_pages(room), length), length)
        return made

    def _resized(self, room: int, used: int) -> Tensor:
        old = self._kept_L2GPD
        new = old.new_empty((*old.shape[:3], room, old.shape[4]))
        new[:, :, :, :used] = old[:, :, :, :used]
        return new


class SequenceKv:
    """The KV cache of a sequence: a shared buffer, if any, then its own, which grows."""

    def __init__(self, shared: KvBuffer | None, own: KvBuffer) -> None:
        self.shared = shared
        self.own = own

    @property
    def length(self) -> int:
        """Cached tokens."""
        return self.own.length + (self.shared.length if self.shared is not None else 0)


class CachedSegment(NamedTuple):
    """Rows that are appended to `kv.own`, and see what is before them in `kv`.

    Consecutive segments may belong to one sequence. Each row is then computed as if it came alone,
    which is not bit-identical to several rows in one segment.
    """

    start: int
    end: int
    kv: SequenceKv
    place: int
    """Position of its first row in `kv.own`."""

    @property
    def own_end(self) -> int:
        """Position after its last row in `kv.own`."""
        return self.place + self.end - self.start

    @property
    def sequence_length(self) -> int:
        """Length of the sequence up to its end."""
        shared = self.kv.shared
        return self.own_end + (0 if shared is None else shared.length)


FEWEST_QUERIES = 4
"""With fewer queries flash attention computes a row differently than among others."""


class _DecodeRows:
    """Decoding rows: each sees its own buffer up to itself, in one call."""

    def __init__(self, rows: Sequence[int], seen: Sequence[LayerKv]) -> None:
        self.rows_N = torch.tensor(rows)
        self._keys = list(zip(*(keys for keys, _ in seen), strict=True))
        self._values = list(zip(*(values for _, values in seen), strict=True))
        # The queries of every layer are copied to one buffer, so that views are made only once.
        self._place_NGQD: Tensor | None = None
        self._queries: Sequence[Tensor] = ()

    def __len__(self) -> int:
        return len(self.rows_N)

    def attend(
        self, layer: int, scale: float, q_NHD: Tensor, key_heads: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The output and log-sum-exp of each row; `_rows_of` stacks either."""
        # Query heads of one key head become several queries of it, which is then read once.
        q_NGQD = q_NHD.unflatten(1, (key_heads, -1))
        if self._place_NGQD is None:
            self._place_NGQD = self._placed(q_NGQD)
        self._place_NGQD.copy_(q_NGQD)
        outs: list[Tensor] = []
        lse: list[Tensor] = []
        for q, k, v in zip(self._queries, self._keys[layer], self._values[layer], strict=True):
            out, some = flash_kernel(q, k, v, 0.0, False, scale=scale)
            outs.append(out)
            lse.append(some)
        return outs, lse

    def _placed(self, q_NGQD: Tensor) -> Tensor:
        rows, key_heads, queries, size = q_NGQD.shape
        # One query short of a multiple of four is a third slower than the multiple, and in bfloat16
        # a single query is more than twice as slow as two.
        is_slow = queries % 4 == 3 or (queries == 1 and q_NGQD.dtype == torch.bfloat16)
        spare = 1 if is_slow else 0
        place = q_NGQD.new_zeros(rows, 1, key_heads, queries + spare, size)
        self._queries = place.unbind(0)
        return place[:, 0, :, :queries]


def _rows_of(parts: Sequence[Tensor], heads: int) -> Tensor:
    """Rows × heads (× dimensions), from 1 × key heads × queries (× …) for each row."""
    whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    made: Tensor = whole[:, :, : heads // whole.shape[1]].flatten(1, 2)
    return made


class _ChunkRows(NamedTuple):
    """A prefill chunk: sees what is in its own buffer, and itself causally."""

    start: int
    end: int
    seen: LayerKv | None
    itself: LayerKv


class _Shared(NamedTuple):
    """Rows that see all of a shared buffer."""

    rows_N: Tensor
    seen: LayerKv


class _CallPlan(NamedTuple):
    """The calls to make in each layer."""

    decode: _DecodeRows
    chunks: list[_ChunkRows]
    shared: list[_Shared]
    masked: list[CachedSegment]


def _plan(segments: Sequence[CachedSegment], limit: int) -> _CallPlan:
    rows: list[int] = []
    seen_by_row: list[LayerKv] = []
    chunks: list[_ChunkRows] = []
    masked: list[CachedSegment] = []
    sharing: dict[int, tuple[KvBuffer, list[int]]] = {}
    for one in segments:
        start, end, keys, place = one
        if one.sequence_length > limit:
            masked.append(one)
            continue
        if end - start == 1:
            rows.append(start)
            seen_by_row.append(keys.own.read(0, place + 1))
        else:
            seen = keys.own.read(0, place) if place else None
            chunks.append(_ChunkRows(start, end, seen, keys.own.read(place, one.own_end)))
        if keys.shared is not None:
            sharing.setdefault(id(keys.shared), (keys.shared, []))[1].extend(range(start, end))
    shared = [_Shared(torch.tensor(some), kv.read(0, kv.length)) for kv, some in sharing.values()]
    return _CallPlan(_DecodeRows(rows, seen_by_row), chunks, shared, masked)


class CachedAttention:
    """Attention over a KV cache, forward only.

    Args:
        segments: All rows of the batch. Their keys and values are appended to the cache.
    """

    def __init__(self, segments: Sequence[CachedSegment]) -> None:
        self._segments = segments
        self._dtype = segments[0].kv.own.dtype
        for one in segments:
            one.kv.own.reserve(one.own_end)
        # Only now: a buffer that has grown has moved.
        self._by_kernel: KernelAttention | None = None
        self._places: list[tuple[Tensor, ...]] = []
        self._plans: dict[int, _CallPlan] = {}
        """By the longest sequence that flash attention supports."""

    def attend(
        self, layer: int, rule: AttentionRule, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor
    ) -> Tensor:
        """`Attention.attend`."""
        kernels = attention_kernels(rule, q_THD, k_TGD, v_TGD)
        if kernels is not None and k_TGD.dtype == self._dtype:
            if self._by_kernel is None:
                ordered = sorted(self._segments, key=_shared_buffer)
                most = most_rows(q_THD.shape[1], k_TGD.shape[1])
                self._by_kernel = KernelAttention(list(map(_for_kernel, ordered)), most)
            return self._by_kernel.attend(kernels, layer, rule, q_THD, k_TGD, v_TGD)
        self._keep(layer, k_TGD, v_TGD)
        limit = flash_limit(rule, q_THD.device)
        if limit not in self._plans:
            self._plans[limit] = _plan(self._segments, limit)
        plan = self._plans[limit]
        if len(plan.decode) == len(self._segments) and not plan.shared:
            outs, _ = plan.decode.attend(layer, rule.scale, q_THD, k_TGD.shape[1])
            return _rows_of(outs, q_THD.shape[1])
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        _fill(layer, rule.scale, q_THD, k_TGD.shape[1], plan, out_THD)
        for one in plan.masked:
            rows = slice(one.start, one.end)
            out_THD[rows] = _masked_segment(layer, rule, q_THD[rows], one)
        return out_THD

    def _keep(self, layer: int, k_TGD: Tensor, v_TGD: Tensor) -> None:
        if not self._places:
            places = (one.kv.own.places(one.place, one.own_end) for one in self._segments)
            self._places = list(zip(*places, strict=True))
        sizes = [one.end - one.start for one in self._segments]
        kept_TGD = torch.cat((k_TGD, v_TGD), 1)
        torch._foreach_copy_(self._places[layer], kept_TGD.split_with_sizes(sizes))

    def done(self) -> None:
        """Count the new rows as cached."""
        for one in self._segments:
            one.kv.own.length = one.own_end


def _shared_buffer(segment: CachedSegment) -> int:
    return 0 if segment.kv.shared is None else id(segment.kv.shared)


def _for_kernel(segment: CachedSegment) -> KernelSegment:
    shared = segment.kv.shared
    past = () if shared is None else (*shared.address(), shared.length)
    rows, own = segment.end - segment.start, segment.kv.own.address()
    return KernelSegment(segment.start, rows, segment.place, *own, *past)


def _fill(
    layer: int, scale: float, q_THD: Tensor, key_heads: int, plan: _CallPlan, out_THD: Tensor
) -> None:
    """Write the output of the segments that flash attention supports."""
    heads = q_THD.shape[1]
    lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
    if len(plan.decode):
        rows_N = plan.decode.rows_N
        outs, lse_of_rows = plan.decode.attend(layer, scale, q_THD[rows_N], key_heads)
        out_THD[rows_N] = _rows_of(outs, heads)
        if plan.shared:
            lse_TH[rows_N] = _rows_of(lse_of_rows, heads)
    for start, end, seen, itself in plan.chunks:
        out, lse = _chunk_attention(layer, scale, q_THD[start:end], seen, itself)
        out_THD[start:end], lse_TH[start:end] = rows_first(out), rows_first(lse)
    for rows_N, (keys, values) in plan.shared:
        out, lse = _full_attention(q_THD[rows_N], keys[layer], values[layer], scale)
        past = rows_first(out), rows_first(lse)
        out_THD[rows_N], _ = merge_attention(past, (out_THD[rows_N], lse_TH[rows_N]))


def _chunk_attention(
    layer: int, scale: float, q_LHD: Tensor, seen: LayerKv | None, itself: LayerKv
) -> tuple[Tensor, Tensor]:
    """The attention of a chunk to its own buffer and itself."""
    found = flash(heads_first(q_LHD), itself[0][layer], itself[1][layer], scale, is_causal=True)
    if seen is None:
        return found
    return merge_attention(_full_attention(q_LHD, seen[0][layer], seen[1][layer], scale), found)


def _full_attention(q_LHD: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Every query sees every key; returns 1 × heads × L × D, and 1 × heads × L.

    Query heads of one key head become more queries of it, so that its keys are read once.
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
        # Threads would split the products of few queries, which gives other bits.
        q, k, v = (one.expand(2, -1, -1, -1) for one in (q, k, v))
    out, lse = flash(q, k, v, scale, is_causal=False)
    out = out[0, :, :queries].unflatten(1, (rows, -1)).transpose(1, 2)
    lse = lse[0, :, :queries].unflatten(1, (rows, -1)).transpose(1, 2)
    return out.reshape(1, heads, rows, size), lse.reshape(1, heads, rows)


def _masked_segment(layer: int, rule: AttentionRule, q_LHD: Tensor, one: CachedSegment) -> Tensor:
    keys = one.kv
    k, v = (both[layer] for both in keys.own.read(0, one.own_end))
    if keys.shared is not None:
        past_k, past_v = (both[layer] for both in keys.shared.read(0, keys.shared.length))
        k, v = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)
    return masked_attention(q_LHD, k[0].transpose(0, 1), v[0].transpose(0, 1), *rule)
