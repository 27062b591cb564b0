"""Sends requests to one of several servers of a service, and to the next when it fails.

All servers share a database: sessions, models and results are known to each, and a request that is
sent twice, under the same ids and idempotency key, counts once. So a request that got no reply is
sent to the next server at once. A server that answers 502, 503 or 504 has answered: its reply is
returned, and the next attempt goes elsewhere.

Clients begin at a random server, so that many of them share the load, and stay with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncIterator, Sequence

from tinsmith.client.transports.base import (
    ExchangeReply,
    StreamReply,
    Transport,
    new_idempotency_key,
)
from tinsmith.errors import APIConnectionError, APITimeoutError
from tinsmith.wire.endpoint_types import Pool
from tinsmith.wire.exchange import HttpRequest

_log = logging.getLogger(__name__)

UNAVAILABLE = frozenset({502, 503, 504})


class FailoverTransport:
    """Sends requests over one of several transports. For one event loop."""

    def __init__(self, transports: Sequence[Transport], first: int | None = None) -> None:
        self._transports = transports
        begins_at = int.from_bytes(os.urandom(4), "big") if first is None else first
        self._current = begins_at % len(transports)

    async def send(
        self,
        request: HttpRequest,
        *,
        pool: Pool,
        timeout_s: float,
        idempotency_key: str | None = None,
        credential: str | None = None,
    ) -> ExchangeReply:
        """As `Transport.send`; a server that cannot be reached is replaced by the next."""
        key = idempotency_key or new_idempotency_key()
        tries_left = len(self._transports)
        while True:
            number, tries_left = self._current, tries_left - 1
            try:
                reply = await self._transports[number].send(
                    request,
                    pool=pool,
                    timeout_s=timeout_s,
                    idempotency_key=key,
                    credential=credential,
                )
            except APIConnectionError as exc:
                self._move_on(number, exc)
                # After a timeout the caller decides whether there is time for another one.
                if not tries_left or isinstance(exc, APITimeoutError):
                    raise
            else:
                if reply.status in UNAVAILABLE:
                    self._move_on(number, None)
                return reply

    @contextlib.asynccontextmanager
    async def stream(
        self, request: HttpRequest, *, pool: Pool, timeout_s: float, idle_s: float
    ) -> AsyncIterator[StreamReply]:
        """As `Transport.stream`; the caller resumes a stream that broke off, at the next server."""
        number = self._current
        try:
            async with self._transports[number].stream(
                request, pool=pool, timeout_s=timeout_s, idle_s=idle_s
            ) as reply:
                if reply.status in UNAVAILABLE:
                    self._move_on(number, None)
                yield reply
        except APIConnectionError as exc:
            self._move_on(number, exc)
            raise

    def _move_on(self, number: int, error: APIConnectionError | None) -> None:
        """Use the next server from now on, unless another request has already moved on."""
        if number == self._current:
            self._current = (number + 1) % len(self._transports)
            if error is not None:
                _log.debug("using the next server: %s", error)

    async def close(self) -> None:
        """As `Transport.close`."""
        for transport in self._transports:
            await transport.close()
