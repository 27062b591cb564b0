"""What users read about waiting: warnings about unusual waits, and paused queues.

A future that is not settled may be queued, paused, between two attempts, running on the server,
downloading something, or running a custom loss. That is normal, however long it takes: a training
step may well last a minute. A wait is *unusual* when it has lasted several times as long as recent
calls of its kind and those ahead of it (`FUTURES`), when a request has no answer, or when the
service asked for a pause. One warning is logged, and no other until a call of that kind has ended
in its usual time. `retry.py` logs retries.

One check per second serves all waits of a kind. Waits of the same name share a line, with the
reasons last given by `say`. At level INFO, whatever takes longer than ten seconds is logged every
ten seconds.

**Paused queues.** Pending answers of a poll carry the state of the queue. `StateTeller` passes it
to the client that made the call, whose `on_queue_state_change` logs it; programs replace that
method to show it in their own way. It runs on the thread for callbacks, so that a slow one does not
block I/O. If states arrive faster than it runs, it sees the latest.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import contextvars
import enum
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from tinsmith.client.futures import run_callback

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
UNUSUAL_FACTOR = 5.0
"""A wait is unusual beyond so many times the median of its kind."""
LEAST_KNOWN = 3
"""From so many calls of a kind on, their median defines what is usual."""
REMEMBERED = 31
"""How many of the latest calls of a kind count."""

Later = Callable[[float, Callable[[], None]], Any]
"""Calls a function after so many seconds."""


class Telling(msgspec.Struct, frozen=True, kw_only=True):
    """When and how waits of a kind are logged."""

    after_s: float
    every_s: float
    unknown_s: float
    """When a wait is unusual if too few calls of its kind are known."""
    text: str


FUTURES = Telling(after_s=9.0, every_s=9.0, unknown_s=60.0, text="still running")
"""Together with the time between two checks, within ten seconds."""
ANSWERS = Telling(after_s=10.0, every_s=60.0, unknown_s=0.0, text="no answer from the service")


class Wait(msgspec.Struct):
    """Something that a user waits for."""

    what: str
    began: float
    reason: str = ""
    is_stalled: bool = False
    """Whether it is paused, or lacks an answer that should come immediately."""
    is_over: bool = False

    @property
    def kind(self) -> str:
        """The call, without the id of its model or sampler."""
        return self.what.partition(" of ")[0]


_current: contextvars.ContextVar[Wait | None] = contextvars.ContextVar("wait", default=None)


def say(reason: str, *, is_stalled: bool = False) -> None:
    """Set the reason for the wait of the current task."""
    wait = _current.get()
    if wait is not None:
        wait.reason, wait.is_stalled = reason, is_stalled


@contextlib.contextmanager
def saying(reason: str, *, is_stalled: bool = False) -> Iterator[bool]:
    """As `say`, until the block ends; yields whether there is a wait that will be logged."""
    wait = _current.get()
    # A connection, or whatever else outlives the wait that created it, keeps its context.
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
    """The context for a task that no user waits for."""
    context = contextvars.copy_context()
    context.run(_current.set, None)
    return context


class WaitReporter:
    """Logs the long waits of one kind on one event loop.

    `sources` are asked for further waits at each check; they remove themselves from the set when
    they have none.
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
        """How long the latest waits of each kind lasted."""
        self._oldest: dict[str, Wait] = {}
        """The oldest waits of the sources, at the last check."""
        self._warned: set[str] = set()
        """Kinds with a warning that have not been back to normal since."""
        self._ended_usually: set[str] = set()
        """Those of them with a call that ended in its usual time since the last check."""
        self._is_looking = False

    def begin(self, what: str) -> Wait:
        """Start a wait."""
        wait = Wait(what, self._clock())
        self._waits[id(wait)] = wait
        self.look_on()
        return wait

    def begin_here(self, what: str) -> Wait:
        """As `begin`, in the task that does the work, which may `say` why it takes long."""
        wait = self.begin(what)
        _current.set(wait)
        return wait

    def end(self, wait: Wait) -> None:
        """End a wait."""
        wait.is_over = True
        if self._waits.pop(id(wait), None) is not None:
            self._note_end(wait)

    def look_on(self) -> None:
        """Start the regular checks, unless they run."""
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
        """Whether one of them takes unusually long, or is stalled.

        A call may be queued behind earlier ones, and take as long as they do.
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
        return sorted(lasted)[len(lasted) // 2]  # importing `statistics` would cost more

    def _note_end(self, wait: Wait) -> None:
        kind, lasted_s = wait.kind, self._clock() - wait.began
        if kind in self._warned:
            if lasted_s >= max(self._telling.after_s, self._usual_limit_s(kind)):
                return  # it does not show what is usual
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


LOGGED_EVERY_S = 60.0
_REASONS = {
    "paused_rate_limit": "rate limit of this account",
    "paused_capacity": "the service is out of capacity",
}


class QueueState(enum.Enum):
    """The state of a queue on the server."""

    ACTIVE = "active"
    PAUSED_RATE_LIMIT = "paused_rate_limit"
    PAUSED_CAPACITY = "paused_capacity"
    UNKNOWN = "unknown"

    @classmethod
    def parse(cls, text: str) -> QueueState:
        """The state of that name; `UNKNOWN` if there is none."""
        try:
            return cls(text)
        except ValueError:
            return cls.UNKNOWN


class QueueStateObserver(abc.ABC):
    """Receives the state of a queue."""

    @abc.abstractmethod
    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None
    ) -> None:
        """Called with the state of the queue, and the server's reason if it gave one."""


class QueueStateLogger(QueueStateObserver):
    """Logs that a queue is paused, at most once a minute."""

    def __init__(
        self,
        identifier: str,
        message_prefix: str = "Operation",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = f"{message_prefix} for {identifier}"
        self._clock = clock
        self._logged_at: float | None = None

    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None
    ) -> None:
        """Log a paused queue, unless that was logged within the last minute."""
        now = self._clock()
        is_recent = self._logged_at is not None and now - self._logged_at < LOGGED_EVERY_S
        if queue_state is QueueState.ACTIVE or is_recent:
            return
        self._logged_at = now
        reason = queue_state_reason or _REASONS.get(queue_state.value, queue_state.value)
        _log.warning("%s is paused. Reason: %s", self._what, reason)


_UNKNOWN: tuple[QueueState, str | None] = (QueueState.UNKNOWN, None)
_MOVING: tuple[QueueState, str | None] = (QueueState.ACTIVE, None)


def in_words(state: str, reason: str) -> str:
    """The state of a queue, for a log line about a wait."""
    return f"the queue is {state}: {reason}" if reason else f"the queue is {state}"


class StateTeller:
    """Passes the states of a queue to one observer, which it does not keep alive.

    It also keeps the latest one, for log lines about long waits.
    """

    def __init__(self, observer: object) -> None:
        self._observer = weakref.ref(observer)
        self._latest = self._known = _UNKNOWN
        self._is_waiting = False

    @property
    def latest(self) -> str:
        """The latest state and its reason, in words; empty if none is known."""
        if self._known is _UNKNOWN:
            return ""
        state, reason = self._known
        return in_words(state.value, reason or "")

    def queue_moves(self) -> None:
        """Results arrived, so the queue is not paused; the observer is not called."""
        self._known = _MOVING

    def tell(self, state: str, reason: str) -> None:
        """Report the state that a poll brought. Returns immediately."""
        self._latest = self._known = (QueueState.parse(state), reason or None)
        if not self._is_waiting:
            self._is_waiting = True
            run_callback(self._call)

    def _call(self) -> None:
        self._is_waiting = False
        observer = self._observer()
        if observer is not None:
            # Looked up now: programs replace the method on the class or on the object.
            observer.on_queue_state_change(*self._latest)  # type: ignore[attr-defined]
