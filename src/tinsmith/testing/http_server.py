"""A small HTTP/1.1 server on loopback: requests in, replies out, and nothing known of the API.

Each connection is kept alive and carries one exchange at a time; `http_reading.py` makes its bytes
into requests. A handler gets a whole `Incoming` and gives an
`HttpReply`, a `StreamedReply` that is sent piece by piece, or a `BrokenReply` for a test that wants
the road to fail. When a client leaves, its handler is cancelled; a client that closes only its
sending half counts as gone.

Knows nothing of endpoints, faults or credentials.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Literal, TypeAlias

import msgspec

from tinsmith.testing.http_reading import Incoming, RefusedRequestError, RequestReader
from tinsmith.wire.exchange import HttpReply
from tinsmith.wire.failures import reply_from_error

_log = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 * 1024 * 1024
_READ_AHEAD_BYTES = 64 * 1024
"""How much of a next request is taken in while the one before it is being answered."""
_BACKLOG = 2048


class StreamedReply(msgspec.Struct, frozen=True):
    """A reply whose pieces are sent as they come."""

    status: int
    headers: dict[str, str]
    pieces: AsyncIterator[bytes]


class BrokenReply(msgspec.Struct, frozen=True):
    """A reply that does not arrive: reset, closed without a byte, or closed half-way through."""

    how: Literal["reset", "close", "half"]
    reply: HttpReply = HttpReply(204, {}, [])


Reply: TypeAlias = HttpReply | StreamedReply | BrokenReply
Handler: TypeAlias = Callable[[Incoming], Awaitable[Reply]]


class HttpServer:
    """Listens on a port of 127.0.0.1 and hands every request to one handler."""

    def __init__(self, handler: Handler, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.handler = handler
        self.max_body_bytes = max_body_bytes
        self.connection_count = 0
        self.connections: set[_Connection] = set()
        self.tasks: set[asyncio.Task[Any]] = set()
        """Those of connections being made, served, and just lost."""
        self._listener: socket.socket | None = None

    async def open(self, port: int = 0) -> int:
        """Begin to listen; returns the port, which the system chooses where it is 0."""
        self._listener = socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)
        chosen: int = self._listener.getsockname()[1]
        return chosen

    async def close(self) -> None:
        """Stop listening, drop every connection, and wait until all handlers have ended."""
        if self._listener is None:
            return
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        self._listener = None
        while self.tasks or self.connections:
            for connection in list(self.connections):
                connection.drop()
            # A connection's socket is closed a turn of the loop after its task has ended.
            await asyncio.gather(*self.tasks, asyncio.sleep(0), return_exceptions=True)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something that `close` is to wait for."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def _accept(self, listener: socket.socket) -> None:
        # Not asyncio's own server: what that has accepted when it is closed stays open for good.
        loop = asyncio.get_running_loop()
        for _ in range(_BACKLOG):
            try:
                client = listener.accept()[0]
            except (BlockingIOError, ConnectionAbortedError):
                return
            client.setblocking(False)
            making = loop.connect_accepted_socket(lambda: _Connection(self), client)
            _ = self.start(making)


class _Connection(asyncio.Protocol):
    """One client's socket: bytes in, requests answered one after the other."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._is_over = False
        self._is_reading = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._reader = RequestReader(
            self._server.connection_count, self._server.max_body_bytes, transport.write
        )
        self._server.connection_count += 1
        self._server.connections.add(self)
        self._task = self._server.start(self._serve())

    def data_received(self, data: bytes) -> None:
        waiting = self._reader.feed(data)
        if not self._is_reading and waiting > _READ_AHEAD_BYTES:
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        return False  # the transport closes, and connection_lost follows

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - why does not matter
        self._is_over = True
        self._server.connections.discard(self)
        self._may_write.set()
        self._task.cancel()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def drop(self) -> None:
        """End the connection now, with whatever is under way on it."""
        self._transport.abort()
        self._task.cancel()

    async def _serve(self) -> None:
        try:
            while not self._is_over:
                self._is_reading = True
                self._transport.resume_reading()
                request, keeps_alive = await self._reader.read()
                self._is_reading = False
                reply = await self._answer(request)
                is_whole = await self._write(reply, request.method, keeps_alive=keeps_alive)
                if not keeps_alive or not is_whole:
                    break
        except RefusedRequestError as exc:
            detail = f'{{"detail": "{exc}"}}'.encode()
            refusal = HttpReply(exc.status, {"Content-Type": "application/json"}, [detail])
            self._write_whole(refusal, "GET", keeps_alive=False)
        except ConnectionError:
            pass  # the client left between two bytes
        finally:
            self._transport.close()

    async def _answer(self, request: Incoming) -> Reply:
        try:
            return await self._server.handler(request)
        except Exception as exc:  # noqa: BLE001 - the outer edge; the test reads of it in the log
            _log.exception("%s %s failed inside the test service", request.method, request.path)
            return reply_from_error(exc)

    async def _write(self, reply: Reply, method: str, *, keeps_alive: bool) -> bool:
        """Send a reply; returns whether all of it went out."""
        if isinstance(reply, BrokenReply):
            self._write_broken(reply)
            return False
        if isinstance(reply, StreamedReply):
            await self._write_stream(reply, keeps_alive=keeps_alive)
        else:
            self._write_whole(reply, method, keeps_alive=keeps_alive)
        await self._may_write.wait()
        return True

    def _write_whole(self, reply: HttpReply, method: str, *, keeps_alive: bool) -> None:
        head = _head(reply.status, _with_length(reply), keeps_alive=keeps_alive)
        body = () if method == "HEAD" else reply.parts
        self._transport.write(b"".join([head, *body]))

    async def _write_stream(self, reply: StreamedReply, *, keeps_alive: bool) -> None:
        headers = {**reply.headers, "Transfer-Encoding": "chunked"}
        self._transport.write(_head(reply.status, headers, keeps_alive=keeps_alive))
        try:
            async for piece in reply.pieces:
                if piece:  # an empty chunk would end the body
                    self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await self._may_write.wait()
        finally:
            with contextlib.suppress(AttributeError):
                await reply.pieces.aclose()  # type: ignore[attr-defined]  # generators have it
        self._transport.write(b"0\r\n\r\n")

    def _write_broken(self, broken: BrokenReply) -> None:
        if broken.how == "reset":
            # Without lingering, closing sends RST instead of FIN.
            linger = struct.pack("ii", 1, 0)
            handle = self._transport.get_extra_info("socket")
            handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self._transport.abort()
        elif broken.how == "half":
            body = b"".join(broken.reply.parts)
            head = _head(broken.reply.status, _with_length(broken.reply), keeps_alive=True)
            half = head + body[: len(body) // 2] if body else head[: len(head) // 2]
            self._transport.write(half)


def _with_length(reply: HttpReply) -> dict[str, str]:
    headers = {n: v for n, v in reply.headers.items() if n.lower() != "content-length"}
    if reply.status not in (204, 304):
        headers["Content-Length"] = str(sum(map(len, reply.parts)))
    return headers


def _head(status: int, headers: dict[str, str], *, keeps_alive: bool) -> bytes:
    with contextlib.suppress(ValueError):
        status = http.HTTPStatus(status)
    phrase = status.phrase if isinstance(status, http.HTTPStatus) else "Status"
    lines = [f"HTTP/1.1 {int(status)} {phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += ["\r\n" if keeps_alive else "Connection: close\r\n\r\n"]
    return "\r\n".join(lines).encode("latin-1")
