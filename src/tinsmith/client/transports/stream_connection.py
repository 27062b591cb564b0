"""A connection whose reply is read piece by piece, for event streams. It carries one exchange.

Pieces wait in memory until they are asked for; above `MOST_WAITING_BYTES` nothing more is read
from the socket, so that a slow reader slows the server down.
"""

from __future__ import annotations

import asyncio

from tinsmith.client.transports.reply_protocol import ReplyProtocol
from tinsmith.wire.protobuf import Parts

MOST_WAITING_BYTES = 256 * 1024


class StreamConnection(ReplyProtocol):
    """See the top of the module. For one event loop."""

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
            ConnectionLostError: They did not come.
        """
        self.check_writable()
        if self._error is not None:
            raise self._error  # closed while the connection was made
        self._transport.write(b"".join((head, *parts)))
        while self.status < 200:
            await self._wait_for_news()

    async def next_piece(self) -> bytes:
        """The next piece of the body; empty at its end.

        Raises:
            ConnectionLostError: The body broke off, after all pieces that came.
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
        """As `ReplyProtocol.fail`; what has come can still be read. Whoever reads closes it."""
        if self._error is None and not self._is_complete:
            self._error = error
        self._tell()

    def complete(self) -> None:
        """As `ReplyProtocol.complete`."""
        self._is_complete = True
        self._tell()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # What the parser says

    def on_headers_complete(self) -> None:
        """All headers are there."""
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
