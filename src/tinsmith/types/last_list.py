"""The list of token ids that became a chunk last, for whoever writes those ids as text at once.

To make Python numbers of packed memory takes twice as long as to write them as text. A program that
samples mostly makes a prompt of a list and has it drawn from in the next line; the numbers are
still there then. So the last list, copied, is kept from when somebody first asked for one: it
costs nobody else memory.

One list for all threads: where two take turns, one of them finds that of the other, and its ids are
written from memory. No lock: what is kept is one object, which is put and taken whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinsmith.types.buffers import Numbers

MOST_IDS = 128 * 1024
"""The longest list that is kept: with its numbers, up to 5 MB."""


class LastList:
    """Keeps one list, once it is wanted."""

    def __init__(self) -> None:
        self._is_wanted = False
        self._kept: tuple[Numbers, Sequence[Any]] | None = None

    def copied(self, values: Any) -> Any:
        """What to pack in place of `values`: a copy that nobody can change, if it will be kept."""
        # Packing gathers a list into a tuple of its own, and a tuple as it is: this costs nothing.
        wants = self._is_wanted and type(values) is list and len(values) <= MOST_IDS
        return tuple(values) if wants else values

    def keep(self, numbers: Numbers, values: Any) -> None:
        """Remember what `copied` gave, and the numbers that were packed from it."""
        if not self._is_wanted or type(values) is not tuple or len(values) > MOST_IDS:
            return
        # Not the elements of a tensor: each holds all of its memory, perhaps a GPU's.
        if values and type(values[0]) is int:
            self._kept = (numbers, values)

    def take(self, numbers: Numbers) -> Sequence[Any] | None:
        """What these numbers were packed from, if that was the last; it is forgotten then.

        They are values that fit, in the caller's own types: an integer may be a bool.
        """
        self._is_wanted = True
        kept = self._kept
        if kept is None or kept[0] is not numbers:
            return None
        self._kept = None
        return kept[1]


LAST_LIST = LastList()
