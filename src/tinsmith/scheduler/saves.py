"""A model's files in the store, written and read; and the entries of the ledger that name them.

Each step may be made twice. A save that is run again after a crash finds the files that it wrote
before, by its request id, or writes the same ones; its entry is put again or found. A disk that is
full for a while is waited for, a name that is taken is the user's to mend.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from tinsmith.checkpoints.manifest import Manifest
from tinsmith.checkpoints.paths import SAMPLERS, CheckpointPath
from tinsmith.engines.base import AdapterId, Saved
from tinsmith.errors import (
    BadRequestError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointUnavailableError,
)
from tinsmith.ledger import audit
from tinsmith.ledger.board import ACTIVE, QueueReport
from tinsmith.ledger.records import CheckpointEntry, Command, LineId, Sampler
from tinsmith.scheduler.models import KnownModel
from tinsmith.scheduler.parts import Parts
from tinsmith.types.record import to_plain

_log = logging.getLogger(__name__)

STORE_PATIENCE_S = 20.0
"""How long a full or absent store is waited for."""
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0

T = TypeVar("T")


async def patiently(
    parts: Parts, what: str, make: Callable[[], Awaitable[T]], line: LineId | None = None
) -> T:
    """What a call of the store gives; one that is unavailable is asked again for a while.

    Meanwhile whoever waits for the line is told why. A store whose settings are wrong is not
    waited for.
    """
    give_up_at, wait_s = time.monotonic() + STORE_PATIENCE_S, FIRST_WAIT_S
    is_told = False
    try:
        while True:
            try:
                return await make()
            except CheckpointUnavailableError as exc:
                board = parts.ledger.board
                board.store_doubted.set()
                if exc.is_lasting or time.monotonic() + wait_s > give_up_at:
                    raise
                _log.warning("%s: the store is unavailable, trying again: %s", what, exc)
                if line is not None:
                    is_told = True
                    why = exc.reason or "it does not answer"
                    told = f"the checkpoint store is unavailable: {why}"
                    board.hold(QueueReport("paused_capacity", told), line)
            await asyncio.sleep(wait_s)
            wait_s = min(LONGEST_WAIT_S, 2 * wait_s)
    finally:
        if is_told:
            parts.ledger.board.hold(ACTIVE, line)


@contextlib.asynccontextmanager
async def files_of(parts: Parts, path: CheckpointPath) -> AsyncIterator[Path]:
    """The folder of a checkpoint, which stays as it is while the block lasts.

    Raises:
        BadRequestError: There is none.
    """
    try:
        reading = await patiently(
            parts, str(path), lambda: asyncio.to_thread(parts.store.open_whole, path)
        )
    except CheckpointNotFoundError as exc:
        if path.kind == SAMPLERS:
            raise BadRequestError(
                f"the weights of sampler {path.run_id} are no longer kept",
                remedy="save them under a name to keep them: save_weights_for_sampler(name)",
            ) from exc
        raise BadRequestError(f"there is no checkpoint {path}") from exc
    try:
        with parts.silence.call(f"the load of {path}"):
            yield reading.folder
    finally:
        await asyncio.to_thread(reading.close)


async def write_files(
    parts: Parts,
    command: Command,
    path: CheckpointPath,
    saved: Saved,
    *,
    overwrite: bool = False,
    finish: Callable[[Path], None] | None = None,
) -> Manifest:
    """Write a model's files as a checkpoint.

    Args:
        path: What it is to be called.
        saved: What is written.
        overwrite: Whether one that is there may be replaced.
        finish: Called on a thread with the folder, before it becomes the checkpoint.

    Raises:
        BadRequestError: The name is taken.
    """

    async def write() -> Manifest:
        origin = command.request_id
        staging = await asyncio.to_thread(parts.store.begin, path, origin=origin)
        try:
            with parts.silence.call(f"the save of {path}"):
                await parts.engine.save_adapter(AdapterId(command.line), staging.folder, saved)
            if finish is not None:
                await asyncio.to_thread(finish, staging.folder)
            return await asyncio.to_thread(staging.commit, overwrite=overwrite)
        finally:
            await asyncio.to_thread(staging.discard)

    try:
        return await patiently(parts, command.request_id, write, command.line)
    except CheckpointExistsError as exc:
        can_overwrite = ", or save it with overwrite=True" if command.kind == "save_weights" else ""
        raise BadRequestError(
            f"there is a checkpoint {path} already", remedy=f"choose another name{can_overwrite}"
        ) from exc


async def keep_entry(
    parts: Parts,
    command: Command,
    known: KnownModel,
    path: CheckpointPath,
    manifest: Manifest,
    *,
    ttl_s: float | None = None,
    user_metadata: dict[str, str] | None = None,
    has_optimizer: bool = False,
) -> CheckpointEntry:
    """Name a checkpoint in the ledger, now that it is on the disk."""
    entries = parts.ledger.entries(CheckpointEntry)
    there = await parts.ask(lambda: entries.get(str(path)))
    if there is not None and there.details.get("version") == manifest.version:
        return there  # a run before this one came so far
    now = parts.ledger.now()
    entry = CheckpointEntry(
        id=str(path),
        tenant_id=command.tenant_id,
        created_at=now,
        run_id=path.run_id,
        checkpoint_id=path.checkpoint_id,
        size_bytes=manifest.size_bytes,
        expires_at=None if ttl_s is None else now + ttl_s,
        user_metadata=user_metadata,
        details={
            "version": manifest.version,
            "base_model": known.spec.base_model,
            "lora_config": to_plain(known.spec.lora),
            "optimizer_config": to_plain(known.spec.optimizer),
            "has_optimizer": has_optimizer,
        },
    )
    await parts.ask(lambda: entries.put(entry))
    await parts.ask(
        lambda: audit.note(
            parts.ledger,
            command.tenant_id,
            audit.CHECKPOINT_CREATED,
            details={"kind": path.kind},
            run_id=path.run_id,
            tinker_path=str(path),
            change=audit.change_id("save", command.request_id),
        )
    )
    return entry


async def keep_sampler(
    parts: Parts, command: Command, known: KnownModel, sampler_id: str, path: CheckpointPath
) -> None:
    """Name a sampler of its own weights in the ledger.

    Raises:
        BadRequestError: Its number belongs to another sampler.
    """
    entries = parts.ledger.entries(Sampler)
    made = Sampler(
        id=sampler_id,
        tenant_id=command.tenant_id,
        created_at=parts.ledger.now(),
        session_id=command.session_id,
        base_model=known.spec.base_model,
        model_path=str(path),
    )
    kept = await parts.ask(lambda: entries.add(made))
    if kept.model_path != made.model_path:
        raise BadRequestError(f"the number of sampler {sampler_id} was used for another one")


async def drop_samplers(parts: Parts, session_id: str) -> None:
    """Delete the files of a session's samplers that have no name."""
    entries, offset = parts.ledger.entries(Sampler), 0
    while page := await parts.ask(partial(entries.of_parent, session_id, offset=offset)):
        offset += len(page)
        for sampler in page:
            path = CheckpointPath.sampler(sampler.id)
            if sampler.model_path == str(path):
                await asyncio.to_thread(parts.store.delete, path)
