"""A TCP relay in front of the service, whose connections can be broken on purpose.

It passes bytes on in both directions and knows nothing of HTTP. Each client's connection has one of
its own to the service, a `ProxiedConnection`, which the service knows by the port that it came
from. It can be reset, closed, or cut after so many bytes: what a crashed process, a restarted load
balancer or a lost network does to a client.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import cast

from tinsmith.service.http.connections import ConnectionGate, ConnectionLimits, ServerConnection
from tinsmith.service.http.server import Acceptor

_UNLIMITED = 1_000_000
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER with no time to linger: closing sends RST instead of FIN."""


class ByteProxy:
    """Relays connections to a port of 127.0.0.1. For one event loop."""

    def __init__(self, listener: socket.socket, service_port: int) -> None:
        self.service_port = service_port
        self.connection_count = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self._open: set[ProxiedConnection] = set()
        self._by_port: dict[int, ProxiedConnection] = {}
        limits = ConnectionLimits(
            connections=_UNLIMITED,
            unauthenticated=_UNLIMITED,
            unauthenticated_per_address=_UNLIMITED,
        )
        self._acceptor = Acceptor(
            listener, ConnectionGate(limits), lambda accepted: ProxiedConnection(self, accepted)
        )

    def connection_from(self, port: int) -> ProxiedConnection:
        """The connection that reaches the service from this port, or was the last to do so."""
        return self._by_port[port]

    async def close(self) -> None:
        """Accept no more, and drop every connection."""
        self._acceptor.close()
        self._acceptor.abort_handshakes()
        await asyncio.sleep(0)
        while self._open or self.tasks:
            for connection in list(self._open):
                connection.drop()
            # A socket is closed in the iteration of the loop after it was dropped.
            await asyncio.gather(*self.tasks, asyncio.sleep(0), return_exceptions=True)

    def opened(self, connection: ProxiedConnection) -> int:
        """A client has connected; returns the connection's number."""
        self._open.add(connection)
        task = asyncio.get_running_loop().create_task(connection.reach_service())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        self.connection_count += 1
        return self.connection_count - 1

    def reached(self, connection: ProxiedConnection, port: int) -> None:
        """The connection reaches the service from this port.

        It stays known when it is closed: the service may not have read its last request yet.
        """
        self._by_port[port] = connection

    def lost(self, connection: ProxiedConnection) -> None:
        """The client's side of it is closed."""
        self._open.discard(connection)


class ProxiedConnection(asyncio.Protocol):
    """A client's connection and the one to the service behind it.

    A client that closes its sending half counts as gone.

    Attributes:
        number: Counted from 0 in the order in which clients connected.
    """

    def __init__(self, proxy: ByteProxy, accepted: ServerConnection) -> None:
        self._proxy = proxy
        self._accepted = accepted
        self._service: _ServiceSide | None = None
        self._bytes_left: int | None = None
        self._has_replied = asyncio.Event()

    # For the service

    def reset(self) -> None:
        """Break the connection with a TCP reset."""
        handle = self.client.get_extra_info("socket")
        if not self.client.is_closing():
            handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.drop()

    def close(self) -> None:
        """Close the connection once what has come so far is sent."""
        self.client.close()

    def cut_after(self, size: int) -> None:
        """Pass on so many of the bytes that the service sends from now on, and close."""
        self._bytes_left = size

    async def wait_relayed(self) -> None:
        """Wait for the next bytes from the service, or for the end of the connection."""
        self._has_replied.clear()
        await self._has_replied.wait()

    # For the proxy

    def drop(self) -> None:
        """End both sides now."""
        self.client.abort()
        if self._service is not None:
            self._service.transport.abort()

    async def reach_service(self) -> None:
        """Connect to the service, and begin to read what the client sends."""
        loop = asyncio.get_running_loop()
        try:
            _, self._service = await loop.create_connection(
                lambda: _ServiceSide(self), "127.0.0.1", self._proxy.service_port
            )
        except OSError:  # the service is being closed
            self.client.abort()
            return
        address = self._service.transport.get_extra_info("sockname")
        self._proxy.reached(self, address[1])
        if self.client.is_closing():
            self._service.transport.close()
        else:
            self.client.resume_reading()

    def relay(self, data: bytes) -> None:
        """Send the client bytes from the service, as many as it is to have."""
        if self._bytes_left is None:
            self.client.write(data)
        else:
            self.client.write(data[: self._bytes_left])
            self._bytes_left -= min(len(data), self._bytes_left)
            if self._bytes_left == 0:
                self.client.close()
        self._has_replied.set()

    # Called by the client's transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connect to the service too."""
        self.client = cast(asyncio.Transport, transport)
        self.client.pause_reading()  # until the service is reached
        self._accepted.opened(self.client.abort)
        self.number = self._proxy.opened(self)

    def data_received(self, data: bytes) -> None:
        """Pass the client's bytes on to the service."""
        assert self._service is not None
        self._service.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - why does not matter
        """Close the connection to the service as well."""
        self._accepted.lost()
        self._proxy.lost(self)
        self._has_replied.set()
        if self._service is not None:
            self._service.transport.close()

    def pause_writing(self) -> None:
        """The client reads more slowly than the service writes."""
        if self._service is not None:
            self._service.transport.pause_reading()

    def resume_writing(self) -> None:
        """The client has caught up."""
        if self._service is not None:
            self._service.transport.resume_reading()


class _ServiceSide(asyncio.Protocol):
    """The connection from the proxy to the service."""

    def __init__(self, connection: ProxiedConnection) -> None:
        self._connection = connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._connection.client.is_closing():
            self._connection.relay(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - why does not matter
        self._connection.close()

    def pause_writing(self) -> None:
        self._connection.client.pause_reading()

    def resume_writing(self) -> None:
        self._connection.client.resume_reading()
