"""Search of checkpoints by project, metadata, type and base model, in pages, newest first.

The order is that of the time at which they were saved, then of an id made from the path. A cursor
names the last checkpoint of a page by both, so that pages neither repeat nor skip one, whatever is
saved, overwritten or deleted between them.
"""

from __future__ import annotations

import heapq
import uuid

from tinsmith.errors import BadRequestError
from tinsmith.service.api.api_call import ApiCall, Handler
from tinsmith.service.api.listings import (
    Projects,
    is_living,
    moment,
    of_tenant,
    owner_urn,
    shown_checkpoint,
)
from tinsmith.service.api.request_checks import is_same_model
from tinsmith.service.ledger.records import CheckpointEntry, ModelEntry
from tinsmith.types.checkpoints import (
    CheckpointSearchCursor,
    CheckpointSearchResponse,
    ParsedCheckpointTinkerPath,
)
from tinsmith.types.requests import CheckpointSearchRequest
from tinsmith.types.runs import UserSearchOwner

LARGEST_SEARCH = 200


async def search_checkpoints(call: ApiCall) -> CheckpointSearchResponse:
    """A page of matching checkpoints."""
    request: CheckpointSearchRequest = call.request
    if not 1 <= request.limit <= LARGEST_SEARCH:
        raise BadRequestError(f"limit is {request.limit}; it must be 1 to {LARGEST_SEARCH}")
    cursor = request.cursor
    if cursor is not None and cursor.last_created_at.tzinfo is None:
        raise BadRequestError("cursor.last_created_at has no offset from UTC; pass it unchanged")
    found = await _found(call, request)
    page = found[: request.limit]
    next_cursor = None
    if len(found) > len(page):
        next_cursor = CheckpointSearchCursor(
            last_created_at=moment(page[-1].created_at), last_checkpoint_uuid=_uuid_of(page[-1])
        )
    return CheckpointSearchResponse(
        checkpoints=[shown_checkpoint(entry) for entry in page], next_cursor=next_cursor
    )


async def _found(call: ApiCall, request: CheckpointSearchRequest) -> list[CheckpointEntry]:
    """One more than a page of matches after the cursor."""
    if not _asks_for_own(call, request):
        return []
    now, projects = call.ledger.now(), Projects(call.ledger)
    matching = [
        entry
        async for entry in of_tenant(call.ledger.entries(CheckpointEntry), call.tenant_id)
        if is_living(entry, now)
        and _is_after(entry, request.cursor)
        and _fits(call, entry, request)
        and await _is_in_projects(call, entry, request.project_ids, projects)
    ]
    return heapq.nlargest(request.limit + 1, matching, key=_order)


def _asks_for_own(call: ApiCall, request: CheckpointSearchRequest) -> bool:
    """Whether the caller is among the requested owners; it sees nobody else's."""
    if not isinstance(request.owner, UserSearchOwner):
        return True
    return bool({call.tenant_id, owner_urn(call.tenant_id)} & set(request.owner.owner_urns))


def _order(entry: CheckpointEntry) -> tuple[float, str]:
    return moment(entry.created_at).timestamp(), _uuid_of(entry)


def _uuid_of(entry: CheckpointEntry) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, entry.id))


def _is_after(entry: CheckpointEntry, cursor: CheckpointSearchCursor | None) -> bool:
    if cursor is None:
        return True
    # A time travels in microseconds: both are compared as they travel.
    created_at, last = moment(entry.created_at), cursor.last_created_at
    if created_at != last:
        return created_at < last
    return _uuid_of(entry) < cursor.last_checkpoint_uuid


def _fits(call: ApiCall, entry: CheckpointEntry, request: CheckpointSearchRequest) -> bool:
    metadata, base = entry.user_metadata or {}, entry.details.get("base_model", "")
    if request.checkpoint_type is not None:
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(entry.id)
        if parsed.checkpoint_type != request.checkpoint_type:
            return False
    if request.base_models is not None and not any(
        is_same_model(call, base, name) for name in request.base_models
    ):
        return False
    return all(metadata.get(name) == value for name, value in request.user_metadata.items())


async def _is_in_projects(
    call: ApiCall, entry: CheckpointEntry, project_ids: list[str] | None, projects: Projects
) -> bool:
    if project_ids is None:
        return True
    run = await call.ledger.entries(ModelEntry).get(entry.run_id)
    return run is not None and await projects.of_run(run) in project_ids


HANDLERS: dict[str, Handler] = {"search_checkpoints": search_checkpoints}
