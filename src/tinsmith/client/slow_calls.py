"""Calls whose answer is long in coming, told in the log so that no wait is silent.

One look per second serves all calls under way; a call itself costs an entry in a table. Of calls of
one kind that wait at the same time one line tells, and again every minute.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)

TOLD_AFTER_S = 10.0
TOLD_EVERY_S = 60.0
LOOK_EVERY_S = 1.0

Later = Callable[[float, Callable[[], None]], Any]
"""Has something called after so many seconds."""


class SlowCalls:
    """The calls of one client that are under way. For one event loop."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, later: Later | None = None
    ) -> None:
        self._clock = clock
        self._later = later
        self._waiting: dict[object, tuple[str, float]] = {}
        self._told_at: dict[str, float] = {}
        self._is_looking = False

    def begin(self, what: str) -> object:
        """Note that an answer is awaited from now on; to be ended with what is returned."""
        key = object()
        self._waiting[key] = (what, self._clock())
        if not self._is_looking:
            self._is_looking = True
            self._look_later()
        return key

    def end(self, key: object) -> None:
        """Note that the answer is no longer awaited."""
        self._waiting.pop(key, None)

    def _look_later(self) -> None:
        later = self._later or asyncio.get_running_loop().call_later
        later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        now = self._clock()
        slow: dict[str, list[float]] = {}
        for what, began in self._waiting.values():
            if now - began < TOLD_AFTER_S:
                break  # they are in the order in which they began
            slow.setdefault(what, []).append(now - began)
        self._told_at = {what: self._told_at.get(what, float("-inf")) for what in slow}
        for what, waits in slow.items():
            if now - self._told_at[what] >= TOLD_EVERY_S:
                self._told_at[what] = now
                _tell(what, waits)
        self._is_looking = bool(self._waiting)
        if self._is_looking:
            self._look_later()


def _tell(what: str, waits: list[float]) -> None:
    longest_s = max(waits)
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - longest_s))
    others = f" ({len(waits)} of them)" if len(waits) > 1 else ""
    _log.warning(
        "%s%s: no answer from the service for %.0f s, since %s", what, others, longest_s, since
    )
