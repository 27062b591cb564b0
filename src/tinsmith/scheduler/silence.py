"""Calls of the engine that do not come back: how long the longest has taken, and what it is.

Nothing is done about one. An engine may be slow for good reasons, and whoever operates the service
knows what is too long (`engine_silence_s`); the log, `/readyz` and a metric say it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator

_log = logging.getLogger(__name__)


class Silence:
    """The engine's calls under way. For one event loop.

    Args:
        most_s: How long one may take before it is told of; 0 for any time.
        clock: Seconds that only run forward.
    """

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s = most_s
        self._clock = clock
        self._numbers = itertools.count()
        self._calls: dict[int, tuple[float, str]] = {}
        self._told: int | None = None

    @contextlib.contextmanager
    def call(self, what: str) -> Iterator[None]:
        """Around a call of the engine; `what` says for whom."""
        number = next(self._numbers)
        self._calls[number] = self._clock(), what
        try:
            yield
        finally:
            del self._calls[number]

    def longest_s(self) -> float:
        """How long the longest has taken so far."""
        since = min((since for since, _ in self._calls.values()), default=None)
        return 0.0 if since is None else self._clock() - since

    def problem(self) -> str | None:
        """What is to be told of it, if that is too long; the log has it once."""
        if not self._most_s or self.longest_s() < self._most_s:
            return None
        number, (since, what) = min(self._calls.items(), key=lambda item: item[1][0])
        if self._told != number:
            self._told = number
            _log.error("the engine has not come back for %g s from %s", self._most_s, what)
        return f"the engine has not come back for {self._clock() - since:.0f} s from {what}"
