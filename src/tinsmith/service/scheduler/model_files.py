"""A model's files in the checkpoint store, and the ledger's entries that name them.

The ledger's entry says where the files of a name are. Files are written to a new place, an edition
of the name, and the entry follows if the scheduler's epoch is still the newest. So the ledger
decides whether a name is taken, and files that no entry names do not count.

Each step may be repeated. A save that runs again after a crash finds the entry that it made before,
by the request id in its files, or writes the same files again. A store that is unavailable for a
while is retried; a name that is taken is an error for the user.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from tinsmith.checkpoints.base import CheckpointStore, Reading
from tinsmith.checkpoints.manifest import Manifest
from tinsmith.checkpoints.paths import SAMPLERS, CheckpointPath
from tinsmith.engine.base import AdapterId, AdapterParts, Engine
from tinsmith.errors import (
    BadRequestError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointUnavailableError,
    StorageFullError,
)
from tinsmith.service.ledger import audit
from tinsmith.service.ledger.board import ACTIVE, QueueReport
from tinsmith.service.ledger.fenced import FencedLedger
from tinsmith.service.ledger.records import CheckpointEntry, Command, QueueId, SamplerEntry
from tinsmith.service.scheduler.known_models import KnownModel
from tinsmith.service.scheduler.suspects import EngineWatchdog
from tinsmith.types.record import to_plain

_log = logging.getLogger(__name__)

FULL_WAIT_S = 20.0
"""How long a full store is waited for at most; it rarely empties by itself."""
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0

T = TypeVar("T")


class ModelFiles:
    """Reads and writes the files of models. For one event loop."""

    def __init__(
        self,
        ledger: FencedLedger,
        store: CheckpointStore,
        engine: Engine,
        watchdog: EngineWatchdog,
        *,
        store_wait_s: float,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._engine = engine
        self._watchdog = watchdog
        self._store_wait_s = store_wait_s
        self._on_wait = on_wait
        self.waiting: set[QueueId] = set()
        """Queues that wait for a store that is unavailable; `on_wait` is called for each."""

    # Reading

    @contextlib.asynccontextmanager
    async def open(
        self, path: CheckpointPath, queue_id: QueueId | None = None
    ) -> AsyncIterator[Path]:
        """The folder of a checkpoint, which stays unchanged while the block runs.

        Args:
            path: The name that clients use, or the place in the store.
            queue_id: Whose clients are told while the store is unavailable.

        Raises:
            BadRequestError: There is no such checkpoint.
        """
        try:
            reading = await self._retry(str(path), lambda: self._open_named(path), queue_id)
        except CheckpointNotFoundError as exc:
            if path.kind == SAMPLERS:
                raise weights_gone(path.run_id) from exc
            raise BadRequestError(f"there is no checkpoint {path}") from exc
        try:
            with self._watchdog.call(f"the load of {path}"):
                yield reading.folder
        finally:
            await asyncio.to_thread(reading.close)

    async def _open_named(self, path: CheckpointPath) -> Reading:
        """Open what a path names now; if it is overwritten meanwhile, look it up again."""
        place = await self._place_of(path)
        while True:
            try:
                return await asyncio.to_thread(self._store.open_whole, place)
            except CheckpointNotFoundError:
                looked_up = await self._place_of(path)
                if looked_up == place:
                    raise
                place = looked_up

    async def _place_of(self, path: CheckpointPath) -> CheckpointPath:
        if path.is_internal:
            return path
        entry = await self._ledger.entries(CheckpointEntry).get(str(path))
        return path if entry is None else entry.files

    async def _manifest_of(self, command: Command, place: CheckpointPath) -> Manifest | None:
        """The manifest of the files at a place, if an earlier run of this command wrote them."""
        try:
            manifest = await self._retry(
                command.request_id,
                lambda: asyncio.to_thread(self._store.info, place),
                command.queue_id,
            )
        except CheckpointNotFoundError:
            return None
        return manifest if manifest.origin == command.request_id else None

    # Checkpoints

    async def find_entry(
        self, command: Command, path: CheckpointPath, *, overwrite: bool
    ) -> CheckpointEntry | None:
        """The entry that an earlier run of this command made, if there is one.

        Raises:
            BadRequestError: The name is taken, and may not be overwritten.
        """
        entry = await self._ledger.entries(CheckpointEntry).get(str(path))
        if entry is None:
            return None
        if await self._manifest_of(command, entry.files) is not None:
            await self._note_created(command, path)  # the earlier run may have ended before
            return entry
        if not overwrite:
            can_overwrite = (
                ", or save it with overwrite=True" if command.kind == "save_weights" else ""
            )
            raise BadRequestError(
                f"there is a checkpoint {path} already",
                remedy=f"choose another name{can_overwrite}",
            )
        return None

    async def write(
        self,
        command: Command,
        place: CheckpointPath,
        saved: AdapterParts,
        *,
        finish: Callable[[Path], None] | None = None,
    ) -> Manifest:
        """Write a model's files.

        Args:
            command: The command that asks for it; its queue is the model's.
            place: Where to write: an edition of its own.
            saved: What is written.
            finish: Called on a thread with the folder, before it becomes the checkpoint.
        """

        async def write_once() -> Manifest:
            origin = command.request_id
            staging = await asyncio.to_thread(self._store.begin, place, origin=origin)
            try:
                with self._watchdog.call(f"the save of {place}"):
                    await self._engine.save_adapter(
                        AdapterId(command.queue_id), staging.folder, saved
                    )
                if finish is not None:
                    await asyncio.to_thread(finish, staging.folder)
                return await asyncio.to_thread(staging.commit, overwrite=True)
            finally:
                await asyncio.to_thread(staging.discard)

        return await self._retry(command.request_id, write_once, command.queue_id)

    async def add_entry(
        self,
        command: Command,
        known: KnownModel,
        place: CheckpointPath,
        manifest: Manifest,
        *,
        ttl_s: float | None = None,
        user_metadata: dict[str, str] | None = None,
        has_optimizer: bool = False,
    ) -> CheckpointEntry:
        """Name a checkpoint in the ledger, now that its files are durable."""
        path = place.in_edition("")
        now = self._ledger.now()
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
        old = await self._ledger.entries(CheckpointEntry).put(entry)
        if old is not None and old.files != entry.files:
            await self._delete_replaced(old.files)
        await self._note_created(command, path)
        return entry

    async def _note_created(self, command: Command, path: CheckpointPath) -> None:
        """Write a save to the audit log, once however often the command runs."""
        await audit.note(
            self._ledger,
            command.tenant_id,
            audit.CHECKPOINT_CREATED,
            details={"kind": path.kind},
            run_id=path.run_id,
            tinker_path=str(path),
            change=audit.change_id("save", command.request_id),
        )

    async def _delete_replaced(self, place: CheckpointPath) -> None:
        """Delete files that no entry names any more.

        If this fails, the sweeper deletes them once the name stands for files of a later epoch.
        """
        try:
            await asyncio.to_thread(self._store.delete, place)
        except CheckpointError as exc:
            _log.warning("could not delete the replaced files of %s: %s", place, exc)

    # Samplers without a name

    async def save_sampler(self, command: Command, known: KnownModel, sampler_id: str) -> None:
        """Write the weights of a sampler without a name, and add its entry.

        Raises:
            BadRequestError: Its number belongs to another sampler.
        """
        entries = self._ledger.entries(SamplerEntry)
        found = await entries.get(sampler_id)
        if found is not None:
            files = found.own_files
            if files is None or await self._manifest_of(command, files) is None:
                raise _number_taken(sampler_id)
            return  # an earlier run of this command finished it
        place = CheckpointPath.sampler(sampler_id).new_edition(self._ledger.epoch)
        await self.write(command, place, AdapterParts.WEIGHTS)
        made = SamplerEntry(
            id=sampler_id,
            tenant_id=command.tenant_id,
            created_at=self._ledger.now(),
            session_id=command.session_id,
            base_model=known.spec.base_model,
            model_path=str(place),
        )
        kept = await entries.add(made)
        if kept.model_path != made.model_path:
            raise _number_taken(sampler_id)

    async def delete_samplers(self, session_id: str) -> None:
        """Delete the files of a session's samplers that have no name."""
        entries, offset = self._ledger.entries(SamplerEntry), 0
        while page := await entries.of_parent(session_id, offset=offset):
            offset += len(page)
            for sampler in page:
                files = sampler.own_files
                if files is not None:
                    await asyncio.to_thread(self._store.delete, files)

    async def _retry(
        self, what: str, call: Callable[[], Awaitable[T]], queue_id: QueueId | None = None
    ) -> T:
        """Make a call of the store; while the store is unavailable, repeat it for a while.

        Meanwhile the queue's state says why it waits. A store whose settings are wrong is not
        retried.
        """
        started, wait_s = time.monotonic(), FIRST_WAIT_S
        board, is_paused, is_retry = self._ledger.board, False, False
        try:
            while True:
                try:
                    if is_retry:  # cheaper than to make the files again for a store that is away
                        await asyncio.to_thread(self._store.check, writes=True)
                    return await call()
                except CheckpointUnavailableError as exc:
                    is_retry = True
                    board.doubt_store()
                    give_up_at = started + self._store_wait_s
                    if isinstance(exc, StorageFullError):
                        give_up_at = min(give_up_at, started + FULL_WAIT_S)
                    if exc.is_lasting or time.monotonic() + wait_s > give_up_at:
                        raise
                    _log.warning("%s: the checkpoint store is unavailable, retrying: %s", what, exc)
                    if queue_id is not None:
                        is_paused = True
                        self.waiting.add(queue_id)
                        self._on_wait()
                        why = exc.reason or "it does not answer"
                        reason = f"the checkpoint store is unavailable: {why}"
                        board.set_queue_state(QueueReport("paused_capacity", reason), queue_id)
                await asyncio.sleep(wait_s)
                wait_s = min(LONGEST_WAIT_S, 2 * wait_s)
        finally:
            if is_paused and queue_id is not None:
                self.waiting.discard(queue_id)
                board.set_queue_state(ACTIVE, queue_id)


def weights_gone(sampler_id: str) -> BadRequestError:
    """The error for a sampler without a name whose weights were deleted to make room."""
    return BadRequestError(
        f"the weights of sampler {sampler_id} have been deleted",
        remedy="save them under a name to keep them: save_weights_for_sampler(name)",
    )


def _number_taken(sampler_id: str) -> BadRequestError:
    return BadRequestError(f"the number of sampler {sampler_id} is already used by another sampler")
