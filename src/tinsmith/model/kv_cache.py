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


class Run:
    """See the top of the module."""

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.length = 0
        sizes = (len(architecture.layers), 2, architecture.kv_heads, 0, architecture.head_size)
        # L layer, then keys and values
        self._kept_L2GPD = torch.empty(sizes, dtype=dtype, device=device)

    @property
    def bytes(self) -> int:
        """How much memory it takes."""
        return self._kept_L2GPD.nbytes

    def reserve(self, tokens: int) -> None:
        """Make room for so many more."""
        needed, room = self.length + tokens, self._kept_L2GPD.shape[3]
        if needed > room:
            # By an eighth at least: long runs would otherwise be copied for every page.
            grown = max(needed, room + room // 8)
            self._kept_L2GPD = self._resized(-(-grown // PAGE_TOKENS) * PAGE_TOKENS, self.length)

    def write(self, layer: int, place: int, keys_TGD: Tensor, values_TGD: Tensor) -> None:
        """Put keys and values of a layer at a place that was reserved."""
        end = place + keys_TGD.shape[0]
        self._kept_L2GPD[layer, 0, :, place:end] = keys_TGD.transpose(0, 1)
        self._kept_L2GPD[layer, 1, :, place:end] = values_TGD.transpose(0, 1)

    def read(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, as views: 1 × key heads × places × dimensions."""
        kept = self._kept_L2GPD[layer, :, :, start:end]
        return kept[0].unsqueeze(0), kept[1].unsqueeze(0)

    def copy(self, length: int) -> Run:
        """Its first tokens, in memory of its own."""
        made = object.__new__(Run)
        made.length = length
        made._kept_L2GPD = self._resized(-(-length // PAGE_TOKENS) * PAGE_TOKENS, length)
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
