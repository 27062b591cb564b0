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

import torch
from torch import Tensor

from tinsmith.model.architecture import Architecture

PAGE_TOKENS = 64


def whole_pages(tokens: int) -> int:
    """So many tokens, and what is left of their last page."""
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS


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
        # Views of each layer, made once: attention asks for them with every token.
        self._layers = [
            (both, both[0].unsqueeze(0), both[1].unsqueeze(0)) for both in kept_L2GPD.unbind(0)
        ]

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

    def write(self, layer: int, place: int, kept_2GTD: Tensor) -> None:
        """Put keys and values of a layer at a place that was reserved."""
        self._layers[layer][0].narrow(2, place, kept_2GTD.shape[2]).copy_(kept_2GTD)

    def read(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, as views: 1 × key heads × places × dimensions."""
        _, keys, values = self._layers[layer]
        return keys.narrow(2, start, end - start), values.narrow(2, start, end - start)

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
