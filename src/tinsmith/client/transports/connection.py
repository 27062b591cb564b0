"""One HTTP/1.1 connection: a request is written, its reply read, one exchange after another.

Knows nothing of pools, second tries or credentials; `transports/direct.py` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import msgspec

from tinsmith.client.transports.reply_protocol import ReplyProtocol
from tinsmith.types.buffers import Memory
from tinsmith.wire import content
from tinsmith.wire.protobuf import Parts

JOINED_BYTES = 256 * 1024
"""A smaller body is written as one piece: the copy costs less than further writes."""
HIGH_WATER_BYTES = 128 * 1024
"""How much may wait in the connection before the rest of a body is held back; also how much is
written at a time. Little, for an event loop copies what it cannot send at once."""


class RawReply(msgspec.Struct, frozen=True):
    """A reply as it came: header names in lower case, the body still packed."""

    status: int
    headers: dict[str, str]
    body: Memory


OnOver: TypeAlias = Callable[["RawReply | BaseException"], object]


def is_small(parts: Parts) -> bool:
    """Whether a body is written as one piece, so that writing it needs no waiting."""
    return sum(map(len, parts)) <= JOINED_BYTES


class Connection(ReplyProtocol):
    """A connection that carries one exchange at a time. For one event loop."""

    def __init__(
        self, on_lost: Callable[[Connection], object], most_bytes: int, loop: Any = None
    ) -> None:
        super().__init__()
        self._loop = loop or asyncio.get_running_loop()
        self._on_lost = on_lost
        self._most_bytes = most_bytes
        self._body: bytes | bytearray = b""
        self._on_over: OnOver | None = None
        self._whole: RawReply | None = None
        self._may_write: asyncio.Future[None] | None = None
        self._deadline = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = 0.0
        self.is_open = False
        """Whether another exchange may begin."""
        self.idle_since = 0.0

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

        def over(found: RawReply | BaseException) -> None:
            if reply.done():
                return
            if isinstance(found, BaseException):
                reply.set_exception(found)
                reply.exception()  # it counts as seen, though its task may be cancelled just now
            else:
                reply.set_result(found)

        try:
            if is_small(parts):
                self.begin(head, parts, deadline, over)
            else:
                self._expect(deadline, over)
                await self._write_large(head, parts, reply)
            return await reply
        except BaseException:
            reply.cancel()
            self.close()
            raise

    def begin(self, head: bytes, parts: Parts, deadline: float, on_over: OnOver) -> None:
        """Write a request whose body `is_small`; as `exchange`, without waiting.

        Args:
            head: As in `exchange`.
            parts: The body.
            deadline: As in `exchange`.
            on_over: Called once, with the reply or with what `exchange` would raise. The next
                exchange may begin there.

        Raises:
            ConnectionLostError: The connection has ended, and nothing was sent.
        """
        self._expect(deadline, on_over)
        self._transport.write(b"".join((head, *parts)))

    def _expect(self, deadline: float, on_over: OnOver) -> None:
        self._is_touched = False
        self.check_writable()
        self._on_over = on_over
        self._deadline = deadline
        if self._alarm is None or self._alarm_at > deadline:
            self._set_alarm()

    def _end(self, found: RawReply | BaseException) -> None:
        """The exchange is over, if there is one."""
        on_over, self._on_over = self._on_over, None
        if on_over is None:
            return
        if isinstance(found, BaseException):
            self.abort()
        elif self._transport.get_write_buffer_size():
            self.is_open = False  # answered early: the rest may never be read
        on_over(found)

    def _set_alarm(self) -> None:
        """See that the exchange ends in time.

        An alarm that is set already is left: when it rings, it is set anew if there is more time.
        So the exchanges of a connection share one; to set and cancel one for each is a dozen calls.
        """
        self._stop_alarm()
        self._alarm_at = self._deadline
        self._alarm = self._loop.call_at(self._deadline, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        if self._on_over is None:
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
        """Piece by piece, as fast as they are taken; no further once the server has answered."""
        self._transport.write(head)
        for piece in pieces_of(parts):
            if reply.done() or self._transport.is_closing():
                self.is_open = False  # the rest of the body was never sent
                return
            self._transport.write(piece)
            if self._may_write is not None:
                await asyncio.wait((self._may_write, reply), return_when=asyncio.FIRST_COMPLETED)

    def fail(self, error: BaseException) -> None:
        """As `ReplyProtocol.fail`."""
        self.is_open = False
        if self._whole is None:
            self._end(error)

    def complete(self) -> None:
        """As `ReplyProtocol.complete`; the parser, which says so, must have ended before we do."""
        if self._whole is None:  # else it is a second one, which nobody asked for
            body = self._body if isinstance(self._body, bytes) else memoryview(self._body)
            self._whole = RawReply(self.status, self.headers, body)
        self.headers, self.status, self._body, self._overhead_bytes = {}, 0, b"", 0
        self.is_open = self.is_open and self._parser.should_keep_alive()

    def _hand_over(self) -> None:
        whole, self._whole = self._whole, None
        if whole is not None:
            self._end(whole)

    # What the event loop says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        super().connection_made(transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """Read what came; bytes that nobody asked for end the connection."""
        if self._on_over is None:
            self.close()
            return
        super().data_received(data)
        self._hand_over()

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
        """The end."""
        self.is_open = False
        self._stop_alarm()
        super().connection_lost(exc)
        self._hand_over()
        self.resume_writing()
        self._on_lost(self)

    # What the parser says

    def on_message_begin(self) -> None:
        """A reply begins; after another one it is unasked for, and must not become the next."""
        if self._whole is not None:
            self.is_open = False

    def on_headers_complete(self) -> None:
        """All headers are there."""
        self.status = self._parser.get_status_code()
        content.check_size(int(self.headers.get("content-length", 0)), self._most_bytes)

    def on_body(self, piece: bytes) -> None:
        """A piece of the body. A large body grows in place and is writable, for its arrays."""
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
