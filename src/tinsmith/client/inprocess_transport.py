"""Requests to a service in the same process: the same bytes, and no socket.

The service is an ASGI application, as any server of its kind runs it. Each request is handed to it
on the client's event loop, and its reply is read as one that came over the wire would be: headers,
status, compression and bounds are the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias
from urllib.parse import urlencode, urlsplit

from tinsmith.client.transport import (
    Credentials,
    ExchangeReply,
    StreamReply,
    TransportSettings,
    connection_error,
    late_error,
    request_headers,
    unpacked,
)
from tinsmith.errors import APIConnectionError
from tinsmith.types.buffers import Memory
from tinsmith.wire import content
from tinsmith.wire.endpoints import Pool
from tinsmith.wire.exchange import HttpRequest

MOST_WAITING = 16
"""How many pieces of a streamed answer wait before the application has to."""

Message: TypeAlias = MutableMapping[str, Any]
Application: TypeAlias = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]


class InProcessTransport:
    """Carries requests to an ASGI application. To be used on one event loop."""

    def __init__(
        self, application: Application, settings: TransportSettings, credentials: Credentials
    ) -> None:
        self._application = application
        self._settings = settings
        self._credentials = credentials
        self._prefix = urlsplit(settings.base_url).path.rstrip("/")
        self._under_way: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def send(
        self,
        request: HttpRequest,
        *,
        pool: Pool,
        timeout_s: float,
        idempotency_key: str | None = None,
        credential: str | None = None,
    ) -> ExchangeReply:
        """As `Transport.send`; pools matter to connections alone."""
        del pool
        if self._is_closed:
            raise APIConnectionError("the client is closed; make a new one")
        headers = request_headers(
            self._settings, request, idempotency_key, credential or self._credentials()
        )
        exchange = _Exchange(request, headers, self._prefix, self._settings.limits.memory_bytes)
        task = asyncio.ensure_future(exchange.run(self._application))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        try:
            async with asyncio.timeout(timeout_s):
                await task
        except TimeoutError as exc:
            raise late_error(self._settings, request, timeout_s) from exc
        except asyncio.CancelledError:
            if not task.cancelled() or not self._is_closed:
                task.cancel()
                raise
            raise APIConnectionError("the client was closed") from None
        except Exception as exc:
            raise connection_error(self._settings, request, exc, is_unreached=False) from exc
        return exchange.reply(self._settings)

    @contextlib.asynccontextmanager
    async def stream(
        self, request: HttpRequest, *, pool: Pool, timeout_s: float, idle_s: float
    ) -> AsyncIterator[StreamReply]:
        """As `Transport.stream`."""
        del pool
        if self._is_closed:
            raise APIConnectionError("the client is closed; make a new one")
        headers = request_headers(self._settings, request, None, self._credentials())
        headers["Accept-Encoding"] = "identity"
        exchange = _StreamedExchange(
            request, headers, self._prefix, self._settings.limits.memory_bytes
        )
        task = asyncio.ensure_future(exchange.run(self._application))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        try:
            first = await self._next_of(exchange, task, request, timeout_s)
            pieces = self._pieces(exchange, task, request, idle_s)
            yield StreamReply(first["status"], exchange.headers, pieces)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _pieces(
        self,
        exchange: _StreamedExchange,
        task: asyncio.Task[None],
        request: HttpRequest,
        idle_s: float,
    ) -> AsyncIterator[bytes]:
        while True:
            message = await self._next_of(exchange, task, request, idle_s)
            if message.get("body"):
                yield bytes(message["body"])
            if not message.get("more_body", False):
                return

    async def _next_of(
        self,
        exchange: _StreamedExchange,
        task: asyncio.Task[None],
        request: HttpRequest,
        timeout_s: float,
    ) -> Message:
        """The application's next message, unless it ends or is silent before that."""
        coming = asyncio.ensure_future(exchange.messages.get())
        try:
            await asyncio.wait(
                (coming, task), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if coming.done():
                return coming.result()
            if not task.done():
                raise late_error(self._settings, request, timeout_s)
            if not exchange.messages.empty():
                return exchange.messages.get_nowait()
            raise ConnectionError("the service ended before its answer did")
        except OSError as exc:
            raise connection_error(self._settings, request, exc, is_unreached=False) from exc
        finally:
            coming.cancel()

    async def close(self) -> None:
        """As `Transport.close`. The application is not ours to end."""
        self._is_closed = True
        under_way = list(self._under_way)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


class _Exchange:
    """One request and what the application says to it."""

    def __init__(
        self, request: HttpRequest, headers: dict[str, str], prefix: str, most_bytes: int
    ) -> None:
        self._parts = list(request.parts)
        self._most_bytes = most_bytes
        self._is_read = False
        self._ended = asyncio.Event()
        self._status: int | None = None
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._size = 0
        length = str(sum(map(len, request.parts)))
        named = {**headers, "Host": "in-process", "Content-Length": length}
        path = prefix + request.path
        self._scope: Message = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode("ascii"),
            "query_string": urlencode(request.query).encode("ascii"),
            "root_path": "",
            "headers": [
                (name.lower().encode("latin-1"), value.encode("latin-1"))
                for name, value in named.items()
            ],
            "client": None,
            "server": None,
        }

    async def run(self, application: Application) -> None:
        """Let the application answer."""
        try:
            await application(self._scope, self._receive, self._send)
        finally:
            self._ended.set()
        if self._status is None:
            raise ConnectionError("the service ended without an answer")

    async def _receive(self) -> Message:
        """The body in its parts, then word that the client has gone once the reply is whole."""
        if self._is_read:
            await self._ended.wait()
            return {"type": "http.disconnect"}
        part = self._parts.pop(0) if self._parts else b""
        self._is_read = not self._parts
        return {"type": "http.request", "body": bytes(part), "more_body": not self._is_read}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            for name, value in message.get("headers", ()):
                self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")
            return
        piece = message.get("body", b"")
        self._size += len(piece)
        content.check_size(self._size, self._most_bytes)
        self._pieces.append(bytes(piece))
        if not message.get("more_body", False):
            self._ended.set()

    def reply(self, settings: TransportSettings) -> ExchangeReply:
        """What was answered."""
        assert self._status is not None
        body: Memory = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        return unpacked(self._status, self._headers, body, settings.limits)


class _StreamedExchange(_Exchange):
    """One request whose answer is taken as it comes; few messages wait at a time."""

    def __init__(
        self, request: HttpRequest, headers: dict[str, str], prefix: str, most_bytes: int
    ) -> None:
        super().__init__(request, headers, prefix, most_bytes)
        self.messages: asyncio.Queue[Message] = asyncio.Queue(MOST_WAITING)
        self.headers: dict[str, str] = self._headers

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await super()._send(message)
        elif not message.get("more_body", False):
            self._ended.set()
        await self.messages.put(message)
