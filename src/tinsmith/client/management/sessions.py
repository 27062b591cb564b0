"""Get, list, search, move and trace sessions and samplers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from tinsmith.client.background import background
from tinsmith.client.futures import APIFuture
from tinsmith.client.management.base import (
    PAGE_SIZE,
    ManagementClient,
    Pages,
    warn_experimental,
)
from tinsmith.client.session import Session
from tinsmith.errors import (
    APIResponseValidationError,
    TinkerError,
    ValidationError,
)
from tinsmith.types import requests as r
from tinsmith.types.requests import ExportSessionTraceRequest
from tinsmith.types.runs import (
    AccessScope,
    GetSessionResponse,
    ListSessionsResponse,
    SessionSearchResponse,
    TraceExportResponse,
)
from tinsmith.types.sampling import GetSamplerResponse

_log = logging.getLogger(__name__)

POLL_EVERY_S = 5.0
LOGGED_EVERY_S = 30.0


class SessionCalls(ManagementClient):
    """The methods of `RestClient` for sessions and samplers."""

    def get_session(
        self,
        session_id: str,
        access_scope: AccessScope = "owned",
        *,
        timeout: float | None = None,
    ) -> APIFuture[GetSessionResponse]:
        """The training runs and samplers of a session."""
        request = r.GetSessionRequest(session_id=session_id, access_scope=access_scope)
        return self._start("get_session", request, timeout)

    async def get_session_async(
        self,
        session_id: str,
        access_scope: AccessScope = "owned",
        *,
        timeout: float | None = None,
    ) -> GetSessionResponse:
        """As `get_session`."""
        return await self.get_session(session_id, access_scope, timeout=timeout)

    def list_sessions(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        *,
        timeout: float | None = None,
    ) -> APIFuture[ListSessionsResponse]:
        """A page of session ids, newest first; `iter_sessions` lists them all."""
        request = r.ListSessionsRequest(limit=limit, offset=offset, access_scope=access_scope)
        return self._start("list_sessions", request, timeout)

    async def list_sessions_async(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        *,
        timeout: float | None = None,
    ) -> ListSessionsResponse:
        """As `list_sessions`."""
        return await self.list_sessions(limit, offset, access_scope, timeout=timeout)

    def iter_sessions(
        self,
        access_scope: AccessScope = "owned",
        page_size: int = PAGE_SIZE,
        *,
        timeout: float | None = None,
    ) -> Pages[str]:
        """Iterate over all session ids; otherwise as `iter_training_runs`."""
        return Pages(
            lambda limit, offset: self.list_sessions(limit, offset, access_scope, timeout=timeout),
            lambda page: (page.sessions, page.cursor),
            page_size,
        )

    def search_sessions(
        self, request: r.SessionSearchRequest, *, timeout: float | None = None
    ) -> APIFuture[SessionSearchResponse]:
        """A page of matching sessions, newest first. Experimental: it may change.

        For the next page, pass this page's `next_cursor` as the request's `cursor`.
        """
        warn_experimental("search_sessions")
        return self._start("search_sessions", request, timeout)

    async def search_sessions_async(
        self, request: r.SessionSearchRequest, *, timeout: float | None = None
    ) -> SessionSearchResponse:
        """As `search_sessions`."""
        warn_experimental("search_sessions")
        found: SessionSearchResponse = await self._start("search_sessions", request, timeout)
        return found

    def assign_session_project(
        self, session_id: str, project_id: str, *, timeout: float | None = None
    ) -> APIFuture[None]:
        """Move a session, with its runs and samplers, into a project. This cannot be undone."""
        request = r.AssignSessionProjectRequest(session_id=session_id, project_id=project_id)
        return self._start("assign_session_project", request, timeout)

    async def assign_session_project_async(
        self, session_id: str, project_id: str, *, timeout: float | None = None
    ) -> None:
        """As `assign_session_project`."""
        await self.assign_session_project(session_id, project_id, timeout=timeout)

    def export_session_trace(
        self,
        session_id: str,
        *,
        timeout: float | None = None,
        poll_every_s: float = POLL_EVERY_S,
    ) -> APIFuture[str]:
        """The URL of a session's trace, once the service has created it.

        This may take minutes; the progress is logged. The URL needs no credential and expires.

        Args:
            session_id: The id of the session.
            timeout: Seconds to wait. The service continues after a timeout; a later call picks up
                the same export.
            poll_every_s: Seconds between polls.

        Raises:
            TraceExportError: From the future, if the service could not create it (a
                `RuntimeError`).
        """
        if poll_every_s <= 0:
            raise ValidationError(f"poll_every_s must be above 0, not {poll_every_s}")

        async def work() -> str:
            return await export_trace(await self._ready(), session_id, poll_every_s=poll_every_s)

        return background().start(work(), f"trace of {session_id}", timeout)

    async def export_session_trace_async(
        self,
        session_id: str,
        *,
        timeout: float | None = None,
        poll_every_s: float = POLL_EVERY_S,
    ) -> str:
        """As `export_session_trace`."""
        return await self.export_session_trace(
            session_id, timeout=timeout, poll_every_s=poll_every_s
        )

    def get_sampler(
        self, sampler_id: str, *, timeout: float | None = None
    ) -> APIFuture[GetSamplerResponse]:
        """The base model and weights of a sampler."""
        return self._start("get_sampler", r.GetSamplerRequest(sampler_id=sampler_id), timeout)

    async def get_sampler_async(
        self, sampler_id: str, *, timeout: float | None = None
    ) -> GetSamplerResponse:
        """As `get_sampler`."""
        return await self.get_sampler(sampler_id, timeout=timeout)


class TraceExportError(TinkerError, RuntimeError):
    """The service could not create a session's trace.

    The message is the service's. The call can be retried.
    """


async def export_trace(
    session: Session,
    session_id: str,
    *,
    poll_every_s: float = POLL_EVERY_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> str:
    """Poll until the trace is ready, and return its URL.

    Waits as long as the service is working on it; the caller sets a timeout.

    Raises:
        TraceExportError: The service could not create it.
        APIError: A request to the service failed.
    """
    request = ExportSessionTraceRequest(session_id=session_id)
    began = clock()
    logged_at = began - LOGGED_EVERY_S
    while True:
        answer: TraceExportResponse = await session.call("export_session_trace", request)
        if answer.status == "failed":
            raise TraceExportError(
                f"the trace of session {session_id} could not be made: "
                f"{answer.error or 'no reason given'}"
            )
        if answer.status == "ready":
            return _address(session_id, answer)
        if clock() - logged_at >= LOGGED_EVERY_S:
            logged_at = clock()
            _log.info(
                "session %s: the service is preparing the trace; waited %.0f s",
                session_id,
                logged_at - began,
            )
        with session.work.under_way():
            await sleep(poll_every_s)


def _address(session_id: str, answer: TraceExportResponse) -> str:
    if not answer.url:
        raise APIResponseValidationError(
            message=f"the trace of session {session_id} is ready, but the answer has no address"
        )
    return answer.url
