"""What the client does, told as it happens to whoever listens in this process.

`on_event` registers a function. It is called with one small frozen record for each thing that
happens: a call, a second try, a pause, a result. From these logs, counters and spans can be made;
`docs/observability.md` shows how. Nothing is sent anywhere.

Where nobody listens the cost is one look at `listeners`. Events carry names, ids, sizes, times and
the service's own words for why it pauses, never a credential, a prompt, a token or a body.
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
    """Something that happened."""

    at: float = msgspec.field(default_factory=time.time)
    """When, in seconds of `time.time()`."""


class CallSent(Event, frozen=True, kw_only=True):
    """A request goes out."""

    endpoint: str
    attempt: int
    """From 0; the further tries of one call count up."""
    body_bytes: int


class CallAnswered(Event, frozen=True, kw_only=True):
    """A reply came, perhaps one that refuses."""

    endpoint: str
    attempt: int
    status: int
    duration_s: float
    body_bytes: int
    """Of the reply, decompressed; 0 for a stream, which is told when its head has come."""


class CallFailed(Event, frozen=True, kw_only=True):
    """No reply came, or nobody waits for it any more."""

    endpoint: str
    attempt: int
    error: str
    """The error's class."""
    duration_s: float


class RetryPlanned(Event, frozen=True, kw_only=True):
    """A call failed and will be made again."""

    endpoint: str
    attempt: int
    """The one that failed, from 0."""
    delay_s: float
    reason: str
    """The error's class, and its status if it has one."""


class PauseBegun(Event, frozen=True, kw_only=True):
    """New samples of a key are held back."""

    state: Literal["rate_limited", "queue_paused"]
    for_s: float
    """As known now; it may grow."""
    reason: str


class PauseEnded(Event, frozen=True, kw_only=True):
    """The first sample leaves after a pause."""


class ResultAwaited(Event, frozen=True, kw_only=True):
    """A result has been waited for, for more than ten seconds; told again every minute."""

    kind: str
    """What was asked for, such as `ForwardBackward` or `Sample`."""
    request_id: str
    waited_s: float
    queue_state: str
    reason: str


class ResultSettled(Event, frozen=True, kw_only=True):
    """A result came, or it is known that none will."""

    kind: str
    request_id: str
    waited_s: float
    polls: int
    error: str | None = None
    """The error's class; None if there is a result."""


class SessionOpened(Event, frozen=True, kw_only=True):
    """The service gave us a session."""

    session_id: str
    base_url: str


class SessionClosed(Event, frozen=True, kw_only=True):
    """The client of a session was closed; `session_id` is None if there had been no need of one."""

    session_id: str | None
    reason: str


class HeartbeatFailed(Event, frozen=True, kw_only=True):
    """A heartbeat was not answered."""

    session_id: str
    silent_s: float
    """How long ago the last one was."""
    error: str


Listener: TypeAlias = Callable[[Event], object]

listeners: tuple[Listener, ...] = ()
"""Who listens. Look here before you make an event."""

_lock = threading.Lock()
_faulty: set[int] = set()


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603 - another thread may have held it when this process was forked
    _lock = threading.Lock()


in_child(_renew_lock)


def on_event(listener: Listener) -> Callable[[], None]:
    """Have a function called with every event of every client in this process.

    It is called on the thread that carries the client's traffic: it should be quick, and hand over
    to a thread of its own what takes time. If it raises, that is logged the first time, and the
    call that was under way goes on.

    Args:
        listener: Takes one `Event`; tell them apart by their class.

    Returns:
        A function that ends it. Calling it again does nothing.
    """
    global listeners  # noqa: PLW0603 - one attribute, so that a look at it is all the cost
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
    """Tell everybody who listens."""
    for listener in listeners:
        try:
            listener(event)
        except Exception:  # noqa: BLE001 - user code; its errors must not reach a call
            if id(listener) not in _faulty:
                _faulty.add(id(listener))
                _log.exception("a listener of on_event raised an error; further ones are not told")


async def told_exchange(
    endpoint: str, attempt: int, body_bytes: int, exchange: Awaitable[ExchangeReply]
) -> ExchangeReply:
    """Make an exchange, and tell of its beginning and end."""
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
    """Open a stream, and tell of its beginning and of the reply's head."""
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
    """An error for an event: its class and status, and none of its words."""
    status = f" {error.status_code}" if isinstance(error, APIStatusError) else ""
    return f"{type(error).__name__}{status}"
