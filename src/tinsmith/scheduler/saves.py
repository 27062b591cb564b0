"""A model's files in the store, written and read; and the entries of the ledger that name them.

The ledger's entry says where the files of a name are. Files are written to a new place, an edition
of their name, and the entry follows, if the scheduler's epoch is still the newest. So whether a
name is taken is asked of the ledger, and files that no entry names count for nothing.

Each step may be made twice. A save that is run again after a crash finds the entry that it made
before, by the request id in its files, or writes the same files again. A disk that is full for a
while is waited for, a name that is taken is the user's to mend.
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

from tinsmith.checkpoints.base import Reading
from tinsmith.checkpoints.manifest import Manifest
from tinsmith.checkpoints.paths import SAMPLERS, CheckpointPath
from tinsmith.engines.base import AdapterId, Saved
from tinsmith.errors import (
    BadRequestError,
    CheckpointError,
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
async def files_of(
    parts: Parts, path: CheckpointPath, line: LineId | None = None
) -> AsyncIterator[Path]:
    """The folder of a checkpoint, which stays as it is while the block lasts.

    Args:
        parts: What the scheduler works with.
        path: What a client calls it, or where it is.
        line: Whose clients are told that the store is waited for.

    Raises:
        BadRequestError: There is none.
    """
    try:
        reading = await patiently(parts, str(path), lambda: _open_named(parts, path), line)
    except CheckpointNotFoundError as exc:
        if path.kind == SAMPLERS:
            raise weights_gone(path.run_id) from exc
        raise BadRequestError(f"there is no checkpoint {path}") from exc
    try:
        with parts.silence.call(f"the load of {path}"):
            yield reading.folder
    finally:
        await asyncio.to_thread(reading.close)


def weights_gone(sampler_id: str) -> BadRequestError:
    """The error for a sampler without a name whose weights made room for others."""
    return BadRequestError(
        f"the weights of sampler {sampler_id} are no longer kept",
        remedy="save them under a name to keep them: save_weights_for_sampler(name)",
    )


async def _open_named(parts: Parts, path: CheckpointPath) -> Reading:
    """Open what a path names now; one that is overwritten meanwhile is looked up again."""
    place = await _place_of(parts, path)
    while True:
        try:
            return await asyncio.to_thread(parts.store.open_whole, place)
        except CheckpointNotFoundError:
            looked_up = await _place_of(parts, path)
            if looked_up == place:
                raise
            place = looked_up


async def _place_of(parts: Parts, path: CheckpointPath) -> CheckpointPath:
    if path.is_internal:
        return path
    entries = parts.ledger.entries(CheckpointEntry)
    entry = await parts.ask(lambda: entries.get(str(path)))
    return path if entry is None else entry.files


async def manifest_of(parts: Parts, command: Command, place: CheckpointPath) -> Manifest | None:
    """The files at a place, if an earlier run of this command wrote them."""
    try:
        manifest = await patiently(
            parts,
            command.request_id,
            lambda: asyncio.to_thread(parts.store.info, place),
            command.line,
        )
    except CheckpointNotFoundError:
        return None
    return manifest if manifest.origin == command.request_id else None


async def write_files(
    parts: Parts,
    command: Command,
    place: CheckpointPath,
    saved: Saved,
    *,
    finish: Callable[[Path], None] | None = None,
) -> Manifest:
    """Write a model's files.

    Args:
        place: Where to: an edition of its own.
        saved: What is written.
        finish: Called on a thread with the folder, before it becomes the checkpoint.
    """

    async def write() -> Manifest:
        origin = command.request_id
        staging = await asyncio.to_thread(parts.store.begin, place, origin=origin)
        try:
            with parts.silence.call(f"the save of {place}"):
                await parts.engine.save_adapter(AdapterId(command.line), staging.folder, saved)
            if finish is not None:
                await asyncio.to_thread(finish, staging.folder)
            return await asyncio.to_thread(staging.commit, overwrite=True)
        finally:
            await asyncio.to_thread(staging.discard)

    return await patiently(parts, command.request_id, write, command.line)


async def find_entry(
    parts: Parts, command: Command, path: CheckpointPath, *, overwrite: bool
) -> CheckpointEntry | None:
    """The entry that an earlier run of this command has made; None if there is none.

    Raises:
        BadRequestError: The name is taken, and is not to be overwritten.
    """
    entries = parts.ledger.entries(CheckpointEntry)
    there = await parts.ask(lambda: entries.get(str(path)))
    if there is None:
        return None
    if await manifest_of(parts, command, there.files) is not None:
        await _note_created(parts, command, path)  # it may have been cut off before its note
        return there
    if not overwrite:
        can_overwrite = ", or save it with overwrite=True" if command.kind == "save_weights" else ""
        raise BadRequestError(
            f"there is a checkpoint {path} already", remedy=f"choose another name{can_overwrite}"
        )
    return None


async def keep_entry(
    parts: Parts,
    command: Command,
    known: KnownModel,
    place: CheckpointPath,
    manifest: Manifest,
    *,
    ttl_s: float | None = None,
    user_metadata: dict[str, str] | None = None,
    has_optimizer: bool = False,
) -> CheckpointEntry:
    """Name a checkpoint in the ledger, now that it is on the disk."""
    path = place.in_edition("")
    entries = parts.ledger.entries(CheckpointEntry)
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
        edition=place.edition,
    )
    old = await parts.ask(lambda: entries.put(entry))
    if old is not None and old.files != entry.files:
        await _delete_replaced(parts, old.files)
    await _note_created(parts, command, path)
    return entry


async def _note_created(parts: Parts, command: Command, path: CheckpointPath) -> None:
    """Tell the audit log of a save, once however often it is run."""
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


async def _delete_replaced(parts: Parts, place: CheckpointPath) -> None:
    """Delete files that no entry names any more.

    If it fails, the sweeper deletes them once the name stands for files of a later epoch.
    """
    try:
        await asyncio.to_thread(parts.store.delete, place)
    except CheckpointError as exc:
        _log.warning("the replaced files of %s could not be deleted: %s", place, exc)


async def save_sampler(parts: Parts, command: Command, known: KnownModel, sampler_id: str) -> None:
    """Write the weights of a sampler without a name, and name it in the ledger.

    Raises:
        BadRequestError: Its number belongs to another sampler.
    """
    entries = parts.ledger.entries(Sampler)
    there = await parts.ask(lambda: entries.get(sampler_id))
    if there is not None:
        files = there.own_files
        if files is None or await manifest_of(parts, command, files) is None:
            raise BadRequestError(f"the number of sampler {sampler_id} was used for another one")
        return  # a run before this one came so far
    place = CheckpointPath.sampler(sampler_id).new_edition(parts.ledger.epoch)
    await write_files(parts, command, place, Saved.WEIGHTS)
    made = Sampler(
        id=sampler_id,
        tenant_id=command.tenant_id,
        created_at=parts.ledger.now(),
        session_id=command.session_id,
        base_model=known.spec.base_model,
        model_path=str(place),
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
            files = sampler.own_files
            if files is not None:
                await asyncio.to_thread(parts.store.delete, files)
