"""Sessions and samplers: looked up, listed, searched, moved and traced."""

from __future__ import annotations

import warnings

from tinsmith.client.background import background
from tinsmith.client.futures import APIFuture
from tinsmith.client.management.base import ManagementClient
from tinsmith.client.management.pages import PAGE_SIZE, Pages
from tinsmith.client.management.trace_export import POLL_EVERY_S, export_trace
from tinsmith.errors import ExperimentalWarning, ValidationError
from tinsmith.types import requests as r
from tinsmith.types.runs import (
    AccessScope,
    GetSessionResponse,
    ListSessionsResponse,
    SessionSearchResponse,
)
from tinsmith.types.sampling import GetSamplerResponse


class SessionCalls(ManagementClient):
    """The part of `RestClient` that is about sessions and samplers."""

    def get_session(
        self,
        session_id: str,
        access_scope: AccessScope = "owned",
        *,
        timeout: float | None = None,
    ) -> APIFuture[GetSessionResponse]:
        """What a session holds: its training runs and samplers."""
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
        """A page of session ids, newest first; `iter_sessions` gives them all."""
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
        """All session ids, fetched as they are taken; else as `iter_training_runs`."""
        return Pages(
            lambda limit, offset: self.list_sessions(limit, offset, access_scope, timeout=timeout),
            lambda page: (page.sessions, page.cursor),
            page_size,
        )

    def search_sessions(
        self, request: r.SessionSearchRequest, *, timeout: float | None = None
    ) -> APIFuture[SessionSearchResponse]:
        """A page of sessions that match, newest first. Experimental: it may change.

        The next page is found with `next_cursor` of this one as the request's `cursor`.
        """
        _warn_experimental()
        return self._start("search_sessions", request, timeout)

    async def search_sessions_async(
        self, request: r.SessionSearchRequest, *, timeout: float | None = None
    ) -> SessionSearchResponse:
        """As `search_sessions`."""
        _warn_experimental()
        found: SessionSearchResponse = await self._start("search_sessions", request, timeout)
        return found

    def assign_session_project(
        self, session_id: str, project_id: str, *, timeout: float | None = None
    ) -> APIFuture[None]:
        """Put a session, and what it holds, into a project; it cannot be taken out again."""
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
        """The address of a session's trace, once the service has made it.

        That may take minutes, which are told in the log. The address needs no credential and
        expires.

        Args:
            session_id: Which session.
            timeout: Seconds after which the wait is given up; asking again later goes on from
                where the service is.
            poll_every_s: How often to ask.

        Raises:
            TraceExportError: From the future, if the service could not make it (a
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
        """What a sampler samples from."""
        return self._start("get_sampler", r.GetSamplerRequest(sampler_id=sampler_id), timeout)

    async def get_sampler_async(
        self, sampler_id: str, *, timeout: float | None = None
    ) -> GetSamplerResponse:
        """As `get_sampler`."""
        return await self.get_sampler(sampler_id, timeout=timeout)


def _warn_experimental() -> None:
    warnings.warn(
        "search_sessions is experimental and may change", ExperimentalWarning, stacklevel=3
    )
