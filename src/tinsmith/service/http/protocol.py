"""One connection: uvicorn's HTTP/1.1, with bounds on what a client without a key can make it hold.

uvicorn, with httptools as its parser, reads requests and writes answers. It sets no limit to the
size of a request's head or to the time it may take, to the number of pipelined requests, or to the
time for which an answer stays unread; and it answers what it cannot parse at once, in the middle of
an earlier answer if need be. `BoundedHttpProtocol` adds these bounds, and what a server behind a
proxy needs to agree with that proxy on where a request ends and who sent it.

Everything here happens before a credential is known. Bounds on bodies are in `bodies.py`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tinsmith.service.http.connections import ServerConnection

if TYPE_CHECKING:
    from tinsmith.service.http.server import HttpServer

MAX_HEAD_BYTES = 128 * 1024
"""The most that is read without completing a request's head or a part of its body: this covers
trailers and chunk extensions too."""
HEAD_TIMEOUT_S = 30.0
"""The time for a head, from the opening of the connection or from its first byte."""
MAX_PIPELINED = 100
"""The most requests that one connection may send before the first of them is answered."""
STALL_TIMEOUT_S = 60.0
"""How long a client may read nothing at all of an answer that is being sent."""
JOINED_BYTES = 64 * 1024
"""A larger body is not copied to be written together with its head."""
LINGER_S = 10.0
"""How long the rest of a refused body is discarded, so that its sender can read the answer."""

_SINGLE_HEADERS = frozenset({b"host", b"x-api-key", b"transfer-encoding"})
"""Headers that decide who may do what and where a body ends. Given twice, a proxy in front of the
service may have looked at the other one."""
_STATUS_LINES = {
    400: "400 Bad Request",
    431: "431 Request Header Fields Too Large",
    501: "501 Not Implemented",
}

_uvicorn_log = logging.getLogger(f"{__name__}.uvicorn")
_uvicorn_log.setLevel(logging.CRITICAL + 1)
"""Discards what uvicorn logs: the edge logs failures, and the answer tells a client what is wrong
with its request."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. The class attributes are there for tests to shorten."""

    head_timeout_s = HEAD_TIMEOUT_S
    stall_timeout_s = STALL_TIMEOUT_S

    def __init__(self, server: HttpServer, connection: ServerConnection) -> None:
        super().__init__(
            server.config,
            server.state,
            {"connection": connection},
            _loop=asyncio.get_running_loop(),
        )
        self.logger = _uvicorn_log
        self.access_log = False
        self._server = server
        self.connection = connection
        self._socket: asyncio.Transport
        self._running: RequestResponseCycle | None = None
        self._is_in_head = False
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._is_deaf = False
        """Whether what the client sends from now on is discarded."""
        self._has_client_ended = False
        self._is_lingering = False
        self._problem = 400, "not HTTP/1.1"
        self._refusal: bytes | None = None
        """The answer to what cannot be parsed; sent after the answers to earlier requests."""

    @property
    def _newest(self) -> RequestResponseCycle | None:
        """The request whose head was parsed last; None before the first."""
        return self.cycle

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timer for the first head."""
        self._socket = cast(asyncio.Transport, transport)
        super().connection_made(cast(asyncio.Transport, _AnswerTransport(self, self._socket)))
        self.connection.opened(self._socket.abort)
        if self._server.is_closing:  # it was accepted, or ended its TLS handshake, just before
            self._socket.close()
        else:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the application about it, for pipelined requests too."""
        self.connection.lost()
        self._cancel_head_timer()
        self._cancel_stall_timer()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        for cycle in (self._running, *(queued for queued, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                _disconnect(cycle)
        self._server.connection_lost()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer complete requests of a client that has closed its half of the connection.

        Usually it has left altogether, so nothing is waited for on its behalf: the application
        receives one more message after the end of the body.
        """
        cycle = self._newest
        if self.scheme == "https" or cycle is None or cycle.response_complete or cycle.more_body:
            return False  # TLS has no halves
        self._has_client_ended = True
        if self._running is not None:
            self._running.message_event.set()
        return True

    def data_received(self, data: bytes) -> None:
        """Parse, and refuse a head that has become too large."""
        if self._is_deaf or self._socket.is_closing():
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._refusal is not None:
            return
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"the request's headers are larger than {MAX_HEAD_BYTES} bytes")
        elif self._is_idle() and self._head_timer is None:
            self._start_head_timer()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered."""
        super().pause_writing()
        self._watch_for_stall()

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        self._cancel_stall_timer()  # by chance as much may be unsent the next time
        if self._socket.is_closing():
            self._watch_for_stall()

    # Called by the parser

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        super().on_message_begin()
        self._is_in_head = True

    def on_headers_complete(self) -> None:
        """Start the request, or queue it behind earlier ones."""
        self._is_in_head = False
        self._head_bytes = 0
        self._cancel_head_timer()
        self._check_head()
        super().on_headers_complete()
        self.headers = []  # trailers must not add to the request's headers
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _UnchunkedSend(self.cycle)  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The next byte belongs to another head."""
        self._head_bytes = 0
        super().on_message_complete()

    def _check_head(self) -> None:
        """Raise what the parser turns into a call of `send_400_response`."""
        single = [name for name, _ in self.headers if name in _SINGLE_HEADERS]
        for name in single if len(set(single)) < len(single) else ():
            if single.count(name) > 1:
                raise self._problem_is(400, f"the header {name.decode()} came twice")
        headers = dict(self.headers)
        encoding = headers.get(b"transfer-encoding")
        if encoding is not None and encoding.strip().lower() != b"chunked":
            raise self._problem_is(501, "the only transfer-encoding supported is chunked")
        has_body = encoding is not None or headers.get(b"content-length", b"0") != b"0"
        if has_body and self.parser.should_upgrade():
            # The parser would skip the body.
            raise self._problem_is(400, "a request to change to another protocol has no body")
        if len(self.pipeline) + 1 >= MAX_PIPELINED:
            raise self._problem_is(400, f"more than {MAX_PIPELINED} requests were pipelined")

    def _problem_is(self, status: int, detail: str) -> ValueError:
        self._problem = status, detail
        return ValueError(detail)

    # Called by uvicorn

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _unsupported_upgrade_warning(self) -> None:
        """Answer the request as it is, and close: what follows is another protocol."""
        self._is_deaf = True
        self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's has no reason
        """Refuse what cannot be parsed, for the reason found here if there is one."""
        self._refuse(*self._problem)

    def on_response_complete(self) -> None:
        """Start the next request; after the last one, send a pending refusal or close."""
        if not self.pipeline and not self.transport.is_closing():
            if self._refusal is not None:
                self._send_refusal()
            elif self._has_client_ended:
                self.close()
        super().on_response_complete()
        if self._is_in_head and self._is_idle() and self._head_timer is None:
            self._start_head_timer()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection on which no further request came."""
        self.close()

    # Closing

    def close(self) -> None:
        """Close once everything is sent, or lingering where a request's body is still arriving."""
        cycle = self._running
        is_body_arriving = cycle is not None and cycle is self.cycle and cycle.more_body
        if is_body_arriving and not self._server.is_closing and not self._has_client_ended:
            self._linger()
        else:
            self._close_socket()

    @property
    def is_closing(self) -> bool:
        """Whether nothing more can be sent."""
        return self._is_lingering or self._socket.is_closing()

    def _linger(self) -> None:
        """Discard what comes for a while.

        If the socket were closed now, data that arrives later would make the system reset the
        connection, and the client might lose the answer.
        """
        self._is_deaf = self._is_lingering = True
        if self._socket.can_write_eof():
            self._socket.write_eof()
        self.flow.resume_reading()
        self._cancel_head_timer()
        self._head_timer = self.loop.call_later(LINGER_S, self._close_socket)

    def _close_socket(self) -> None:
        if not self._socket.is_closing():
            self._socket.close()
            if self._stall_timer is None and self._socket.get_write_buffer_size():
                self._watch_for_stall()

    def _watch_for_stall(self, unsent_bytes: int | None = None) -> None:
        """Abort if the client has read nothing since the last look, when so much was unsent."""
        now_unsent_bytes = self._socket.get_write_buffer_size()
        if now_unsent_bytes == unsent_bytes:
            self._socket.abort()
        else:
            self._stall_timer = self.loop.call_later(
                self.stall_timeout_s, self._watch_for_stall, now_unsent_bytes
            )

    def _cancel_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    # Heads

    def _is_idle(self) -> bool:
        newest = self._newest
        return newest is None or (newest.response_complete and not self.pipeline)

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._close_socket)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # Refusals

    def _refuse(self, status: int, detail: str) -> None:
        """Read no more, and send the reason after the answers to earlier requests."""
        self._is_deaf = True
        body = f'{{"detail":"{detail}"}}'
        self._refusal = (
            f"HTTP/1.1 {_STATUS_LINES[status]}\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        newest = self._newest
        if newest is not None and newest.more_body:
            self._refuse_body(newest)
        elif self._is_idle():
            self._send_refusal()

    def _refuse_body(self, cycle: RequestResponseCycle) -> None:
        """The fault is in the body of the newest request: this is the one to refuse."""
        if self.pipeline:
            self.pipeline.popleft()  # its newest end: this request was not started
        elif cycle.response_started:
            self._close_socket()  # a refusal would be taken for a part of the answer
        else:
            _disconnect(cycle)
            self._send_refusal()

    def _send_refusal(self) -> None:
        assert self._refusal is not None
        self._socket.write(self._refusal)
        self._close_socket()


class _AnswerTransport:
    """The transport as uvicorn sees it: closing it is left to the protocol.

    The head of a small answer is written together with its body, which saves a system call and
    wakes the client once.
    """

    def __init__(self, protocol: BoundedHttpProtocol, transport: asyncio.Transport) -> None:
        self._protocol = protocol
        self._transport = transport
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write this, or keep a head until its body is written."""
        connection = self._protocol.connection
        if connection.is_body_next:
            connection.is_body_next = False
            self._head = data
            return
        if self._head:
            head, self._head = self._head, b""
            if len(data) <= JOINED_BYTES:
                data = b"".join((head, data))
            else:
                self._transport.write(head)
        self._transport.write(data)

    def close(self) -> None:
        """Close once everything is sent."""
        self._protocol.close()

    def is_closing(self) -> bool:
        """Whether nothing more can be sent."""
        return self._protocol.is_closing


class _UnchunkedSend:
    """Sends an HTTP/1.0 client an answer of unknown length: its end is the connection's end."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._has_length = False

    async def __call__(self, message: Any) -> None:
        cycle = self._cycle
        if message["type"] == "http.response.start":
            self._has_length = any(name == b"content-length" for name, _ in message["headers"])
            if not self._has_length:
                cycle.chunked_encoding = False
        elif not self._has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await RequestResponseCycle.send(cycle, message)


def _disconnect(cycle: RequestResponseCycle) -> None:
    cycle.disconnected = True
    cycle.message_event.set()
