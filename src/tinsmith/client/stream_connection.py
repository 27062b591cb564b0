"""A connection whose reply is read piece by piece, for event streams. It carries one exchange.

Pieces wait in memory until they are asked for; above `MOST_WAITING_BYTES` nothing more is read
from the socket, so that a slow reader slows the server down.
"""

from __future__ import annotations

import asyncio
import collections
from typing import Any

import httptools

from tinsmith.client.connection import MOST_HEADER_BYTES, ConnectionLostError
from tinsmith.wire import content
from tinsmith.wire.protobuf import Parts

MOST_WAITING_BYTES = 256 * 1024


class StreamConnection(asyncio.Protocol):
    """See the top of the module. For one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: Any = None
        self._parser = httptools.HttpResponseParser(self)
        self._begun: asyncio.Future[None] = loop.create_future()
        self._grown: asyncio.Future[None] | None = None
        self._pieces: collections.deque[bytes] = collections.deque()
        self._waiting_bytes = 0
        self._header_bytes = 0
        self._error: BaseException | None = None
        self._is_complete = False
        self.headers: dict[str, str] = {}
        self.status = 0

    async def begin(self, head: bytes, parts: Parts) -> None:
        """Write the request and wait for the reply's headers.

        Raises:
            ConnectionLostError: They did not come.
        """
        self._transport.write(b"".join((head, *parts)))
        await self._begun

    async def next_piece(self) -> bytes:
        """The next piece of the body; empty at its end.

        Raises:
            ConnectionLostError: The body broke off, after all pieces that came.
        """
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._is_complete:
                return b""
            self._grown = self._loop.create_future()
            await self._grown
        piece = b"".join(self._pieces)
        self._pieces.clear()
        self._waiting_bytes = 0
        self._transport.resume_reading()
        return piece

    def close(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # What the event loop says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Read what came."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as exc:
            self._fail(exc.__context__ or exc)
        except httptools.HttpParserError as exc:
            self._fail(ConnectionLostError(f"no HTTP reply: {exc}", is_untouched=False))

    def connection_lost(self, exc: Exception | None) -> None:
        """The end."""
        why = str(exc) if exc else "the server closed the connection"
        self._fail(ConnectionLostError(why, is_untouched=not self.status))

    def _fail(self, error: BaseException) -> None:
        if self._error is None and not self._is_complete:
            self._error = error
        if not self._begun.done():
            self._begun.set_exception(error)
        self._wake()
        self.close()

    def _wake(self) -> None:
        if self._grown is not None and not self._grown.done():
            self._grown.set_result(None)

    # What the parser says

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._header_bytes += len(name) + len(value)
        content.check_size(self._header_bytes, MOST_HEADER_BYTES)
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """All headers are there; those of an interim answer are not the reply's."""
        if self._parser.get_status_code() < 200:
            self.headers.clear()
            return
        self.status = self._parser.get_status_code()
        if not self._begun.done():
            self._begun.set_result(None)

    def on_body(self, piece: bytes) -> None:
        """A piece of the body."""
        self._pieces.append(piece)
        self._waiting_bytes += len(piece)
        if self._waiting_bytes > MOST_WAITING_BYTES:
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        """The body is whole."""
        if self.status:
            self._is_complete = True
            self._wake()
