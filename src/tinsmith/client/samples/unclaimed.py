"""Ends of samples that nobody waits for: not yet, or not any more.

A sample may have ended before the answer to its submission is here: its end is kept until it is
asked for. One that was given up may end later: its end is dropped, and reported as if it had been
read, so that the service does not keep its result.
"""

from __future__ import annotations

from typing import Generic, TypeVar

C = TypeVar("C")

MOST_UNCLAIMED = 10_000
"""How many of either kind are remembered."""


class Unclaimed(Generic[C]):
    """Those of one sampler and clone. For the background loop."""

    def __init__(self) -> None:
        self._kept: dict[str, C] = {}
        self._given_up: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, request_id: str) -> C | None:
        """What was kept for a sample."""
        return self._kept.pop(request_id, None)

    def keep(self, request_id: str, completion: C) -> bool:
        """Keep the end of a sample until it asks; False if it was given up, and never will."""
        if request_id in self._given_up:
            del self._given_up[request_id]
            return False
        _make_room(self._kept)
        self._kept[request_id] = completion
        return True

    def give_up(self, request_id: str) -> bool:
        """Nobody waits for a sample any more; whether its end was kept here."""
        if self._kept.pop(request_id, None) is not None:
            return True
        _make_room(self._given_up)
        self._given_up[request_id] = None
        return False


def _make_room(remembered: dict[str, C]) -> None:
    if len(remembered) >= MOST_UNCLAIMED:
        remembered.pop(next(iter(remembered)))
