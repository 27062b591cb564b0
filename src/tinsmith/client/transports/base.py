"""The transport interface: what sends requests to a service and returns its replies.

`transports/direct.py` implements it over connections of its own, `transports/proxied.py` through a
proxy, and `transports/in_process.py` by calls in the same process (`transports/embedded.py` finds
or starts that service); all send the same bytes. `transports/failover.py` has one for each of
several servers. `transport_for` chooses.
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

from tinsmith.client.settings import EMBEDDED
from tinsmith.errors import (
    APIConnectionError,
    APITimeoutError,
    CertificateError,
    DecodeError,
    ValidationError,
)
from tinsmith.types.buffers import Memory
from tinsmith.wire import content
from tinsmith.wire.decode_limits import DEFAULT_LIMITS, DecodeLimits
from tinsmith.wire.endpoint_types import Pool
from tinsmith.wire.exchange import HttpRequest

MOST_CONNECTIONS = 512
"""For each pool; further requests wait for a free one."""

CONNECT_TIMEOUT_S = 5.0
KEEP_ALIVE_S = 60.0
"""How long an idle connection is kept; servers should keep theirs longer."""

CredentialSource = Callable[[], str]
"""Returns the credential for a request; called for each."""


class ExchangeReply(msgspec.Struct, frozen=True):
    """A whole reply: header names in lower case, the body decompressed."""

    status: int
    headers: dict[str, str]
    body: Memory


class StreamReply(msgspec.Struct, frozen=True):
    """A reply whose body is read as it arrives: header names in lower case, nothing compressed."""

    status: int
    headers: dict[str, str]
    pieces: AsyncIterator[bytes]
    """Raises as `Transport.send` does if the body breaks off or stalls."""


class Transport(Protocol):
    """Sends requests to a service."""

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
            idempotency_key: The same for every attempt of one call; generated if None.
            credential: Replaces the usual one, for the call that exchanges it.

        Raises:
            APIConnectionError: No whole reply arrived.
            APITimeoutError: It did not arrive within `timeout_s`.
            DecodeError: It cannot be decompressed, or is too large.
        """
        ...

    def stream(
        self, request: HttpRequest, *, pool: Pool, timeout_s: float, idle_s: float
    ) -> AbstractAsyncContextManager[StreamReply]:
        """Send a request and read its reply piece by piece, over a connection of its own.

        Leaving the block before the end of the body closes the connection. The block may be left
        in another task than it was entered in.

        Args:
            request: What to send.
            pool: Over which connections.
            timeout_s: Until the reply begins.
            idle_s: How long the body may stall.

        Raises:
            APIConnectionError: As `send`, on entering and from the pieces.
        """
        ...

    async def close(self) -> None:
        """Close all connections. Pending requests fail; further ones are refused."""
        ...


_OWN_HEADERS = frozenset(
    {"x-api-key", "x-idempotency-key", "host", "content-length", "transfer-encoding"}
)
"""Headers that users cannot set: the credential (S12), the idempotency key, and those that frame
the request."""


_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


class TransportSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a service."""

    base_url: str
    """Scheme, host, port and path prefix, without a trailing slash."""
    further_urls: tuple[str, ...] = ()
    """The same of other servers of the service."""
    headers: dict[str, str] = {}
    """Sent with every request; they override a request's own."""
    unix_socket: str | None = None
    ca_file: str | None = None
    proxy: str | None = None
    """The HTTP proxy to use, if any."""
    most_connections: int = MOST_CONNECTIONS
    limits: DecodeLimits = DEFAULT_LIMITS

    def __post_init__(self) -> None:
        allowed = {
            name: value for name, value in self.headers.items() if name.lower() not in _OWN_HEADERS
        }
        for name, value in allowed.items():
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                raise ValidationError(f"the header {name!r:.200} is not valid in HTTP")
        force_setattr(self, "headers", allowed)
        if self.ca_file is not None:
            _check_is_file(self.ca_file)


def _check_is_file(ca_file: str) -> None:
    import pathlib  # rarely needed

    if not pathlib.Path(ca_file).is_file():
        raise ValidationError(f"ca_file {ca_file!r:.200} is not a file")


def request_headers(
    settings: TransportSettings,
    request: HttpRequest,
    idempotency_key: str | None,
    credential: str,
) -> dict[str, str]:
    """All headers of a request, except those that route and frame it."""
    headers = fixed_headers(settings, {**request.headers, **request.once}, credential)
    if request.method != "GET":
        headers["X-Idempotency-Key"] = idempotency_key or new_idempotency_key()
    return headers


def fixed_headers(
    settings: TransportSettings, headers: dict[str, str], credential: str
) -> dict[str, str]:
    """The headers of a request, with those that every request has."""
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
    """Numbered keys with a random prefix, which a forked child replaces with its own."""

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
        DecodeError: It is not compressed as declared. For a refusal the body is dropped instead: a
            proxy may have written it for a browser.
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
    """The error for a reply that did not arrive in time."""
    return APITimeoutError(
        f"{request.path}: no reply from {settings.base_url} within {timeout_s:g} s"
    )


def silent_error(request: HttpRequest, idle_s: float) -> APITimeoutError:
    """The error for a body that stalled before its end."""
    return APITimeoutError(f"{request.path}: no data for {idle_s:g} s")


def connection_error(
    settings: TransportSettings, request: HttpRequest, cause: BaseException, is_unreached: bool
) -> APIConnectionError:
    """The error for a missing reply; `is_unreached` if there was not even a connection."""
    import ssl  # imported with the first connection, not with the package

    message = f"{request.method} {settings.base_url}{request.path}: {cause}"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return CertificateError(
            message,
            remedy="check the host name, or pass the authority's ca_file; the environment variable "
            "SSL_CERT_FILE works too",
        )
    remedy = _other_scheme(settings.base_url, cause)
    if remedy is None and is_unreached:
        remedy = "check the base URL, and that the service is running there"
        if settings.proxy is not None:
            remedy = "check the proxy and the base URL"
    return APIConnectionError(message, remedy=remedy)


def _other_scheme(base_url: str, cause: BaseException) -> str | None:
    """What to try if only one side seems to speak TLS."""
    if "WRONG_VERSION_NUMBER" in str(cause):  # OpenSSL's word for bytes that are not TLS
        return f"the service does not use TLS; try http:{base_url.partition(':')[2]}"
    # A TLS server answers plain HTTP with an alert, or not at all.
    is_like_tls = getattr(cause, "is_untouched", False) or getattr(cause, "is_tls_alert", False)
    if base_url.startswith("http:") and is_like_tls:
        return f"if the service has a certificate, try https:{base_url.partition(':')[2]}"
    return None


def transport_for(reach: TransportSettings, credentials: Callable[[], str]) -> Transport:
    """The transport for a service; its module is loaded when it is chosen."""
    if reach.further_urls and reach.unix_socket is None:
        from tinsmith.client.transports.failover import FailoverTransport

        servers = [
            msgspec.structs.replace(reach, base_url=url, further_urls=())
            for url in (reach.base_url, *reach.further_urls)
        ]
        return FailoverTransport([transport_for(server, credentials) for server in servers])
    if reach.base_url == EMBEDDED:
        from tinsmith.client.transports.embedded import EmbeddedTransport

        return EmbeddedTransport(reach, credentials)
    if reach.proxy is not None:
        from tinsmith.client.transports.proxied import (
            ProxiedTransport,  # importing its library takes 0.2 s
        )

        return ProxiedTransport(reach, credentials)
    from tinsmith.client.transports.direct import DirectTransport

    return DirectTransport(reach, credentials)
