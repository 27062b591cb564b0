"""Runs uvicorn's protocol on a listening socket, and closes its connections gracefully.

uvicorn's own `Server` is made for a process that serves one application: it installs signal
handlers, configures logging and accepts without bounds. Here the service may run on a thread of
somebody's program, so the listening socket and the shutdown are ours.

An `Acceptor` accepts connections within the bounds of a gate. Each accepted socket gets a protocol
by `loop.connect_accepted_socket`. A connection counts from `accept` on, so one that never finishes
its TLS handshake is bounded too.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from typing import Any, TypeAlias

import uvicorn
from uvicorn.server import ServerState

from tinsmith.service.http.connections import UNIX, ConnectionGate, ServerConnection
from tinsmith.service.http.protocol import BoundedHttpProtocol

_log = logging.getLogger(__name__)

AT_ONCE = 32
"""Connections accepted in one iteration of the event loop, before open ones are served again."""
HANDSHAKE_S = 30.0
"""How long a TLS handshake may take."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_PAUSE_S = 0.05
_TOLD_AGAIN_S = 10.0


class Acceptor:
    """Accepts until it is closed. For one event loop."""

    def __init__(
        self,
        listener: socket.socket,
        gate: ConnectionGate,
        make_protocol: Callable[[ServerConnection], asyncio.Protocol],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listener = listener
        self._gate = gate
        self._make_protocol = make_protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._resuming: asyncio.TimerHandle | None = None
        self._told_until = 0.0
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no more, and close the listening socket. What was accepted is still opened."""
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def abort_handshakes(self) -> None:
        """Close connections that are still being opened."""
        for task in self._opening:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                if exc.errno not in _EXHAUSTED:
                    _log.warning("cannot accept a connection: %s", exc)
                    return
                self._wait_for_descriptors(exc)
                return
            self._open(accepted, address)

    def _wait_for_descriptors(self, error: OSError) -> None:
        """Close a connection and retry in a moment; the new one stays in the backlog meanwhile."""
        if time.monotonic() >= self._told_until:
            self._told_until = time.monotonic() + _TOLD_AGAIN_S
            _log.warning("cannot accept a connection: %s; raise `ulimit -n`", error)
        self._gate.close_one()
        self._loop.remove_reader(self._listener)
        self._resuming = self._loop.call_later(
            _PAUSE_S, lambda: self._loop.add_reader(self._listener, self._accept)
        )

    def _open(self, accepted: socket.socket, address: Any) -> None:
        host = address[0] if isinstance(address, tuple) else UNIX
        connection = self._gate.admit(host, lambda: None)
        opening = self._loop.create_task(self._connect(accepted, connection))
        connection.close = lambda: _cancel(opening)
        self._opening.add(opening)

        def ended(_: asyncio.Task[None]) -> None:
            self._opening.discard(opening)
            if not connection.is_open:  # it failed, or was cancelled before it began
                self._gate.forget(connection)
                accepted.close()

        opening.add_done_callback(ended)

    async def _connect(self, accepted: socket.socket, connection: ServerConnection) -> None:
        try:
            accepted.setblocking(False)
            if accepted.family != socket.AF_UNIX:
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(
                lambda: self._make_protocol(connection),
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_S,
            )
        except OSError as exc:  # including TLS errors; there is nobody to answer
            _log.debug("cannot open a connection: %s", exc)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


BACKLOG = 2048
KEEP_ALIVE_S = 90
"""Longer than our clients and the official ones keep an idle connection, so that they close it."""
_DATE_S = 1.0

AsgiApp: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]


class HttpServer:
    """Serves an ASGI application. For one event loop.

    Attributes:
        config: uvicorn's, for connections.
        state: uvicorn's: open connections and the tasks that answer requests.
        is_closing: Whether connections are being closed.
    """

    def __init__(
        self,
        app: AsgiApp,
        protocol: type[BoundedHttpProtocol] = BoundedHttpProtocol,
        gate: ConnectionGate | None = None,
    ) -> None:
        self.config = uvicorn.Config(
            app,
            interface="asgi3",
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            server_header=False,
            proxy_headers=False,  # any client could claim to be any other
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self.config.load()
        self.state = ServerState()
        self.is_closing = False
        self._gate = gate or ConnectionGate()
        self._protocol = protocol
        self._connection_lost = asyncio.Event()
        self._date_timer: asyncio.TimerHandle | None = None

    async def open(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept connections from now on; `close` closes the listening socket."""
        listener.listen(BACKLOG)
        self._set_date()
        self._acceptor = Acceptor(
            listener, self._gate, lambda connection: self._protocol(self, connection), tls
        )

    async def close(self, timeout_s: float) -> None:
        """Accept no more, close idle connections, and give requests this long to be answered."""
        self.is_closing = True
        self._acceptor.close()
        for protocol in list(self.state.connections):
            protocol.shutdown()
        try:
            async with asyncio.timeout(timeout_s):
                while self.state.connections:
                    self._connection_lost.clear()
                    await self._connection_lost.wait()
                if self.state.tasks:
                    await asyncio.wait(self.state.tasks)
        except TimeoutError:
            _log.warning("%d requests were not answered in time", len(self.state.tasks))
        self._acceptor.abort_handshakes()
        for protocol in list(self.state.connections):
            protocol.transport.abort()
        for task in list(self.state.tasks):
            task.cancel()
        await asyncio.gather(*self.state.tasks, return_exceptions=True)
        if self._date_timer is not None:
            self._date_timer.cancel()

    def connection_lost(self) -> None:
        """A connection has been removed from `state`."""
        self._connection_lost.set()

    def _set_date(self) -> None:
        self.state.default_headers = [(b"date", formatdate(time.time(), usegmt=True).encode())]
        self._date_timer = asyncio.get_running_loop().call_later(_DATE_S, self._set_date)
