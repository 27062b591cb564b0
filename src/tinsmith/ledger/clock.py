"""The ledger's time: it starts from the wall clock and then only ever runs forward.

The wall clock can be set, by a person or by its keeper. A jump ahead would expire every result at
once, a jump back would keep them for ever. So the wall clock is read once, when a ledger is
opened, and from then on the monotonic clock counts. What was written before the opening moves the
start up to itself: times in one ledger never run backwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]


class SteadyClock:
    """Seconds since the epoch, whatever happens to the wall clock meanwhile."""

    def __init__(self, wall: Clock = time.time, monotonic: Clock = time.monotonic) -> None:
        self._monotonic = monotonic
        self._ahead_s = wall() - monotonic()

    def now(self) -> float:
        """The time."""
        return self._monotonic() + self._ahead_s

    def start_after(self, moment: float) -> None:
        """Move ahead so that nothing is earlier than what was written at `moment`."""
        self._ahead_s += max(0.0, moment - self.now())
