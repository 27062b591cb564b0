"""Sessions: opened, kept alive, finished. Listings and searches are in `search.py`."""

from __future__ import annotations

import hashlib
import secrets

from tinsmith.errors import APIStatusError
from tinsmith.service.api.api_call import ApiCall, Handler
from tinsmith.service.api.listings import DEFAULT_PROJECT
from tinsmith.service.api.request_checks import MOST_TAGS, check_metadata, check_texts, refuse
from tinsmith.service.ledger.records import SessionEntry
from tinsmith.types.record import to_plain
from tinsmith.types.requests import CreateSessionRequest, FinishSessionRequest
from tinsmith.types.runs import (
    ClientSessionFinished,
    ClientSessionFinishSuccess,
    CreateSessionResponse,
    SessionHeartbeatResponse,
)

_GONE = 410


async def create_session(call: ApiCall) -> CreateSessionResponse:
    """Open a session; the same idempotency key gives the same one."""
    request: CreateSessionRequest = call.request
    if len(request.tags) > MOST_TAGS:
        raise refuse("the number of tags", len(request.tags), f"the maximum is {MOST_TAGS}")
    check_texts(
        ("sdk_version", request.sdk_version),
        ("project_id", request.project_id),
        ("display_name", request.display_name),
        *(("tags", tag) for tag in request.tags),
    )
    check_metadata("user_metadata", request.user_metadata)
    session_id = _session_id(call)
    known = await call.ledger.entries(SessionEntry).get(session_id)
    if known is not None and known.ended_at is not None:  # too late for a retry
        known, session_id = None, f"session-{secrets.token_hex(16)}"
    now = call.ledger.now()
    session = SessionEntry(
        id=session_id,
        tenant_id=call.tenant_id,
        created_at=now,
        project_id=request.project_id or DEFAULT_PROJECT,
        heartbeat_at=now,
        display_name=request.display_name,
        sdk_version=request.sdk_version,
        tags=request.tags,
        user_metadata=request.user_metadata or {},
    )
    quotas, sessions = call.context.quotas, call.ledger.entries(SessionEntry)
    async with quotas.turn(call.tenant_id):
        if known is None:
            await quotas.check_sessions(call.tenant_id)
        kept = await sessions.add(session)
    return CreateSessionResponse(session_id=kept.id)


def _session_id(call: ApiCall) -> str:
    """A random id. A retry, recognised by its idempotency key, gets the id of the first attempt."""
    key = call.headers.get("x-idempotency-key", "")
    if not key:
        return f"session-{secrets.token_hex(16)}"
    told_by = f"{call.tenant_id}\0{key}".encode("utf-8", "replace")
    digest = hashlib.blake2b(told_by, key=call.context.secret[:64], digest_size=16)
    return f"session-{digest.hexdigest()}"


async def session_heartbeat(call: ApiCall) -> SessionHeartbeatResponse:
    """Note that the client is alive; 410 once the session has ended."""
    session = await call.context.lookups.session(call.tenant_id, call.request.session_id)
    if session.ended_at is None:
        session = await call.context.sessions.beat(session)
    if session.ended_at is not None:
        raise APIStatusError(f"session {session.id} has ended", status_code=_GONE)
    return SessionHeartbeatResponse()


async def finish_session(call: ApiCall) -> None:
    """End a session; the first reason is kept.

    An embedded service ends with its program: if that was interrupted, the answer comes once the
    models are saved, so that they are listed before the program is gone.
    """
    request: FinishSessionRequest = call.request
    session = await call.context.lookups.session(call.tenant_id, request.session_id)
    detail = request.detail if isinstance(request.detail, str) else None
    check_texts(("detail", detail))
    status = ClientSessionFinished(reason=request.reason, detail=detail)
    sessions, settings = call.context.sessions, call.settings
    await sessions.end(session.id, to_plain(status))
    if settings.is_embedded and not isinstance(request.reason, ClientSessionFinishSuccess):
        await call.context.long_polls.until(sessions.wait_released(session.id), call)


HANDLERS: dict[str, Handler] = {
    "create_session": create_session,
    "session_heartbeat": session_heartbeat,
    "finish_session": finish_session,
}
