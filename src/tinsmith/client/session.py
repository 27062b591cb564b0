"""A client's session with one service: its calls, its flags, its heartbeats and its end.

A typed request becomes an exchange of the transport, retried as its endpoint allows, and the reply
becomes the endpoint's answer or an error. A refused token is renewed once. `ready` and `session_id`
do what is needed before the first call, once, however many wait for it. Users hold a session
through a `SessionLease` (`lease.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

from tinsmith._version import __version__
from tinsmith.client import embedding, events, upkeep
from tinsmith.client.auth import ClientCredentials
from tinsmith.client.background import Work, closed_error
from tinsmith.client.forking import in_child
from tinsmith.client.limits import Limiter, shared_limiter
from tinsmith.client.retry import Retrier
from tinsmith.client.settings import EMBEDDED, ClientSettings, Secret
from tinsmith.client.transports.base import (
    ExchangeReply,
    StreamReply,
    Transport,
    TransportSettings,
    new_idempotency_key,
    transport_for,
)
from tinsmith.client.waits import unattended
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
from tinsmith.types.checkpoints import CheckpointsListResponse
from tinsmith.types.extensions import ServiceFlags
from tinsmith.types.record import Frozen, Record
from tinsmith.types.runs import (
    ClientSessionFinishReason,
    ClientSessionFinishSuccess,
    CreateSessionResponse,
)
from tinsmith.types.service import (
    AuthTokenResponse,
    ClientDynamicConfigResponse,
)
from tinsmith.wire.endpoint_types import Endpoint, RetryClass
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import HttpRequest, read_reply, to_http
from tinsmith.wire.failures import error_from_reply

T = TypeVar("T")

_log = logging.getLogger(__name__)

SDK_VERSION = "0.36.0"
"""The release of the official SDK whose protocol we speak; servers adapt their answers to it."""
EMPTY_400_BUDGET = 16
"""How many 400s without a body are attributed to a broken proxy and retried."""
UNAUTHORIZED = 401
MOST_ERROR_BYTES = 64 * 1024
FINISH_TIMEOUT_S = 10.0
"""How long closing tries to finish the session on the service."""
SAVE_TIMEOUT_S = 30.0
"""How long it waits for an embedded service to save the models of an interrupted program."""
SLOW_S = 1.0
"""After so long a line says why the program has not ended yet."""


TaskEnded: TypeAlias = Callable[[asyncio.Task[None]], object]


class _Forks:
    """How many forks led to this process."""

    count = 0

    def add(self) -> None:
        self.count += 1


_forks = _Forks()
in_child(_forks.add)


class Session:
    """What all clients of one lease share. Every method is for the background loop."""

    def __init__(self, settings: ClientSettings, transport: Transport | None = None) -> None:
        self.settings = settings
        self.credentials = ClientCredentials(settings)
        self.work = Work()
        self.retrier = Retrier(settings.retry, sleep=self._sleep)
        self._transport = transport
        self._empty_400s_left = EMPTY_400_BUDGET
        self.limiter = self._limiter()
        self.flags = ServiceFlags()
        self.dynamic_flags = ClientDynamicConfigResponse()
        self._starting: asyncio.Task[ServiceFlags] | None = None
        self._opening: asyncio.Task[str] | None = None
        self._tasks: dict[asyncio.Task[None], TaskEnded | None] = {}
        self._closing: asyncio.Task[None] | None = None
        self._is_closed = False
        self._counters: dict[str, itertools.count[int]] = {}
        self._adopted_id: str | None = None
        self._has_dynamic_flags = asyncio.Event()
        self.model_ids: list[str] = []
        """The models created in it."""
        self.is_saving = False
        """Whether the service is saving its models, as the program was interrupted."""
        self._forks = _forks.count

    def adopt(
        self, session_id: str, flags: ServiceFlags, dynamic: ClientDynamicConfigResponse
    ) -> None:
        """Use a session that another process opened and will finish."""
        self._adopted_id = session_id
        self.flags, self.dynamic_flags = flags, dynamic

    @property
    def is_adopted(self) -> bool:
        """Whether another process opened it, and numbers its models and samplers."""
        return self._adopted_id is not None

    def _limiter(self) -> Limiter:
        settings = self.settings
        if settings.limiter_scope == "client":
            return Limiter()
        return shared_limiter(settings.base_url, settings.api_key, settings.unix_socket)

    @property
    def is_closing(self) -> bool:
        """Whether it was closed, or is about to be."""
        return self._is_closed

    def check_open(self) -> None:
        """Raise `ClosedError` if it was closed, or used before this process was forked."""
        if self._forks != _forks.count and self.is_inherited():
            raise ClosedError(
                "the client belongs to the process that this one was forked from",
                remedy="create a new one here; one that was not used before the fork works too",
            )
        if self._is_closed:
            raise closed_error()

    @property
    def opened_id(self) -> str | None:
        """The id of the session that we opened, and so have to finish. From any thread."""
        opening = self._opening
        if opening is None or not opening.done() or _failed(opening) or self._adopted_id:
            return None
        return opening.result()

    def is_inherited(self) -> bool:
        """Whether the parent process used it before this one was forked."""
        if self._forks == _forks.count:
            return False
        if self._transport is None and self._starting is None:
            self._forks = _forks.count  # it was not used before the fork
            return False
        return True

    # Calls

    async def call(
        self,
        name: str,
        request: Record | Frozen,
        *,
        headers: Mapping[str, str] | None = None,
        credential: Secret | None = None,
    ) -> Any:
        """Make one call of the API, retried as its endpoint allows.

        Returns:
            The decoded answer; None where the endpoint answers nothing.

        Raises:
            APIError: It failed, and the retries are used up or would not help.
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
        asleep: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> Any:
        """As `call`, for an encoded request.

        Args:
            endpoint: Where it goes.
            sent: The request.
            headers: Further headers.
            credential: Replaces the session's.
            retrier: Retries it; the session's if None.
            asleep: As in `Retrier.call`.
        """
        key = new_idempotency_key()  # the same for every attempt of this call

        async def attempt(number: int) -> Any:
            reply = await self.send(
                endpoint,
                sent,
                headers={"x-stainless-retry-count": str(number), **(headers or {})},
                idempotency_key=key,
                credential=credential,
            )
            return self.decoded(endpoint, reply)

        if endpoint.retry is RetryClass.OWN:
            return await attempt(0)
        return await (retrier or self.retrier).call(
            attempt,
            endpoint.name,
            final=_final_errors(endpoint),
            asleep=asleep,
            is_watched=endpoint.name not in _SAMPLES,  # their sender reports what they wait for
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
        """Send a request once and return its reply.

        Raises:
            APIStatusError: The reply is a refusal.
            APIConnectionError: There was none.
        """
        if endpoint.name not in _AFTER_CLOSE:
            self.check_open()
        sent.headers.update(_own_headers(endpoint.name, endpoint.timeout_s, endpoint.is_management))
        sent.headers.update(headers or {})
        is_ours = credential is None
        if is_ours and self.credentials.is_stale():
            await self.renew_credential()
        token = self.credentials.token
        reply = await self._reply(endpoint, sent, idempotency_key, credential)
        if reply.status == UNAUTHORIZED and is_ours and token is not None:
            # Our clock may be wrong, or the service's keys have changed.
            await self.renew_credential(refused=token)
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
        """Send a request once and read its reply piece by piece.

        Raises:
            APIStatusError: The reply is a refusal.
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
            encoding = reply.headers.get("content-encoding", "identity")
            if encoding != "identity":
                raise APIResponseValidationError(
                    reply,
                    message=f"{endpoint.name}: unexpected Content-Encoding {encoding!r:.80}",
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
        """Wait until the service has started, where it is ours to start.

        The timeouts and retries of calls are meant for a service that runs.
        """
        reach = getattr(self._carrier(), "reach", None)
        if reach is not None:
            await reach()

    def _carrier(self) -> Transport:
        if self._transport is None:
            settings = self.settings
            reach = TransportSettings(
                base_url=settings.base_url,
                further_urls=settings.further_urls,
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
                f"{endpoint.name}: a 400 without a body, as from a broken proxy"
            )

    def _tell_deprecation(self, reply: ExchangeReply) -> None:
        note = reply.headers.get("x-deprecation-note")
        if note:
            is_error = reply.headers.get("x-deprecation-level") == "error"
            _log.log(logging.ERROR if is_error else logging.WARNING, "the service says: %s", note)

    def decoded(self, endpoint: Endpoint, reply: ExchangeReply) -> Any:
        """A reply as the endpoint's type."""
        try:
            return read_reply(endpoint, reply.body)
        except DecodeError as exc:
            raise APIResponseValidationError(
                reply, bytes(reply.body[:1000]), message=f"{endpoint.name}: {exc}"
            ) from exc

    async def _sleep(self, delay_s: float) -> None:
        with self.work.under_way():
            await asyncio.sleep(delay_s)

    # Start and session

    async def ready(self) -> ServiceFlags:
        """Fetch the service's flags and a token; done once."""
        self.check_open()  # before it counts as used
        self._starting = _once(self._starting, self._start)
        return await self._unless_closed(self._starting)

    async def _start(self) -> ServiceFlags:
        raw = await self.credentials.open()
        await self.reach()
        if not self.is_adopted:
            self.flags = await self.call("client_config", _ABOUT_US, credential=raw)
        self.retrier.pause_for_billing(float(self.flags.billing_exception_max_pause_duration_sec))
        if self.flags.pjwt_auth_enabled:
            await self.renew_credential()
            self.spawn(self._keep_renewing())
        elif not self.is_adopted and not self.credentials.has_key:
            raise AuthenticationError(
                "this service only accepts API keys", remedy="set TINKER_API_KEY"
            )
        if not self.is_adopted:
            # Together with the next call, not before it: only cancelled samples need them.
            self.spawn(self._take_dynamic_flags(), lambda _: self._has_dynamic_flags.set())
        return self.flags

    async def _take_dynamic_flags(self) -> None:
        try:
            self.dynamic_flags = await self.retrier.call(
                self._fetch_dynamic_flags, "client_dynamic_config"
            )
        except NotFoundError:
            return  # older services do not have it
        except APIError as error:
            _log.warning("continuing with the default values of the service's flags: %s", error)

    async def _fetch_dynamic_flags(self, attempt: int = 0) -> ClientDynamicConfigResponse:
        headers = {"x-stainless-retry-count": str(attempt)}
        flags: ClientDynamicConfigResponse = await self.call(
            "client_dynamic_config", _ABOUT_US, headers=headers
        )
        return flags

    def _keep_up(self, session_id: str) -> None:
        """Send heartbeats, and read the flags that may change, from now on."""

        def take(flags: ClientDynamicConfigResponse) -> None:
            self.dynamic_flags = flags

        self.spawn(upkeep.keep_alive(self.call, session_id))
        self.spawn(upkeep.keep_fresh(self.dynamic_flags, self._fetch_dynamic_flags, take))

    async def renew_credential(self, refused: str | None = None) -> None:
        """Get a new token, unless another call has replaced the `refused` one already."""
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
            await self.renew_credential()

    async def session_id(self) -> str:
        """The id of our session, which is opened on first use and then kept alive."""
        self._opening = _once(self._opening, self._open)
        return await self._unless_closed(self._opening)

    async def _unless_closed(self, task: asyncio.Task[T]) -> T:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._is_closed:
                raise closed_error() from None  # not the caller's cancellation
            raise
        finally:
            self._forget_failed()

    def _forget_failed(self) -> None:
        """Keep no task that failed: the traceback of its error refers to the caller's frames.

        Those refer to the client, which would then never be freed.
        """
        self._starting = _unless_failed(self._starting)
        self._opening = _unless_failed(self._opening)
        self._closing = _unless_failed(self._closing)

    async def _open(self) -> str:
        await self.ready()
        if self._adopted_id is not None:
            self._keep_up(self._adopted_id)
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
        await self._has_dynamic_flags.wait()
        self._keep_up(opened.session_id)
        if events.listeners:
            base_url = settings.base_url
            events.tell(events.SessionOpened(session_id=opened.session_id, base_url=base_url))
        return opened.session_id

    def spawn(self, work: Coroutine[Any, Any, None], on_end: TaskEnded | None = None) -> None:
        """Run a task that is cancelled when the session is closed.

        Args:
            work: What to run.
            on_end: Called with the task when it has ended, even if it never started.
        """
        task = asyncio.create_task(work, context=unattended())
        self._tasks[task] = on_end  # a loop holds its tasks weakly
        task.add_done_callback(self._spawned_ended)

    def _spawned_ended(self, task: asyncio.Task[None]) -> None:
        on_end = self._tasks.pop(task)
        if on_end is not None:
            on_end(task)

    def next_number(self, counter: str) -> int:
        """The next number of a counter, from 0: the client numbers models, samplers and losses.

        From any thread; each number is given out once.
        """
        return next(self._counters.setdefault(counter, itertools.count()))

    # End

    async def close(self, reason: ClientSessionFinishReason, detail: str | None = None) -> None:
        """Finish the session, if one was opened, and close all connections. Done once.

        Pending calls fail immediately, however long the service takes to answer.

        Raises:
            APIError: The service could not be told; everything is closed nevertheless.
        """
        if self.is_inherited():
            return  # the parent finishes it, over its own connections
        if not self._is_closed:
            self._is_closed = True
            self._closing = asyncio.create_task(self._close(reason, detail))
        if self._closing is not None:
            await self._unless_closed(self._closing)

    async def _close(self, reason: ClientSessionFinishReason, detail: str | None) -> None:
        self.work.end()
        _cancel_all(self._tasks)
        try:
            session_id = self.opened_id
            if session_id is not None:
                await self._finish(session_id, reason, detail)
        finally:
            _cancel_all(self._tasks)
            self._starting, self._opening = _given_up(self._starting), _given_up(self._opening)
            if self._transport is not None:
                await self._transport.close()
            if events.listeners:
                known = self._adopted_id or self.opened_id
                events.tell(events.SessionClosed(session_id=known, reason=reason.type))

    async def _finish(
        self, session_id: str, reason: ClientSessionFinishReason, detail: str | None
    ) -> None:
        request = r.FinishSessionRequest(session_id=session_id, reason=reason, detail=detail)
        is_success = isinstance(reason, ClientSessionFinishSuccess)
        self.is_saving = self.is_embedded and not is_success and bool(self.model_ids)
        limit = asyncio.timeout(SAVE_TIMEOUT_S if self.is_saving else FINISH_TIMEOUT_S)
        slow = asyncio.get_running_loop().call_later(SLOW_S, self._tell_slow)
        try:
            async with limit:
                await self.call("finish_session", request)
                await self._note_saved()
        except TimeoutError as exc:
            if not limit.expired():
                raise
            if self.is_saving:
                embedding.note_unsaved(self.model_ids)
                return
            raise APITimeoutError(
                f"session {session_id} could not be finished within {FINISH_TIMEOUT_S:g} s; "
                "it will expire"
            ) from exc
        finally:
            slow.cancel()
            self.is_saving = False

    @property
    def is_embedded(self) -> bool:
        """Whether the service may run in this process."""
        return self.settings.base_url == EMBEDDED

    async def _note_saved(self) -> None:
        if not self.is_saving:
            return
        for model_id in self.model_ids:
            request = r.ListCheckpointsRequest(training_run_id=model_id)
            listed: CheckpointsListResponse = await self.call("list_checkpoints", request)
            embedding.note_saved(listed.checkpoints)

    def _tell_slow(self) -> None:
        if self.is_saving:
            embedding.tell_slow()


async def _first_bytes(pieces: AsyncIterator[bytes]) -> bytes:
    """The start of a refusal's body, for its error."""
    body = bytearray()
    async for piece in pieces:
        body += piece
        if len(body) > MOST_ERROR_BYTES:
            break
    return bytes(body[:MOST_ERROR_BYTES])


@functools.cache
def _own_headers(endpoint_name: str, timeout_s: float, is_management: bool) -> Mapping[str, str]:
    """The headers that identify the client."""
    headers = {
        "User-Agent": f"tinsmith/{__version__}",
        "X-Stainless-Package-Version": SDK_VERSION,
        "x-stainless-read-timeout": f"{timeout_s:g}",
    }
    if is_management:
        headers |= {"x-sdk-version": SDK_VERSION, "x-sdk-method": endpoint_name}
    return headers


_ABOUT_US = r.ClientConfigRequest(sdk_version=SDK_VERSION)
_AFTER_CLOSE = frozenset({"finish_session", "list_checkpoints"})
_SAMPLES = frozenset({"asample", "asample_many"})


def _final_errors(endpoint: Endpoint) -> tuple[type[APIError], ...]:
    """Errors that are not retried here, though they may be temporary."""
    if endpoint.retry is RetryClass.EXCHANGE:
        return (BillingError,)  # creating something fails without funds, and is not paused
    return (RateLimitError,) if endpoint.name in _SAMPLES else ()  # the sender handles them


def _once(task: asyncio.Task[T] | None, work: Callable[[], Any]) -> asyncio.Task[T]:
    """The task that does something once; started again if it failed."""
    return _unless_failed(task) or asyncio.create_task(work())


def _cancel_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    # A separate function, so that no frame refers to one of them; see `_given_up`.
    for task in tasks:
        task.cancel()


def _given_up(task: asyncio.Task[T] | None) -> asyncio.Task[T] | None:
    """Cancel a task unless it is done. A cancelled one is not kept.

    It refers to its error, that to our frames, and those to the session: a cycle that Python 3.11
    never frees.
    """
    if task is None or task.done():
        return task
    task.add_done_callback(_failed)  # no caller is left: asyncio would log its error
    task.cancel()
    return None


def _unless_failed(task: asyncio.Task[T] | None) -> asyncio.Task[T] | None:
    return None if task is not None and task.done() and _failed(task) else task


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None


def death_of(task: asyncio.Task[None]) -> BaseException | None:
    """The error with which a task of `spawn` ended; None if it ran to its end."""
    if task.cancelled():
        return ClosedError("the client was closed", remedy="create a new one")
    return task.exception()
