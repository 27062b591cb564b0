"""Requests over HTTP/1.1: one exchange goes out and comes back, and nothing is decided about it.

The HTTP library appears here and nowhere else in the client. What it raises becomes
`APIConnectionError` or `APITimeoutError`; any reply, also one that refuses, is returned.

Calls travel over connections of their pool, so that hung samples hold up neither a heartbeat nor a
training step (S22). HTTP/1.1 carries one exchange per connection at a time. A request that meets a
connection which the server has just closed is sent once more, under the same idempotency key.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import uuid
from collections.abc import Mapping
from typing import Any

import aiohttp

from tinsmith.client.transport import Credentials, ExchangeReply, TransportSettings
from tinsmith.errors import APIConnectionError, APITimeoutError
from tinsmith.wire import content
from tinsmith.wire.endpoints import Pool
from tinsmith.wire.exchange import HttpRequest
from tinsmith.wire.protobuf import Parts

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
JOINED_BYTES = 256 * 1024
"""A smaller body is sent as one piece: the copy costs less than further writes."""
KEEP_ALIVE_S = 60.0
"""How long an idle connection is kept; servers should keep theirs longer."""


class HttpTransport:
    """Carries requests over HTTP/1.1. To be used on one event loop."""

    def __init__(self, settings: TransportSettings, credentials: Credentials) -> None:
        self._settings = settings
        self._credentials = credentials
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
        headers = self._headers(request, idempotency_key, credential or self._credentials())
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
        except TimeoutError as exc:
            raise APITimeoutError(
                f"{request.path}: no reply from {self._settings.base_url} within {timeout_s:g} s"
            ) from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise self._connection_error(request, exc) from exc

    async def _exchange(
        self, request: HttpRequest, headers: Mapping[str, str], pool: Pool
    ) -> ExchangeReply:
        session = self._session(pool)
        async with session.request(
            request.method,
            self._settings.base_url + request.path,
            params=request.query or None,
            headers=headers,
            data=_body(request.parts),
            proxy=self._settings.proxy,
            allow_redirects=False,
        ) as reply:
            found = {name.lower(): value for name, value in reply.headers.items()}
            packed = await self._read(reply)
        encoding = found.get("content-encoding")
        body = content.decompress(packed, encoding, self._settings.limits)
        return ExchangeReply(reply.status, found, body)

    async def _read(self, reply: aiohttp.ClientResponse) -> bytes | bytearray:
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
        return pieces[0] if len(pieces) == 1 else bytearray().join(pieces)

    def _headers(
        self, request: HttpRequest, idempotency_key: str | None, credential: str
    ) -> dict[str, str]:
        headers = {
            "Accept-Encoding": "zstd, gzip, deflate",
            **request.headers,
            **self._settings.headers,
            "X-API-Key": credential,  # last, so that nothing can replace it (S12)
        }
        if request.method != "GET":
            headers["X-Idempotency-Key"] = idempotency_key or f"tinsmith-{uuid.uuid4()}"
        return headers

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

    def _connection_error(self, request: HttpRequest, cause: BaseException) -> APIConnectionError:
        remedy = None
        if isinstance(cause, aiohttp.ClientConnectorError):
            remedy = "check the base URL, and that the service runs there"
        return APIConnectionError(
            f"{request.method} {self._settings.base_url}{request.path}: {cause}", remedy=remedy
        )

    async def close(self) -> None:
        """As `Transport.close`."""
        self._is_closed = True
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            await session.close()


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
