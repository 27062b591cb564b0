"""What is waited for, told in the log, so that no wait is silent.

A user waits for a future that is not settled: it may be in a line, held back by a pause, between
two tries, on the server, in a download or in a loss of the user's own. That may be as it should be,
and is told every ten seconds (`FUTURES`). A request that nobody answers is a fault: it is told as
the reason of the call that waits for it, and by itself, every minute, if none does (`ANSWERS`).

One look per second serves all waits of a kind; of those with one name one line tells, with the
reasons that were last given by `say`. It is a warning once a minute, for programs that have set up
no logging: Python shows them warnings alone. The other lines are for those who asked for INFO.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
WARN_EVERY_S = 60.0
"""Of waits with one name, from call to call: a loop of long steps is no reason for a line each."""

Later = Callable[[float, Callable[[], None]], Any]
"""Has something called after so many seconds."""


class Telling(msgspec.Struct, frozen=True, kw_only=True):
    """When a kind of waits is told, and how."""

    after_s: float
    every_s: float
    text: str


FUTURES = Telling(after_s=9.0, every_s=9.0, text="waiting")
"""With the time between two looks, within ten seconds."""
ANSWERS = Telling(after_s=10.0, every_s=60.0, text="no answer from the service")


class Wait(msgspec.Struct):
    """Something that somebody waits for."""

    what: str
    began: float
    reason: str = ""
    is_over: bool = False


_current: contextvars.ContextVar[Wait | None] = contextvars.ContextVar("wait", default=None)


def say(reason: str) -> None:
    """Say what the work that runs here is waiting for, from now on."""
    wait = _current.get()
    if wait is not None:
        wait.reason = reason


@contextlib.contextmanager
def saying(reason: str) -> Iterator[bool]:
    """As `say`, until the block ends; gives whether there is a wait that will tell it."""
    wait = _current.get()
    # A connection, or whatever else outlives the wait that it was made in, keeps its context.
    if wait is None or wait.is_over:
        yield False
        return
    before, wait.reason = wait.reason, reason
    try:
        yield True
    finally:
        wait.reason = before


def unattended() -> contextvars.Context:
    """The context for work that no user waits for, whoever set it off."""
    context = contextvars.copy_context()
    context.run(_current.set, None)
    return context


class Waits:
    """The waits of one kind on one event loop.

    `sources` are asked for further waits with each look; they keep count themselves, and leave the
    set when they have none.
    """

    def __init__(
        self,
        telling: Telling,
        *,
        clock: Callable[[], float] = time.monotonic,
        later: Later | None = None,
    ) -> None:
        self._telling = telling
        self._clock = clock
        self._later = later
        self._waits: dict[int, Wait] = {}
        self.sources: set[Callable[[], Iterable[Wait]]] = set()
        self._told_at: dict[str, float] = {}
        self._warned_at: dict[str, float] = {}
        self._is_looking = False

    def begin(self, what: str) -> Wait:
        """Note that something is waited for."""
        wait = Wait(what, self._clock())
        self._waits[id(wait)] = wait
        self.look_on()
        return wait

    def begin_here(self, what: str) -> Wait:
        """As `begin`, in the task that does the work: what it does may `say` why it takes long."""
        wait = self.begin(what)
        _current.set(wait)
        return wait

    def end(self, wait: Wait) -> None:
        """Note that it is not waited for any more."""
        wait.is_over = True
        self._waits.pop(id(wait), None)

    def look_on(self) -> None:
        """See to it that whoever waits is looked at."""
        if not self._is_looking:
            self._is_looking = True
            self._look_later()

    def _look_later(self) -> None:
        later = self._later or asyncio.get_running_loop().call_later
        later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        now = self._clock()
        others = [wait for source in list(self.sources) for wait in source()]
        waits = [*self._waits.values(), *others]
        long: dict[str, list[Wait]] = {}
        for wait in waits:
            if now - wait.began >= self._telling.after_s:
                long.setdefault(wait.what, []).append(wait)
        self._told_at = {what: self._told_at.get(what, float("-inf")) for what in long}
        for what, group in long.items():
            if now - self._told_at[what] >= self._telling.every_s:
                self._told_at[what] = now
                _tell(self._telling, what, group, now, self._level(what, now))
        self._is_looking = bool(waits)
        if waits:
            self._look_later()

    def _level(self, what: str, now: float) -> int:
        recent = {name: at for name, at in self._warned_at.items() if now - at < WARN_EVERY_S}
        self._warned_at = {what: now, **recent}
        return logging.INFO if what in recent else logging.WARNING


def _tell(telling: Telling, what: str, group: list[Wait], now: float, level: int) -> None:
    oldest = min(group, key=lambda wait: wait.began)
    waited_s = now - oldest.began
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited_s))
    reasons = sorted({wait.reason for wait in group if wait.reason})
    _log.log(
        level,
        "%s%s: %s for %.0f s, since %s%s",
        what,
        f" ({len(group)} of them)" if len(group) > 1 else "",
        telling.text,
        waited_s,
        since,
        f", for {'; '.join(reasons)}" if reasons else "",
    )
