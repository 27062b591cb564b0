"""Vectors that nobody uses any more, for whoever needs one of their size next.

Fresh memory is dear: the system hands it out page by page, and clears it. To fill 40 MB of it, the
weights of an adapter of SmolLM2, takes about seven times as long as to fill 40 MB that were in use
before. Training needs such vectors with every pass and step, and soon has done with others.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

MOST_BYTES = 512 << 20


class SpareVectors:
    """Vectors that were used and may be used again. For any number of threads.

    Args:
        most_bytes: What may be kept; what was given first is let go for it.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, like: Tensor) -> Tensor:
        """A vector of that size, type and device. What is in it means nothing."""
        with self._lock:
            for place in reversed(range(len(self._kept))):  # the last is the likeliest to be cached
                one = self._kept[place]
                if (one.shape, one.dtype, one.device) == (like.shape, like.dtype, like.device):
                    return self._kept.pop(place)
        return torch.empty_like(like)

    def give(self, *vectors: Tensor) -> None:
        """Keep vectors for later. Nobody else may use them from now on."""
        with self._lock:
            self._kept += vectors
            while sum(one.nbytes for one in self._kept) > self._most_bytes:
                self._kept.pop(0)
