"""Sessions for their owner: listed, searched, shown, moved into a project."""

from __future__ import annotations

import msgspec

from tinsmith.errors import BadRequestError, UnknownEntryError
from tinsmith.service.api.api_call import ApiCall, Handler
from tinsmith.service.api.listings import (
    check_page,
    checkpoints_of_run,
    metadata_as_text,
    moment,
    of_parent,
    of_tenant,
    owner_urn,
)
from tinsmith.service.api.lookups import unknown
from tinsmith.service.api.request_checks import check_project
from tinsmith.service.ledger import audit
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.records import ModelEntry, SamplerEntry, SessionEntry
from tinsmith.types.checkpoints import Cursor
from tinsmith.types.requests import (
    AssignSessionProjectRequest,
    ListSessionsRequest,
    SessionSearchRequest,
)
from tinsmith.types.runs import (
    ClientFinishedSessionStatusQuery,
    ClientSessionFinished,
    GetSessionResponse,
    ListSessionsResponse,
    SessionActive,
    SessionCancelled,
    SessionSearchCursor,
    SessionSearchResponse,
    SessionStatus,
    SessionStatusQuery,
    SessionSummary,
    UserSearchOwner,
)

LARGEST_SEARCH = 200


async def list_sessions(call: ApiCall) -> ListSessionsResponse:
    """A page of the tenant's session ids, newest first."""
    request: ListSessionsRequest = call.request
    check_page(request.limit, request.offset)
    sessions = call.ledger.entries(SessionEntry)
    total = await sessions.count(tenant_id=call.tenant_id)
    page = await sessions.of_tenant(call.tenant_id, limit=request.limit, offset=request.offset)
    return ListSessionsResponse(
        sessions=[session.id for session in page],
        cursor=Cursor(offset=request.offset, limit=request.limit, total_count=total),
    )


async def get_session(call: ApiCall) -> GetSessionResponse:
    """The contents of a session, oldest first."""
    session = await call.context.lookups.session(call.tenant_id, call.request.session_id)
    models = await of_parent(call.ledger.entries(ModelEntry), session.id, call.tenant_id)
    samplers = await of_parent(call.ledger.entries(SamplerEntry), session.id, call.tenant_id)
    return GetSessionResponse(
        training_run_ids=[model.id for model in reversed(models)],
        sampler_ids=[sampler.id for sampler in reversed(samplers)],
        user_metadata=metadata_as_text(session.user_metadata),
        display_name=session.display_name,
    )


async def assign_session_project(call: ApiCall) -> None:
    """Move a session into a project."""
    request: AssignSessionProjectRequest = call.request
    project = request.project_id
    check_project("project_id", project)
    session = await call.context.lookups.session(call.tenant_id, request.session_id)
    try:
        await call.ledger.entries(SessionEntry).change(
            session.id, lambda old: msgspec.structs.replace(old, project_id=project)
        )
    except UnknownEntryError:
        raise unknown("session", session.id) from None
    call.context.lookups.forget(session)
    await audit.note(
        call.ledger,
        call.tenant_id,
        audit.SESSION_ASSIGNED,
        details={"session_id": session.id, "project_id": project, "from": session.project_id},
    )


# Search


async def search_sessions(call: ApiCall) -> SessionSearchResponse:
    """Matching sessions, newest first."""
    request: SessionSearchRequest = call.request
    if not 1 <= request.limit <= LARGEST_SEARCH:
        raise BadRequestError(f"limit is {request.limit}; it must be 1 to {LARGEST_SEARCH}")
    found: list[SessionEntry] = []
    if _asks_for(request, call.tenant_id):
        found = await _found(call, request)
    page = found[: request.limit]
    next_cursor = None
    if len(found) > len(page):
        next_cursor = SessionSearchCursor(
            last_created_at=moment(page[-1].created_at), last_session_id=page[-1].id
        )
    return SessionSearchResponse(
        sessions=[await _summary(call.ledger, session) for session in page],
        next_cursor=next_cursor,
    )


async def _found(call: ApiCall, request: SessionSearchRequest) -> list[SessionEntry]:
    """One more than a page of matches after the cursor."""
    found: list[SessionEntry] = []
    cursor = request.cursor
    is_before = cursor is not None
    async for session in of_tenant(call.ledger.entries(SessionEntry), call.tenant_id):
        if is_before and cursor is not None:
            # The session it names may be gone by now; then its time marks the place.
            is_before = session.id != cursor.last_session_id and (
                session.created_at >= cursor.last_created_at.timestamp()
            )
            if is_before or session.id == cursor.last_session_id:
                continue
        if _fits(session, request):
            found.append(session)
            if len(found) > request.limit:
                break
    return found


def _asks_for(request: SessionSearchRequest, tenant_id: str) -> bool:
    """Whether the caller is among the requested owners."""
    if not isinstance(request.owner, UserSearchOwner):
        return True
    return bool({tenant_id, owner_urn(tenant_id)} & set(request.owner.owner_urns))


def _fits(session: SessionEntry, request: SessionSearchRequest) -> bool:
    metadata = metadata_as_text(session.user_metadata) or {}
    return (
        _fits_names(session, request)
        and (request.project_ids is None or session.project_id in request.project_ids)
        and all(metadata.get(name) == value for name, value in request.user_metadata.items())
        and (
            request.statuses is None
            or any(_fits_status(status_of(session), query) for query in request.statuses)
        )
    )


def _fits_names(session: SessionEntry, request: SessionSearchRequest) -> bool:
    """Whether the id or the display name matches; of both, either is enough."""
    if request.session_id is None and request.display_name is None:
        return True
    if session.id == request.session_id:
        return True
    words = (request.display_name or "").lower().split()
    name = (session.display_name or "").lower()
    return bool(words) and all(word in name for word in words)


def _fits_status(status: SessionStatus, query: SessionStatusQuery) -> bool:
    if isinstance(query, ClientFinishedSessionStatusQuery) and query.reasons is not None:
        return isinstance(status, ClientSessionFinished) and status.reason.type in list[str](
            query.reasons
        )
    return status.type == query.type


def status_of(session: SessionEntry) -> SessionStatus:
    """The status of a session."""
    if session.ended_at is None:
        return SessionActive()
    if session.ending is None:
        return SessionCancelled()
    status: SessionStatus = msgspec.convert(session.ending, SessionStatus)
    return status


async def _summary(ledger: Ledger, session: SessionEntry) -> SessionSummary:
    models = await of_parent(ledger.entries(ModelEntry), session.id, session.tenant_id)
    sizes = [
        entry.size_bytes for model in models for entry in await checkpoints_of_run(ledger, model)
    ]
    return SessionSummary(
        session_id=session.id,
        created_at=moment(session.created_at),
        owner=owner_urn(session.tenant_id),
        project_id=session.project_id,
        status=status_of(session),
        checkpoints_count=len(sizes),
        display_name=session.display_name,
        user_metadata=metadata_as_text(session.user_metadata),
        checkpoint_storage_bytes=sum(sizes),
    )


HANDLERS: dict[str, Handler] = {
    "list_sessions": list_sessions,
    "search_sessions": search_sessions,
    "get_session": get_session,
    "assign_session_project": assign_session_project,
}
