"""One HTTP/1.1 connection, on top of the `httptools` parser.

An `HttpConnection` carries one exchange after another and returns whole replies; a
`StreamConnection` carries one and hands its body on as it arrives. A server is not trusted:
whatever is neither a body nor valid HTTP is bounded in size, however it is split up.

Knows nothing of pools, retries or credentials; `transports/direct.py` does.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import httptools
import msgspec

from tinsmith.errors import BodyTooLargeError
from tinsmith.types.buffers import Memory
from tinsmith.wire import content
from tinsmith.wire.protobuf import Parts

MOST_OVERHEAD_BYTES = 256 * 1024
"""How much may arrive around the pieces of a body: headers, interim replies, trailers."""
_BODILESS = (204, 304)


class ConnectionLostError(ConnectionError):
    """The connection ended before the whole reply had arrived."""

    def __init__(self, message: str, *, is_untouched: bool) -> None:
        super().__init__(message)
        self.is_untouched = is_untouched
        """Whether no byte of a reply had arrived."""
        self.is_tls_alert = False
        """Whether a TLS alert arrived instead of a reply."""


class ReplyProtocol(asyncio.Protocol, ABC):
    """One end of a connection, for one event loop."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._overhead_bytes = 0
        self._is_touched = False
        self._is_ended = False
        self.headers: dict[str, str] = {}
        """The headers of the reply that is being read, with names in lower case."""
        self.status = 0
        """The status of that reply, once all its headers have arrived."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Fail the exchange, unless its reply is complete."""

    @abstractmethod
    def complete(self) -> None:
        """Called when the reply is complete."""

    def lost(self, message: str) -> ConnectionLostError:
        """The error for a connection that ended too early."""
        return ConnectionLostError(message, is_untouched=not self._is_touched)

    def check_writable(self) -> None:
        """Raise if the connection has ended or is about to."""
        if self._transport.is_closing():
            error = self.lost("the server closed the connection")
            self.fail(error)
            raise error

    def close(self) -> None:
        """Close the connection immediately; a pending reply fails."""
        self.fail(self.lost("the client was closed"))
        self.abort()

    def abort(self) -> None:
        """Abort the connection once; event loops differ on a second time."""
        if self._transport is not None and not self._is_ended:
            self._transport.abort()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Parse data."""
        self._is_touched = True
        self._overhead_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as exc:
            self.fail(exc.__context__ or exc)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            error = self.lost(f"the server sent no valid HTTP reply: {exc}")
            error.is_tls_alert = data.startswith(b"\x15\x03")
            self.fail(error)
        if self._overhead_bytes > MOST_OVERHEAD_BYTES:
            self.fail(BodyTooLargeError(f"the reply's headers exceed {MOST_OVERHEAD_BYTES} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection ended; so does a reply without a declared length."""
        self._is_ended = True
        if exc is None and self._ends_with_connection():
            self.complete()
        else:
            self.fail(self.lost(str(exc) if exc else "the server closed the connection"))

    def _ends_with_connection(self) -> bool:
        says_length = "content-length" in self.headers or "transfer-encoding" in self.headers
        return self.status >= 200 and self.status not in _BODILESS and not says_length

    # Called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; trailers are ignored."""
        if not self.status:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """All headers have arrived."""
        self.status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        """The reply is complete, or it was an interim one."""
        if self.status >= 200:
            self.complete()
        else:
            self.headers, self.status = {}, 0


JOINED_BYTES = 256 * 1024
"""A smaller body is written in one piece: the copy costs less than further writes."""
HIGH_WATER_BYTES = 128 * 1024
"""How much may be buffered before writing pauses; also how much is written at a time. It is small
because an event loop copies what it cannot send immediately."""


class RawReply(msgspec.Struct, frozen=True):
    """A reply as received: header names in lower case, the body still compressed."""

    status: int
    headers: dict[str, str]
    body: Memory


class HttpConnection(ReplyProtocol):
    """A connection that carries one exchange at a time. For one event loop."""

    def __init__(
        self, on_lost: Callable[[HttpConnection], object], most_bytes: int, loop: Any = None
    ) -> None:
        super().__init__()
        self._loop = loop or asyncio.get_running_loop()
        self._on_lost = on_lost
        self._most_bytes = most_bytes
        self._body: bytes | bytearray = b""
        self._reply: asyncio.Future[RawReply] | None = None
        self._whole: RawReply | None = None
        self._may_write: asyncio.Future[None] | None = None
        self._deadline = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = 0.0
        self.is_open = False
        """Whether another exchange may start."""
        self.idle_since = 0.0

    # The exchange

    async def exchange(self, head: bytes, parts: Parts, deadline: float) -> RawReply:
        """Write a request and wait for its reply. Any failure closes the connection.

        Args:
            head: The first line and the headers, with the empty line that ends them.
            parts: The body.
            deadline: Until when to wait, on the event loop's clock.

        Raises:
            TimeoutError: The reply did not arrive in time.
            ConnectionLostError: There was no whole reply.
            BodyTooLargeError: The reply is too large.
        """
        reply: asyncio.Future[RawReply] = self._loop.create_future()
        try:
            self._expect(reply, deadline)
            if sum(map(len, parts)) <= JOINED_BYTES:
                self._transport.write(b"".join((head, *parts)))
            else:
                await self._write_large(head, parts, reply)
            return await reply
        except BaseException:
            reply.cancel()
            self.close()
            raise

    def _expect(self, reply: asyncio.Future[RawReply], deadline: float) -> None:
        self._is_touched = False
        self.check_writable()
        self._reply = reply
        self._deadline = deadline
        if self._alarm is None or self._alarm_at > deadline:
            self._set_alarm()

    def _end(self, found: RawReply | BaseException) -> None:
        """End the current exchange, if there is one."""
        reply, self._reply = self._reply, None
        if reply is None:
            return
        if isinstance(found, BaseException):
            self.abort()
        elif self._transport.get_write_buffer_size():
            self.is_open = False  # answered early: the rest of the request may never be read
        if reply.done():
            return
        if isinstance(found, BaseException):
            reply.set_exception(found)
            reply.exception()  # marks it as retrieved, if its task was just cancelled
        else:
            reply.set_result(found)

    def _set_alarm(self) -> None:
        """Start the timer that ends the exchange in time.

        A timer that is running is kept, and restarted when it fires early. So the exchanges of a
        connection share one; setting and cancelling one for each costs a dozen calls.
        """
        self._stop_alarm()
        self._alarm_at = self._deadline
        self._alarm = self._loop.call_at(self._deadline, self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm = None
        if self._reply is None:
            return
        if self._deadline <= self._alarm_at:
            self.fail(TimeoutError("no reply in time"))
        else:
            self._set_alarm()

    def _stop_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    async def _write_large(
        self, head: bytes, parts: Parts, reply: asyncio.Future[RawReply]
    ) -> None:
        """Write in pieces, as fast as the socket takes them; stop once the server has answered."""
        self._transport.write(head)
        for piece in pieces_of(parts):
            if reply.done() or self._transport.is_closing():
                self.is_open = False  # the rest of the body was never sent
                return
            self._transport.write(piece)
            if self._may_write is not None:
                await asyncio.wait((self._may_write, reply), return_when=asyncio.FIRST_COMPLETED)

    def fail(self, error: BaseException) -> None:
        """Fail the exchange, unless its reply is complete."""
        self.is_open = False
        if self._whole is None:
            self._end(error)

    def complete(self) -> None:
        """Keep the reply until the parser has returned."""
        if self._whole is None:  # else it is an unrequested second one
            body = self._body if isinstance(self._body, bytes) else memoryview(self._body)
            self._whole = RawReply(self.status, self.headers, body)
        self.headers, self.status, self._body, self._overhead_bytes = {}, 0, b"", 0
        self.is_open = self.is_open and self._parser.should_keep_alive()

    def _hand_over(self) -> None:
        whole, self._whole = self._whole, None
        if whole is not None:
            self._end(whole)

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        super().connection_made(transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """Parse data; unrequested bytes close the connection."""
        if self._reply is None:
            self.close()
            return
        super().data_received(data)
        self._hand_over()

    def pause_writing(self) -> None:
        """Pause writing the body."""
        if self._may_write is None:
            self._may_write = self._loop.create_future()

    def resume_writing(self) -> None:
        """Continue writing the body."""
        if self._may_write is not None and not self._may_write.done():
            self._may_write.set_result(None)
        self._may_write = None

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection ended."""
        self.is_open = False
        self._stop_alarm()
        super().connection_lost(exc)
        self._hand_over()
        self.resume_writing()
        self._on_lost(self)

    # Called by the parser

    def on_message_begin(self) -> None:
        """A reply starts; an unrequested second one must not become the next."""
        if self._whole is not None:
            self.is_open = False

    def on_headers_complete(self) -> None:
        """All headers have arrived."""
        self.status = self._parser.get_status_code()
        content.check_size(int(self.headers.get("content-length", 0)), self._most_bytes)

    def on_body(self, piece: bytes) -> None:
        """A piece of the body. A large body grows in place and is writable."""
        self._overhead_bytes = 0
        if not self._body:
            self._body = piece
        elif isinstance(self._body, bytes):
            self._body = bytearray().join((self._body, piece))
        else:
            self._body += piece
        content.check_size(len(self._body), self._most_bytes)


def pieces_of(parts: Parts) -> Iterator[bytes | memoryview]:
    """A body in pieces of at most `HIGH_WATER_BYTES`: small parts together, large ones in slices.

    Every piece is a system call, and samples that share a request have hundreds of small parts.
    """
    small: Parts = []
    size = 0
    for part in parts:
        if small and size + len(part) > HIGH_WATER_BYTES:
            yield b"".join(small)
            small, size = [], 0
        if len(part) <= HIGH_WATER_BYTES:
            small.append(part)
            size += len(part)
            continue
        whole = memoryview(part)
        for start in range(0, len(whole), HIGH_WATER_BYTES):
            yield whole[start : start + HIGH_WATER_BYTES]
    if small:
        yield b"".join(small)


MOST_WAITING_BYTES = 256 * 1024


class StreamConnection(ReplyProtocol):
    """A connection whose reply is read piece by piece, for event streams. It carries one exchange.

    Pieces wait in memory until they are read; above `MOST_WAITING_BYTES` nothing more is read from
    the socket, so that a slow reader slows the server down. For one event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._news: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self._waiting_bytes = 0
        self._error: BaseException | None = None
        self._is_complete = False

    async def begin(self, head: bytes, parts: Parts) -> None:
        """Write the request and wait for the reply's headers.

        Raises:
            ConnectionLostError: They did not arrive.
        """
        self.check_writable()
        if self._error is not None:
            raise self._error  # closed while connecting
        self._transport.write(b"".join((head, *parts)))
        while self.status < 200:
            await self._wait_for_news()

    async def next_piece(self) -> bytes:
        """The next piece of the body; empty at its end.

        Raises:
            ConnectionLostError: The body broke off; raised after all pieces that arrived.
        """
        while not self._pieces and not self._is_complete:
            await self._wait_for_news()
        piece = b"".join(self._pieces)
        self._pieces.clear()
        if self._waiting_bytes > MOST_WAITING_BYTES and not self._transport.is_closing():
            self._transport.resume_reading()
        self._waiting_bytes = 0
        return piece

    async def _wait_for_news(self) -> None:
        if self._error is not None:
            raise self._error
        self._news = self._loop.create_future()
        await self._news

    def fail(self, error: BaseException) -> None:
        """Fail the reply; pieces that have arrived can still be read. The reader closes it."""
        if self._error is None and not self._is_complete:
            self._error = error
        self._tell()

    def complete(self) -> None:
        """The body is complete."""
        self._is_complete = True
        self._tell()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # Called by the parser

    def on_headers_complete(self) -> None:
        """All headers have arrived."""
        super().on_headers_complete()
        self._tell()

    def on_body(self, piece: bytes) -> None:
        """A piece of the body."""
        self._overhead_bytes = 0
        self._pieces.append(piece)
        self._waiting_bytes += len(piece)
        if self._waiting_bytes > MOST_WAITING_BYTES:
            self._transport.pause_reading()
        self._tell()
