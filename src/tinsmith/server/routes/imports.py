"""Adapters that were made elsewhere, as checkpoints to go on from.

The checkpoint of an import lives in a run of its own, `import-<id>`, which cannot be trained
itself; a training client is made from it as from any saved state, without an optimizer's.
"""

from __future__ import annotations

import secrets

from tinsmith.checkpoints.format import Adapter
from tinsmith.checkpoints.manifest import Manifest
from tinsmith.errors import BadRequestError, CheckpointFormatError, shown
from tinsmith.ledger import audit
from tinsmith.ledger.model_config import write_config
from tinsmith.ledger.records import CheckpointEntry, Model, SessionId
from tinsmith.server.call import Call, Handler
from tinsmith.server.checks import base_model, check_metadata, check_texts, expiry
from tinsmith.server.imports import Import
from tinsmith.server.listings import PROJECT
from tinsmith.types.imports import (
    BeginImportRequest,
    BeginImportResponse,
    FinishImportResponse,
    ImportPartRequest,
)
from tinsmith.wire.import_endpoints import IMPORT_ENDPOINTS

LARGEST_PART = 16 * 1024 * 1024


async def begin_import(call: Call) -> BeginImportResponse:
    """Say where to send an adapter; the same idempotency key gives the same place."""
    request: BeginImportRequest = call.request
    check_texts(("project_id", request.project_id), ("base_model", request.base_model))
    check_metadata("user_metadata", request.user_metadata)
    expiry(request.ttl_seconds, call.ledger.now())
    if request.base_model is not None:
        base_model(call, request.base_model)
    await call.service.quotas.check_storage(call.tenant_id)
    key = call.headers.get("x-idempotency-key")
    made = audit.change_id("import", call.tenant_id, key) if key else secrets.token_hex(16)
    begun = await call.service.imports.begin(f"import-{made}", call.tenant_id, request)
    part_bytes = min(LARGEST_PART, call.settings.body_bytes)
    return BeginImportResponse(import_id=begun.import_id, part_bytes=part_bytes)


async def send_import_part(call: Call) -> None:
    """Take a part of a file."""
    request: ImportPartRequest = call.request
    found = call.service.imports.find(request.import_id, call.tenant_id)
    async with found.turn:
        await call.service.store_threads.run(found.write, request.name, request.offset, call.body)


async def finish_import(call: Call) -> FinishImportResponse:
    """Make a checkpoint of what was sent. Asked again, it tells of the one that there is."""
    done = await _finished(call)
    if done is not None:
        return done
    found = call.service.imports.find(call.request.import_id, call.tenant_id)
    async with found.turn:
        done = await _finished(call)
        if done is not None:  # by a try whose reply was lost
            return done
        found.check_complete()
        try:
            name = await _base_model(call, found)
            async with call.service.imports.finishing:
                adapter, manifest = await call.service.store_threads.run(
                    found.finish, call.store, name
                )
        except (BadRequestError, CheckpointFormatError) as exc:
            await call.service.imports.end(found)  # it would end the same way again
            raise BadRequestError(str(exc)) from exc
        await _keep(call, found, adapter, manifest)
    await call.service.imports.end(found)
    return _told(adapter.base_model, adapter.rank, str(found.path), manifest.size_bytes)


async def _base_model(call: Call, found: Import) -> str:
    """The base model by our name: the one that was asked for, else the one in the settings."""
    config = await call.service.store_threads.run(found.config)
    given = str(found.request.base_model or config.get("base_model_name_or_path") or "")
    by_source = {one.source: one.name for one in call.parts.base_models.values()}
    name = given if given in call.parts.base_models else by_source.get(given, given)
    model = base_model(call, name, "base_model_name_or_path in adapter_config.json")
    rank, most = config.get("r"), model.max_rank
    if isinstance(rank, int) and rank > most:
        raise BadRequestError(f"the adapter has rank {shown(rank)}; it may have {most}")
    return model.name


async def _keep(call: Call, found: Import, adapter: Adapter, manifest: Manifest) -> None:
    """Name the run and the checkpoint in the ledger."""
    lora, request, now = adapter.lora_config(), found.request, call.ledger.now()
    config = write_config(lora, None)
    project = {PROJECT: request.project_id} if request.project_id else {}
    model = Model(
        id=found.import_id,
        tenant_id=call.tenant_id,
        created_at=now,
        session_id=SessionId(""),
        base_model=adapter.base_model,
        config={**config, **project},
        released_at=now,
    )
    await call.ledger.entries(Model).add(model)
    entry = CheckpointEntry(
        id=str(found.path),
        tenant_id=call.tenant_id,
        created_at=now,
        run_id=found.import_id,
        checkpoint_id=found.path.checkpoint_id,
        size_bytes=manifest.size_bytes,
        expires_at=expiry(request.ttl_seconds, now),
        user_metadata=request.user_metadata,
        details={
            "version": manifest.version,
            "base_model": adapter.base_model,
            **config,
            "has_optimizer": False,
        },
    )
    await call.ledger.entries(CheckpointEntry).add(entry)
    await audit.note(
        call.ledger,
        call.tenant_id,
        audit.CHECKPOINT_IMPORTED,
        run_id=found.import_id,
        tinker_path=entry.id,
        change=audit.change_id("imported", entry.id),
    )


async def _finished(call: Call) -> FinishImportResponse | None:
    """What a try before this one made."""
    model = await call.ledger.entries(Model).get(call.request.import_id)
    if model is None or model.tenant_id != call.tenant_id or model.session_id:
        return None
    saved = await call.ledger.entries(CheckpointEntry).of_parent(model.id, limit=1)
    if not saved:
        return None
    rank = int(model.config["lora_config"]["rank"])
    return _told(model.base_model, rank, saved[0].id, saved[0].size_bytes)


def _told(name: str, rank: int, path: str, size_bytes: int) -> FinishImportResponse:
    return FinishImportResponse(
        tinker_path=path, base_model=name, lora_rank=rank, size_bytes=size_bytes
    )


FURTHER_ENDPOINTS = IMPORT_ENDPOINTS
HANDLERS: dict[str, Handler] = {
    "begin_import": begin_import,
    "send_import_part": send_import_part,
    "finish_import": finish_import,
}
