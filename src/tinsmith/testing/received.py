"""Every request that came, kept for assertions.

The service adds a `ReceivedRequest` when a request arrives and notes how it ended. Tests read the
log, or wait until so many requests have come, from any thread.
"""

from __future__ import annotations

import collections
import threading
from typing import Any

import msgspec

from tinsmith.errors import ValidationError
from tinsmith.testing.downloads import DOWNLOAD
from tinsmith.wire.endpoints import ENDPOINTS

WAIT_TIMEOUT_S = 60.0
KEPT = 100_000


class ReceivedRequest(msgspec.Struct, kw_only=True, eq=False):
    """One request: where it went, what it said, when it came and how it was answered."""

    number: int
    """Counted from 0 in order of arrival."""
    endpoint: str | None
    """The name in `ENDPOINTS`, or `download`; None for a path that is not there."""
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    """Names in lower case."""
    body_bytes: int
    """As it was sent, compressed or not."""
    body: bytes | None = None
    """The same, with the option `keep_bodies`."""
    connection: int
    arrived_at: float
    """In seconds of `time.monotonic()`."""
    request: Any = None
    """The decoded request; None if it could not be decoded."""
    status: int | None = None
    """What was answered; None while it is under way, and where the reply was lost or broken."""
    client_left: bool = False
    """Whether the client closed its connection before it was answered."""
    is_ended: bool = False


class RequestLog:
    """The newest requests, in order of arrival."""

    def __init__(self) -> None:
        self._requests: collections.deque[ReceivedRequest] = collections.deque(maxlen=KEPT)
        self._changed = threading.Condition()
        self._count = 0

    def add(self, **fields: Any) -> ReceivedRequest:
        """Keep a request that has just come."""
        with self._changed:
            received = ReceivedRequest(number=self._count, **fields)
            self._count += 1
            self._requests.append(received)
            self._changed.notify_all()
        return received

    def end(self, received: ReceivedRequest, status: int | None, *, client_left: bool) -> None:
        """Note how a request was answered."""
        with self._changed:
            received.status, received.client_left = status, client_left
            received.is_ended = True
            self._changed.notify_all()

    def requests(self, endpoint: str | None = None) -> list[ReceivedRequest]:
        """All requests, or those to one endpoint."""
        check_endpoint(endpoint)
        with self._changed:
            return [r for r in self._requests if endpoint in (None, r.endpoint)]

    def in_flight(self, endpoint: str | None = None) -> int:
        """How many requests have come and are not answered yet."""
        return sum(not received.is_ended for received in self.requests(endpoint))

    def wait(
        self, endpoint: str | None, count: int, timeout_s: float = WAIT_TIMEOUT_S
    ) -> list[ReceivedRequest]:
        """Block until `count` requests have come, and give them.

        Raises:
            TimeoutError: Fewer came in time.
        """
        with self._changed:
            came = self._changed.wait_for(lambda: len(self.requests(endpoint)) >= count, timeout_s)
        found = self.requests(endpoint)
        if not came:
            raise TimeoutError(
                f"{len(found)} of {count} requests to {endpoint or 'any endpoint'} "
                f"arrived within {timeout_s:g} s"
            )
        return found

    def wait_ended(self, endpoint: str | None, count: int, timeout_s: float) -> None:
        """Block until `count` requests have ended; raises `TimeoutError`."""

        def ended() -> int:
            return sum(received.is_ended for received in self.requests(endpoint))

        with self._changed:
            if not self._changed.wait_for(lambda: ended() >= count, timeout_s):
                raise TimeoutError(f"{ended()} of {count} requests ended within {timeout_s:g} s")

    def clear(self) -> None:
        """Forget what has come so far."""
        with self._changed:
            self._requests.clear()


def check_endpoint(name: str | None) -> None:
    """Refuse a name that no endpoint has: a test with a typing mistake would pass for ever."""
    known = (*ENDPOINTS, DOWNLOAD)
    if name is not None and name not in known:
        raise ValidationError(
            f"unknown endpoint {name!r}", remedy=f"expected one of {', '.join(known)}"
        )
