"""Keys and values of tokens that were read, for those that come after them.

A *run* holds those of consecutive tokens, in all layers, one after the other in memory: attention
reads them as they lie. It grows by pages, so that a sequence takes memory for the tokens that it
has and not for those that it may have. What a sequence sees is a shared run, which others see too
and which never changes, and a run of its own.

Runs are not scattered over a pool of pages, as caches on GPUs are: without a kernel that follows
page tables, pages would have to be gathered for every token, and that costs several times the
attention itself.
"""

# G key head, D dimension of a head, P place in the run, T row of the pack

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tinsmith.model.architecture import Architecture

PAGE_TOKENS = 64


def whole_pages(tokens: int) -> int:
    """So many tokens, and what is left of their last page."""
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS


LayerKeys: TypeAlias = tuple[Sequence[Tensor], Sequence[Tensor]]
"""The keys of each layer, and the values of each layer."""


class Run:
    """See the top of the module."""

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, device: torch.device
    ) -> None:
        sizes = (len(architecture.layers), 2, architecture.kv_heads, 0, architecture.head_size)
        self._keep(torch.empty(sizes, dtype=dtype, device=device), 0)

    def _keep(self, kept_L2GPD: Tensor, length: int) -> None:
        """L layers, 2 for keys and values."""
        self.length = length
        self.room = kept_L2GPD.shape[3]
        """How many tokens it can hold without growing."""
        self._kept_L2GPD = kept_L2GPD
        # Keys and values one behind the other; views, made once for all that are made of them.
        self._views_L1GPD = kept_L2GPD.flatten(0, 1).unsqueeze(1)
        self._places_LPGD = kept_L2GPD.flatten(1, 2).transpose(1, 2)

    @property
    def dtype(self) -> torch.dtype:
        """What its numbers are in."""
        return self._kept_L2GPD.dtype

    @property
    def bytes(self) -> int:
        """How much memory it takes."""
        return self._kept_L2GPD.nbytes

    @property
    def is_full(self) -> bool:
        """Whether another token makes it grow."""
        return self.length >= self.room

    def room_for(self, length: int) -> int:
        """How many tokens it has room for, once it has been made to hold so many."""
        if length <= self.room:
            return self.room
        # By an eighth at least: long runs would otherwise be copied for every page.
        return whole_pages(max(length, self.room + self.room // 8))

    def reserve(self, length: int) -> None:
        """Make room for so many tokens in all."""
        if length > self.room:
            self._keep(self._resized(self.room_for(length), self.length), self.length)

    def places(self, start: int, end: int) -> Sequence[Tensor]:
        """Where keys and values of each layer belong: places × 2 · key heads × dimensions."""
        return self._places_LPGD.narrow(1, start, end - start).unbind(0)

    def read(self, start: int, end: int) -> LayerKeys:
        """Keys and values of all layers, as views: 1 × key heads × places × dimensions.

        Of all layers at a time, since views that are made one by one take longer than attention to
        a short sequence does.
        """
        views = self._views_L1GPD.narrow(3, start, end - start).unbind(0)
        return views[::2], views[1::2]

    def address(self) -> tuple[int, int]:
        """Where it is in memory, for kernels, and how many bytes from one head to the next."""
        return self._kept_L2GPD.data_ptr(), self._kept_L2GPD.stride(2) * self._kept_L2GPD.itemsize

    def copy(self, length: int, room: int) -> Run:
        """Its first tokens, in memory of its own, with room for so many."""
        made = object.__new__(Run)
        made._keep(self._resized(whole_pages(room), length), length)
        return made

    def _resized(self, room: int, used: int) -> Tensor:
        old = self._kept_L2GPD
        new = old.new_empty((*old.shape[:3], room, old.shape[4]))
        new[:, :, :, :used] = old[:, :, :, :used]
        return new


class SequenceKeys:
    """What a sequence sees: a run that it shares, if any, and then its own, which grows."""

    def __init__(self, shared: Run | None, own: Run) -> None:
        self.shared = shared
        self.own = own

    @property
    def length(self) -> int:
        """How many tokens it has."""
        return self.own.length + (self.shared.length if self.shared is not None else 0)


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
