"""A client's stay with one service: its flags, its session, its heartbeats, and its end.

`Session` lives on the background loop. Its calls are those of `calls.py`; `ready` and `session_id`
do what must be done before the first, once, however many ask. What users hold refers to it through
a `SessionLease` (`lease.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeAlias, TypeVar

from tinsmith.client import autosaves, events
from tinsmith.client.calls import SDK_VERSION, Calls
from tinsmith.client.dynamic_flags import keep_fresh
from tinsmith.client.forking import in_child
from tinsmith.client.heartbeat import keep_alive
from tinsmith.client.limits import Limiter, shared_limiter
from tinsmith.client.settings import EMBEDDED, ClientSettings, Secret
from tinsmith.client.transports.base import (
    Transport,
)
from tinsmith.client.waits import unattended
from tinsmith.client.work import closed_error
from tinsmith.errors import (
    APIError,
    APITimeoutError,
    AuthenticationError,
    ClosedError,
    NotFoundError,
)
from tinsmith.types import requests as r
from tinsmith.types.checkpoints import CheckpointsListResponse
from tinsmith.types.extensions import ServiceFlags
from tinsmith.types.runs import (
    ClientSessionFinishReason,
    ClientSessionFinishSuccess,
    CreateSessionResponse,
)
from tinsmith.types.service import (
    AuthTokenResponse,
    ClientDynamicConfigResponse,
)
from tinsmith.wire.endpoints import ENDPOINTS

T = TypeVar("T")

_log = logging.getLogger(__name__)

FINISH_TIMEOUT_S = 10.0
"""How long closing tries to tell the service that the session is over."""
SAVE_TIMEOUT_S = 30.0
"""How long it waits for an embedded service to save the models of a program that was stopped."""
SLOW_S = 1.0
"""After so much of that the user is told why the program does not end."""


TaskEnded: TypeAlias = Callable[[asyncio.Task[None]], object]


class _Forks:
    """How many forks led to this process."""

    count = 0

    def add(self) -> None:
        self.count += 1


_forks = _Forks()
in_child(_forks.add)


class Session(Calls):
    """See the top of the module. Every method is for the background loop."""

    def __init__(self, settings: ClientSettings, transport: Transport | None = None) -> None:
        super().__init__(settings, transport)
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
        """The models that it made."""
        self.is_saving = False
        """Whether the service is saving its models, as the program was stopped."""
        self._forks = _forks.count

    def adopt(
        self, session_id: str, flags: ServiceFlags, dynamic: ClientDynamicConfigResponse
    ) -> None:
        """Take part in a session that another process opened; it is not ours to finish."""
        self._adopted_id = session_id
        self.flags, self.dynamic_flags = flags, dynamic

    @property
    def is_adopted(self) -> bool:
        """Whether another process opened it, and gives out its numbers."""
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
                remedy="make a new one here; one that was not used before the fork will do",
            )
        if self._is_closed:
            raise closed_error()

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
        await self.reach()
        if self._adopted_id is not None:
            pause_s = float(self.flags.billing_exception_max_pause_duration_sec)
            self.retrier.pause_for_billing(pause_s)
            if self.flags.pjwt_auth_enabled:
                await self.renew_credential()
                self.spawn(self._keep_renewing())
            return self.flags
        about = r.ClientConfigRequest(sdk_version=SDK_VERSION)
        self.flags = await self.call("client_config", about, credential=raw)
        self.retrier.pause_for_billing(float(self.flags.billing_exception_max_pause_duration_sec))
        if self.flags.pjwt_auth_enabled:
            await self.renew_credential()
            self.spawn(self._keep_renewing())
        elif not self.credentials.has_key:
            raise AuthenticationError(
                "this service takes API keys alone", remedy="set TINKER_API_KEY"
            )
        # Beside the next call, and not before it: only samples that are given up need them.
        self.spawn(self._take_dynamic_flags(), lambda _: self._has_dynamic_flags.set())
        return self.flags

    async def _take_dynamic_flags(self) -> None:
        try:
            self.dynamic_flags = await self._fetch_dynamic_flags()
        except APIError as error:
            _log.warning("going on without the service's flags that may change: %s", error)

    async def _fetch_dynamic_flags(self) -> ClientDynamicConfigResponse:
        about = r.ClientConfigRequest(sdk_version=SDK_VERSION)
        endpoint = ENDPOINTS["client_dynamic_config"]

        async def attempt(number: int) -> ClientDynamicConfigResponse:
            headers = {"x-stainless-retry-count": str(number)}
            reply = await self.exchange(endpoint, about, headers=headers)
            flags: ClientDynamicConfigResponse = self.decoded(endpoint, reply)
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

    async def renew_credential(self, refused: str | None = None) -> None:
        """As `Calls.renew_credential`."""
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
        await self._has_dynamic_flags.wait()
        self.spawn(keep_alive(self.call, opened.session_id))
        self.spawn(self._keep_flags_fresh())
        if events.listeners:
            base_url = settings.base_url
            events.tell(events.SessionOpened(session_id=opened.session_id, base_url=base_url))
        return opened.session_id

    def spawn(self, work: Coroutine[Any, Any, None], on_end: TaskEnded | None = None) -> None:
        """Run something beside the calls, for as long as the session lasts.

        Args:
            work: What to run.
            on_end: Called with the task when it has ended, also one that never began.
        """
        task = asyncio.create_task(work, context=unattended())
        self._tasks[task] = on_end  # a loop holds its tasks weakly
        task.add_done_callback(self._spawned_ended)

    def _spawned_ended(self, task: asyncio.Task[None]) -> None:
        on_end = self._tasks.pop(task)
        if on_end is not None:
            on_end(task)

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
        self.end_begun()
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
                autosaves.note_unsaved(self.model_ids)
                return
            raise APITimeoutError(
                f"the service was not told within {FINISH_TIMEOUT_S:g} s that session "
                f"{session_id} is over; it will expire"
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
            autosaves.note_saved(listed.checkpoints)

    def _tell_slow(self) -> None:
        if self.is_saving:
            autosaves.tell_slow()


def _once(task: asyncio.Task[T] | None, work: Callable[[], Any]) -> asyncio.Task[T]:
    """The task that does something once; begun anew if it failed."""
    return _unless_failed(task) or asyncio.create_task(work())


def _cancel_all(tasks: Iterable[asyncio.Task[None]]) -> None:
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
    task.add_done_callback(_failed)  # whoever waited has gone: asyncio would complain of its error
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
