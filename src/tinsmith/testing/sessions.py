"""Sessions: opened, kept alive, finished, listed and searched.

Other parts ask here whether a session may still be used, and report what it holds. Knows nothing
of models, samplers and checkpoints but their ids and counts.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tinsmith.errors import APIStatusError, BadRequestError, NotFoundError
from tinsmith.testing.account import Audit, metadata_as_text, now
from tinsmith.testing.downloads import Downloads
from tinsmith.testing.received import ReceivedRequest
from tinsmith.testing.settings import ServiceSettings
from tinsmith.types.checkpoints import Cursor
from tinsmith.types.requests import (
    AssignSessionProjectRequest,
    CreateSessionRequest,
    FinishSessionRequest,
    ListSessionsRequest,
    SessionSearchRequest,
)
from tinsmith.types.runs import (
    ClientFinishedSessionStatusQuery,
    ClientSessionFinished,
    CreateSessionResponse,
    GetSessionResponse,
    ListSessionsResponse,
    SessionActive,
    SessionCancelled,
    SessionHeartbeatResponse,
    SessionSearchCursor,
    SessionSearchResponse,
    SessionStatus,
    SessionStatusQuery,
    SessionSummary,
    TraceExportResponse,
)

DEFAULT_PROJECT = "project-default"
_GONE = 410


class Session(msgspec.Struct, kw_only=True, eq=False):
    """One client's stay."""

    session_id: str
    number: int
    asked: CreateSessionRequest
    project_id: str
    created_at: datetime.datetime
    beat_at: float
    status: SessionStatus = SessionActive()
    training_run_ids: list[str] = []
    sampler_ids: list[str] = []


class Sessions:
    """All sessions of the service."""

    def __init__(
        self,
        settings: ServiceSettings,
        audit: Audit,
        checkpoint_sizes: Callable[[list[str]], list[int]],
        downloads: Downloads,
    ) -> None:
        self._settings = settings
        self._audit = audit
        self._checkpoint_sizes = checkpoint_sizes
        self._downloads = downloads
        self._sessions: dict[str, Session] = {}
        self._by_key: dict[str, str] = {}
        self._traces_asked: dict[str, int] = {}

    def handlers(self) -> dict[str, Callable[[ReceivedRequest], Any]]:
        """What answers each endpoint."""
        return {
            "create_session": self.create,
            "session_heartbeat": self.beat,
            "finish_session": self.finish,
            "list_sessions": self.list_ids,
            "search_sessions": self.search,
            "get_session": self.show,
            "assign_session_project": self.assign_project,
            "export_session_trace": self.export_trace,
        }

    def usable(self, session_id: str) -> Session:
        """The session, if work may be done in it.

        Raises:
            NotFoundError: There is none.
            BadRequestError: It has ended.
        """
        session = self.known(session_id)
        if not isinstance(session.status, SessionActive):
            raise BadRequestError(f"session {session_id} has ended; make a new client")
        return session

    def known(self, session_id: str) -> Session:
        """The session, in whatever state; raises `NotFoundError`."""
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFoundError(f"there is no session {session_id!r}")
        lifetime_s = self._settings.session_lifetime_s
        is_active = isinstance(session.status, SessionActive)
        if is_active and lifetime_s is not None and time.monotonic() > session.beat_at + lifetime_s:
            session.status = SessionCancelled(detail="no heartbeat came")
        return session

    def cancel(self, session_id: str, detail: str | None = None) -> None:
        """End a session from outside, as an operator would: its heartbeats are answered 410."""
        self.known(session_id).status = SessionCancelled(detail=detail)

    def create(self, received: ReceivedRequest) -> CreateSessionResponse:
        """Open a session; the same idempotency key gives the same one."""
        request: CreateSessionRequest = received.request
        key = received.headers.get("x-idempotency-key", "")
        if key not in self._by_key or not key:
            number = len(self._sessions)
            session = Session(
                session_id=f"session-{number}",
                number=number,
                asked=request,
                project_id=request.project_id or DEFAULT_PROJECT,
                created_at=now(),
                beat_at=time.monotonic(),
            )
            self._sessions[session.session_id] = session
            self._by_key[key] = session.session_id
        return CreateSessionResponse(session_id=self._by_key[key])

    def beat(self, received: ReceivedRequest) -> SessionHeartbeatResponse:
        """Note that the client still runs."""
        session = self.known(received.request.session_id)
        if not isinstance(session.status, SessionActive):
            raise APIStatusError(f"session {session.session_id} has ended", status_code=_GONE)
        session.beat_at = time.monotonic()
        return SessionHeartbeatResponse()

    def finish(self, received: ReceivedRequest) -> None:
        """End a session; the first reason stays."""
        request: FinishSessionRequest = received.request
        session = self.known(request.session_id)
        if isinstance(session.status, SessionActive):
            detail = request.detail if isinstance(request.detail, str) else None
            session.status = ClientSessionFinished(reason=request.reason, detail=detail)

    def show(self, received: ReceivedRequest) -> GetSessionResponse:
        """What a session holds."""
        session = self.known(received.request.session_id)
        return GetSessionResponse(
            training_run_ids=session.training_run_ids,
            sampler_ids=session.sampler_ids,
            user_metadata=metadata_as_text(session.asked.user_metadata),
            display_name=session.asked.display_name,
        )

    def list_ids(self, received: ReceivedRequest) -> ListSessionsResponse:
        """A page of ids, newest first."""
        request: ListSessionsRequest = received.request
        newest_first = list(reversed(self._sessions))
        return ListSessionsResponse(
            sessions=newest_first[request.offset : request.offset + request.limit],
            cursor=Cursor(
                offset=request.offset, limit=request.limit, total_count=len(newest_first)
            ),
        )

    def assign_project(self, received: ReceivedRequest) -> None:
        """Put a session into a project."""
        request: AssignSessionProjectRequest = received.request
        session = self.known(request.session_id)
        session.project_id = request.project_id
        self._audit.add("project.session_assigned", {**msgspec.structs.asdict(request)})

    def export_trace(self, received: ReceivedRequest) -> TraceExportResponse:
        """Where the trace is, once it was asked for often enough."""
        session = self.known(received.request.session_id)
        asked = self._traces_asked.get(session.session_id, 0)
        self._traces_asked[session.session_id] = asked + 1
        if asked < self._settings.trace_polls:
            return TraceExportResponse(status="pending")
        trace = msgspec.json.encode({"traceEvents": []})
        url = self._downloads.put(f"traces/{session.session_id}.json", trace)
        return TraceExportResponse(status="ready", url=url)

    def search(self, received: ReceivedRequest) -> SessionSearchResponse:
        """Sessions that fit, newest first."""
        request: SessionSearchRequest = received.request
        found = [s for s in reversed(self._sessions.values()) if self._fits(s, request)]
        if request.cursor is not None:
            last = self.known(request.cursor.last_session_id).number
            found = [session for session in found if session.number < last]
        page = found[: request.limit]
        next_cursor = None
        if len(found) > len(page):
            next_cursor = SessionSearchCursor(
                last_created_at=page[-1].created_at, last_session_id=page[-1].session_id
            )
        return SessionSearchResponse(
            sessions=[self._summary(session) for session in page], next_cursor=next_cursor
        )

    def _fits(self, session: Session, request: SessionSearchRequest) -> bool:
        metadata = metadata_as_text(session.asked.user_metadata) or {}
        return (
            _fits_names(session, request)
            and (request.project_ids is None or session.project_id in request.project_ids)
            and all(metadata.get(name) == value for name, value in request.user_metadata.items())
            and (
                request.statuses is None
                or any(_fits_status(session.status, query) for query in request.statuses)
            )
        )

    def _summary(self, session: Session) -> SessionSummary:
        sizes = self._checkpoint_sizes(session.training_run_ids)
        return SessionSummary(
            session_id=session.session_id,
            created_at=session.created_at,
            owner="test-user",
            project_id=session.project_id,
            status=session.status,
            checkpoints_count=len(sizes),
            display_name=session.asked.display_name,
            user_metadata=metadata_as_text(session.asked.user_metadata),
            checkpoint_storage_bytes=sum(sizes),
        )


def _fits_names(session: Session, request: SessionSearchRequest) -> bool:
    """Whether id or display name is the one asked for; of both, either is enough."""
    if request.session_id is None and request.display_name is None:
        return True
    if session.session_id == request.session_id:
        return True
    words = (request.display_name or "").lower().split()
    name = (session.asked.display_name or "").lower()
    return bool(words) and all(word in name for word in words)


def _fits_status(status: SessionStatus, query: SessionStatusQuery) -> bool:
    if isinstance(query, ClientFinishedSessionStatusQuery) and query.reasons is not None:
        return isinstance(status, ClientSessionFinished) and status.reason.type in list[str](
            query.reasons
        )
    return status.type == query.type
