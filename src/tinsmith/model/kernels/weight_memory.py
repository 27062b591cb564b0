"""Memory for packed weights: many matrices lie in one large piece, one behind the other.

A large piece comes in huge pages (`load_models` asks PyTorch for them), which a matrix of a
megabyte by itself does not. With eight rows, the products of SmolLM2's layers take a sixth less
time so, and with 32 a twentieth: in small pages, much of it goes by on finding where an address is.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

PIECE_NUMBERS = 16 << 20
"""Of 32 bits. What of a piece is never written takes no memory."""
_STEP = 16
"""Numbers of a cache line, at which matrices begin."""


class WeightMemory:
    """See the top of the module. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = torch.empty(0, dtype=torch.int32)
        """Of the last piece; one that is full lives as long as a matrix in it does."""

    def take(self, numbers: int) -> Tensor:
        """Room for so many numbers of 32 bits. What is in it means nothing."""
        with self._lock:
            if len(self._left) < numbers:
                self._left = torch.empty(max(numbers, PIECE_NUMBERS), dtype=torch.int32)
            taken = self._left[:numbers]
            self._left = self._left[numbers + -numbers % _STEP :]
        return taken
