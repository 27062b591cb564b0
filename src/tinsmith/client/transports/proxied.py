"""Send requests through a proxy, with aiohttp.

Only this module of the client uses aiohttp, and it is imported only if there is a proxy. Otherwise
it works like `transports/direct.py`: pools by purpose, and one retry if a connection was closed
before the reply began.
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
from tinsmith.client.transports.connection import JOINED_BYTES
from tinsmith.errors import APIConnectionError, ValidationError
from tinsmith.types.buffers import Memory
from tinsmith.wire import content
from tinsmith.wire.endpoint_types import Pool
from tinsmith.wire.exchange import HttpRequest
from tinsmith.wire.protobuf import Parts

_log = logging.getLogger(__name__)


class ProxiedTransport:
    """Sends requests over HTTP/1.1 through a proxy. Must be used on one event loop."""

    def __init__(self, settings: TransportSettings, credentials: CredentialSource) -> None:
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
        """Send a request and return the complete reply."""
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
                    # Most likely a keep-alive connection that the server closed as we reused it.
                    _log.debug("%s: %r; sending it once more", request.path, exc)
                    return await self._exchange(request, headers, pool)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._is_closed or task is None or task.cancelling():
                raise
            # When aiohttp is closed, it cancels the tasks that wait for a connection.
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
        """Send a request and yield the reply, whose body is read as it arrives."""
        headers = request_headers(self._settings, request, None, self._credentials())
        headers["Accept-Encoding"] = "identity"  # compression could delay events
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
            reply.close()  # not released, which would read the rest of the body
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
            # With TLS, the proxy sees only the CONNECT request.
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
        """The undecoded body; refuses bodies above the limit.

        The memory of a large body is writable, so its arrays can be returned without a copy.
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
            raise APIConnectionError("the client is closed; create a new one")
        session = self._sessions.get(pool)
        if session is None:
            session = self._sessions[pool] = aiohttp.ClientSession(
                connector=self._connector(),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # aiohttp's has no size limit; ours does
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
        """Close all connections; waiting requests fail."""
        self._is_closed = True
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            await session.close()


def _proxy_of(settings: TransportSettings) -> tuple[str | None, dict[str, str]]:
    """The proxy's URL without its login, and the login as a header: aiohttp shows URLs in errors.

    Raises:
        ValidationError: The proxy's URL is invalid.
    """
    if settings.proxy is None:
        return None, {}
    parts = urlsplit(settings.proxy if "://" in settings.proxy else f"http://{settings.proxy}")
    try:
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port  # raises if it is not a number
    except ValueError:
        is_good = False
    if not is_good:
        raise ValidationError(
            f"the proxy {parts.scheme}://{parts.hostname or ''} cannot be used",
            remedy="pass one like http://127.0.0.1:3128",
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
    """A body of known size in several pieces, which are sent without joining them."""

    _autoclose = True

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts, content_type="application/octet-stream")
        self._parts = parts
        self._size = sum(map(len, parts))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The body as text, for aiohttp's debugging."""
        return b"".join(self._parts).decode(encoding, errors)

    async def write(self, writer: aiohttp.abc.AbstractStreamWriter) -> None:
        """Write the pieces; may be called again for a retry."""
        for part in self._parts:
            await writer.write(part)
