"""What carries requests to a service: the promise, and what it is told and gives back.

`transports/direct.py` keeps the promise over connections of its own, `transports/proxied.py`
through a proxy, `transports/in_process.py` by a call in the same process (where
`transports/embedded.py` finds or starts the service); all with the same bytes.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec
from msgspec.structs import force_setattr

from tinsmith.errors import (
    APIConnectionError,
    APITimeoutError,
    CertificateError,
    DecodeError,
    ValidationError,
)
from tinsmith.types.buffers import Memory
from tinsmith.wire import content
from tinsmith.wire.endpoint_types import Pool
from tinsmith.wire.exchange import HttpRequest
from tinsmith.wire.limits import DEFAULT_LIMITS, DecodeLimits

MOST_CONNECTIONS = 512
"""For each pool; a call beyond it waits for a free one."""

CONNECT_TIMEOUT_S = 5.0
KEEP_ALIVE_S = 60.0
"""How long an idle connection is kept; servers should keep theirs longer."""

Credentials = Callable[[], str]
"""Gives the credential to send with a request, asked anew for each."""


class ExchangeReply(msgspec.Struct, frozen=True):
    """What came back: header names in lower case, the body decompressed."""

    status: int
    headers: dict[str, str]
    body: Memory


class StreamReply(msgspec.Struct, frozen=True):
    """A reply whose body is read as it comes: header names in lower case, nothing compressed."""

    status: int
    headers: dict[str, str]
    pieces: AsyncIterator[bytes]
    """Raises as `Transport.send` does where the body breaks off or falls silent."""


class Begun(Protocol):
    """A request that was sent at once, and whose reply is on its way."""

    def whole_reply(self) -> ExchangeReply | None:
        """The reply, once it is over; None if none came, or none that can be read."""
        ...

    async def reply(self) -> ExchangeReply:
        """The reply, once it is over; raises and tries again as `Transport.send`."""
        ...

    def cancel(self) -> None:
        """Give it up; it is over then."""
        ...


class Transport(Protocol):
    """Carries requests to a service."""

    def begin(
        self,
        request: HttpRequest,
        *,
        pool: Pool,
        timeout_s: float,
        idempotency_key: str,
        on_over: Callable[[], object],
    ) -> Begun | None:
        """Send a request without waiting.

        For those who make thousands of small calls: a task for each costs more than the call.

        Args:
            request: What to send.
            pool: Over which connections.
            timeout_s: For the whole exchange.
            idempotency_key: The same for every try of one call.
            on_over: Called once, from the event loop, when the reply is there or will not come.

        Returns:
            None if more than a connection has to be waited for, and `send` has to do it.
        """
        ...

    async def send(
        self,
        request: HttpRequest,
        *,
        pool: Pool,
        timeout_s: float,
        idempotency_key: str | None = None,
        credential: str | None = None,
    ) -> ExchangeReply:
        """Send a request and wait for the whole reply.

        Args:
            request: What to send.
            pool: Over which connections.
            timeout_s: For the whole exchange.
            idempotency_key: The same for every try of one call; made up if None.
            credential: Instead of the usual one, for the call that exchanges it.

        Raises:
            APIConnectionError: No whole reply arrived.
            APITimeoutError: Not within `timeout_s`.
            DecodeError: It cannot be unpacked, or is larger than any may be.
        """
        ...

    def stream(
        self, request: HttpRequest, *, pool: Pool, timeout_s: float, idle_s: float
    ) -> AbstractAsyncContextManager[StreamReply]:
        """Send a request and read its reply piece by piece, over a connection of its own.

        Leaving the block before the end of the body closes the connection. The block may be left
        on another task than it was entered on.

        Args:
            request: What to send.
            pool: Over which connections.
            timeout_s: Until the reply begins.
            idle_s: How long the body may be silent.

        Raises:
            APIConnectionError: As `send`, on entering and from the pieces.
        """
        ...

    async def close(self) -> None:
        """Close all connections. Calls under way fail; further ones are refused."""
        ...


class NeverAtOnce:
    """For transports whose every request has to be waited for."""

    def begin(
        self,
        request: HttpRequest,
        *,
        pool: Pool,
        timeout_s: float,
        idempotency_key: str,
        on_over: Callable[[], object],
    ) -> Begun | None:
        """As `Transport.begin`."""
        del request, pool, timeout_s, idempotency_key, on_over
        return None


_OWN_HEADERS = frozenset(
    {"x-api-key", "x-idempotency-key", "host", "content-length", "transfer-encoding"}
)
"""What nobody else may set: the credential (S12), what tells calls apart, and what says where a
request ends."""


_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


class TransportSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a service."""

    base_url: str
    """Scheme, host, port and path prefix, without a slash at its end."""
    headers: dict[str, str] = {}
    """Sent with every request, over those that a request has of its own."""
    unix_socket: str | None = None
    ca_file: str | None = None
    proxy: str | None = None
    """An HTTP proxy, if one is to be used."""
    most_connections: int = MOST_CONNECTIONS
    limits: DecodeLimits = DEFAULT_LIMITS

    def __post_init__(self) -> None:
        allowed = {
            name: value for name, value in self.headers.items() if name.lower() not in _OWN_HEADERS
        }
        for name, value in allowed.items():
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                raise ValidationError(f"HTTP cannot carry the header {name!r:.200}")
        force_setattr(self, "headers", allowed)
        if self.ca_file is not None:
            _check_is_file(self.ca_file)


def _check_is_file(ca_file: str) -> None:
    import pathlib  # not needed by who names no file

    if not pathlib.Path(ca_file).is_file():
        raise ValidationError(f"ca_file {ca_file!r:.200} is not a file")


def request_headers(
    settings: TransportSettings,
    request: HttpRequest,
    idempotency_key: str | None,
    credential: str,
) -> dict[str, str]:
    """All headers of a request, but for those that say where it goes and where it ends."""
    headers = fixed_headers(settings, {**request.headers, **request.once}, credential)
    if request.method != "GET":
        headers["X-Idempotency-Key"] = idempotency_key or new_idempotency_key()
    return headers


def fixed_headers(
    settings: TransportSettings, headers: dict[str, str], credential: str
) -> dict[str, str]:
    """The headers of a request with those that every request has."""
    headers = {"Accept-Encoding": "zstd, gzip, deflate", **headers}
    if settings.headers:
        given = {name.lower() for name in settings.headers}
        kept = {name: value for name, value in headers.items() if name.lower() not in given}
        headers = {**kept, **settings.headers}
    headers.pop("X-API-Key", None)
    if credential:
        headers["X-API-Key"] = credential
    return headers


class _Keys:
    """Numbered keys with a random beginning, which a forked child replaces with its own."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.prefix = f"tinsmith-{os.urandom(16).hex()}"
        self.numbers = itertools.count()


_keys = _Keys()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keys.begin)


def new_idempotency_key() -> str:
    """A key that no other call has, in this process or another."""
    return f"{_keys.prefix}-{next(_keys.numbers)}"


def unpacked(
    status: int, headers: dict[str, str], body: Memory, limits: DecodeLimits
) -> ExchangeReply:
    """A reply with its body decompressed.

    Raises:
        DecodeError: It is not packed as it says. A refusal counts all the same, without its words:
            a proxy may have written it for a browser.
    """
    encoding = headers.get("content-encoding")
    if encoding is not None and len(body):
        try:
            body = content.decompress(body, encoding, limits)
        except DecodeError:
            if 200 <= status < 300:
                raise
            body = b""
    return ExchangeReply(status, headers, body)


def late_error(
    settings: TransportSettings, request: HttpRequest, timeout_s: float
) -> APITimeoutError:
    """For a reply that did not come in time."""
    return APITimeoutError(
        f"{request.path}: no reply from {settings.base_url} within {timeout_s:g} s"
    )


def silent_error(request: HttpRequest, idle_s: float) -> APITimeoutError:
    """For a body that fell silent before its end."""
    return APITimeoutError(f"{request.path}: silent for {idle_s:g} s")


def connection_error(
    settings: TransportSettings, request: HttpRequest, cause: BaseException, is_unreached: bool
) -> APIConnectionError:
    """For a reply that did not come at all; `is_unreached` if there was not even a connection."""
    import ssl  # loaded with the first connection, not with the package

    message = f"{request.method} {settings.base_url}{request.path}: {cause}"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return CertificateError(
            message,
            remedy="check the host's name, or give the authority's ca_file; SSL_CERT_FILE of the "
            "environment can name it too",
        )
    remedy = _other_scheme(settings.base_url, cause)
    if remedy is None and is_unreached:
        remedy = "check the base URL, and that the service runs there"
        if settings.proxy is not None:
            remedy = "check the proxy and the base URL"
    return APIConnectionError(message, remedy=remedy)


def _other_scheme(base_url: str, cause: BaseException) -> str | None:
    """What to try where one side speaks TLS and the other does not, if that is how it looks."""
    if "WRONG_VERSION_NUMBER" in str(cause):  # what OpenSSL says of bytes that are no TLS
        return f"the service there speaks no TLS; try http:{base_url.partition(':')[2]}"
    # A server that waits for TLS answers plain HTTP with an alert, or with nothing at all.
    is_like_tls = getattr(cause, "is_untouched", False) or getattr(cause, "is_tls_alert", False)
    if base_url.startswith("http:") and is_like_tls:
        return f"if the service has a certificate, try https:{base_url.partition(':')[2]}"
    return None
