"""The network address of a service, and how to connect to it: names, sockets, TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any, TypeAlias

from tinsmith.client.held_gil import new_socket
from tinsmith.client.settings import base_url_parts
from tinsmith.client.transports.base import CONNECT_TIMEOUT_S, TransportSettings

ADDRESS_LIFETIME_S = 10.0
"""How long the addresses of a host are cached."""

_Found: TypeAlias = tuple[int, int, int, str, Any]
"""An entry of `getaddrinfo`."""


class Address:
    """The network address of one service."""

    def __init__(self, settings: TransportSettings) -> None:
        parts = base_url_parts(settings.base_url)
        self._unix_socket = settings.unix_socket
        self._host = parts.host
        if not self._host.isascii():
            self._host = self._host.encode("idna").decode()
        self._is_secure = parts.scheme == "https"
        self._port = parts.port
        self._ca_file = settings.ca_file
        self._tls: ssl.SSLContext | None = None
        self._found: list[_Found] = []
        self._found_at = float("-inf")
        self._asking = asyncio.Lock()
        self.host_header = parts._replace(host=self._host).netloc

    async def connect(self, connection: asyncio.Protocol) -> None:
        """Connect a protocol, within `CONNECT_TIMEOUT_S`.

        Raises:
            OSError: That failed, for any reason.
        """
        loop = asyncio.get_running_loop()
        tls = self._context() if self._is_secure else None
        name = self._host if self._is_secure else None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if self._unix_socket is not None:
                    reached = await _connected(loop, self._unix_socket, socket.AF_UNIX)
                    await loop.create_unix_connection(
                        lambda: connection, sock=reached, ssl=tls, server_hostname=name
                    )
                    return
                reached = await _reached(loop, await self._addresses(loop))
                reached.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.create_connection(
                    lambda: connection, sock=reached, ssl=tls, server_hostname=name
                )
        except TimeoutError as exc:
            raise OSError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from exc
        except UnicodeError as exc:
            raise OSError(f"{self._host[:80]!r} is not a host name") from exc

    async def _addresses(self, loop: asyncio.AbstractEventLoop) -> list[_Found]:
        if loop.time() - self._found_at <= ADDRESS_LIFETIME_S:
            return self._found
        async with self._asking:  # one lookup for all
            if loop.time() - self._found_at > ADDRESS_LIFETIME_S:
                # As bytes: for text Python loads its IDNA tables, half a megabyte; so does TLS.
                host = self._host.encode()
                found = await loop.getaddrinfo(host, self._port, type=socket.SOCK_STREAM)
                self._found, self._found_at = list(found), loop.time()
        return self._found

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context(cafile=self._ca_file)
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls


async def _reached(loop: asyncio.AbstractEventLoop, found: list[_Found]) -> socket.socket:
    """A socket that is connected to the first of the addresses that answers."""
    if len(found) == 1:
        family, kind, protocol, _, address = found[0]
        return await _connected(loop, address, family, kind, protocol)
    import aiohappyeyeballs

    return await aiohappyeyeballs.start_connection(
        found,
        happy_eyeballs_delay=0.25,
        interleave=1,
        loop=loop,
        socket_factory=lambda info: new_socket(*info[:3]),
    )


async def _connected(loop: asyncio.AbstractEventLoop, address: Any, *kind: int) -> socket.socket:
    made = new_socket(*kind)
    try:
        made.setblocking(False)
        await loop.sock_connect(made, address)
    except BaseException:
        made.close()
        raise
    return made
