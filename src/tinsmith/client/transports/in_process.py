"""Send requests to a service in the same process, with the same bytes but no socket.

The service is an ordinary ASGI application. It handles each request on the client's event loop, and
its reply is read like one from the network: status, headers, compression and limits are the same.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias
from urllib.parse import unquote, urlencode, urlsplit

from tinsmith.client.transports.base import (
    CredentialSource,
    ExchangeReply,
    StreamReply,
    TransportSettings,
    connection_error,
    late_error,
    request_headers,
    silent_error,
    unpacked,
)
from tinsmith.errors import APIConnectionError, DecodeError, without_frames
from tinsmith.types.buffers import Memory
from tinsmith.wire import content
from tinsmith.wire.endpoint_types import Pool
from tinsmith.wire.exchange import HttpRequest

_log = logging.getLogger(__name__)

MOST_WAITING = 16
"""Maximum buffered messages of a streamed response; the application waits when it is reached."""

Message: TypeAlias = MutableMapping[str, Any]
Application: TypeAlias = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]


class InProcessTransport:
    """Sends requests to an ASGI application. Must be used on one event loop."""

    def __init__(
        self, application: Application, settings: TransportSettings, credentials: CredentialSource
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
        """Send a request and return the complete reply; there are no connections to pool."""
        del pool
        if self._is_closed:
            raise APIConnectionError("the client is closed; create a new one")
        headers = request_headers(
            self._settings, request, idempotency_key, credential or self._credentials()
        )
        exchange = _Exchange(request, headers, self._prefix, self._settings.limits.memory_bytes)
        task = self._begin(exchange)
        try:
            async with asyncio.timeout(timeout_s):
                await exchange.ended.wait()
        except TimeoutError as exc:
            task.cancel()
            raise late_error(self._settings, request, timeout_s) from exc
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not exchange.is_whole:
            raise self._failure(exchange, request)
        return exchange.reply(self._settings)

    def _begin(self, exchange: _Exchange) -> asyncio.Task[None]:
        """Start the application; it may keep running after its response, as in any server."""
        task = asyncio.ensure_future(exchange.run(self._application))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    def _failure(self, exchange: _Exchange, request: HttpRequest) -> Exception:
        """The error for an application that returned before its response was complete."""
        if self._is_closed:
            return APIConnectionError("the client was closed")
        error = exchange.error or ConnectionError(
            "the service stopped before its response was complete"
        )
        if isinstance(error, DecodeError):
            return error
        failure = connection_error(self._settings, request, error, is_unreached=False)
        failure.__cause__ = error
        return failure

    @contextlib.asynccontextmanager
    async def stream(
        self, request: HttpRequest, *, pool: Pool, timeout_s: float, idle_s: float
    ) -> AsyncIterator[StreamReply]:
        """Send a request and yield the reply, whose body is read as it arrives."""
        del pool
        if self._is_closed:
            raise APIConnectionError("the client is closed; create a new one")
        headers = request_headers(self._settings, request, None, self._credentials())
        headers["Accept-Encoding"] = "identity"
        exchange = _StreamedExchange(
            request, headers, self._prefix, self._settings.limits.memory_bytes
        )
        task = self._begin(exchange)
        try:
            try:
                await self._next_of(exchange, request, timeout_s)
            except TimeoutError as exc:
                raise late_error(self._settings, request, timeout_s) from exc
            pieces = self._pieces(exchange, request, idle_s)
            yield StreamReply(exchange.status, exchange.headers, pieces)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _pieces(
        self, exchange: _StreamedExchange, request: HttpRequest, idle_s: float
    ) -> AsyncIterator[bytes]:
        while True:
            try:
                message = await self._next_of(exchange, request, idle_s)
            except TimeoutError as exc:
                raise silent_error(request, idle_s) from exc
            if message.get("body"):
                yield bytes(message["body"])
            if not message.get("more_body", False):
                return

    async def _next_of(
        self, exchange: _StreamedExchange, request: HttpRequest, timeout_s: float
    ) -> Message:
        """The application's next message; raises if it returns or times out before sending one."""
        async with asyncio.timeout(timeout_s):
            message = await exchange.messages.get()
        if message is None:
            raise self._failure(exchange, request)
        return message

    async def close(self) -> None:
        """Cancel running requests; does not shut down the application."""
        self._is_closed = True
        under_way = list(self._under_way)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


class _Exchange:
    """One request and the application's response."""

    def __init__(
        self, request: HttpRequest, headers: dict[str, str], prefix: str, most_bytes: int
    ) -> None:
        self._parts = collections.deque(request.parts)
        self._most_bytes = most_bytes
        self._is_read = False
        self._pieces: list[bytes] = []
        self._size = 0
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_whole = False
        self.error: Exception | None = None
        self.ended = asyncio.Event()
        """Set when the response is complete, or the application returned without one."""
        length = str(sum(map(len, request.parts)))
        named = {**headers, "Host": "in-process", "Content-Length": length}
        path = prefix + request.path
        self._scope: Message = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": unquote(path),
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
        """Run the application; its errors are stored in `error`."""
        try:
            await application(self._scope, self._receive, self._send)
        except Exception as error:  # noqa: BLE001 - raised for the caller that awaits the response
            if self.is_whole:
                _log.warning("the service failed after it had responded", exc_info=True)
            self.error = self.error or without_frames(error)
        finally:
            self.ended.set()

    async def _receive(self) -> Message:
        """The body in parts, then `http.disconnect` once the response is complete."""
        if self._is_read:
            await self.ended.wait()
            return {"type": "http.disconnect"}
        part = self._parts.popleft() if self._parts else b""
        self._is_read = not self._parts
        return {"type": "http.request", "body": bytes(part), "more_body": not self._is_read}

    async def _send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start":
            self.status = message["status"]
            for name, value in message.get("headers", ()):
                self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        elif kind == "http.response.body":
            if not self.status or self.is_whole:
                raise RuntimeError("a body is sent after its start and before its end")
            await self._take(message)
            if not message.get("more_body", False):
                self.is_whole = True
                self.ended.set()

    async def _take(self, message: Message) -> None:
        piece = message.get("body", b"")
        self._size += len(piece)
        try:
            content.check_size(self._size, self._most_bytes)
        except DecodeError as error:
            self.error = error  # even if the application catches it
            raise
        self._pieces.append(bytes(piece))

    def reply(self, settings: TransportSettings) -> ExchangeReply:
        """The complete reply."""
        body: Memory = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        return unpacked(self.status, self.headers, body, settings.limits)


class _StreamedExchange(_Exchange):
    """One request with a streamed response; buffers at most `MOST_WAITING` messages."""

    def __init__(
        self, request: HttpRequest, headers: dict[str, str], prefix: str, most_bytes: int
    ) -> None:
        super().__init__(request, headers, prefix, most_bytes)
        self.messages: asyncio.Queue[Message | None] = asyncio.Queue(MOST_WAITING)
        """The start, then the pieces of the body; None if the application returned too early."""

    async def run(self, application: Application) -> None:
        """Run the application; the reader fails at once if it returns early or is cancelled."""
        try:
            await super().run(application)
            if not self.is_whole:
                await self.messages.put(None)
        except asyncio.CancelledError:  # make a waiting reader fail at once
            while not self.messages.empty():
                self.messages.get_nowait()
            self.messages.put_nowait(None)
            raise

    async def _send(self, message: Message) -> None:
        await super()._send(message)
        if message["type"] == "http.response.start":
            await self.messages.put(message)

    async def _take(self, message: Message) -> None:
        await self.messages.put(message)
