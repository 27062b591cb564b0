"""Requests straight to the service: HTTP/1.1 over connections of our own.

Calls travel over connections of their pool, so that hung samples hold up neither a heartbeat nor a
training step (S22). HTTP/1.1 carries one exchange per connection at a time. A request whose
connection ends before a byte of the reply has come is sent once more, under the same idempotency
key: most likely it met a kept connection that the server had just closed.

A general HTTP library costs several times more per call (`docs/dependencies.md` has the figures).
Where the way leads through a proxy, `transports/proxied.py` uses one all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from urllib.parse import urlencode, urlsplit

from tinsmith.client.transports.address import Address
from tinsmith.client.transports.base import (
    Credentials,
    ExchangeReply,
    StreamReply,
    TransportSettings,
    connection_error,
    late_error,
    request_headers,
    silent_error,
    unpacked,
)
from tinsmith.client.transports.connection import RawReply
from tinsmith.client.transports.connection_pool import ConnectionPool
from tinsmith.client.transports.reply_protocol import ConnectionLostError
from tinsmith.client.transports.stream_connection import StreamConnection
from tinsmith.errors import APIConnectionError, ValidationError
from tinsmith.wire.endpoints import Pool
from tinsmith.wire.exchange import HttpRequest

_log = logging.getLogger(__name__)


class DirectTransport:
    """Carries requests over HTTP/1.1. To be used on one event loop."""

    def __init__(self, settings: TransportSettings, credentials: Credentials) -> None:
        self._settings = settings
        self._credentials = credentials
        self._address = Address(settings)
        self._pools: dict[Pool, ConnectionPool] = {}
        self._prefix = urlsplit(settings.base_url).path.rstrip("/")
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
            raise APIConnectionError("the client is closed; make a new one")
        head = self._head(request, idempotency_key, credential)
        connections = self._pool(pool)
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            try:
                raw = await _exchange(connections, head, request, deadline)
            except ConnectionLostError as exc:
                if not exc.is_untouched or self._is_closed:
                    raise
                _log.debug("%s: %s; sending it once more", request.path, exc)
                connections.close_free()
                raw = await _exchange(connections, head, request, deadline)
        except TimeoutError as exc:
            raise late_error(self._settings, request, timeout_s) from exc
        except OSError as exc:
            is_unreached = not isinstance(exc, ConnectionLostError)
            raise connection_error(self._settings, request, exc, is_unreached) from exc
        return unpacked(raw.status, raw.headers, raw.body, self._settings.limits)

    @contextlib.asynccontextmanager
    async def stream(
        self, request: HttpRequest, *, pool: Pool, timeout_s: float, idle_s: float
    ) -> AsyncIterator[StreamReply]:
        """As `Transport.stream`; each has a connection of its own, of no pool."""
        del pool
        if self._is_closed:
            raise APIConnectionError("the client is closed; make a new one")
        head = self._head(request, None, None, packings="identity")
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

    def _head(
        self,
        request: HttpRequest,
        idempotency_key: str | None,
        credential: str | None,
        *,
        packings: str | None = None,
    ) -> bytes:
        """The request's first line and headers."""
        headers = request_headers(
            self._settings, request, idempotency_key, credential or self._credentials()
        )
        headers["Host"] = self._address.host_header
        if packings is not None:
            headers["Accept-Encoding"] = packings
        if request.method != "GET" or request.parts:
            headers["Content-Length"] = str(sum(map(len, request.parts)))
        target = self._prefix + request.path
        if request.query:
            target += "?" + urlencode(request.query)
        lines = [f"{request.method} {target} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        text = "\r\n".join(lines)
        # Nothing given for a header may add a line of its own.
        count = len(headers)
        if text.count("\n") != count or text.count("\r") != count or "\0" in text:
            raise ValidationError("a header of the request holds a line break or a NUL")
        try:
            return f"{text}\r\n\r\n".encode("latin-1")
        except UnicodeEncodeError as exc:
            raise ValidationError("a header holds a character that HTTP cannot carry") from exc

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


async def _exchange(
    connections: ConnectionPool, head: bytes, request: HttpRequest, deadline: float
) -> RawReply:
    connection = connections.free() or await connections.next_free(deadline)
    try:
        return await connection.exchange(head, request.parts, deadline)
    finally:
        connections.give_back(connection)
