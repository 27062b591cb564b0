"""HTTP/1.1 on one connection: requests are read, answered one after another, and bounded.

httptools reads heads and bodies. Whoever has no key yet is bounded here: a head may have so many
bytes and so much time, requests that are sent ahead of their turn stop the reading, and so does a
body that nobody takes. What is in a request is the app's, which is called for each in a task of its
own.

`http_server.py` listens; `http_request.py` is one request with its answer.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import http
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias, cast

import httptools

from tinsmith.serve.http_request import HttpRequest
from tinsmith.server.connections import UNIX
from tinsmith.server.incoming import Incoming

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

MOST_AHEAD = 100
"""Requests that may be sent before the first of them is answered."""
STALLED_S = 60.0
"""How long a client may take nothing at all of what waits to be sent to it."""
LINGER_S = 10.0
"""How long the rest of a refused body is passed over, so that its sender can read the answer."""

_ONCE = frozenset({"host", "x-api-key", "transfer-encoding"})
"""Headers by which it is decided who may do what and where a body ends: a proxy may look at the
other one."""
_LONGEST_USUAL = 64
"""Names of headers up to this length are remembered."""
_STATUS_LINES = {
    int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n" for status in http.HTTPStatus
}


class HttpConnection(asyncio.Protocol):
    """One connection."""

    head_s = HEAD_S
    stalled_s = STALLED_S

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
        self._watch: asyncio.TimerHandle | None = None
        self._is_stopping = False
        self._is_lingering = False
        self._problem = 400, "not HTTP/1.1"
        """Why a callback of the parser refuses what it was called with."""
        self._refusal: bytes | None = None
        """What is said after the answers to what was asked before; nothing more is read."""
        self.is_lost = False
        self.has_client_ended = False
        """Whether it sends no more: it has left, or waits for the answers to what it has sent."""

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first head."""
        self.transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.client = (str(peer[0]), int(peer[1])) if isinstance(peer, tuple) else (UNIX, id(self))
        self.scheme = "http" if transport.get_extra_info("sslcontext") is None else "https"
        self._server.connections.add(self)
        if self._server.is_closing:  # it was accepted, or shook hands, in the last moment
            self.stop()
        else:
            self._wait_for_head(self.head_s)

    def connection_lost(self, _: Exception | None) -> None:
        """Tell whoever works for this client that it has left."""
        self.is_lost = self.has_client_ended = True
        self._server.forget(self)
        if self._timer is not None:
            self._timer.cancel()
        self.resume_writing()
        for request in self._requests:
            request.tell_left()
        del self._parser  # it references this connection: a circle that only the collector ends

    def eof_received(self) -> bool:
        """Answer what has come whole, and close then.

        Whoever sends no more has left, as a rule, so nothing is waited for on its behalf; but it
        may have closed its half of the connection alone.
        """
        self.has_client_ended = True
        if self.scheme == "https" or not self._requests or not self._requests[-1].is_whole:
            return False  # TLS has no halves
        for request in self._requests:
            request.tell_left()
        return True

    def data_received(self, data: bytes) -> None:
        """Read on, and begin with a request that has come."""
        if self.transport.is_closing() or self._refusal is not None or self._is_lingering:
            return
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.stop()  # what follows may be anything
        except httptools.HttpParserError:
            self._refuse(*self._problem)
        if self._head_bytes > MOST_HEAD_BYTES and self._refusal is None:
            self._refuse(431, f"the request's headers are larger than {MOST_HEAD_BYTES} bytes")
        elif self._is_in_head and self._give_up_at == math.inf and not self._requests:
            self._wait_for_head(self.head_s)
        self._start_next()

    def pause_writing(self) -> None:
        """The client takes its answer more slowly than it is made."""
        self._drained = self.loop.create_future()
        self._watch_writing()

    def resume_writing(self) -> None:
        """It has caught up, or left."""
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None
        if self._watch is not None:
            self._watch.cancel()  # what waits the next time may by chance be as much
            self._watch = None
        if self.transport.is_closing() and not self.is_lost:
            self._watch_writing()

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
        """A header, or a trailer, which nobody is given."""
        text = _usual_name(name) if len(name) <= _LONGEST_USUAL else _lowered(name)
        if text in self._headers and text in _ONCE:
            raise self._refused(f"the header {text} came twice")
        self._headers[text] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """A head has ended."""
        self._is_in_head = False
        self._head_bytes = 0
        self._give_up_at = math.inf
        if not self._url.startswith(b"/"):
            self._url = _local_part(self._url)
        path, _, query = self._url.decode("latin-1").partition("?")
        if self._headers.get("transfer-encoding", "chunked").rstrip(" ").lower() != "chunked":
            raise self._refused("transfer-encoding may be chunked and nothing else", 501)
        version = self._parser.get_http_version()
        request = HttpRequest(
            self, self._parser.get_method().decode("ascii"), path, query, self._headers
        )
        self._headers = {}  # trailers must not change what was decided by the head
        request.is_last = version == "1.0" or not self._parser.should_keep_alive()
        request.is_chunkable = version != "1.0"
        if len(self._requests) == MOST_AHEAD:
            raise self._refused(f"more than {MOST_AHEAD} requests were sent at once")
        if self._parser.should_upgrade() and request.announces_body:
            # The parser would pass its body over.
            raise self._refused("a request to become another protocol has no body")
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
        if after.must_close and after.is_ended and not after.is_whole and not self._is_stopping:
            self._linger()
            return
        if after.must_close or self._is_stopping:
            self._close()
            return
        if self._refusal is not None and not self._requests:
            self._say_refusal()
            return
        if self.has_client_ended and not self._requests:
            self._close()
            return
        if len(self._requests) <= 1:
            self.resume_reading()
        if self._requests:
            self._start_next()
        else:
            self._wait_for_head(self.head_s if self._is_in_head else KEEP_ALIVE_S)

    def stop(self) -> None:
        """Close the connection when what was asked is answered."""
        self._is_stopping = True
        if not self._requests:
            self._close()

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
            self._close()
        elif self._give_up_at < math.inf:
            self._timer = self.loop.call_at(self._give_up_at, self._look_at_time)

    def _linger(self) -> None:
        """Close when the client has, or after a while.

        What comes to a socket that is closed makes the system drop the answer at the client.
        """
        self._is_lingering = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.resume_reading()
        self._wait_for_head(LINGER_S)

    def _close(self) -> None:
        """Close when what was written is sent, if it is taken."""
        if self._watch is None and self.transport.get_write_buffer_size():
            self._watch_writing()
        self.transport.close()

    def _watch_writing(self, before: int | None = None) -> None:
        """Give up a client that takes nothing for so long; `before` is how much waited then."""
        waiting = self.transport.get_write_buffer_size()
        if waiting == before:
            self.transport.abort()
        else:
            self._watch = self.loop.call_later(self.stalled_s, self._watch_writing, waiting)

    def _refused(self, problem: str, status: int = 400) -> ValueError:
        """For callbacks of the parser, which makes an error of its own of whatever they raise."""
        self._problem = status, problem
        return ValueError(problem)

    def _refuse(self, status: int, detail: str) -> None:
        """Read no more, and say why after the answers to what was asked before."""
        body = f'{{"detail":"{detail}"}}'
        self._refusal = (
            f"{_STATUS_LINES[status]}Content-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        if self._requests and not self._requests[-1].is_whole:
            # The fault is in its body: it is this request that is refused.
            if self._requests[-1].is_begun:
                self._close()
                return
            if self._requests[-1].is_started:
                self._say_refusal()
                return
            self._requests.pop()
        if not self._requests:
            self._say_refusal()

    def _say_refusal(self) -> None:
        assert self._refusal is not None
        self.transport.write(self._refusal)
        self._close()


def _lowered(name: bytes) -> str:
    return name.decode("latin-1").lower()


_usual_name = functools.lru_cache(maxsize=1024)(_lowered)
"""Clients send a dozen headers with every request, and always the same ones."""


def _local_part(url: bytes) -> bytes:
    """What is asked for in an address with a host; raises what the parser makes a refusal."""
    parsed = httptools.parse_url(url)
    path: bytes = parsed.path or b"/"
    return path + b"?" + parsed.query if parsed.query else path
