"""What is waited for, told in the log: a warning once where a wait is unusual.

A user waits for a future that is not settled: it may be queued, held back by a pause, between two
attempts, on the server, in a download or in a loss of the user's own. That is normal work, however
long it takes: a training step may well last a minute. It is *unusual* when it has lasted several
times as long as calls of its kind, and those ahead of it, did lately (`FUTURES`), or when a request
has no answer or the service asked for a pause. Of unusual waits one warning tells, and no other
until a call of that kind has ended in its usual time. Retries and paused queues are told by those
who know of them (`retry.py`, `queue_state.py`).

One look per second serves all waits of a kind; of those with one name one line tells, with the
reasons that were last given by `say`. Programs that ask for INFO get a line every ten seconds for
whatever takes longer than that.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
UNUSUAL_FACTOR = 5.0
"""A wait is unusual beyond so many times the median of its kind."""
LEAST_KNOWN = 3
"""Of so many calls of a kind on their median says what is usual."""
REMEMBERED = 31
"""So many of the latest of a kind count."""

Later = Callable[[float, Callable[[], None]], Any]
"""Has something called after so many seconds."""


class Telling(msgspec.Struct, frozen=True, kw_only=True):
    """When a kind of waits is told, and how."""

    after_s: float
    every_s: float
    unknown_s: float
    """From when on a wait is unusual where nothing is known of its kind."""
    text: str


FUTURES = Telling(after_s=9.0, every_s=9.0, unknown_s=60.0, text="still running")
"""With the time between two looks, within ten seconds."""
ANSWERS = Telling(after_s=10.0, every_s=60.0, unknown_s=0.0, text="no answer from the service")


class Wait(msgspec.Struct):
    """Something that somebody waits for."""

    what: str
    began: float
    reason: str = ""
    is_stalled: bool = False
    """Whether it is held up: by a pause, or by an answer that should be there at once."""
    is_over: bool = False

    @property
    def kind(self) -> str:
        """The call, without what it is made on."""
        return self.what.partition(" of ")[0]


_current: contextvars.ContextVar[Wait | None] = contextvars.ContextVar("wait", default=None)


def say(reason: str, *, is_stalled: bool = False) -> None:
    """Say what the work that runs here is waiting for, from now on."""
    wait = _current.get()
    if wait is not None:
        wait.reason, wait.is_stalled = reason, is_stalled


@contextlib.contextmanager
def saying(reason: str, *, is_stalled: bool = False) -> Iterator[bool]:
    """As `say`, until the block ends; gives whether there is a wait that will tell it."""
    wait = _current.get()
    # A connection, or whatever else outlives the wait that it was made in, keeps its context.
    if wait is None or wait.is_over:
        yield False
        return
    before = wait.reason, wait.is_stalled
    wait.reason, wait.is_stalled = reason, is_stalled
    try:
        yield True
    finally:
        wait.reason, wait.is_stalled = before


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
        self._lasted: dict[str, deque[float]] = {}
        """How long the latest waits of each kind took."""
        self._oldest: dict[str, Wait] = {}
        """The oldest waits of the sources, at the last look."""
        self._warned: set[str] = set()
        """Kinds of which a warning has told, and that were not back to normal since."""
        self._ended_usually: set[str] = set()
        """Those of them of which a call ended in its usual time since the last look."""
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
        if self._waits.pop(id(wait), None) is not None:
            self._note_end(wait)

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
        self._note_ends_of_sources(others)
        waits = [*self._waits.values(), *others]
        long: dict[str, list[Wait]] = {}
        for wait in waits:
            if now - wait.began >= self._telling.after_s:
                long.setdefault(wait.what, []).append(wait)
        self._told_at = {what: self._told_at.get(what, float("-inf")) for what in long}
        unusual = {what for what, group in long.items() if self._is_unusual(group, waits, now)}
        self._warned -= self._ended_usually - {long[what][0].kind for what in unusual}
        self._ended_usually.clear()
        for what, group in long.items():
            is_new = what in unusual and group[0].kind not in self._warned
            if is_new:
                self._warned.add(group[0].kind)
            if is_new or now - self._told_at[what] >= self._telling.every_s:
                self._told_at[what] = now
                level = logging.WARNING if is_new else logging.INFO
                _log.log(level, "%s", self._text(what, group, now))
        self._is_looking = bool(waits)
        if waits:
            self._look_later()

    def _is_unusual(self, group: list[Wait], waits: list[Wait], now: float) -> bool:
        """Whether one of them takes unusually long, or is held up.

        A call may be queued behind those that were made before it, and take as long as they do.
        """
        began = min(wait.began for wait in group)
        ahead = {wait.kind for wait in waits if wait.began <= began}
        limit_s = max(map(self._usual_limit_s, ahead))
        return any(wait.is_stalled or now - wait.began >= limit_s for wait in group)

    def _usual_limit_s(self, kind: str) -> float:
        usual_s = self._usual_s(kind)
        return self._telling.unknown_s if usual_s is None else UNUSUAL_FACTOR * usual_s

    def _usual_s(self, kind: str) -> float | None:
        lasted = self._lasted.get(kind, ())
        if len(lasted) < LEAST_KNOWN:
            return None
        return sorted(lasted)[len(lasted) // 2]  # `statistics` is much to load for a median

    def _note_end(self, wait: Wait) -> None:
        kind, lasted_s = wait.kind, self._clock() - wait.began
        if kind in self._warned:
            if lasted_s >= max(self._telling.after_s, self._usual_limit_s(kind)):
                return  # it says nothing of what is usual
            self._ended_usually.add(kind)
        self._lasted.setdefault(kind, deque(maxlen=REMEMBERED)).append(lasted_s)

    def _note_ends_of_sources(self, waits: list[Wait]) -> None:
        oldest = {wait.what: wait for wait in sorted(waits, key=lambda one: -one.began)}
        for what, before in self._oldest.items():
            after = oldest.get(what)
            if after is None or after.began > before.began:
                self._note_end(before)
        self._oldest = oldest

    def _text(self, what: str, group: list[Wait], now: float) -> str:
        waited_s = now - min(wait.began for wait in group)
        count = f" ({len(group)} of them)" if len(group) > 1 else ""
        usual_s = self._usual_s(group[0].kind)
        usual = "" if usual_s is None else f", usually {usual_s:.0f} s"
        reasons = "; ".join(sorted({wait.reason for wait in group if wait.reason}))
        because = f" ({reasons})" if reasons else ""
        return f"{what}{count}: {self._telling.text} after {waited_s:.0f} s{usual}{because}"
