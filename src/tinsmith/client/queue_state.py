"""Telling the user that a queue on the server is paused.

Pending answers of a poll carry the state of the queue. `StateTeller` hands it to the client that
made the call, whose `on_queue_state_change` logs it; programs replace that method to show it in
their own way. It runs on the thread for callbacks, so that a slow one holds up no traffic, and
where states come faster than it runs, it sees the latest.
"""

from __future__ import annotations

import abc
import enum
import logging
import time
import weakref
from collections.abc import Callable

from tinsmith.client.futures import run_callback

_log = logging.getLogger(__name__)

LOGGED_EVERY_S = 60.0
_REASONS = {
    "paused_rate_limit": "too many at once for this account",
    "paused_capacity": "the service is short of capacity",
}


class QueueState(enum.Enum):
    """What a queue on the server does."""

    ACTIVE = "active"
    PAUSED_RATE_LIMIT = "paused_rate_limit"
    PAUSED_CAPACITY = "paused_capacity"
    UNKNOWN = "unknown"

    @classmethod
    def parse(cls, text: str) -> QueueState:
        """The state of that name; one that is not known is `UNKNOWN`."""
        try:
            return cls(text)
        except ValueError:
            return cls.UNKNOWN


class QueueStateObserver(abc.ABC):
    """Something that wants to know the state of a queue."""

    @abc.abstractmethod
    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None
    ) -> None:
        """The queue has this state, for the reason that the server gave, if it did."""


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
        """Log it, unless the queue moves or it was logged within the last minute."""
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
    """The state of a queue for a line that says what is waited for."""
    return f"the queue is {state}: {reason}" if reason else f"the queue is {state}"


class StateTeller:
    """Hands the states of a queue to one observer, which it does not keep alive.

    It knows the latest, also for those who tell of long waits.
    """

    def __init__(self, observer: object) -> None:
        self._observer = weakref.ref(observer)
        self._latest = self._known = _UNKNOWN
        self._is_waiting = False

    @property
    def latest(self) -> str:
        """The state that is known last, with its reason, in words; empty if none is."""
        if self._known is _UNKNOWN:
            return ""
        state, reason = self._known
        return in_words(state.value, reason or "")

    def queue_moves(self) -> None:
        """Results came, and so the queue is not paused; that is not worth telling."""
        self._known = _MOVING

    def tell(self, state: str, reason: str) -> None:
        """A poll brought this state. Returns at once."""
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
