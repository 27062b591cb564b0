"""A tenant's usage, the storage of its checkpoints, and its audit log.

Usage is counted by the ledger, by the hour. There are no prices: costs are left out.
"""

from __future__ import annotations

import datetime

import msgspec

from tinsmith.errors import BadRequestError
from tinsmith.service.api.api_call import ApiCall, Handler
from tinsmith.service.api.listings import (
    DEFAULT_PROJECT,
    Projects,
    is_living,
    metadata_as_text,
    moment,
    of_tenant,
    owner_urn,
)
from tinsmith.service.api.sweeper import GIGABYTE, STORAGE
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.records import (
    AuditEntry,
    CheckpointEntry,
    ModelEntry,
    SessionEntry,
    TenantId,
    UsageKey,
    UsageRow,
)
from tinsmith.types.requests import (
    GetAuditLogRequest,
    GetBillingUsageRequest,
    GetCurrentCheckpointStorageUsageRequest,
)
from tinsmith.types.usage import (
    AuditLogEntry,
    AuditLogResponse,
    BillingEventInfo,
    BillingUsageEvent,
    BillingUsageResponse,
    BillingUsageSession,
    CheckpointBillingEvent,
    CurrentCheckpointStorageUsageItem,
    CurrentCheckpointStorageUsageResponse,
    SamplingPrefillBillingEvent,
    SamplingSampleBillingEvent,
    StorageBillingEvent,
    TrainingBillingEvent,
)

HOUR_S = 3600
LONGEST_DAYS = 14
MOST_AUDIT_ENTRIES = 100_000


async def get_billing_usage(call: ApiCall) -> BillingUsageResponse:
    """Usage in whole hours of at most two weeks."""
    request: GetBillingUsageRequest = call.request
    since = _whole_hour("starting_on", request.starting_on)
    before = _whole_hour("ending_before", request.ending_before)
    if not since < before <= since + LONGEST_DAYS * 24 * HOUR_S:
        raise BadRequestError(
            "ending_before must come after starting_on, by at most "
            f"{LONGEST_DAYS} days; it comes {(before - since) / 86400:g} days after it"
        )
    rows = _without_lines(await call.ledger.usage(call.tenant_id, since=since, before=before))
    sessions = await _sessions(call.ledger, call.tenant_id, rows)
    events = [_event(row, sessions) for row in rows]
    this_hour = call.ledger.now() // HOUR_S * HOUR_S
    return BillingUsageResponse(
        data=[event for event in events if event is not None],
        sessions={
            name: BillingUsageSession(user_metadata=metadata_as_text(session.user_metadata))
            for name, session in sessions.items()
        },
        cost_data_through=moment(min(before, this_hour)),
    )


def _whole_hour(field: str, given: datetime.datetime) -> float:
    if given.tzinfo is None:
        given = given.replace(tzinfo=datetime.UTC)
    try:
        seconds = given.timestamp()
    except (OverflowError, ValueError) as exc:
        raise BadRequestError(f"{field} is {given}, which is out of range") from exc
    if seconds < 0 or seconds % HOUR_S:
        raise BadRequestError(f"{field} is {given.isoformat()}; it must be a whole hour")
    return seconds


def _without_lines(rows: list[UsageRow]) -> list[UsageRow]:
    """The rows of a session combined: a training loop makes a sampler at every step."""
    amounts: dict[tuple[int, UsageKey], float] = {}
    for row in rows:
        key = row.hour, msgspec.structs.replace(row.key, queue_id="")
        amounts[key] = amounts.get(key, 0.0) + row.amount
    return [UsageRow(key=key, hour=hour, amount=amount) for (hour, key), amount in amounts.items()]


async def _sessions(
    ledger: Ledger, tenant_id: TenantId, rows: list[UsageRow]
) -> dict[str, SessionEntry]:
    """The sessions that usage refers to, as far as they still exist."""
    found = {}
    for name in {row.key.session_id for row in rows if row.key.session_id}:
        session = await ledger.entries(SessionEntry).get(name)
        if session is not None and session.tenant_id == tenant_id:
            found[name] = session
    return found


def _event(row: UsageRow, sessions: dict[str, SessionEntry]) -> BillingUsageEvent | None:
    info = _info(row.key.kind, row.amount)
    if info is None:
        return None
    session = sessions.get(row.key.session_id)
    return BillingUsageEvent(
        bucket_start=moment(row.hour),
        bucket_end=moment(row.hour + HOUR_S),
        base_model=row.key.base_model or None,
        user_id=owner_urn(row.key.tenant_id),
        user_name=row.key.tenant_id,
        session_id=row.key.session_id or None,
        project_id=session.project_id if session is not None else None,
        event_info=info,
    )


def _info(kind: str, amount: float) -> BillingEventInfo | None:
    """The API's name for a kind of use; None for one that it does not have."""
    count = round(amount)
    if kind == "training":
        return TrainingBillingEvent(token_count=count)
    if kind == "sampling_prefill":
        return SamplingPrefillBillingEvent(cached=False, token_count=count)
    if kind == "sampling_prefill_cached":
        return SamplingPrefillBillingEvent(cached=True, token_count=count)
    if kind == "sampling_sample":
        return SamplingSampleBillingEvent(token_count=count)
    if kind == "checkpoint":
        return CheckpointBillingEvent(count=count)
    if kind == STORAGE:
        return StorageBillingEvent(gigabyte_hours=amount)
    return None


async def get_current_checkpoint_storage_usage(
    call: ApiCall,
) -> CurrentCheckpointStorageUsageResponse:
    """The storage of each project's checkpoints."""
    request: GetCurrentCheckpointStorageUsageRequest = call.request
    sizes: dict[str, list[int]] = {}
    projects, now = Projects(call.ledger), call.ledger.now()
    of_run: dict[str, str] = {}
    async for entry in of_tenant(call.ledger.entries(CheckpointEntry), call.tenant_id):
        if not is_living(entry, now):
            continue
        if entry.run_id not in of_run:
            model = await call.ledger.entries(ModelEntry).get(entry.run_id)
            of_run[entry.run_id] = await projects.of_run(model) if model else DEFAULT_PROJECT
        sizes.setdefault(of_run[entry.run_id], []).append(entry.size_bytes)
    return CurrentCheckpointStorageUsageResponse(
        data=[
            CurrentCheckpointStorageUsageItem(
                project_id=project,
                org_user_urn=owner_urn(call.tenant_id),
                user_name=call.tenant_id,
                checkpoint_count=len(found),
                size_bytes=sum(found),
                size_gigabytes=sum(found) / GIGABYTE,
            )
            for project, found in sorted(sizes.items())
            if request.project_id in (None, project)
        ]
    )


async def get_audit_log(call: ApiCall) -> AuditLogResponse:
    """Changes to one kind of thing, on one day if given, oldest first."""
    request: GetAuditLogRequest = call.request
    since, before = 0.0, call.ledger.now() + HOUR_S
    if request.day is not None:
        start = datetime.datetime.combine(request.day, datetime.time(), datetime.UTC)
        since = max(0.0, start.timestamp())
        before = start.timestamp() + 24 * HOUR_S
    kind = request.event_type.removesuffix("s")
    entries = await call.ledger.entries(AuditEntry).due(
        before, since=since, tenant_id=call.tenant_id, limit=MOST_AUDIT_ENTRIES
    )
    return AuditLogResponse(
        entries=[
            _shown(entry)
            for entry in entries
            if kind == "all" or entry.event.startswith(f"{kind}.")
        ]
    )


def _shown(entry: AuditEntry) -> AuditLogEntry:
    return AuditLogEntry(
        timestamp=moment(entry.created_at),
        event=entry.event,
        event_details=entry.details,
        model_id=entry.model_id,
        tinker_path=entry.tinker_path,
    )


HANDLERS: dict[str, Handler] = {
    "get_billing_usage": get_billing_usage,
    "get_current_checkpoint_storage_usage": get_current_checkpoint_storage_usage,
    "get_audit_log": get_audit_log,
}
