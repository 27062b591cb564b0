"""HTTP/1.1 on one connection: requests are read, answered one after another, and bounded.

httptools reads heads and bodies. Whoever has no key yet is bounded here: a head may have so many
bytes and so much time, requests that are sent ahead of their turn stop the reading, and so does a
body that nobody takes. What is in a request is the app's, which is called for each in a task of its
own.

A request whose body came with its head, as nearly all do, is handed over whole; an answer is one
write. `http_server.py` listens.
"""

from __future__ import annotations

import asyncio
import collections
import http
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias, cast

import httptools

from tinsmith.server.incoming import Incoming, Message

if TYPE_CHECKING:
    from tinsmith.serve.http_server import HttpServer

_log = logging.getLogger(__name__)

App: TypeAlias = Callable[[Incoming], Awaitable[None]]

MOST_HEAD_BYTES = 128 * 1024
"""Of what is read without a request or a part of a body coming of it: heads, trailers, and what may
stand beside the sizes of chunks."""
HEAD_S = 30.0
"""How long a head may take, from the opening of the connection or from its first byte."""
KEEP_ALIVE_S = 90.0
"""Longer than our clients and the official ones keep an idle connection, so that they close it."""
MOST_UNREAD_BYTES = 64 * 1024
"""Of a body that waits to be taken; more is not read from the socket."""
LARGE_BYTES = 64 * 1024
"""A larger body of an answer is not copied to be one with its head."""

_STATUS_LINES = {
    int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n" for status in http.HTTPStatus
}
_WITHOUT_BODY = (204, 304)


class HttpConnection(asyncio.Protocol):
    """One connection."""

    head_s = HEAD_S

    def __init__(self, server: HttpServer) -> None:
        self.loop = asyncio.get_running_loop()
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._requests: collections.deque[HttpRequest] = collections.deque()
        """The one that is being answered, and those behind it."""
        self._url = b""
        self._headers: dict[str, str] = {}
        self._is_in_head = False
        self._head_bytes = 0
        self._give_up_at = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._is_paused = False
        self._drained: asyncio.Future[None] | None = None
        self._is_stopping = False
        self.is_lost = False

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first head."""
        self.transport = cast(asyncio.Transport, transport)
        self.scheme = "http" if transport.get_extra_info("sslcontext") is None else "https"
        self._server.connections.add(self)
        self._wait_for_head(self.head_s)

    def connection_lost(self, _: Exception | None) -> None:
        """Tell whoever works for this client that it has left."""
        self.is_lost = True
        self._server.forget(self)
        if self._timer is not None:
            self._timer.cancel()
        self.resume_writing()
        for request in self._requests:
            request.tell_left()

    def data_received(self, data: bytes) -> None:
        """Read on, and begin with a request that has come."""
        if self.transport.is_closing():
            return
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._requests[-1].is_last = True  # what follows may be anything
        except httptools.HttpParserError:
            self._refuse(400, "this is not HTTP/1.1")
            return
        if self._head_bytes > MOST_HEAD_BYTES:
            self._refuse(431, f"the request's headers are larger than {MOST_HEAD_BYTES} bytes")
        elif self._is_in_head and self._give_up_at == math.inf:
            self._wait_for_head(self.head_s)
        self._start_next()

    def pause_writing(self) -> None:
        """The client takes its answer more slowly than it is made."""
        self._drained = self.loop.create_future()

    def resume_writing(self) -> None:
        """It has caught up, or left."""
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    # What the parser calls

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        self._url = b""
        self._headers = {}
        self._is_in_head = True
        self._give_up_at = math.inf

    def on_url(self, url: bytes) -> None:
        """A part of the address."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """A head has ended."""
        self._is_in_head = False
        self._head_bytes = 0
        self._give_up_at = math.inf
        if not self._url.startswith(b"/"):
            self._url = _local_part(self._url)
        path, _, query = self._url.decode("latin-1").partition("?")
        version = self._parser.get_http_version()
        request = HttpRequest(
            self, self._parser.get_method().decode("ascii"), path, query, self._headers
        )
        request.is_last = version == "1.0" or not self._parser.should_keep_alive()
        request.is_chunkable = version != "1.0"
        self._requests.append(request)
        if len(self._requests) > 1:
            self._pause_reading()  # it was sent ahead of its turn

    def on_body(self, body: bytes) -> None:
        """A part of the body, which the app bounds."""
        self._head_bytes = 0
        if self._requests and self._requests[-1].add_piece(body) > MOST_UNREAD_BYTES:
            self._pause_reading()

    def on_message_complete(self) -> None:
        """What comes next is another head."""
        self._head_bytes = 0
        if self._requests:
            self._requests[-1].end_body()

    # Answering

    def _start_next(self) -> None:
        if self._requests and not self._requests[0].is_started and not self.is_lost:
            request = self._requests[0]
            request.is_started = True
            self._server.start(self._run(request))

    async def _run(self, request: HttpRequest) -> None:
        try:
            await self._server.app(request)
        except Exception:  # noqa: BLE001 - told in full; the connection must go on or end
            _log.exception("a request failed")
            if not request.is_begun:
                await request.answer(500, {"Content-Length": "0"}, b"")
        finally:
            self._requests.popleft()
            self._go_on(request)

    def _go_on(self, after: HttpRequest) -> None:
        if self.is_lost or self.transport.is_closing():
            return
        if after.must_close or self._is_stopping:
            self.transport.close()
            return
        if len(self._requests) <= 1:
            self.resume_reading()
        if self._requests:
            self._start_next()
        elif not self._is_in_head:
            self._wait_for_head(KEEP_ALIVE_S)

    def stop(self) -> None:
        """Close the connection when what was asked is answered."""
        self._is_stopping = True
        if not self._requests:
            self.transport.close()

    def head(self, request: HttpRequest, status: int, headers: Mapping[str, str]) -> str:
        """The head of an answer, but for the empty line at its end."""
        line = _STATUS_LINES.get(status)
        lines = [line if line is not None else f"HTTP/1.1 {status} \r\n"]
        lines += [f"{name}: {value}\r\n" for name, value in headers.items()]
        lines.append(self._server.date_line())
        if request.is_last or self._is_stopping:
            request.is_last = True
            lines.append("Connection: close\r\n")
        text = "".join(lines)
        if text.count("\n") != len(lines) or text.count("\r") != len(lines):
            raise ValueError("a header of an answer has more than one line")
        return text

    async def drain(self) -> None:
        """Return when there is room to write."""
        if self._drained is not None:
            await self._drained

    # Bounds

    def _pause_reading(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Take more from the socket, if we have stopped."""
        if self._is_paused and not self.transport.is_closing():
            self._is_paused = False
            self.transport.resume_reading()

    def _wait_for_head(self, seconds: float) -> None:
        """Close the connection at that time, unless a head has begun or ended before.

        A timer stays when it is no longer wanted, and looks at the time when it rings: two for
        every request would cost more than reading it does.
        """
        self._give_up_at = self.loop.time() + seconds
        if self._timer is None or self._timer.when() > self._give_up_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_at(self._give_up_at, self._look_at_time)

    def _look_at_time(self) -> None:
        self._timer = None
        if self._give_up_at <= self.loop.time():
            self.transport.close()
        elif self._give_up_at < math.inf:
            self._timer = self.loop.call_at(self._give_up_at, self._look_at_time)

    def _refuse(self, status: int, detail: str) -> None:
        body = f'{{"detail":"{detail}"}}'
        self.transport.write(
            f"{_STATUS_LINES[status]}Content-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        self.transport.close()


class HttpRequest(Incoming):
    """One request of a connection, and its answer."""

    __slots__ = (
        "_awaited",
        "_connection",
        "_is_chunked",
        "_is_whole",
        "_left",
        "_missing_bytes",
        "_pieces",
        "_waits_to_go_on",
        "is_begun",
        "is_chunkable",
        "is_ended",
        "is_last",
        "is_started",
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
        self._connection = connection
        self._pieces: list[bytes] = []
        self._is_whole = False
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

    # The body

    def add_piece(self, piece: bytes) -> int:
        """A part of the body has come; returns how many bytes wait to be taken."""
        if self.is_ended:
            return 0  # nobody wants it
        self._pieces.append(piece)
        self._wake()
        return sum(map(len, self._pieces))

    def end_body(self) -> None:
        """All of the body has come."""
        self._is_whole = True
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
        while not self._pieces and not self._is_whole and not connection.is_lost:
            connection.resume_reading()
            self._awaited = connection.loop.create_future()
            await self._awaited
        if connection.is_lost and not self._is_whole:
            return {"type": "http.disconnect"}
        return {
            "type": "http.request",
            "body": self._taken(),
            "more_body": not self._is_whole,
        }

    def _taken(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    def left(self) -> asyncio.Future[None]:
        """`Incoming.left`."""
        self._left = self._connection.loop.create_future()
        if self._connection.is_lost:
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
        head = self._connection.head(self, status, headers)
        self.is_begun = True
        return head

    async def _send(self, data: bytes) -> None:
        if not self._connection.transport.is_closing():
            self._connection.transport.write(data)
        await self._connection.drain()


def _local_part(url: bytes) -> bytes:
    """What is asked for in an address with a host; raises what the parser makes a refusal."""
    parsed = httptools.parse_url(url)
    path: bytes = parsed.path or b"/"
    return path if parsed.query is None else path + b"?" + parsed.query
