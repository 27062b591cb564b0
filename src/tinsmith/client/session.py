"""A client's stay with one service: its calls, flags, session and heartbeats.

`Session` lives on the background loop. `call` makes one call of the API with second tries; `ready`
and `session_id` do what must be done before the first, once, however many ask. What users hold
refers to it through a `SessionLease`: when the last lease is gone, so is the session, its tasks
and its connections.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import functools
import itertools
import logging
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from tinsmith._version import __version__
from tinsmith.client import events
from tinsmith.client.auth import Credentials
from tinsmith.client.background import background
from tinsmith.client.dynamic_flags import keep_fresh
from tinsmith.client.forking import in_child
from tinsmith.client.futures import APIFuture
from tinsmith.client.heartbeat import keep_alive
from tinsmith.client.limits import Limiter, shared_limiter
from tinsmith.client.retry import Retrier
from tinsmith.client.settings import ClientSettings, Secret
from tinsmith.client.transport import (
    ExchangeReply,
    Transport,
    TransportSettings,
    new_idempotency_key,
)
from tinsmith.client.work import Work, closed_error
from tinsmith.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APITimeoutError,
    AuthenticationError,
    BillingError,
    ClosedError,
    DecodeError,
    NotFoundError,
    RateLimitError,
)
from tinsmith.types import requests as r
from tinsmith.types.extensions import ServiceFlags
from tinsmith.types.record import Frozen, Record
from tinsmith.types.runs import (
    ClientSessionFinishErrored,
    ClientSessionFinishInterrupted,
    ClientSessionFinishReason,
    ClientSessionFinishSuccess,
    CreateSessionResponse,
)
from tinsmith.types.service import (
    AuthTokenResponse,
    ClientDynamicConfigResponse,
)
from tinsmith.wire.endpoints import ENDPOINTS, Endpoint, RetryClass
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
FINISH_TIMEOUT_S = 10.0
"""How long closing tries to tell the service that the session is over."""
EXIT_TIMEOUT_S = 3.0
"""How long the interpreter's exit may wait for sessions to be finished."""


class _Forks:
    """How many forks led to this process."""

    count = 0

    def add(self) -> None:
        self.count += 1


_forks = _Forks()
in_child(_forks.add)


class Session:
    """See the top of the module. Every method is for the background loop."""

    def __init__(self, settings: ClientSettings, transport: Transport | None = None) -> None:
        self.settings = settings
        self.credentials = Credentials(settings)
        self.work = Work()
        self.retrier = Retrier(settings.retry, sleep=self._sleep)
        self.limiter = self._limiter()
        self.flags = ServiceFlags()
        self.dynamic_flags = ClientDynamicConfigResponse()
        self._transport = transport
        self._empty_400s_left = EMPTY_400_BUDGET
        self._starting: asyncio.Task[ServiceFlags] | None = None
        self._opening: asyncio.Task[str] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None
        self._is_closed = False
        self._counters: dict[str, itertools.count[int]] = {}
        self._adopted_id: str | None = None
        self._forks = _forks.count

    def adopt(
        self, session_id: str, flags: ServiceFlags, dynamic: ClientDynamicConfigResponse
    ) -> None:
        """Take part in a session that another process opened; it is not ours to finish."""
        self._adopted_id = session_id
        self.flags, self.dynamic_flags = flags, dynamic

    def _limiter(self) -> Limiter:
        if self.settings.limiter_scope == "client":
            return Limiter()
        key = self.settings.api_key
        return shared_limiter(self.settings.base_url, key.reveal() if key is not None else "")

    # Calls

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
        retrier: Retrier | None = None,
    ) -> Any:
        """As `call`, for a request that is bytes already; `retrier` None is the session's."""
        key = new_idempotency_key()  # the same for every try of this call

        async def attempt(number: int) -> Any:
            reply = await self.send(
                endpoint,
                sent,
                headers={**(headers or {}), "x-stainless-retry-count": str(number)},
                idempotency_key=key,
                credential=credential,
            )
            return self._decoded(endpoint, reply)

        return await self._with_retries(endpoint, attempt, retrier or self.retrier)

    async def _with_retries(
        self, endpoint: Endpoint, attempt: Callable[[int], Awaitable[T]], retrier: Retrier
    ) -> T:
        if endpoint.retry is RetryClass.OWN:
            return await attempt(0)
        return await retrier.call(attempt, endpoint.name, final=_final_errors(endpoint))

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
    ) -> ExchangeReply:
        """As `exchange`, for a request that is bytes already."""
        if endpoint.name not in _AFTER_CLOSE:
            self.check_open()
        sent.headers.update(_own_headers(endpoint.name))
        sent.headers.update(headers or {})
        is_ours = credential is None
        if is_ours and self.credentials.is_stale():
            await self._renew_credential()
        token = self.credentials.token
        reply = await self._reply(endpoint, sent, idempotency_key, credential)
        if reply.status == UNAUTHORIZED and is_ours and token is not None:
            # Our clock may be wrong, or the service's keys have changed: one more try.
            await self._renew_credential(refused=token)
            if self.credentials.token != token:
                reply = await self._reply(endpoint, sent, idempotency_key, credential)
        self._tell_deprecation(reply)
        if 200 <= reply.status < 300:
            self._empty_400s_left = min(EMPTY_400_BUDGET, self._empty_400s_left + 1)
            return reply
        self._check_empty_400(endpoint, reply)
        raise error_from_reply(
            reply.status, reply.headers, reply.body, request_id=reply.headers.get("x-request-id")
        )

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
            await self._renew_credential()
        sent.headers.update({**_own_headers(endpoint.name), **(headers or {})})
        stream = self._carrier().stream(
            sent, pool=endpoint.pool, timeout_s=endpoint.timeout_s, idle_s=idle_s
        )
        if events.listeners:
            stream = events.told_stream(endpoint.name, sum(map(len, sent.parts)), stream)
        async with stream as reply:
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

    def _decoded(self, endpoint: Endpoint, reply: ExchangeReply) -> Any:
        try:
            return read_reply(endpoint, reply.body)
        except DecodeError as exc:
            raise APIResponseValidationError(
                reply, bytes(reply.body[:1000]), message=f"{endpoint.name}: {exc}"
            ) from exc

    @property
    def is_closing(self) -> bool:
        """Whether it was closed, or is about to be."""
        return self._is_closed

    def check_open(self) -> None:
        """Raise `ClosedError` if it was closed, or used before this process was forked."""
        if self.is_inherited():
            raise ClosedError(
                "the client belongs to the process that this one was forked from",
                remedy="make a new one here; one that was not used before the fork will do",
            )
        if self._is_closed:
            raise closed_error()

    async def _sleep(self, delay_s: float) -> None:
        with self.work.under_way():
            await asyncio.sleep(delay_s)

    @property
    def opened_id(self) -> str | None:
        """The id of the session that we opened, if we have opened one. From any thread."""
        return self._own_session_id()

    def _own_session_id(self) -> str | None:
        """The session that we opened and so have to finish, if there is one."""
        opening = self._opening
        if opening is None or not opening.done() or _failed(opening) or self._adopted_id:
            return None
        return opening.result()

    def is_inherited(self) -> bool:
        """Whether another process used it before this one was forked from that."""
        if self._forks == _forks.count:
            return False
        if self._transport is None and self._starting is None:
            self._forks = _forks.count  # nobody used it: it is ours
            return False
        return True

    # Start and session

    async def ready(self) -> ServiceFlags:
        """Introduce ourselves and learn the service's flags; done once."""
        self.check_open()  # before it counts as used
        self._starting = _once(self._starting, self._start)
        return await self._unless_closed(self._starting)

    async def _start(self) -> ServiceFlags:
        raw = await self.credentials.open()
        if self._adopted_id is not None:
            pause_s = float(self.flags.billing_exception_max_pause_duration_sec)
            self.retrier.pause_for_billing(pause_s)
            if self.flags.pjwt_auth_enabled:
                await self._renew_credential()
                self.spawn(self._keep_renewing())
            return self.flags
        about = r.ClientConfigRequest(sdk_version=SDK_VERSION)
        self.flags = await self.call("client_config", about, credential=raw)
        self.retrier.pause_for_billing(float(self.flags.billing_exception_max_pause_duration_sec))
        if self.flags.pjwt_auth_enabled:
            await self._renew_credential()
            self.spawn(self._keep_renewing())
        elif not self.credentials.has_key:
            raise AuthenticationError(
                "this service takes API keys alone", remedy="set TINKER_API_KEY"
            )
        self.retrier.limit_billing_pause(self.flags.billing_exception_max_pause_duration_sec)
        self.dynamic_flags = await self._fetch_dynamic_flags()
        return self.flags

    async def _fetch_dynamic_flags(self) -> ClientDynamicConfigResponse:
        about = r.ClientConfigRequest(sdk_version=SDK_VERSION)
        endpoint = ENDPOINTS["client_dynamic_config"]

        async def attempt(number: int) -> ClientDynamicConfigResponse:
            headers = {"x-stainless-retry-count": str(number)}
            reply = await self.exchange(endpoint, about, headers=headers)
            flags: ClientDynamicConfigResponse = self._decoded(endpoint, reply)
            return flags

        try:
            return await self.retrier.call(attempt, endpoint.name)
        except NotFoundError:  # older services do not have it
            return ClientDynamicConfigResponse()

    async def _keep_flags_fresh(self) -> None:
        about = r.ClientConfigRequest(sdk_version=SDK_VERSION)

        def take(flags: ClientDynamicConfigResponse) -> None:
            self.dynamic_flags = flags

        await keep_fresh(
            self.dynamic_flags, lambda: self.call("client_dynamic_config", about), take
        )

    async def _renew_credential(self, refused: str | None = None) -> None:
        source = self.flags.credential_default_source
        await self.credentials.renew(self._exchange_credential, source, refused=refused)

    async def _exchange_credential(self, credential: Secret) -> str:
        answer: AuthTokenResponse = await self.call(
            "auth_token", r.AuthTokenRequest(), credential=credential
        )
        return answer.jwt

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(self.credentials.next_renewal_s())
            await self._renew_credential()

    async def session_id(self) -> str:
        """The id of our session, opened on first use and kept alive from then on."""
        self._opening = _once(self._opening, self._open)
        return await self._unless_closed(self._opening)

    async def _unless_closed(self, task: asyncio.Task[T]) -> T:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._is_closed:
                raise closed_error() from None  # it was not the caller who gave up
            raise
        finally:
            self._forget_failed()

    def _forget_failed(self) -> None:
        """Keep no task that failed: its error knows the frames that it passed.

        Those of the caller hold the client, which would then never be dropped.
        """
        self._starting = _unless_failed(self._starting)
        self._opening = _unless_failed(self._opening)
        self._closing = _unless_failed(self._closing)

    async def _open(self) -> str:
        await self.ready()
        if self._adopted_id is not None:
            self.spawn(keep_alive(self.call, self._adopted_id))
            self.spawn(self._keep_flags_fresh())
            return self._adopted_id
        settings = self.settings
        opened: CreateSessionResponse = await self.call(
            "create_session",
            r.CreateSessionRequest(
                tags=list(settings.tags),
                user_metadata=settings.user_metadata or {},
                sdk_version=SDK_VERSION,
                project_id=settings.project_id,
                display_name=settings.display_name,
            ),
        )
        for level, message in (
            (logging.INFO, opened.info_message),
            (logging.WARNING, opened.warning_message),
            (logging.ERROR, opened.error_message),
        ):
            if message:
                _log.log(level, "the service says: %s", message)
        self.spawn(keep_alive(self.call, opened.session_id))
        self.spawn(self._keep_flags_fresh())
        if events.listeners:
            base_url = settings.base_url
            events.tell(events.SessionOpened(session_id=opened.session_id, base_url=base_url))
        return opened.session_id

    def spawn(
        self,
        work: Coroutine[Any, Any, None],
        on_end: Callable[[asyncio.Task[None]], object] | None = None,
    ) -> None:
        """Run something beside the calls, for as long as the session lasts.

        Args:
            work: What to run.
            on_end: Called with the task when it has ended, also one that never began.
        """
        task = asyncio.create_task(work)
        self._tasks.add(task)  # a loop holds its tasks weakly
        task.add_done_callback(self._tasks.discard)
        if on_end is not None:
            task.add_done_callback(on_end)

    def next_number(self, counter: str) -> int:
        """The next number of a counter, from 0: models, samplers and losses are numbered by us.

        From any thread; each number is given out once.
        """
        return next(self._counters.setdefault(counter, itertools.count()))

    # End

    async def close(self, reason: ClientSessionFinishReason, detail: str | None = None) -> None:
        """Finish the session, if one was opened, and let go of everything. Done once.

        Whatever is under way fails at once, however long the service takes to answer.

        Raises:
            APIError: The service could not be told; all is let go of nevertheless.
        """
        if self.is_inherited():
            return  # the parent's to finish, over connections that are the parent's
        if not self._is_closed:
            self._is_closed = True
            self._closing = asyncio.create_task(self._close(reason, detail))
        if self._closing is not None:
            await self._unless_closed(self._closing)

    async def _close(self, reason: ClientSessionFinishReason, detail: str | None) -> None:
        self.work.end()
        _cancel_all(self._tasks)
        try:
            session_id = self._own_session_id()
            if session_id is not None:
                await self._finish(session_id, reason, detail)
        finally:
            _cancel_all(self._tasks)
            self._starting, self._opening = _given_up(self._starting), _given_up(self._opening)
            if self._transport is not None:
                await self._transport.close()
            if events.listeners:
                known = self._adopted_id or self._own_session_id()
                events.tell(events.SessionClosed(session_id=known, reason=reason.type))

    async def _finish(
        self, session_id: str, reason: ClientSessionFinishReason, detail: str | None
    ) -> None:
        request = r.FinishSessionRequest(session_id=session_id, reason=reason, detail=detail)
        limit = asyncio.timeout(FINISH_TIMEOUT_S)
        try:
            async with limit:
                await self.call("finish_session", request)
        except TimeoutError as exc:
            if not limit.expired():
                raise
            raise APITimeoutError(
                f"the service was not told within {FINISH_TIMEOUT_S:g} s that session "
                f"{session_id} is over; it will expire"
            ) from exc


def transport_for(reach: TransportSettings, credentials: Callable[[], str]) -> Transport:
    """What carries requests to a service: through a proxy if there is one, else straight."""
    if reach.proxy is not None:
        from tinsmith.client.proxied_transport import ProxiedTransport  # its library takes 0.2 s

        return ProxiedTransport(reach, credentials)
    from tinsmith.client.direct_transport import DirectTransport

    return DirectTransport(reach, credentials)


async def _first_bytes(pieces: AsyncIterator[bytes]) -> bytes:
    """As much of a refusal's body as an error keeps."""
    body = bytearray()
    async for piece in pieces:
        body += piece
        if len(body) > MOST_ERROR_BYTES:
            break
    return bytes(body[:MOST_ERROR_BYTES])


@functools.cache
def _own_headers(endpoint_name: str) -> Mapping[str, str]:
    """What we say of ourselves with each call."""
    endpoint = ENDPOINTS[endpoint_name]
    headers = {
        "User-Agent": f"tinsmith/{__version__}",
        "X-Stainless-Package-Version": SDK_VERSION,
        "x-stainless-read-timeout": f"{endpoint.timeout_s:g}",
    }
    if endpoint.is_management:
        headers |= {"x-sdk-version": SDK_VERSION, "x-sdk-method": endpoint.name}
    return headers


_AFTER_CLOSE = frozenset({"finish_session"})


def _final_errors(endpoint: Endpoint) -> tuple[type[APIError], ...]:
    """Errors that somebody else deals with, though another try might help."""
    if endpoint.retry is RetryClass.EXCHANGE:
        return (BillingError,)  # to make something is not paused for want of funds, but refused
    is_sample = endpoint.name in ("asample", "asample_many")
    return (RateLimitError,) if is_sample else ()  # the limiter's


def _once(task: asyncio.Task[T] | None, work: Callable[[], Any]) -> asyncio.Task[T]:
    """The task that does something once; begun anew if it failed."""
    return _unless_failed(task) or asyncio.create_task(work())


def _cancel_all(tasks: set[asyncio.Task[None]]) -> None:
    # A function of its own, so that no frame keeps one of them; see `_given_up`.
    for task in tasks:
        task.cancel()


def _given_up(task: asyncio.Task[T] | None) -> asyncio.Task[T] | None:
    """Cancel a task unless it is done. A cancelled one is not kept.

    It holds its error, that error our frames, and those the session: Python 3.11 cannot see that
    this is a circle, and would never free it.
    """
    if task is None or task.done():
        return task
    task.cancel()
    return None


def _unless_failed(task: asyncio.Task[T] | None) -> asyncio.Task[T] | None:
    return None if task is not None and task.done() and _failed(task) else task


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None


def death_of(task: asyncio.Task[None]) -> BaseException | None:
    """Why a task of `spawn` ended before its end, for those who wait for what it was to bring."""
    if task.cancelled():
        return ClosedError("the client was closed", remedy="make a new one")
    return task.exception()


class SessionLease:
    """A user's hold on a session; when the last one is dropped, the session is closed.

    Clients show it as `holder`. The methods are what programs use of the official SDK's holder;
    they may be called from any thread but the background loop's.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        finalizer = weakref.finalize(self, _close_dropped, session)
        finalizer.atexit = False  # at exit `_finish_all` does it, while the loop still runs
        _open_sessions.add(session)

    def get_session_id(self) -> str:
        """The session's id; opens it if need be, which blocks."""
        return background().run(self.session.session_id(), "get_session_id")

    def get_client_config(self) -> ServiceFlags:
        """The service's flags; asks for them if need be, which blocks."""
        return background().run(self.session.ready(), "get_client_config")

    def get_client_dynamic_config(self) -> ClientDynamicConfigResponse:
        """The flags that may change, as they were when last asked for."""
        return self.session.dynamic_flags

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that carries all traffic: what blocks it stops everything."""
        return background().loop

    def run_coroutine_threadsafe(self, work: Coroutine[Any, Any, T]) -> APIFuture[T]:
        """Run a coroutine on that loop; returns at once."""
        return background().start(work, "run_coroutine_threadsafe")

    def get_telemetry(self) -> None:
        """There is none."""


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_of_parent: list[Session] = []


def _keep_inherited() -> None:
    """In a forked child: touch nothing that was open, not even to free it.

    Connections and event loops are shared with the parent, which goes on using them.
    """
    _of_parent.extend(session for session in _open_sessions if session.is_inherited())


in_child(_keep_inherited)


def _finish_all() -> None:
    """At the interpreter's exit, tell the service how it went; but do not keep the user waiting."""
    reason = _reason_of_exit()
    closing = [background().start(s.close(reason), "close") for s in list(_open_sessions)]
    concurrent.futures.wait(closing, timeout=EXIT_TIMEOUT_S)


def _reason_of_exit() -> ClientSessionFinishReason:
    error = getattr(sys, "last_value", None)  # what ended the program, or the last error typed in
    if error is None or hasattr(sys, "ps1"):
        return ClientSessionFinishSuccess()
    is_error = isinstance(error, Exception)
    return ClientSessionFinishErrored() if is_error else ClientSessionFinishInterrupted()


# Registered after the background loop's own, and so run before it.
atexit.register(_finish_all)


def _close_dropped(session: Session) -> None:
    if not session.is_inherited():
        _ = background().start(session.close(ClientSessionFinishSuccess()), "close")
