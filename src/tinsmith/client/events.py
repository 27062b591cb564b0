"""Events: what the client does, reported to listeners in this process.

`on_event` registers a function. It is called with one small frozen record for each event: a call, a
retry, a pause, a result. Use them for logs, counters and spans; `docs/observability.md` shows how.
Nothing is sent anywhere.

Without listeners the cost is one check of `listeners`. Events carry names, ids, sizes, times and
the service's reason for a pause, never a credential, a prompt, a token or a body.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from tinsmith.client.forking import in_child
from tinsmith.errors import APIStatusError

if TYPE_CHECKING:
    from tinsmith.client.transports.base import ExchangeReply, StreamReply

_log = logging.getLogger(__name__)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """The base class of all events."""

    at: float = msgspec.field(default_factory=time.time)
    """When it happened, in seconds of `time.time()`."""


class CallSent(Event, frozen=True, kw_only=True):
    """A request is sent."""

    endpoint: str
    attempt: int
    """From 0; retries count up."""
    body_bytes: int


class CallAnswered(Event, frozen=True, kw_only=True):
    """A reply arrived, which may be a refusal."""

    endpoint: str
    attempt: int
    status: int
    duration_s: float
    body_bytes: int
    """Of the decompressed reply; 0 for a stream, which is reported when its headers arrive."""


class CallFailed(Event, frozen=True, kw_only=True):
    """No reply arrived, or the call was cancelled."""

    endpoint: str
    attempt: int
    error: str
    """The error's class."""
    duration_s: float


class RetryPlanned(Event, frozen=True, kw_only=True):
    """A call failed and will be retried."""

    endpoint: str
    attempt: int
    """The attempt that failed, from 0."""
    delay_s: float
    reason: str
    """The error's class, and its status if it has one."""


class PauseBegun(Event, frozen=True, kw_only=True):
    """New samples of a key are paused."""

    state: Literal["rate_limited", "queue_paused"]
    for_s: float
    """As known now; it may become longer."""
    reason: str


class PauseEnded(Event, frozen=True, kw_only=True):
    """The first sample is sent after a pause."""


class ResultAwaited(Event, frozen=True, kw_only=True):
    """A result has been pending for more than ten seconds; repeated every minute."""

    kind: str
    """The kind of the result, such as `ForwardBackward` or `Sample`."""
    request_id: str
    waited_s: float
    queue_state: str
    reason: str


class ResultSettled(Event, frozen=True, kw_only=True):
    """A result arrived, or the call failed."""

    kind: str
    request_id: str
    waited_s: float
    polls: int
    error: str | None = None
    """The error's class; None if there is a result."""


class SessionOpened(Event, frozen=True, kw_only=True):
    """A session was opened."""

    session_id: str
    base_url: str


class SessionClosed(Event, frozen=True, kw_only=True):
    """A session was closed; `session_id` is None if it had never been opened."""

    session_id: str | None
    reason: str


class HeartbeatFailed(Event, frozen=True, kw_only=True):
    """A heartbeat was not answered."""

    session_id: str
    silent_s: float
    """How long ago the last one was answered."""
    error: str


Listener: TypeAlias = Callable[[Event], object]

listeners: tuple[Listener, ...] = ()
"""The registered listeners. Check it before creating an event."""

_lock = threading.Lock()
_faulty: set[int] = set()


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603 - another thread may have held it when this process was forked
    _lock = threading.Lock()


in_child(_renew_lock)


def on_event(listener: Listener) -> Callable[[], None]:
    """Call a function with every event of every client in this process.

    It is called on the client's I/O thread: it should return quickly, and use a thread of its own
    for slow work. If it raises, that is logged the first time, and the call continues.

    Args:
        listener: Receives one `Event`; distinguish them by their class.

    Returns:
        A function that removes the listener. Calling it again has no effect.
    """
    global listeners  # noqa: PLW0603 - one attribute, so that checking it is all the cost
    entry: Listener = lambda event: listener(event)  # noqa: E731, PLW0108 - removable by identity
    with _lock:
        listeners = (*listeners, entry)

    def remove() -> None:
        global listeners  # noqa: PLW0603 - as above
        with _lock:
            listeners = tuple(one for one in listeners if one is not entry)
            _faulty.discard(id(entry))

    return remove


def tell(event: Event) -> None:
    """Pass an event to all listeners."""
    for listener in listeners:
        try:
            listener(event)
        except Exception:  # noqa: BLE001 - user code; its errors must not reach a call
            if id(listener) not in _faulty:
                _faulty.add(id(listener))
                _log.exception("an on_event listener failed; its further errors are not logged")


async def told_exchange(
    endpoint: str, attempt: int, body_bytes: int, exchange: Awaitable[ExchangeReply]
) -> ExchangeReply:
    """Make an exchange, and report its start and end."""
    began = time.monotonic()
    tell(CallSent(endpoint=endpoint, attempt=attempt, body_bytes=body_bytes))
    try:
        reply = await exchange
    except BaseException as error:
        tell(
            CallFailed(
                endpoint=endpoint,
                attempt=attempt,
                error=type(error).__name__,
                duration_s=time.monotonic() - began,
            )
        )
        raise
    tell(
        CallAnswered(
            endpoint=endpoint,
            attempt=attempt,
            status=reply.status,
            duration_s=time.monotonic() - began,
            body_bytes=len(reply.body),
        )
    )
    return reply


@contextlib.asynccontextmanager
async def told_stream(
    endpoint: str, body_bytes: int, stream: AbstractAsyncContextManager[StreamReply]
) -> AsyncIterator[StreamReply]:
    """Open a stream, and report its start and the arrival of its headers."""
    began = time.monotonic()
    tell(CallSent(endpoint=endpoint, attempt=0, body_bytes=body_bytes))
    is_answered = False
    try:
        async with stream as reply:
            is_answered = True
            took_s = time.monotonic() - began
            tell(
                CallAnswered(
                    endpoint=endpoint,
                    attempt=0,
                    status=reply.status,
                    duration_s=took_s,
                    body_bytes=0,
                )
            )
            yield reply
    except BaseException as error:
        if not is_answered:
            took_s = time.monotonic() - began
            name = type(error).__name__
            tell(CallFailed(endpoint=endpoint, attempt=0, error=name, duration_s=took_s))
        raise


def named(error: BaseException) -> str:
    """An error for an event: its class and status, without its message."""
    status = f" {error.status_code}" if isinstance(error, APIStatusError) else ""
    return f"{type(error).__name__}{status}"
