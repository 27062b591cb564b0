"""Reading replies off a socket: what every connection of ours does, whatever it does with them.

`ReplyProtocol` is an `asyncio.Protocol` on top of the `httptools` parser.
`transports/connection.py` gathers whole replies with it, `transports/stream_connection.py` hands
bodies on as they come.

A server is not trusted: what is neither a body nor sound HTTP is bounded, however it is cut up.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

import httptools

from tinsmith.errors import BodyTooLargeError

MOST_OVERHEAD_BYTES = 256 * 1024
"""How much may come before or between the pieces of a body: headers, interim replies, trailers."""
_BODILESS = (204, 304)


class ConnectionLostError(ConnectionError):
    """The connection ended before the whole reply was there."""

    def __init__(self, message: str, *, is_untouched: bool) -> None:
        super().__init__(message)
        self.is_untouched = is_untouched
        """Whether not one byte of a reply had come."""
        self.is_tls_alert = False
        """Whether what came instead of a reply is an alert of TLS."""


class ReplyProtocol(asyncio.Protocol, ABC):
    """One end of a connection, for one event loop."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._overhead_bytes = 0
        self._is_touched = False
        self._is_ended = False
        self.headers: dict[str, str] = {}
        """Of the reply that is being read, with names in lower case."""
        self.status = 0
        """Of that reply, once all its headers are there."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """There will be no whole reply, unless there is one already."""

    @abstractmethod
    def complete(self) -> None:
        """The reply is whole."""

    def lost(self, message: str) -> ConnectionLostError:
        """The error for a connection that ended before its time."""
        return ConnectionLostError(message, is_untouched=not self._is_touched)

    def check_writable(self) -> None:
        """Raise if the connection has ended, also if we are yet to be told."""
        if self._transport.is_closing():
            error = self.lost("the server closed the connection")
            self.fail(error)
            raise error

    def close(self) -> None:
        """End the connection at once; a reply that is awaited fails."""
        self.fail(self.lost("the client was closed"))
        self.abort()

    def abort(self) -> None:
        """End the connection, if there is one; the event loops differ on doing it again."""
        if self._transport is not None and not self._is_ended:
            self._transport.abort()

    # What the event loop says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Read what came."""
        self._is_touched = True
        self._overhead_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as exc:
            self.fail(exc.__context__ or exc)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            error = self.lost(f"what came is no HTTP reply: {exc}")
            error.is_tls_alert = data.startswith(b"\x15\x03")
            self.fail(error)
        if self._overhead_bytes > MOST_OVERHEAD_BYTES:
            self.fail(BodyTooLargeError(f"the reply's head has over {MOST_OVERHEAD_BYTES} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The end; a reply that does not say its length ends with it."""
        self._is_ended = True
        if exc is None and self._ends_with_connection():
            self.complete()
        else:
            self.fail(self.lost(str(exc) if exc else "the server closed the connection"))

    def _ends_with_connection(self) -> bool:
        says_length = "content-length" in self.headers or "transfer-encoding" in self.headers
        return self.status >= 200 and self.status not in _BODILESS and not says_length

    # What the parser says

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; one that comes after the body is not the reply's."""
        if not self.status:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """All headers are there."""
        self.status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        """The reply is whole, or an interim one is, and the real one follows."""
        if self.status >= 200:
            self.complete()
        else:
            self.headers, self.status = {}, 0
