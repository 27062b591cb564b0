"""Sends requests to the embedded service: in this process, or in another with its data folder.

In this process, requests run on the service's own event loop, so that they block neither the
client's nor the user's (`in_process.py` does the exchange); otherwise they use a Unix socket. When
the process that ran the service ends, the next request finds the one that runs it now, which may be
this one: accepted work is in the data folder, and nothing is lost.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import msgspec

from tinsmith.client.embedding import HerePlace, Place, find_place
from tinsmith.client.transports.base import (
    CredentialSource,
    ExchangeReply,
    StreamReply,
    Transport,
    TransportSettings,
)
from tinsmith.client.transports.direct import DirectTransport
from tinsmith.client.transports.in_process import InProcessTransport
from tinsmith.client.waits import say
from tinsmith.errors import APIConnectionError, APITimeoutError
from tinsmith.wire.exchange import HttpRequest

T = TypeVar("T")

LOCAL_URL = "http://localhost"
"""A service without keys answers only to this host name."""


class EmbeddedTransport:
    """Sends requests to the embedded service, wherever it runs. For one event loop."""

    def __init__(self, settings: TransportSettings, credentials: CredentialSource) -> None:
        self._settings = settings
        self._credentials = credentials
        self._carrier: Transport | None = None
        self._place: Place | None = None
        self._lost: Place | None = None
        self._is_closed = False

    async def send(self, request: HttpRequest, **how: Any) -> ExchangeReply:
        """As `Transport.send`; the timeout starts when the service has started."""
        carrier = await self._found()
        try:
            return await carrier.send(request, **how)
        except APIConnectionError as error:
            await self._lose(carrier, error)
            raise

    @contextlib.asynccontextmanager
    async def stream(self, request: HttpRequest, **how: Any) -> AsyncIterator[StreamReply]:
        """As `Transport.stream`."""
        carrier = await self._found()
        try:
            async with carrier.stream(request, **how) as reply:
                yield reply
        except APIConnectionError as error:
            await self._lose(carrier, error)
            raise

    async def reach(self) -> None:
        """Find or start the service, which may have to download a model."""
        await self._found()

    async def _found(self) -> Transport:
        if self._is_closed:
            raise APIConnectionError("the client is closed; create a new one")
        if self._carrier is None:
            say("the embedded service is starting")
            place = await find_place(self._lost)
            if self._carrier is None:  # another call may have been faster
                self._carrier, self._place = self._carrier_to(place), place
        return self._carrier

    def _carrier_to(self, place: Place) -> Transport:
        if isinstance(place, HerePlace):
            reach = msgspec.structs.replace(self._settings, base_url=LOCAL_URL)
            inner = InProcessTransport(place.application, reach, self._credentials)
            return _OtherLoopTransport(inner, place.loop)
        reach = msgspec.structs.replace(
            self._settings, base_url=LOCAL_URL, unix_socket=place.unix_socket
        )
        return DirectTransport(reach, self._credentials)

    async def _lose(self, carrier: Transport, error: APIConnectionError) -> None:
        """Look for the service again before the next request, unless it was only slow."""
        if isinstance(error, APITimeoutError) or carrier is not self._carrier or self._is_closed:
            return
        self._lost, self._carrier = self._place, None
        await carrier.close()

    async def close(self) -> None:
        """As `Transport.close`. The service keeps running: others may use it."""
        self._is_closed = True
        if self._carrier is not None:
            await self._carrier.close()


class _OtherLoopTransport:
    """A transport that is used on one event loop and does its work on another."""

    def __init__(self, inner: InProcessTransport, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._loop = loop

    async def send(self, request: HttpRequest, **how: Any) -> ExchangeReply:
        return await self._there(self._inner.send(request, **how))

    @contextlib.asynccontextmanager
    async def stream(self, request: HttpRequest, **how: Any) -> AsyncIterator[StreamReply]:
        block: AbstractAsyncContextManager[StreamReply] = self._inner.stream(request, **how)
        reply = await self._there(_entered(block))
        try:
            yield StreamReply(reply.status, reply.headers, self._pieces(reply.pieces))
        finally:
            await self._there(_left(block))

    async def _pieces(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        while (piece := await self._there(_next_of(pieces))) is not None:
            yield piece

    async def close(self) -> None:
        with contextlib.suppress(APIConnectionError):  # it has ended, and all of it is closed
            await self._there(self._inner.close())

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the other loop; cancelling it here cancels it there."""
        try:
            doing = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as exc:  # the loop is closed
            work.close()
            raise _ended() from exc
        try:
            return await asyncio.wrap_future(doing)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _ended() from None  # it was cancelled there: the service has stopped
        except concurrent.futures.CancelledError as exc:
            raise _ended() from exc


def _ended() -> APIConnectionError:
    return APIConnectionError("the embedded service has stopped")


async def _entered(block: AbstractAsyncContextManager[StreamReply]) -> StreamReply:
    return await block.__aenter__()


async def _left(block: AbstractAsyncContextManager[StreamReply]) -> None:
    await block.__aexit__(None, None, None)


async def _next_of(pieces: AsyncIterator[bytes]) -> bytes | None:
    return await anext(pieces, None)
