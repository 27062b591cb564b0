"""One request of an HTTP connection: its body as it comes, and its answer as it is made.

A request whose body came with its head, as nearly all do, is handed over whole. An answer that is
known whole is one write, which saves a system call and wakes its client once. What is said before
and after it on the connection is `http_connection.py`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tinsmith.server.incoming import Incoming, Message

if TYPE_CHECKING:
    from tinsmith.serve.http_connection import HttpConnection

LARGE_BYTES = 64 * 1024
"""A larger body of an answer is not copied to be one with its head."""
_WITHOUT_BODY = (204, 304)


class HttpRequest(Incoming):
    """One request of a connection, and its answer."""

    __slots__ = (
        "_awaited",
        "_connection",
        "_is_chunked",
        "_left",
        "_missing_bytes",
        "_pieces",
        "_unread_bytes",
        "_waits_to_go_on",
        "is_begun",
        "is_chunkable",
        "is_ended",
        "is_last",
        "is_started",
        "is_whole",
    )

    def __init__(
        self,
        connection: HttpConnection,
        method: str,
        path: str,
        query: str,
        headers: dict[str, str],
    ) -> None:
        super().__init__(method, path, query, headers, connection.scheme)
        self.client = connection.client
        self._connection = connection
        self._pieces: list[bytes] = []
        self._unread_bytes = 0
        self.is_whole = False
        self._awaited: asyncio.Future[None] | None = None
        self._left: asyncio.Future[None] | None = None
        self._is_chunked = False
        self._missing_bytes = 0
        self._waits_to_go_on = headers.get("expect", "").lower() == "100-continue"
        self.is_last = False
        self.is_chunkable = True
        self.is_started = False
        self.is_begun = False
        self.is_ended = False

    @property
    def must_close(self) -> bool:
        """Whether nothing can follow: the client, or what was not sent, does not allow it."""
        return self.is_last or not self.is_ended or self._waits_to_go_on

    @property
    def announces_body(self) -> bool:
        """Whether its head says that more follows."""
        return self.headers.get("content-length", "0") != "0" or "transfer-encoding" in self.headers

    # The body

    def add_piece(self, piece: bytes) -> int:
        """A part of the body has come; returns how many bytes wait to be taken."""
        if self.is_ended:
            return 0  # nobody wants it
        self._pieces.append(piece)
        self._unread_bytes += len(piece)  # not summed anew: pieces may be very many and tiny
        self._wake()
        return self._unread_bytes

    def end_body(self) -> None:
        """All of the body has come."""
        self.is_whole = True
        self._waits_to_go_on = False
        if not self.is_started:
            self.body = self._taken()
        self._wake()

    def tell_left(self) -> None:
        """The client has left."""
        self._wake()
        if self._left is not None and not self._left.done():
            self._left.set_result(None)

    async def receive(self) -> Message:
        """`Incoming.receive`."""
        connection = self._connection
        if self._waits_to_go_on and not connection.is_lost:
            self._waits_to_go_on = False
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not self._pieces and not self.is_whole and not connection.is_lost:
            connection.resume_reading()
            self._awaited = connection.loop.create_future()
            await self._awaited
        if connection.is_lost and not self.is_whole:
            return {"type": "http.disconnect"}
        return {
            "type": "http.request",
            "body": self._taken(),
            "more_body": not self.is_whole,
        }

    def _taken(self) -> bytes:
        pieces, self._pieces, self._unread_bytes = self._pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    def left(self) -> asyncio.Future[None]:
        """`Incoming.left`."""
        self._left = self._connection.loop.create_future()
        if self._connection.has_client_ended:
            self._left.set_result(None)
        return self._left

    # The answer

    async def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """`Incoming.answer`."""
        head = self._begin(status, headers)
        self.is_ended = True
        if self.method == "HEAD" or status in _WITHOUT_BODY:
            body = b""
        if len(body) <= LARGE_BYTES:
            await self._send(b"%b\r\n%b" % (head.encode(), body))
        else:
            await self._send(head.encode() + b"\r\n")
            await self._send(body)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """`Incoming.start`."""
        head = self._begin(status, headers)
        has_body = self.method != "HEAD" and status not in _WITHOUT_BODY
        if has_body and "Content-Length" in headers:
            self._missing_bytes = int(headers["Content-Length"])
        elif has_body and self.is_chunkable:
            self._is_chunked = True
            head += "Transfer-Encoding: chunked\r\n"
        await self._send(head.encode() + b"\r\n")

    async def write(self, piece: bytes) -> None:
        """`Incoming.write`."""
        if not piece or self.method == "HEAD":
            return
        self._missing_bytes -= len(piece)
        if self._is_chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        await self._send(piece)

    async def end(self) -> None:
        """`Incoming.end`."""
        if self._is_chunked:
            await self._send(b"0\r\n\r\n")
        # With fewer bytes than were announced the client must not take the next answer for them.
        self.is_ended = self._is_chunked or self.is_last or self._missing_bytes == 0

    def _begin(self, status: int, headers: Mapping[str, str]) -> str:
        assert not self.is_begun, "a request is answered once"
        if headers.get("Connection") == "close":
            headers = {name: value for name, value in headers.items() if name != "Connection"}
            self.is_last = True
        if self._waits_to_go_on:
            self.is_last = True  # whether its body comes after all cannot be known
        head = self._connection.head(self, status, headers)
        self.is_begun = True
        return head

    async def _send(self, data: bytes) -> None:
        if not self._connection.transport.is_closing():
            self._connection.transport.write(data)
        await self._connection.drain()
