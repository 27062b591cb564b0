"""Checkpoints: listed, described, published, given a time to live, copied, deleted.

`downloads.py` serves the files. Checkpoints of another tenant do not exist for the caller, unless
they are published or the caller has a credential of the owner.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.errors import (
    APIStatusError,
    AuthenticationError,
    BadRequestError,
    CheckpointNotFoundError,
    UnknownEntryError,
)
from tinsmith.service.api.api_call import ApiCall, Handler
from tinsmith.service.api.listings import (
    PROJECT,
    Projects,
    check_page,
    checkpoints_of_run,
    is_living,
    of_tenant,
    shown_checkpoint,
)
from tinsmith.service.api.lookups import unknown
from tinsmith.service.api.request_checks import check_project, expiry
from tinsmith.service.api.sweeper import forget_empty_run
from tinsmith.service.ledger import audit
from tinsmith.service.ledger.model_config import read_config
from tinsmith.service.ledger.records import CheckpointEntry, ModelEntry, SessionId, TenantId
from tinsmith.types.checkpoints import CheckpointsListResponse, CopyWeightsResponse, Cursor
from tinsmith.types.requests import (
    CopyWeightsRequest,
    ListUserCheckpointsRequest,
    SetCheckpointTtlRequest,
)
from tinsmith.types.runs import WeightsInfoResponse

COPIES = "copy"
"""The prefix of the ids of runs that hold one copied checkpoint and cannot be trained."""


async def list_checkpoints(call: ApiCall) -> CheckpointsListResponse:
    """All checkpoints of a run, newest first."""
    model = await call.context.lookups.model(call.tenant_id, call.request.training_run_id)
    saved = await checkpoints_of_run(call.ledger, model)
    return CheckpointsListResponse(checkpoints=[shown_checkpoint(entry) for entry in saved])


async def list_user_checkpoints(call: ApiCall) -> CheckpointsListResponse:
    """A page of the tenant's checkpoints, newest first."""
    request: ListUserCheckpointsRequest = call.request
    check_page(request.limit, request.offset)
    entries, now = call.ledger.entries(CheckpointEntry), call.ledger.now()
    if await entries.due(now, tenant_id=call.tenant_id, limit=1):
        # Expired ones may still exist: only counting one by one gives stable pages.
        every = of_tenant(entries, call.tenant_id)
        living = [entry async for entry in every if is_living(entry, now)]
        page, total = living[request.offset : request.offset + request.limit], len(living)
    else:
        page = await entries.of_tenant(call.tenant_id, limit=request.limit, offset=request.offset)
        total = await entries.count(tenant_id=call.tenant_id)
    return CheckpointsListResponse(
        checkpoints=[shown_checkpoint(entry) for entry in page],
        cursor=Cursor(offset=request.offset, limit=request.limit, total_count=total),
    )


async def get_weights_info(call: ApiCall) -> WeightsInfoResponse:
    """What a checkpoint was trained from."""
    entry = await readable(call, call.request.tinker_path, token=_access_token(call))
    model = await _run_of(call, entry)
    lora, optimizer = read_config(model.config)
    return WeightsInfoResponse(
        base_model=model.base_model,
        optimizer_config=optimizer,
        is_lora=True,
        lora_rank=lora.rank,
        train_unembed=lora.train_unembed,
        train_mlp=lora.train_mlp,
        train_attn=lora.train_attn,
    )


async def publish_checkpoint(call: ApiCall) -> None:
    """Let every tenant read a checkpoint. Repeating it succeeds, since clients retry."""
    await _set_published(call, True)


async def unpublish_checkpoint(call: ApiCall) -> None:
    """Make a checkpoint private again."""
    await _set_published(call, False)


async def _set_published(call: ApiCall, is_published: bool) -> None:
    entry = await named(call)
    if entry.is_published == is_published:
        return
    await _change(call, entry, is_published=is_published)
    event = audit.CHECKPOINT_PUBLISHED if is_published else audit.CHECKPOINT_UNPUBLISHED
    await _note(call, entry, event)


async def set_checkpoint_ttl(call: ApiCall) -> None:
    """Set or remove the time at which a checkpoint expires."""
    request: SetCheckpointTtlRequest = call.request
    entry = await named(call)
    if not isinstance(request.ttl_seconds, int | None):
        raise BadRequestError("ttl_seconds is missing; null means never")
    expires_at = expiry(request.ttl_seconds, call.ledger.now())
    await _change(call, entry, expires_at=expires_at)
    await _note(call, entry, audit.CHECKPOINT_TTL_SET, ttl_seconds=request.ttl_seconds)


async def delete_checkpoint(call: ApiCall) -> None:
    """Delete a checkpoint; repeated with the same idempotency key, it succeeds again."""
    path = _path_of(call)
    key = call.headers.get("x-idempotency-key")
    change = audit.change_id("delete", call.tenant_id, key, str(path)) if key else None
    try:
        entry = await named(call)
    except APIStatusError:
        if change is not None and await audit.is_noted(call.ledger, call.tenant_id, change):
            return
        raise
    # Noted first: a retry that finds nothing must recognise its own deletion.
    await _note(call, entry, audit.CHECKPOINT_DELETED, change=change)
    await call.context.store_threads.run(call.store.delete, entry.files)
    entries = call.ledger.entries(CheckpointEntry)
    kept = await entries.get(entry.id)
    if kept is not None and kept.files == entry.files:  # else it was overwritten meanwhile
        await entries.remove(entry.id)
    forgotten = await forget_empty_run(call.ledger, entry.run_id)
    if forgotten is not None:
        call.context.lookups.forget(forgotten)


# Copies


async def copy_weights(call: ApiCall) -> CopyWeightsResponse:
    """Copy a checkpoint into a run of its own, once for each idempotency key.

    Every step is idempotent: a retry after a crash continues where the first attempt ended.
    """
    request: CopyWeightsRequest = call.request
    expires_at = expiry(request.ttl_seconds, call.ledger.now())
    if request.destination_project_id is not None:
        check_project("destination_project_id", request.destination_project_id)
    key = call.headers.get("x-idempotency-key")
    change = audit.change_id("copy", call.tenant_id, key) if key else secrets.token_hex(16)
    run_id = f"{COPIES}-{change}"
    source_path = _parsed(request.source_path)
    target = CheckpointPath(run_id, source_path.kind, source_path.name)
    if await call.ledger.entries(CheckpointEntry).get(str(target)) is not None:
        return CopyWeightsResponse(tinker_path=str(target))
    token = request.weights_access_token or _access_token(call)
    source = await readable(call, request.source_path, token=token)
    await call.context.quotas.check_storage(call.tenant_id)
    # The files first: a run without a checkpoint would stay in listings for ever.
    manifest = await call.context.store_threads.run(_copy_files, call, source, target, run_id)
    await _add_home(call, run_id, source, request.destination_project_id)
    await call.ledger.entries(CheckpointEntry).add(
        CheckpointEntry(
            id=str(target),
            tenant_id=call.tenant_id,
            created_at=call.ledger.now(),
            run_id=run_id,
            checkpoint_id=target.checkpoint_id,
            size_bytes=manifest.size_bytes,
            expires_at=expires_at,
            user_metadata=source.user_metadata,
            details={**source.details, "version": manifest.version},
        )
    )
    await audit.note(
        call.ledger,
        call.tenant_id,
        audit.CHECKPOINT_COPIED,
        details={"source": source.id},
        run_id=run_id,
        tinker_path=str(target),
        change=change,
    )
    return CopyWeightsResponse(tinker_path=str(target))


def _copy_files(call: ApiCall, source: CheckpointEntry, target: CheckpointPath, run_id: str) -> Any:
    try:
        return call.store.copy(source.files, target, origin=run_id)
    except CheckpointNotFoundError:
        raise unknown("checkpoint", source.id) from None


async def _add_home(
    call: ApiCall, run_id: str, source: CheckpointEntry, project: str | None
) -> None:
    """Add the run that holds a copy. It was never loaded, and counts as released."""
    origin = await _run_of(call, source)
    now = call.ledger.now()
    if project is None:
        is_own = origin.tenant_id == call.tenant_id
        project = await Projects(call.ledger).of_run(origin) if is_own else None
    await call.ledger.entries(ModelEntry).add(
        msgspec.structs.replace(
            origin,
            id=run_id,
            tenant_id=call.tenant_id,
            created_at=now,
            session_id=SessionId(""),
            config={**origin.config, **({PROJECT: project} if project else {})},
            released_at=now,
        )
    )


# Lookups


async def named(call: ApiCall) -> CheckpointEntry:
    """The tenant's own checkpoint at a path; raises `NotFoundError`."""
    path = str(_path_of(call))
    entry = await call.context.lookups.checkpoint(call.tenant_id, path)
    if not is_living(entry, call.ledger.now()):
        raise unknown("checkpoint", path)
    return entry


async def readable(call: ApiCall, path: str, *, token: str | None = None) -> CheckpointEntry:
    """A checkpoint that the caller may read: its own, a published one, or the token's owner's."""
    parsed = str(_parsed(path))
    owner: TenantId | None = None
    if token:
        try:
            owner = (await call.context.authenticator.holder(token)).tenant.tenant_id
        except AuthenticationError:
            owner = None  # as if it were not given: the same 404
    return await call.context.lookups.readable_checkpoint(call.tenant_id, parsed, also_of=owner)


def _access_token(call: ApiCall) -> str | None:
    return call.headers.get("x-tinker-weights-access-token")


def _path_of(call: ApiCall) -> CheckpointPath:
    return CheckpointPath.of(call.request.training_run_id, call.request.checkpoint_id)


def _parsed(path: str) -> CheckpointPath:
    parsed = CheckpointPath.parse(path)
    if parsed.is_internal:
        raise unknown("checkpoint", path)
    return parsed


async def _run_of(call: ApiCall, entry: CheckpointEntry) -> ModelEntry:
    model = await call.ledger.entries(ModelEntry).get(entry.run_id)
    if model is None:
        raise unknown("checkpoint", entry.id)
    return model


async def _change(call: ApiCall, entry: CheckpointEntry, **fields: Any) -> None:
    def changed(old: CheckpointEntry) -> CheckpointEntry:
        return msgspec.structs.replace(old, **fields)

    try:
        await call.ledger.entries(CheckpointEntry).change(entry.id, changed)
    except UnknownEntryError:
        raise unknown("checkpoint", entry.id) from None


async def _note(
    call: ApiCall, entry: CheckpointEntry, event: str, change: str | None = None, **details: Any
) -> None:
    await audit.note(
        call.ledger,
        call.tenant_id,
        event,
        details=details,
        run_id=entry.run_id,
        tinker_path=entry.id,
        change=change,
    )


HANDLERS: dict[str, Handler] = {
    "list_checkpoints": list_checkpoints,
    "list_model_checkpoints": list_checkpoints,
    "list_user_checkpoints": list_user_checkpoints,
    "get_weights_info_by_tinker_path": get_weights_info,
    "publish_checkpoint": publish_checkpoint,
    "unpublish_checkpoint": unpublish_checkpoint,
    "set_checkpoint_ttl": set_checkpoint_ttl,
    "delete_checkpoint": delete_checkpoint,
    "copy_weights": copy_weights,
}
