"""One HTTP/1.1 connection: a request is written, its reply read, one exchange after another.

`Connection` is an `asyncio.Protocol` on top of the `httptools` parser. It knows nothing of pools,
second tries or credentials; `direct_transport.py` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
import msgspec

from tinsmith.types.buffers import Memory
from tinsmith.wire import content
from tinsmith.wire.protobuf import Parts

JOINED_BYTES = 256 * 1024
"""A smaller body is written as one piece: the copy costs less than further writes."""
PREPARED_BYTES = 64 * 1024
"""For a larger reply of known size memory is taken at once; a smaller one is put together."""
MOST_HEADER_BYTES = 256 * 1024
HIGH_WATER_BYTES = 1024 * 1024
"""How much may wait in the connection before the rest of a body is held back."""


class ConnectionLostError(ConnectionError):
    """The connection ended before the whole reply was there."""

    def __init__(self, message: str, *, is_untouched: bool) -> None:
        super().__init__(message)
        self.is_untouched = is_untouched
        """Whether not one byte of a reply had come."""


class RawReply(msgspec.Struct, frozen=True):
    """A reply as it came: header names in lower case, the body still packed."""

    status: int
    headers: dict[str, str]
    body: Memory


class Connection(asyncio.Protocol):
    """A connection that carries one exchange at a time. For one event loop."""

    def __init__(
        self, on_lost: Callable[[Connection], object], most_bytes: int, loop: Any = None
    ) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self._on_lost = on_lost
        self._most_bytes = most_bytes
        self._parser = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._reply: asyncio.Future[RawReply] | None = None
        self._may_write: asyncio.Future[None] | None = None
        self._is_touched = False
        self._reset()
        self.is_open = False
        """Whether another exchange may begin."""
        self.idle_since = 0.0

    def _reset(self) -> None:
        self._headers: dict[str, str] = {}
        self._header_bytes = 0
        self._pieces: list[bytes] = []
        self._size = 0
        self._prepared: memoryview | None = None
        self._has_length = False
        self._are_headers_complete = False

    # The exchange

    async def exchange(self, head: bytes, parts: Parts, deadline: float) -> RawReply:
        """Write a request and wait for its reply. Whatever goes wrong closes the connection.

        Args:
            head: The first line and the headers, with the empty line that ends them.
            parts: The body.
            deadline: Until when to wait, on the event loop's clock.

        Raises:
            TimeoutError: The reply was not there in time.
            ConnectionLostError: There was no whole reply.
            BodyTooLargeError: The reply is larger than any may be.
        """
        reply: asyncio.Future[RawReply] = self._loop.create_future()
        self._reply = reply
        self._is_touched = False
        late = self._loop.call_at(deadline, self._fail, TimeoutError("no reply in time"))
        try:
            size = sum(map(len, parts))
            if size <= JOINED_BYTES:
                self._transport.write(b"".join((head, *parts)))
            else:
                await self._write_large(head, parts)
            return await reply
        except BaseException:
            self.close()
            raise
        finally:
            late.cancel()
            self._reply = None

    async def _write_large(self, head: bytes, parts: Parts) -> None:
        """Piece by piece, as fast as they are taken; no further once the server has answered."""
        reply = self._reply
        assert reply is not None
        self._transport.write(head)
        for part in parts:
            if reply.done():
                self.is_open = False  # the rest of the body was never sent
                return
            self._transport.write(part)
            if self._may_write is not None:
                await asyncio.wait((self._may_write, reply), return_when=asyncio.FIRST_COMPLETED)

    def close(self) -> None:
        """End the connection at once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # What the event loop says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = transport
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """Read what came; bytes that nobody asked for end the connection."""
        if self._reply is None or self._reply.done():
            self.close()
            return
        self._is_touched = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as exc:
            self._fail(exc.__context__ or exc)
        except httptools.HttpParserError as exc:
            self._fail(self._lost(f"what came is no HTTP reply: {exc}"))

    def pause_writing(self) -> None:
        """Hold the rest of the body back."""
        if self._may_write is None:
            self._may_write = self._loop.create_future()

    def resume_writing(self) -> None:
        """Go on with the body."""
        if self._may_write is not None and not self._may_write.done():
            self._may_write.set_result(None)
        self._may_write = None

    def connection_lost(self, exc: Exception | None) -> None:
        """The end; a reply without a length ends with it."""
        self.is_open = False
        if exc is None and self._are_headers_complete and not self._has_length:
            self.on_message_complete()
        else:
            self._fail(self._lost(str(exc) if exc else "the server closed the connection"))
        self.resume_writing()
        self._on_lost(self)

    def _lost(self, message: str) -> ConnectionLostError:
        return ConnectionLostError(message, is_untouched=not self._is_touched)

    def _fail(self, error: BaseException) -> None:
        self.is_open = False
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)

    # What the parser says

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._header_bytes += len(name) + len(value)
        content.check_size(self._header_bytes, MOST_HEADER_BYTES)
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """All headers are there."""
        self._are_headers_complete = True
        status = self._parser.get_status_code()
        length = self._headers.get("content-length", "")
        self._has_length = (
            bool(length) or "transfer-encoding" in self._headers or status in (204, 304)
        )
        if length.isdecimal() and int(length) > PREPARED_BYTES:
            content.check_size(int(length), self._most_bytes)
            self._prepared = memoryview(bytearray(int(length)))

    def on_body(self, piece: bytes) -> None:
        """A piece of the body."""
        begin, self._size = self._size, self._size + len(piece)
        if self._prepared is not None:
            self._prepared[begin : self._size] = piece
            return
        content.check_size(self._size, self._most_bytes)
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """The reply is whole."""
        status, pieces = self._parser.get_status_code(), self._pieces
        body: Memory = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if self._prepared is not None:
            body = self._prepared
        headers = self._headers
        self._reset()
        if status < 200:  # an interim answer; the real one follows
            return
        self.is_open = self.is_open and self._parser.should_keep_alive()
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(RawReply(status, headers, body))
        self.resume_writing()
