"""Requests straight to the service: HTTP/1.1 over connections of our own.

Calls travel over connections of their pool, so that hung samples hold up neither a heartbeat nor a
training step (S22). HTTP/1.1 carries one exchange per connection at a time. A request whose
connection ends before a byte of the reply has come is sent once more, under the same idempotency
key: most likely it met a kept connection that the server had just closed.

A general HTTP library costs several times more per call (`docs/dependencies.md` has the figures).
Where the way leads through a proxy, `proxied_transport.py` uses one all the same.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from urllib.parse import urlencode, urlsplit

import aiohappyeyeballs

from tinsmith.client.connection import Connection, RawReply
from tinsmith.client.reply_protocol import ConnectionLostError
from tinsmith.client.stream_connection import StreamConnection
from tinsmith.client.transport import (
    CONNECT_TIMEOUT_S,
    KEEP_ALIVE_S,
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
from tinsmith.errors import APIConnectionError, ValidationError
from tinsmith.wire.endpoints import Pool
from tinsmith.wire.exchange import HttpRequest

_log = logging.getLogger(__name__)

FIRST_CONNECTIONS = 8
ROUND_S = 0.005
"""While calls wait, as many connections are opened in each such time as there are already, and so
many at least."""
ADDRESS_LIFETIME_S = 10.0
"""How long the addresses of a host are remembered."""


class DirectTransport:
    """Carries requests over HTTP/1.1. To be used on one event loop."""

    def __init__(self, settings: TransportSettings, credentials: Credentials) -> None:
        self._settings = settings
        self._credentials = credentials
        self._address = _Address(settings)
        self._pools: dict[Pool, _ConnectionPool] = {}
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

    def _pool(self, pool: Pool) -> _ConnectionPool:
        connections = self._pools.get(pool)
        if connections is None:
            connections = self._pools[pool] = _ConnectionPool(self._address, self._settings)
        return connections

    async def close(self) -> None:
        """As `Transport.close`."""
        self._is_closed = True
        for stream in list(self._streams):
            stream.close()
        for connections in self._pools.values():
            await connections.close()


async def _exchange(
    connections: _ConnectionPool, head: bytes, request: HttpRequest, deadline: float
) -> RawReply:
    connection = connections.free() or await connections.next_free(deadline)
    try:
        return await connection.exchange(head, request.parts, deadline)
    finally:
        connections.give_back(connection)


class _ConnectionPool:
    """The connections for one purpose.

    Whoever finds none free waits for the next that is given back or made, whichever comes first.
    They are made in rounds, each as large as what is there: a burst of short calls is served by a
    few of them, and a burst of long ones soon has as many as it needs.
    """

    def __init__(self, address: _Address, settings: TransportSettings) -> None:
        self._address = address
        self._most = settings.most_connections
        self._most_bytes = settings.limits.memory_bytes
        self._free: list[Connection] = []
        self._all: set[Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._waiting: collections.deque[asyncio.Future[Connection]] = collections.deque()
        self._round: asyncio.TimerHandle | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def free(self) -> Connection | None:
        """A connection that nobody uses, for one exchange; to be given back after it."""
        while self._free:
            connection = self._free.pop()
            if connection.is_open:
                return connection
        return None

    async def next_free(self, deadline: float) -> Connection:
        """As `free`, for the first that is given back or made.

        Raises:
            TimeoutError: There was none before `deadline`.
            OSError: None could be made.
        """
        turn: asyncio.Future[Connection] = self._loop.create_future()
        self._waiting.append(turn)
        self._open_more()
        try:
            async with asyncio.timeout_at(deadline):
                return await turn
        except (asyncio.CancelledError, TimeoutError):
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give_back(turn.result())  # it was given to us as we were cancelled
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(turn)
            raise

    def close_free(self) -> None:
        """Close those that nobody uses: what ended one of them may have ended all."""
        for connection in self._free:
            connection.close()
        self._free.clear()

    def give_back(self, connection: Connection) -> None:
        """Let the next one have it, or keep it for a while."""
        if not connection.is_open:
            connection.close()
            return
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(connection)
                return
        connection.idle_since = self._loop.time()
        self._free.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(KEEP_ALIVE_S, self._close_old)

    def _open_more(self) -> None:
        """Have more connections made, if those who wait need them and there may be more."""
        if self._round is not None:
            return  # another round is coming
        count = min(
            len(self._waiting) - len(self._opening),
            max(FIRST_CONNECTIONS, len(self._all)),
            self._most - len(self._all) - len(self._opening),
        )
        for _ in range(count):
            task = self._loop.create_task(self._open())
            self._opening.add(task)
            task.add_done_callback(self._opened)
        if count > 0:
            self._round = self._loop.call_later(ROUND_S, self._next_round)

    def _next_round(self) -> None:
        self._round = None
        self._open_more()

    async def _open(self) -> None:
        connection = Connection(self._lost, self._most_bytes, self._loop)
        try:
            await self._address.connect(connection)
        except (OSError, APIConnectionError) as error:
            self._fail_next(error)
            return
        if not connection.is_open:  # ended as soon as it was made
            self._fail_next(connection.lost("the server closed the connection"))
            return
        self._all.add(connection)
        self.give_back(connection)

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if not task.cancelled():
            if (error := task.exception()) is not None:
                self._fail_next(error)
            self._open_more()

    def _fail_next(self, error: BaseException) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(error)
                return

    def _lost(self, connection: Connection) -> None:
        self._all.discard(connection)
        with contextlib.suppress(ValueError):
            self._free.remove(connection)
        self._open_more()

    def _close_old(self) -> None:
        """Close what was idle for too long; the oldest come first."""
        oldest_kept = self._loop.time() - KEEP_ALIVE_S
        while self._free and self._free[0].idle_since <= oldest_kept:
            self._free.pop(0).close()
        self._sweep = None
        if self._free:
            delay_s = self._free[0].idle_since - oldest_kept
            self._sweep = self._loop.call_later(delay_s, self._close_old)

    async def close(self) -> None:
        """Close all connections; whoever waits or exchanges fails."""
        for timer in (self._round, self._sweep):
            if timer is not None:
                timer.cancel()
        # Before anything else ends: whoever still waited would have another connection made.
        for turn in self._waiting:
            if not turn.done():
                turn.set_exception(ConnectionLostError("the client was closed", is_untouched=False))
        self._waiting.clear()
        opening = list(self._opening)
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        for connection in list(self._all):
            connection.close()
        await asyncio.sleep(0)  # lets the event loop close the sockets


class _Address:
    """Where the service is, and how to get a connection there."""

    def __init__(self, settings: TransportSettings) -> None:
        parts = urlsplit(settings.base_url)
        self._unix_socket = settings.unix_socket
        self._host = parts.hostname or ""
        if not self._host.isascii():
            self._host = self._host.encode("idna").decode()
        self._is_secure = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_secure else 80)
        self._ca_file = settings.ca_file
        self._tls: ssl.SSLContext | None = None
        self._found: list[aiohappyeyeballs.AddrInfoType] = []
        self._found_at = float("-inf")
        self._asking = asyncio.Lock()
        shown = f"[{self._host}]" if ":" in self._host else self._host
        self.host_header = shown if parts.port is None else f"{shown}:{parts.port}"

    async def connect(self, connection: asyncio.Protocol) -> None:
        """Connect it, within `CONNECT_TIMEOUT_S`.

        Raises:
            OSError: That failed, for whatever reason.
        """
        loop = asyncio.get_running_loop()
        tls = self._context() if self._is_secure else None
        name = self._host if self._is_secure else None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if self._unix_socket is not None:
                    await loop.create_unix_connection(
                        lambda: connection, self._unix_socket, ssl=tls, server_hostname=name
                    )
                    return
                found = await self._addresses(loop)
                reached = await aiohappyeyeballs.start_connection(
                    found, happy_eyeballs_delay=0.25, interleave=1, loop=loop
                )
                reached.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.create_connection(
                    lambda: connection, sock=reached, ssl=tls, server_hostname=name
                )
        except TimeoutError as exc:
            raise OSError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from exc
        except UnicodeError as exc:
            raise OSError(f"{self._host[:80]!r} is no host's name") from exc

    async def _addresses(
        self, loop: asyncio.AbstractEventLoop
    ) -> list[aiohappyeyeballs.AddrInfoType]:
        if loop.time() - self._found_at <= ADDRESS_LIFETIME_S:
            return self._found
        async with self._asking:  # one asks for all
            if loop.time() - self._found_at > ADDRESS_LIFETIME_S:
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                self._found, self._found_at = list(found), loop.time()
        return self._found

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context(cafile=self._ca_file)
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls
