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
from collections.abc import AsyncIterator, Awaitable, Callable

from tinsmith.client.transports.address import Address
from tinsmith.client.transports.base import (
    Begun,
    Credentials,
    ExchangeReply,
    StreamReply,
    TransportSettings,
    connection_error,
    late_error,
    silent_error,
    unpacked,
)
from tinsmith.client.transports.connection import Connection, RawReply, is_small
from tinsmith.client.transports.connection_pool import ConnectionPool
from tinsmith.client.transports.heads import Heads
from tinsmith.client.transports.reply_protocol import ConnectionLostError
from tinsmith.client.transports.stream_connection import StreamConnection
from tinsmith.errors import APIConnectionError, DecodeError
from tinsmith.wire.endpoint_types import Pool
from tinsmith.wire.exchange import HttpRequest

_log = logging.getLogger(__name__)


class DirectTransport:
    """Carries requests over HTTP/1.1. To be used on one event loop."""

    def __init__(self, settings: TransportSettings, credentials: Credentials) -> None:
        self._settings = settings
        self._credentials = credentials
        self._address = Address(settings)
        self.limits = settings.limits
        """How much memory a reply may take."""
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
            raise APIConnectionError("the client is closed; make a new one")
        head = self._heads.of(request, idempotency_key, credential or self._credentials())
        deadline = asyncio.get_running_loop().time() + timeout_s
        exchange = _Exchange(self._pool(pool), head, request, deadline)
        return await self.reply_of(exchange, exchange.run(), timeout_s)

    def begin(
        self,
        request: HttpRequest,
        *,
        pool: Pool,
        timeout_s: float,
        idempotency_key: str,
        on_over: Callable[[], object],
    ) -> Begun | None:
        """As `Transport.begin`: if the body is small."""
        if self._is_closed or not is_small(request.parts):
            return None
        head = self._heads.of(request, idempotency_key, self._credentials())
        deadline = asyncio.get_running_loop().time() + timeout_s
        exchange = _Exchange(self._pool(pool), head, request, deadline)
        begun = _BegunExchange(self, exchange, timeout_s, on_over)
        return begun if begun.start() else None

    async def reply_of(
        self, exchange: _Exchange, raw: Awaitable[RawReply], timeout_s: float
    ) -> ExchangeReply:
        """What an exchange gives, which runs as `raw`; it is run once more where that may help."""
        request = exchange.request
        try:
            try:
                found = await raw
            except ConnectionLostError as exc:
                if not exc.is_untouched or self._is_closed:
                    raise
                _log.debug("%s: %s; sending it once more", request.path, exc)
                exchange.connections.close_free()
                found = await exchange.run()
        except TimeoutError as exc:
            raise late_error(self._settings, request, timeout_s) from exc
        except OSError as exc:
            is_unreached = not isinstance(exc, ConnectionLostError)
            raise connection_error(self._settings, request, exc, is_unreached) from exc
        return unpacked(found.status, found.headers, found.body, self.limits)

    @contextlib.asynccontextmanager
    async def stream(
        self, request: HttpRequest, *, pool: Pool, timeout_s: float, idle_s: float
    ) -> AsyncIterator[StreamReply]:
        """As `Transport.stream`; each has a connection of its own, of no pool."""
        del pool
        if self._is_closed:
            raise APIConnectionError("the client is closed; make a new one")
        head = self._heads.of(request, None, self._credentials(), packings="identity")
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


class _Exchange:
    """A request as it is sent, however often."""

    __slots__ = ("connections", "deadline", "head", "request")

    def __init__(
        self, connections: ConnectionPool, head: bytes, request: HttpRequest, deadline: float
    ) -> None:
        self.connections = connections
        self.head = head
        self.request = request
        self.deadline = deadline

    async def run(self) -> RawReply:
        connections = self.connections
        connection = connections.free() or await connections.next_free(self.deadline)
        try:
            return await connection.exchange(self.head, self.request.parts, self.deadline)
        finally:
            connections.give_back(connection)


class _BegunExchange:
    """As `Begun`. Where no connection is free, it is sent over the next one that is."""

    __slots__ = (
        "_alarm",
        "_connection",
        "_exchange",
        "_found",
        "_on_over",
        "_timeout_s",
        "_transport",
        "_turn",
    )

    def __init__(
        self,
        transport: DirectTransport,
        exchange: _Exchange,
        timeout_s: float,
        on_over: Callable[[], object],
    ) -> None:
        self._transport = transport
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._turn: asyncio.Future[Connection] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._connection: Connection | None = None
        self._on_over: Callable[[], object] | None = on_over
        self._found: RawReply | BaseException | None = None

    def start(self) -> bool:
        """Send it, or wait for a connection; False if neither can be."""
        connections = self._exchange.connections
        connection = connections.free()
        if connection is None:
            self._turn = connections.turn()
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_at(self._exchange.deadline, self._come_too_late)
            self._turn.add_done_callback(self._take_turn)
            return True
        try:
            self._send(connection)
        except ConnectionLostError:  # it has just ended, and nothing was sent
            connections.give_back(connection)
            return False
        return True

    def _take_turn(self, turn: asyncio.Future[Connection]) -> None:
        if self._turn is None:
            return  # it was left
        self._stop_waiting()
        error = turn.exception()
        if error is None:
            try:
                self._send(turn.result())
            except ConnectionLostError as exc:
                self._exchange.connections.give_back(turn.result())
                error = exc
        if error is not None:
            self._over(error)

    def _send(self, connection: Connection) -> None:
        exchange = self._exchange
        connection.begin(exchange.head, exchange.request.parts, exchange.deadline, self._over)
        self._connection = connection

    def _come_too_late(self) -> None:
        self._leave(TimeoutError("no connection in time"))

    def _leave(self, error: BaseException) -> None:
        turn = self._turn
        assert turn is not None
        self._stop_waiting()
        self._exchange.connections.leave(turn)
        self._over(error)

    def _stop_waiting(self) -> None:
        self._turn = None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _over(self, found: RawReply | BaseException) -> None:
        self._found = found
        connection, self._connection = self._connection, None
        if connection is not None:
            self._exchange.connections.give_back(connection)
        on_over, self._on_over = self._on_over, None  # it may hold whoever holds us: a circle
        if on_over is None:
            return
        try:
            on_over()
        except Exception as error:  # noqa: BLE001 - as of any callback: others count on who calls us
            told = {"message": f"{self._exchange.request.path}: told in vain", "exception": error}
            asyncio.get_running_loop().call_exception_handler(told)

    def whole_reply(self) -> ExchangeReply | None:
        found = self._found
        if not isinstance(found, RawReply):
            return None
        try:
            return unpacked(found.status, found.headers, found.body, self._transport.limits)
        except (DecodeError, MemoryError):  # `reply` says so
            return None

    async def reply(self) -> ExchangeReply:
        return await self._transport.reply_of(self._exchange, self._first(), self._timeout_s)

    async def _first(self) -> RawReply:
        found, self._found = self._found, None
        assert found is not None
        try:
            if isinstance(found, BaseException):
                raise found
            return found
        finally:
            del found  # an error holds our frame: a circle

    def cancel(self) -> None:
        if self._turn is not None:
            self._leave(ConnectionLostError("the client was closed", is_untouched=False))
        elif self._connection is not None:
            self._connection.close()
