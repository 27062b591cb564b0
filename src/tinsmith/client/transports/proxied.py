"""Requests through a proxy, carried by an HTTP library that knows proxies.

The library appears here and nowhere else in the client, and is loaded only where there is a proxy.
Otherwise as `transports/direct.py`: pools by purpose, one more try where a connection ended before
the reply began.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import aiohttp

from tinsmith.client.transports.base import (
    CONNECT_TIMEOUT_S,
    KEEP_ALIVE_S,
    Credentials,
    ExchangeReply,
    NeverAtOnce,
    StreamReply,
    TransportSettings,
    connection_error,
    late_error,
    request_headers,
    silent_error,
    unpacked,
)
from tinsmith.client.transports.connection import JOINED_BYTES
from tinsmith.errors import APIConnectionError, ValidationError
from tinsmith.types.buffers import Memory
from tinsmith.wire import content
from tinsmith.wire.endpoint_types import Pool
from tinsmith.wire.exchange import HttpRequest
from tinsmith.wire.protobuf import Parts

_log = logging.getLogger(__name__)


class ProxiedTransport(NeverAtOnce):
    """Carries requests over HTTP/1.1, through a proxy. To be used on one event loop."""

    def __init__(self, settings: TransportSettings, credentials: Credentials) -> None:
        self._settings = settings
        self._credentials = credentials
        self._proxy, self._login = _proxy_of(settings)
        self._sessions: dict[Pool, aiohttp.ClientSession] = {}
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
        headers = request_headers(
            self._settings, request, idempotency_key, credential or self._credentials()
        )
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._exchange(request, headers, pool)
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as exc:
                    if isinstance(exc, aiohttp.ClientConnectorError):
                        raise
                    # Most likely a kept connection that the server closed as we took it.
                    _log.debug("%s: %r; sending it once more", request.path, exc)
                    return await self._exchange(request, headers, pool)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._is_closed or task is None or task.cancelling():
                raise
            # The library cancels whoever waits for a connection when it is closed.
            raise APIConnectionError("the client was closed") from None
        except TimeoutError as exc:
            raise late_error(self._settings, request, timeout_s) from exc
        except (aiohttp.ClientError, OSError) as exc:
            is_unreached = isinstance(exc, aiohttp.ClientConnectorError)
            raise connection_error(self._settings, request, exc, is_unreached) from exc

    @contextlib.asynccontextmanager
    async def stream(
        self, request: HttpRequest, *, pool: Pool, timeout_s: float, idle_s: float
    ) -> AsyncIterator[StreamReply]:
        """As `Transport.stream`."""
        headers = request_headers(self._settings, request, None, self._credentials())
        headers["Accept-Encoding"] = "identity"  # events are to be seen when they are sent
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._begin(request, headers, pool)
        except TimeoutError as exc:
            raise late_error(self._settings, request, timeout_s) from exc
        except (aiohttp.ClientError, OSError) as exc:
            is_unreached = isinstance(exc, aiohttp.ClientConnectorError)
            raise connection_error(self._settings, request, exc, is_unreached) from exc
        pieces = self._pieces(request, reply, idle_s)
        try:
            found = {name.lower(): value for name, value in reply.headers.items()}
            yield StreamReply(reply.status, found, pieces)
        finally:
            reply.close()  # not given back: the rest of the body would be waited for
            await pieces.aclose()

    async def _pieces(
        self, request: HttpRequest, reply: aiohttp.ClientResponse, idle_s: float
    ) -> AsyncGenerator[bytes, None]:
        while True:
            try:
                async with asyncio.timeout(idle_s):
                    piece = await reply.content.readany()
            except TimeoutError as exc:
                raise silent_error(request, idle_s) from exc
            except (aiohttp.ClientError, OSError) as exc:
                raise connection_error(self._settings, request, exc, is_unreached=False) from exc
            if not piece:
                return
            yield piece

    async def _begin(
        self, request: HttpRequest, headers: Mapping[str, str], pool: Pool
    ) -> aiohttp.ClientResponse:
        is_secure = self._settings.base_url.startswith("https:")
        return await self._session(pool).request(
            request.method,
            self._settings.base_url + request.path,
            params=request.query or None,
            # With TLS the proxy reads only the request for the connection.
            headers=headers if is_secure else {**headers, **self._login},
            data=_body(request.parts),
            proxy=self._proxy,
            proxy_headers=self._login if is_secure else None,
            allow_redirects=False,
        )

    async def _exchange(
        self, request: HttpRequest, headers: Mapping[str, str], pool: Pool
    ) -> ExchangeReply:
        async with await self._begin(request, headers, pool) as reply:
            found = {name.lower(): value for name, value in reply.headers.items()}
            packed = await self._read(reply)
        return unpacked(reply.status, found, packed, self._settings.limits)

    async def _read(self, reply: aiohttp.ClientResponse) -> Memory:
        """The body as it came, refused where it is larger than any body may be.

        A large one is writable, so that its arrays can be handed to the user without a copy.
        """
        limit = self._settings.limits.memory_bytes
        pieces: list[bytes] = []
        size = 0
        async for piece in reply.content.iter_any():
            size += len(piece)
            content.check_size(size, limit)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else memoryview(bytearray().join(pieces))

    def _session(self, pool: Pool) -> aiohttp.ClientSession:
        if self._is_closed:
            raise APIConnectionError("the client is closed; make a new one")
        session = self._sessions.get(pool)
        if session is None:
            session = self._sessions[pool] = aiohttp.ClientSession(
                connector=self._connector(),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # its own has no bound; ours does
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                skip_auto_headers=("User-Agent",),
            )
        return session

    def _connector(self) -> aiohttp.BaseConnector:
        limits: dict[str, Any] = {
            "limit": self._settings.most_connections,
            "keepalive_timeout": KEEP_ALIVE_S,
        }
        if self._settings.unix_socket is not None:
            return aiohttp.UnixConnector(self._settings.unix_socket, **limits)
        if self._settings.ca_file is not None:
            limits["ssl"] = ssl.create_default_context(cafile=self._settings.ca_file)
        return aiohttp.TCPConnector(**limits)

    async def close(self) -> None:
        """As `Transport.close`."""
        self._is_closed = True
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            await session.close()


def _proxy_of(settings: TransportSettings) -> tuple[str | None, dict[str, str]]:
    """The proxy's address, and a header with the login: the library shows addresses in errors.

    Raises:
        ValidationError: There can be no such proxy.
    """
    if settings.proxy is None:
        return None, {}
    parts = urlsplit(settings.proxy if "://" in settings.proxy else f"http://{settings.proxy}")
    try:
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port  # raises where it is no number
    except ValueError:
        is_good = False
    if not is_good:
        raise ValidationError(
            f"the proxy {parts.scheme}://{parts.hostname or ''} cannot be used",
            remedy="give one like http://127.0.0.1:3128",
        )
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    if parts.username is None:
        return address, {}
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return address, {"Proxy-Authorization": f"Basic {b64encode(login.encode()).decode()}"}


def _body(parts: Parts) -> Any:
    if not parts:
        return None
    is_small = sum(map(len, parts)) <= JOINED_BYTES
    return b"".join(parts) if is_small else _PartsPayload(parts)


class _PartsPayload(aiohttp.Payload):
    """A body in pieces, sent one after another without being joined; its size is known."""

    _autoclose = True

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts, content_type="application/octet-stream")
        self._parts = parts
        self._size = sum(map(len, parts))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The body as text, for the library's own debugging."""
        return b"".join(self._parts).decode(encoding, errors)

    async def write(self, writer: aiohttp.abc.AbstractStreamWriter) -> None:
        """Send the pieces; may be asked for again, for the second try."""
        for part in self._parts:
            await writer.write(part)
