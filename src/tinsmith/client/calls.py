"""Calls of the API: sent with what we say of ourselves, tried again as their kind allows, read.

`Calls` makes a typed request into an exchange of the transport, and its reply into what the
endpoint answers or the error that it stands for. A refused token is renewed once. What it does not
know is whose calls they are: `Session` adds the session, its flags and its life.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

from tinsmith._version import __version__
from tinsmith.client import events
from tinsmith.client.auth import Credentials
from tinsmith.client.retry import Retrier
from tinsmith.client.settings import ClientSettings, Secret
from tinsmith.client.transports.base import (
    Begun,
    ExchangeReply,
    StreamReply,
    Transport,
    TransportSettings,
    new_idempotency_key,
)
from tinsmith.client.transports.registry import transport_for
from tinsmith.client.work import Work
from tinsmith.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    BillingError,
    DecodeError,
    RateLimitError,
    TinkerError,
)
from tinsmith.types.record import Frozen, Record
from tinsmith.wire.endpoint_types import Endpoint, RetryClass
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import HttpRequest, read_reply, to_http
from tinsmith.wire.failures import error_from_reply

T = TypeVar("T")

_log = logging.getLogger(__name__)

SDK_VERSION = "0.36.0"
"""The release of the official SDK whose protocol we speak, which servers choose their answers
by."""
EMPTY_400_BUDGET = 16
"""How many 400s without a body are taken for a broken proxy before one is believed."""
UNAUTHORIZED = 401
MOST_ERROR_BYTES = 64 * 1024


class Calls:
    """Makes calls with one set of settings and credentials. For the background loop."""

    def __init__(self, settings: ClientSettings, transport: Transport | None = None) -> None:
        self.settings = settings
        self.credentials = Credentials(settings)
        self.work = Work()
        self.retrier = Retrier(settings.retry, sleep=self._sleep)
        self._transport = transport
        self.begun: set[BegunCall] = set()
        """What `begin` sent and is not answered yet."""
        self._empty_400s_left = EMPTY_400_BUDGET

    def check_open(self) -> None:
        """Raise `ClosedError` if no more calls may be made."""
        raise NotImplementedError

    async def renew_credential(self, refused: str | None = None) -> None:
        """Get a new token, unless somebody else has since `refused` was."""
        raise NotImplementedError

    async def call(
        self,
        name: str,
        request: Record | Frozen,
        *,
        headers: Mapping[str, str] | None = None,
        credential: Secret | None = None,
    ) -> Any:
        """Make one call of the API, trying again as its kind allows.

        Returns:
            What the endpoint answers, decoded; None where it answers nothing.

        Raises:
            APIError: It failed for good.
        """
        endpoint = ENDPOINTS[name]
        sent = to_http(endpoint, request)
        return await self.call_with(endpoint, sent, headers=headers, credential=credential)

    async def call_with(
        self,
        endpoint: Endpoint,
        sent: HttpRequest,
        *,
        headers: Mapping[str, str] | None = None,
        credential: Secret | None = None,
        begun: BegunCall | None = None,
        retrier: Retrier | None = None,
        asleep: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> Any:
        """As `call`, for a request that is bytes already.

        Args:
            endpoint: Where it goes.
            sent: What is sent.
            headers: Sent with it.
            credential: Instead of the usual one.
            begun: What `begin` gave for it: its first try.
            retrier: Tries it again; the session's if None.
            asleep: As in `Retrier.call`.
        """
        # The same for every try of this call.
        key = new_idempotency_key() if begun is None else begun.idempotency_key

        async def attempt(number: int) -> Any:
            reply = await self.send(
                endpoint,
                sent,
                headers={**(headers or {}), "x-stainless-retry-count": str(number)},
                idempotency_key=key,
                credential=credential,
                begun=begun if number == 0 else None,
            )
            return self.decoded(endpoint, reply)

        if endpoint.retry is RetryClass.OWN:
            return await attempt(0)
        return await (retrier or self.retrier).call(
            attempt,
            endpoint.name,
            began=None if begun is None else begun.began,
            final=_final_errors(endpoint),
            asleep=asleep,
            is_watched=endpoint.name not in _SAMPLES,  # who sends them tells what they wait for
        )

    async def exchange(
        self,
        endpoint: Endpoint,
        request: Record | Frozen,
        *,
        headers: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
        credential: Secret | None = None,
    ) -> ExchangeReply:
        """Send a call once and return its reply, which is not a refusal.

        Raises:
            APIStatusError: The reply refuses.
            APIConnectionError: There was none.
        """
        sent = to_http(endpoint, request)
        return await self.send(
            endpoint, sent, headers=headers, idempotency_key=idempotency_key, credential=credential
        )

    async def send(
        self,
        endpoint: Endpoint,
        sent: HttpRequest,
        *,
        headers: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
        credential: Secret | None = None,
        begun: BegunCall | None = None,
    ) -> ExchangeReply:
        """As `exchange`, for a request that is bytes already, or was sent by `begin`."""
        if endpoint.name not in _AFTER_CLOSE:
            self.check_open()
        sent.headers.update(_own_headers(endpoint.name, endpoint.timeout_s, endpoint.is_management))
        sent.headers.update(headers or {})
        is_ours = credential is None
        if is_ours and self.credentials.is_stale():
            await self.renew_credential()
        # One that was begun may have been sent with a token that others have renewed since.
        token = self.credentials.token if begun is None else begun.token
        if begun is None:
            reply = await self._reply(endpoint, sent, idempotency_key, credential)
        else:
            reply = await begun.carried.reply()
        if reply.status == UNAUTHORIZED and is_ours and token is not None:
            # Our clock may be wrong, or the service's keys have changed: one more try.
            await self.renew_credential(refused=token)
            if self.credentials.token != token:
                reply = await self._reply(endpoint, sent, idempotency_key, credential)
        self._tell_deprecation(reply)
        if 200 <= reply.status < 300:
            self.took_well()
            return reply
        self._check_empty_400(endpoint, reply)
        raise error_from_reply(
            reply.status, reply.headers, reply.body, request_id=reply.headers.get("x-request-id")
        )

    def begin(
        self,
        endpoint: Endpoint,
        sent: HttpRequest,
        *,
        headers: Mapping[str, str],
        on_over: Callable[[BegunCall], object],
    ) -> BegunCall | None:
        """Send a call at once, without a task that waits for its reply.

        Where all is well nothing more is needed: `BegunCall.whole_reply` gives the reply. For all
        else `send` and `call_with` go on from where it got to.

        Args:
            endpoint: Where it goes.
            sent: What is sent.
            headers: Sent with it.
            on_over: Called once, from the event loop, when the reply is there or will not come.

        Returns:
            None if something has to be waited for, or is wrong; `send` will do and say what.
        """
        if events.listeners or self.credentials.is_stale():
            return None
        sent.headers.update(_own_headers(endpoint.name, endpoint.timeout_s, endpoint.is_management))
        sent.headers.update(headers)
        call = BegunCall(self, on_over)
        try:
            self.check_open()
            carried = self._carrier().begin(
                sent,
                pool=endpoint.pool,
                timeout_s=endpoint.timeout_s,
                idempotency_key=call.idempotency_key,
                on_over=call.over,
            )
        except TinkerError:
            return None
        if carried is None:
            return None
        call.carried = carried
        self.begun.add(call)
        return call

    def end_begun(self) -> None:
        """Give up whatever `begin` sent and is not answered."""
        for call in list(self.begun):
            call.carried.cancel()

    @contextlib.asynccontextmanager
    async def stream(
        self,
        endpoint: Endpoint,
        sent: HttpRequest,
        *,
        headers: Mapping[str, str] | None = None,
        idle_s: float,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send a call once and read its reply, which is not a refusal, piece by piece.

        Raises:
            APIStatusError: The reply refuses.
            APIConnectionError: There was none, or it broke off; also from the pieces.
        """
        self.check_open()
        if self.credentials.is_stale():
            await self.renew_credential()
        sent.headers.update(
            {
                **_own_headers(endpoint.name, endpoint.timeout_s, endpoint.is_management),
                **(headers or {}),
            }
        )
        token = self.credentials.token
        async with contextlib.AsyncExitStack() as opened:
            reply = await opened.enter_async_context(self._stream(endpoint, sent, idle_s))
            if reply.status == UNAUTHORIZED and token is not None:
                await self.renew_credential(refused=token)
                if self.credentials.token != token:
                    await opened.aclose()
                    reply = await opened.enter_async_context(self._stream(endpoint, sent, idle_s))
            if not 200 <= reply.status < 300:
                body = await _first_bytes(reply.pieces)
                self._check_empty_400(endpoint, ExchangeReply(reply.status, reply.headers, body))
                raise error_from_reply(
                    reply.status,
                    reply.headers,
                    body,
                    request_id=reply.headers.get("x-request-id"),
                )
            packing = reply.headers.get("content-encoding", "identity")
            if packing != "identity":
                raise APIResponseValidationError(
                    reply,
                    message=f"{endpoint.name}: packed as {packing!r:.80}, unasked",
                )
            yield reply.pieces

    def _stream(
        self, endpoint: Endpoint, sent: HttpRequest, idle_s: float
    ) -> contextlib.AbstractAsyncContextManager[StreamReply]:
        stream = self._carrier().stream(
            sent, pool=endpoint.pool, timeout_s=endpoint.timeout_s, idle_s=idle_s
        )
        if events.listeners:
            stream = events.told_stream(endpoint.name, sum(map(len, sent.parts)), stream)
        return stream

    async def _reply(
        self,
        endpoint: Endpoint,
        sent: HttpRequest,
        idempotency_key: str | None,
        credential: Secret | None,
    ) -> ExchangeReply:
        exchange = self._carrier().send(
            sent,
            pool=endpoint.pool,
            timeout_s=endpoint.timeout_s,
            idempotency_key=idempotency_key,
            credential=None if credential is None else credential.reveal(),
        )
        if events.listeners:
            attempt = int(sent.headers.get("x-stainless-retry-count", 0))
            size = sum(map(len, sent.parts))
            exchange = events.told_exchange(endpoint.name, attempt, size, exchange)
        return await exchange

    async def reach(self) -> None:
        """Wait until the service can be asked, where that is known to take long.

        Before the first call, whose time and second tries are for a service that runs.
        """
        find = getattr(self._carrier(), "reach", None)
        if find is not None:
            await find()

    def _carrier(self) -> Transport:
        if self._transport is None:
            settings = self.settings
            reach = TransportSettings(
                base_url=settings.base_url,
                headers=settings.default_headers,
                unix_socket=settings.unix_socket,
                ca_file=settings.ca_file,
                proxy=settings.proxy,
            )
            self._transport = transport_for(reach, self.credentials.current)
        return self._transport

    def took_well(self) -> None:
        """A call was taken."""
        self._empty_400s_left = min(EMPTY_400_BUDGET, self._empty_400s_left + 1)

    def _check_empty_400(self, endpoint: Endpoint, reply: ExchangeReply) -> None:
        """A 400 without a body comes from a broken proxy, not from the service."""
        is_empty = not len(reply.body) and reply.headers.get("content-length", "0") == "0"
        if reply.status == 400 and is_empty and self._empty_400s_left > 0:
            self._empty_400s_left -= 1
            raise APIConnectionError(
                f"{endpoint.name}: a 400 without a body, as broken proxies give"
            )

    def _tell_deprecation(self, reply: ExchangeReply) -> None:
        note = reply.headers.get("x-deprecation-note")
        if note:
            is_error = reply.headers.get("x-deprecation-level") == "error"
            _log.log(logging.ERROR if is_error else logging.WARNING, "the service says: %s", note)

    def decoded(self, endpoint: Endpoint, reply: ExchangeReply) -> Any:
        """What a reply says, in the endpoint's own type."""
        try:
            return read_reply(endpoint, reply.body)
        except DecodeError as exc:
            raise APIResponseValidationError(
                reply, bytes(reply.body[:1000]), message=f"{endpoint.name}: {exc}"
            ) from exc

    async def _sleep(self, delay_s: float) -> None:
        with self.work.under_way():
            await asyncio.sleep(delay_s)


class BegunCall:
    """A call that was sent at once; see `Calls.begin`."""

    __slots__ = ("_calls", "_on_over", "began", "carried", "idempotency_key", "token")

    carried: Begun

    def __init__(self, calls: Calls, on_over: Callable[[BegunCall], object]) -> None:
        self._calls = calls
        self._on_over: Callable[[BegunCall], object] | None = on_over
        self.began = time.monotonic()
        self.idempotency_key = new_idempotency_key()
        self.token = calls.credentials.token
        """What it was sent with, if that was no key."""

    def over(self) -> None:
        """The reply is there, or will not come."""
        self._calls.begun.discard(self)
        on_over, self._on_over = self._on_over, None  # it may hold whoever holds us: a circle
        if on_over is not None:
            on_over(self)

    def whole_reply(self) -> ExchangeReply | None:
        """The reply, if one came that takes the call and says nothing else."""
        reply = self.carried.whole_reply()
        if reply is None or not 200 <= reply.status < 300 or "x-deprecation-note" in reply.headers:
            return None
        self._calls.took_well()
        return reply


async def _first_bytes(pieces: AsyncIterator[bytes]) -> bytes:
    """As much of a refusal's body as an error keeps."""
    body = bytearray()
    async for piece in pieces:
        body += piece
        if len(body) > MOST_ERROR_BYTES:
            break
    return bytes(body[:MOST_ERROR_BYTES])


@functools.cache
def _own_headers(endpoint_name: str, timeout_s: float, is_management: bool) -> Mapping[str, str]:
    """What we say of ourselves with each call."""
    headers = {
        "User-Agent": f"tinsmith/{__version__}",
        "X-Stainless-Package-Version": SDK_VERSION,
        "x-stainless-read-timeout": f"{timeout_s:g}",
    }
    if is_management:
        headers |= {"x-sdk-version": SDK_VERSION, "x-sdk-method": endpoint_name}
    return headers


_AFTER_CLOSE = frozenset({"finish_session", "list_checkpoints"})
_SAMPLES = frozenset({"asample", "asample_many"})


def _final_errors(endpoint: Endpoint) -> tuple[type[APIError], ...]:
    """Errors that somebody else deals with, though another try might help."""
    if endpoint.retry is RetryClass.EXCHANGE:
        return (BillingError,)  # to make something is not paused for want of funds, but refused
    return (RateLimitError,) if endpoint.name in _SAMPLES else ()  # the limiter's
