"""What users wait for, told in the log every ten seconds, so that no wait is silent.

A wait is a future that is not settled: it may be in a line, held back by a pause, between two
tries, on the server, in a download or in a loss of the user's own. One look per second serves all
of them; of those with one name one line tells, with the reasons that were last given by `say`.

`slow_calls.py` tells of single requests that nobody answers, which is a fault; a wait may be as it
should be, and is told at the level INFO.
"""

from __future__ import annotations

import contextvars
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
TOLD_AFTER_S = 9.0
"""With the time between two looks, at most ten seconds."""

Later = Callable[[float, Callable[[], None]], Any]
"""Has something called after so many seconds."""


class Wait(msgspec.Struct):
    """Something that somebody waits for."""

    what: str
    began: float
    reason: str = ""


_current: contextvars.ContextVar[Wait | None] = contextvars.ContextVar("wait", default=None)


def say(reason: str) -> None:
    """Say what the work that runs here is waiting for, from now on."""
    wait = _current.get()
    if wait is not None:
        wait.reason = reason


class Waits:
    """All waits of one event loop.

    `sources` are asked for further waits with each look; they keep count themselves, and leave the
    set when they have none.
    """

    def __init__(self, clock: Callable[[], float], later: Later) -> None:
        self._clock = clock
        self._later = later
        self._waits: dict[int, Wait] = {}
        self.sources: set[Callable[[], Iterable[Wait]]] = set()
        self._told_at: dict[str, float] = {}
        self._is_looking = False

    def begin(self, what: str) -> Wait:
        """Note that something is waited for; to be called in the task that does the work."""
        wait = Wait(what, self._clock())
        self._waits[id(wait)] = wait
        _current.set(wait)
        self.look_on()
        return wait

    def end(self, wait: Wait) -> None:
        """Note that it is not waited for any more."""
        self._waits.pop(id(wait), None)

    def look_on(self) -> None:
        """See to it that whoever waits is looked at."""
        if not self._is_looking:
            self._is_looking = True
            self._later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        now = self._clock()
        others = [wait for source in list(self.sources) for wait in source()]
        waits = [*self._waits.values(), *others]
        long: dict[str, list[Wait]] = {}
        for wait in waits:
            if now - wait.began >= TOLD_AFTER_S:
                long.setdefault(wait.what, []).append(wait)
        self._told_at = {what: self._told_at.get(what, float("-inf")) for what in long}
        for what, group in long.items():
            if now - self._told_at[what] >= TOLD_AFTER_S:
                self._told_at[what] = now
                _tell(what, group, now)
        self._is_looking = bool(waits)
        if waits:
            self._later(LOOK_EVERY_S, self._look)


def _tell(what: str, group: list[Wait], now: float) -> None:
    oldest = min(group, key=lambda wait: wait.began)
    waited_s = now - oldest.began
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited_s))
    reasons = sorted({wait.reason for wait in group if wait.reason})
    _log.info(
        "%s%s: waiting for %.0f s, since %s%s",
        what,
        f" ({len(group)} of them)" if len(group) > 1 else "",
        waited_s,
        since,
        f", for {'; '.join(reasons)}" if reasons else "",
    )
