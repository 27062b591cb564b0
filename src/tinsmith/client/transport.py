"""What carries requests to a service: the promise, and what it is told and gives back.

`http_transport.py` keeps the promise over HTTP. Others may plug in here, such as a service in the
same process, with the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from tinsmith.types.buffers import Memory
from tinsmith.wire.endpoints import Pool
from tinsmith.wire.exchange import HttpRequest
from tinsmith.wire.limits import DEFAULT_LIMITS, DecodeLimits

MOST_CONNECTIONS = 512
"""For each pool; a call beyond it waits for a free one."""

Credentials = Callable[[], str]
"""Gives the credential to send with a request, asked anew for each."""


class ExchangeReply(msgspec.Struct, frozen=True):
    """What came back: header names in lower case, the body decompressed."""

    status: int
    headers: dict[str, str]
    body: Memory


class Transport(Protocol):
    """Carries requests to a service."""

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
        """
        ...

    async def close(self) -> None:
        """Close all connections. Calls under way fail; further ones are refused."""
        ...


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
