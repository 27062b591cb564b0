"""Accepts connections from a listening socket, within the bounds of a gate.

It hands each accepted socket to `loop.connect_accepted_socket` with a protocol of whatever server
is used. A connection counts from `accept` on, so one that never finishes its TLS handshake is
bounded too.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, cast

from tinsmith.server.connections import UNIX, Connection, ConnectionGate

_log = logging.getLogger(__name__)

AT_ONCE = 32
"""Connections that are accepted before those that are open are read from again."""
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
        make_protocol: Callable[[], asyncio.Protocol],
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
        """Accept no more; the listening socket is closed."""
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
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
                    _log.warning("a connection could not be accepted: %s", exc)
                    return
                self._wait_for_descriptors(exc)
                return
            self._open(accepted, address)

    def _wait_for_descriptors(self, error: OSError) -> None:
        """Close a connection and go on in a moment: it stays ready to be accepted meanwhile."""
        if time.monotonic() >= self._told_until:
            self._told_until = time.monotonic() + _TOLD_AGAIN_S
            _log.warning("a connection could not be accepted: %s; raise `ulimit -n`", error)
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
            if connection.client is None:  # it came to nothing, perhaps before it began
                self._gate.forget(connection)
                accepted.close()

        opening.add_done_callback(ended)

    async def _connect(self, accepted: socket.socket, connection: Connection) -> None:
        try:
            accepted.setblocking(False)
            if accepted.family != socket.AF_UNIX:
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            protocol = self._make_protocol()
            _watch(protocol, self._gate, connection)
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_S,
            )
        except OSError as exc:  # of TLS too; nobody is there to be answered
            _log.debug("a connection could not be opened: %s", exc)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _watch(protocol: asyncio.Protocol, gate: ConnectionGate, connection: Connection) -> None:
    """Tell the gate when the protocol's connection is made and lost.

    In place on this one object: a protocol around it would be called for every piece of data.
    """
    made, lost = protocol.connection_made, protocol.connection_lost

    def connection_made(transport: asyncio.BaseTransport) -> None:
        connection.close = cast(asyncio.WriteTransport, transport).abort
        made(transport)
        # As ASGI servers keep it, for the `client` of their scopes.
        gate.make_known(connection, getattr(protocol, "client", None) or (UNIX, id(protocol)))

    def connection_lost(error: Exception | None) -> None:
        gate.forget(connection)
        lost(error)

    vars(protocol).update(connection_made=connection_made, connection_lost=connection_lost)
