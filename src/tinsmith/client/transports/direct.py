"""Sends requests directly to the service: HTTP/1.1 over connections of our own.

Each purpose has its own pool of connections, so that samples that hang delay neither a heartbeat
nor a training step (S22). HTTP/1.1 carries one exchange per connection at a time. A request whose
connection ends before the first byte of the reply is sent once more, under the same idempotency
key: most likely the server had just closed an idle connection.

Nearly all headers are the same for every request of a kind, so `Heads` caches their text.

A general HTTP library costs several times more per call (`docs/dependencies.md` has the figures).
Through a proxy, `transports/proxied.py` uses one all the same.

A `ConnectionPool` decides which request gets a connection next, and when connections are opened and
closed.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from collections.abc import AsyncIterator

from tinsmith.client.settings import base_url_parts
from tinsmith.client.transports.address import Address
from tinsmith.client.transports.base import (
    KEEP_ALIVE_S,
    CredentialSource,
    ExchangeReply,
    StreamReply,
    TransportSettings,
    connection_error,
    fixed_headers,
    late_error,
    new_idempotency_key,
    silent_error,
    unpacked,
)
from tinsmith.client.transports.connection import (
    ConnectionLostError,
    HttpConnection,
    RawReply,
    StreamConnection,
)
from tinsmith.errors import APIConnectionError, ValidationError
from tinsmith.wire.endpoint_types import Pool
from tinsmith.wire.exchange import HttpRequest
from tinsmith.wire.protobuf import Parts

FIRST_CONNECTIONS = 8
ROUND_S = 0.005
"""While requests wait, the pool opens as many connections per round as it has, at least the first
number, and a round lasts the second."""


class ConnectionPool:
    """The connections for one purpose.

    If none is free, a request waits for the next one that is returned or opened. Connections are
    opened in rounds, each of which doubles the pool, but not for requests that those in use would
    serve within another round: a burst of short requests needs few connections, and a burst of
    long ones soon has as many as it needs.
    """

    def __init__(self, address: Address, settings: TransportSettings) -> None:
        self._address = address
        self._most = settings.most_connections
        self._most_bytes = settings.limits.memory_bytes
        self._free: list[HttpConnection] = []
        self._all: set[HttpConnection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._waiting: collections.deque[asyncio.Future[HttpConnection]] = collections.deque()
        self._round: asyncio.TimerHandle | None = None
        self._served = 0
        """How many requests got a returned connection in this round."""
        self._sweep: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    async def exchange(self, head: bytes, parts: Parts, deadline: float) -> RawReply:
        """Carry one exchange over the next free connection; raises as `HttpConnection.exchange`.

        Raises:
            TimeoutError: No connection was free before `deadline`.
            OSError: None could be opened.
        """
        connection = self._free_connection() or await self._next_free(deadline)
        try:
            return await connection.exchange(head, parts, deadline)
        finally:
            self._give_back(connection)

    def _free_connection(self) -> HttpConnection | None:
        while self._free:
            connection = self._free.pop()
            if connection.is_open:
                return connection
        return None

    async def _next_free(self, deadline: float) -> HttpConnection:
        """The next connection that is returned or opened."""
        waiter: asyncio.Future[HttpConnection] = self._loop.create_future()
        self._waiting.append(waiter)
        self._open_more()
        try:
            async with asyncio.timeout_at(deadline):
                return await waiter
        except (asyncio.CancelledError, TimeoutError):
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._give_back(waiter.result())  # it was given to us as we were cancelled
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(waiter)
            raise

    def close_free(self) -> None:
        """Close the idle ones: what ended one of them may have ended all."""
        for connection in self._free:
            connection.close()
        self._free.clear()

    def _give_back(self, connection: HttpConnection) -> None:
        if not connection.is_open:
            connection.close()
            return
        if self._waiting:
            self._served += 1
        self._hand_out(connection)

    def _hand_out(self, connection: HttpConnection) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        connection.idle_since = self._loop.time()
        self._free.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(KEEP_ALIVE_S, self._close_old)

    def _open_more(self, soon_served: int = 0) -> None:
        """Open more connections, if requests wait for them and the limit allows it."""
        if self._round is not None:
            return  # another round is coming
        count = min(
            len(self._waiting) - len(self._opening) - soon_served,
            max(FIRST_CONNECTIONS, len(self._all)),
            self._most - len(self._all) - len(self._opening),
        )
        for _ in range(count):
            task = self._loop.create_task(self._open())
            self._opening.add(task)
            task.add_done_callback(self._opened)
        if count > 0 or (soon_served and self._waiting):
            self._served = 0
            self._round = self._loop.call_later(ROUND_S, self._next_round)

    def _next_round(self) -> None:
        self._round = None
        self._open_more(self._served)

    async def _open(self) -> None:
        connection = HttpConnection(self._lost, self._most_bytes, self._loop)
        try:
            await self._address.connect(connection)
        except OSError as error:
            self._fail_next(error)
            return
        if not connection.is_open:  # closed as soon as it was opened
            self._fail_next(connection.lost("the server closed the connection"))
            return
        self._all.add(connection)
        self._hand_out(connection)

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if not task.cancelled():
            if (error := task.exception()) is not None:
                self._fail_next(error)
            self._open_more()

    def _fail_next(self, error: BaseException) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(error)
                return

    def _lost(self, connection: HttpConnection) -> None:
        self._all.discard(connection)
        with contextlib.suppress(ValueError):
            self._free.remove(connection)
        self._open_more()

    def _close_old(self) -> None:
        """Close connections that were idle for too long; the oldest come first."""
        oldest_kept = self._loop.time() - KEEP_ALIVE_S
        while self._free and self._free[0].idle_since <= oldest_kept:
            self._free.pop(0).close()
        self._sweep = None
        if self._free:
            delay_s = self._free[0].idle_since - oldest_kept
            self._sweep = self._loop.call_later(delay_s, self._close_old)

    async def close(self) -> None:
        """Close all connections; pending requests fail."""
        for timer in (self._round, self._sweep):
            if timer is not None:
                timer.cancel()
        # First: a request that still waited would have another connection opened.
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(
                    ConnectionLostError("the client was closed", is_untouched=False)
                )
        self._waiting.clear()
        opening = list(self._opening)
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        for connection in list(self._all):
            connection.close()
        await asyncio.sleep(0)  # lets the event loop close the sockets


_log = logging.getLogger(__name__)


class DirectTransport:
    """Sends requests over HTTP/1.1. For one event loop."""

    def __init__(self, settings: TransportSettings, credentials: CredentialSource) -> None:
        self._settings = settings
        self._credentials = credentials
        self._address = Address(settings)
        self._pools: dict[Pool, ConnectionPool] = {}
        self._heads = Heads(settings, self._address.host_header)
        self._streams: set[StreamConnection] = set()
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
        """As `Transport.send`."""
        if self._is_closed:
            raise APIConnectionError("the client is closed; create a new one")
        head = self._heads.of(request, idempotency_key, credential or self._credentials())
        deadline = asyncio.get_running_loop().time() + timeout_s
        connections = self._pool(pool)
        try:
            try:
                found = await connections.exchange(head, request.parts, deadline)
            except ConnectionLostError as exc:
                if not exc.is_untouched or self._is_closed:
                    raise
                _log.debug("%s: %s; sending it again", request.path, exc)
                connections.close_free()
                found = await connections.exchange(head, request.parts, deadline)
        except TimeoutError as exc:
            raise late_error(self._settings, request, timeout_s) from exc
        except OSError as exc:
            is_unreached = not isinstance(exc, ConnectionLostError)
            raise connection_error(self._settings, request, exc, is_unreached) from exc
        return unpacked(found.status, found.headers, found.body, self._settings.limits)

    @contextlib.asynccontextmanager
    async def stream(
        self, request: HttpRequest, *, pool: Pool, timeout_s: float, idle_s: float
    ) -> AsyncIterator[StreamReply]:
        """As `Transport.stream`; each stream has its own connection, outside the pools."""
        del pool
        if self._is_closed:
            raise APIConnectionError("the client is closed; create a new one")
        head = self._heads.of(request, None, self._credentials(), encodings="identity")
        connection = StreamConnection(asyncio.get_running_loop())
        self._streams.add(connection)
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._address.connect(connection)
                    await connection.begin(head, request.parts)
            except TimeoutError as exc:
                raise late_error(self._settings, request, timeout_s) from exc
            except OSError as exc:
                is_unreached = not isinstance(exc, ConnectionLostError)
                raise connection_error(self._settings, request, exc, is_unreached) from exc
            pieces = self._pieces(request, connection, idle_s)
            yield StreamReply(connection.status, connection.headers, pieces)
        finally:
            self._streams.discard(connection)
            connection.close()

    async def _pieces(
        self, request: HttpRequest, connection: StreamConnection, idle_s: float
    ) -> AsyncIterator[bytes]:
        while True:
            try:
                async with asyncio.timeout(idle_s):
                    piece = await connection.next_piece()
            except TimeoutError as exc:
                raise silent_error(request, idle_s) from exc
            except OSError as exc:
                raise connection_error(self._settings, request, exc, is_unreached=False) from exc
            if not piece:
                return
            yield piece

    def _pool(self, pool: Pool) -> ConnectionPool:
        connections = self._pools.get(pool)
        if connections is None:
            connections = self._pools[pool] = ConnectionPool(self._address, self._settings)
        return connections

    async def close(self) -> None:
        """As `Transport.close`."""
        self._is_closed = True
        for stream in list(self._streams):
            stream.close()
        for connections in self._pools.values():
            await connections.close()


MOST_KEPT = 64
"""For how many kinds of requests. Each path with an id in it is a kind of its own."""


class Heads:
    """The first line and headers of requests to one service, as bytes. For one thread."""

    def __init__(self, settings: TransportSettings, host: str) -> None:
        self._settings = settings
        self._host = host
        self._prefix = base_url_parts(settings.base_url).path
        self._overridden = frozenset(name.lower() for name in settings.headers)
        self._kept: dict[tuple[object, ...], bytes] = {}

    def of(
        self,
        request: HttpRequest,
        idempotency_key: str | None,
        credential: str,
        *,
        encodings: str | None = None,
    ) -> bytes:
        """The head of a request, with the empty line that ends it.

        Args:
            request: The request.
            idempotency_key: Generated if None.
            credential: The credential to send.
            encodings: Replaces the usual `Accept-Encoding`.

        Raises:
            ValidationError: A header is not valid in HTTP.
        """
        text = ""
        if request.method != "GET":
            text = f"X-Idempotency-Key: {idempotency_key or new_idempotency_key()}\r\n"
        if request.method != "GET" or request.parts:
            text += f"Content-Length: {sum(map(len, request.parts))}\r\n"
        own = _lines(self._not_overridden(request.once)) if request.once else b""
        return b"".join(
            (self._beginning(request, credential, encodings), own, text.encode(), b"\r\n")
        )

    def _not_overridden(self, headers: dict[str, str]) -> dict[str, str]:
        if not self._overridden:
            return headers
        return {
            name: value for name, value in headers.items() if name.lower() not in self._overridden
        }

    def _beginning(self, request: HttpRequest, credential: str, encodings: str | None) -> bytes:
        if request.query:
            return self._written(request, credential, encodings)
        kind = (request.method, request.path, credential, encodings, *request.headers.items())
        text = self._kept.get(kind)
        if text is None:
            text = self._written(request, credential, encodings)
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[kind] = text
        return text

    def _written(self, request: HttpRequest, credential: str, encodings: str | None) -> bytes:
        headers = fixed_headers(self._settings, request.headers, credential)
        headers["Host"] = self._host
        if encodings is not None:
            headers["Accept-Encoding"] = encodings
        target = self._prefix + request.path
        if request.query:
            from urllib.parse import urlencode  # samples do not need it

            target += "?" + urlencode(request.query)
        return _checked(f"{request.method} {target} HTTP/1.1\r\n", 1) + _lines(headers)


def _lines(headers: dict[str, str]) -> bytes:
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    return _checked(text, len(headers))


def _checked(text: str, lines: int) -> bytes:
    """Encode header lines; raises if a value would add a line."""
    if text.count("\n") != lines or text.count("\r") != lines or "\0" in text:
        raise ValidationError("a header of the request contains a line break or NUL")
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError as exc:
        raise ValidationError("a header contains a character that is not valid in HTTP") from exc
