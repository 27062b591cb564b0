"""Commands that run by themselves: creations, loads, saves, and the end of a model.

Each runs as a task while its line waits; lines of other models go on. Whatever it raises becomes
the failure that it is settled with.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tinsmith.checkpoints.encryption import encrypt_files
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.engines.base import AdapterId, Saved
from tinsmith.errors import (
    BadRequestError,
    CheckpointNotFoundError,
    ClosedError,
    TinkerError,
    UnknownEntryError,
)
from tinsmith.ledger.board import ACTIVE, QueueReport
from tinsmith.ledger.records import (
    LARGEST_NUMBER,
    Command,
    LineId,
    Model,
    Session,
    Settlement,
    Use,
)
from tinsmith.scheduler import saves
from tinsmith.scheduler.models import KnownModel, could_not_be_made, spec_of, was_let_go
from tinsmith.scheduler.order import TRAINING
from tinsmith.scheduler.parts import Parts, use
from tinsmith.scheduler.settling import failure, success
from tinsmith.scheduler.snapshots import Snapshots
from tinsmith.types.record import Record
from tinsmith.types.requests import (
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinsmith.types.training import (
    CreateCustomLossResponse,
    CreateModelResponse,
    LoadWeightsResponse,
    SaveWeightsExternalResponseInternal,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsResponse,
    UnloadModelResponse,
)

_log = logging.getLogger(__name__)

RELEASE = "release_model"
ENDED = "was let go of when its session ended"
FULL = (
    "all places for models are taken (limits.adapters); it goes on when one is let go of: a client "
    "is closed, or silent for session_timeout_s"
)

Done = tuple[Record | None, tuple[Use, ...]]


class Singles:
    """Runs them. For one event loop."""

    def __init__(self, parts: Parts, snapshots: Snapshots) -> None:
        self._parts = parts
        self._snapshots = snapshots
        self._tasks: set[asyncio.Task[None]] = set()
        self._creating = 0
        self._held: set[LineId] = set()
        self._runners: dict[str, Callable[[Command], Awaitable[Done]]] = {
            "create_model": self._create,
            "load_weights": self._load,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
            "unload_model": self._unload,
            RELEASE: self._release,
        }

    async def run(self) -> None:
        """Start what may run, until cancelled or the scheduler closes."""
        changed = self._parts.listen()
        while not self._parts.is_closing:
            changed.clear()
            for line in self._parts.order.ready():
                self._consider(line)
            await changed.wait()

    async def wait(self) -> None:
        """Return when nothing runs."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Abandon what runs. It was not settled and will be run again."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _consider(self, line: LineId) -> None:
        command = self._parts.order.head(line)
        if command.kind in TRAINING or len(self._tasks) >= self._parts.settings.most_singles:
            return
        is_creation = command.seq_id == 0 and command.kind in ("create_model", "load_weights")
        if is_creation and not self._has_place():
            if line not in self._held:
                self._held.add(line)
                self._parts.ledger.board.hold(QueueReport("paused_capacity", FULL), line)
            return
        if line in self._held:
            self._held.discard(line)
            self._parts.ledger.board.hold(ACTIVE, line)
        self._parts.order.start(line)
        self._creating += is_creation
        task = asyncio.create_task(self._run(command, is_creation=is_creation))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._parts.wake()  # only now is there room: what it woke itself has counted it still

    def _has_place(self) -> bool:
        capacity = self._parts.engine.capacity()
        return capacity.adapters + self._creating < capacity.most_adapters

    async def _run(self, command: Command, *, is_creation: bool) -> None:
        parts = self._parts
        try:
            await parts.suspects.wait_alone()
            if parts.is_closing:
                return  # as below: the engine may be gone, and nobody is to enter it any more
            parts.suspects.enter([command.request_id])
            started_at = parts.ledger.now()
            settlement = await self._settlement(command)
        except ClosedError as exc:
            # The command is not to blame: it stays claimed, and is run after the next start.
            parts.problem = f"the engine is gone: {exc}"
            return
        finally:
            self._creating -= is_creation
        parts.suspects.leave([command.request_id])
        parts.settler.add(msgspec.structs.replace(settlement, started_at=started_at))
        parts.statistics.count("failed_commands" if settlement.is_failed else "done_commands")
        parts.order.finish(command.line, [command], time.monotonic())
        if command.kind == RELEASE and not settlement.is_failed:
            self._forget(command.line)
        else:
            self._snapshots.consider(command.line)
        parts.ended()

    def _forget(self, line: LineId) -> None:
        """Close the line of a model that is no more; what came behind its end fails."""
        error = was_let_go(line, ENDED)
        late = self._parts.order.waiting(line)
        self._parts.settler.add(*(failure(one, error) for one in late))
        self._parts.order.forget(line)
        self._parts.models.forget(line)
        self._parts.ended(len(late))

    async def _settlement(self, command: Command) -> Settlement:
        runner = self._runners.get(command.kind)
        if runner is None:
            return failure(command, BadRequestError(f"there is no command {command.kind!r}"))
        try:
            self._parts.suspects.check(command.request_id)
            return success(command, *await runner(command))
        except ClosedError:
            raise
        except TinkerError as exc:
            error: BaseException = exc
        except Exception as exc:  # noqa: BLE001 - whatever it is, others go on
            _log.exception("command %s of tenant %s failed", command.request_id, command.tenant_id)
            error = exc
        if command.seq_id == 0 and command.kind in ("create_model", "load_weights"):
            known = self._parts.models.get(command.line)
            if known is not None and not known.is_ready:
                known.trouble = could_not_be_made(command.line, error)
        return failure(command, error)

    # Making

    async def make(self, command: Command) -> KnownModel:
        """Make a model's adapter, as number 0 of its line asks."""
        entries = self._parts.ledger.entries(Model)
        model = await self._parts.ask(lambda: entries.get(command.line))
        if model is None:
            raise BadRequestError(f"nothing is known of model {command.line}")
        known = self._parts.models.add(spec_of(model))
        if command.kind == "create_model":
            with self._parts.silence.call(f"the creation of {command.line}"):
                await self._parts.engine.create_adapter(known.spec)
        else:
            await self.load_into(known, await self._parts.request(command))
        known.is_ready = True
        known.unsaved_commands += 1
        return known

    async def load_into(self, known: KnownModel, request: LoadWeightsRequest) -> None:
        """Load a checkpoint into a model's adapter."""
        parts = Saved.CHECKPOINT if request.optimizer else Saved.WEIGHTS
        path = CheckpointPath.parse(request.path)
        await self.load_files(known, path, parts)
        # A replay must not need the checkpoint: it may be deleted or overwritten by then.
        known.must_save = True

    async def load_files(self, known: KnownModel, path: CheckpointPath, parts: Saved) -> None:
        """Load an adapter from the store."""
        try:
            reading = await saves.patiently(
                str(path), lambda: asyncio.to_thread(self._parts.store.open_whole, path)
            )
        except CheckpointNotFoundError as exc:
            raise BadRequestError(f"there is no checkpoint {path}") from exc
        try:
            with self._parts.silence.call(f"the load of {path}"):
                await self._parts.engine.load_adapter(known.spec, reading.folder, parts)
        finally:
            await asyncio.to_thread(reading.close)

    async def _create(self, command: Command) -> Done:
        await self.make(command)
        return CreateModelResponse(model_id=command.line), ()

    async def _load(self, command: Command) -> Done:
        request: LoadWeightsRequest = await self._parts.request(command)
        if command.seq_id == 0:
            await self.make(command)
        else:
            await self.load_into(self._parts.models.ready(command.line), request)
        response = LoadWeightsResponse(
            path=request.path, model_id=command.line, type="load_weights"
        )
        return response, ()

    # Saving

    async def _save(self, command: Command) -> Done:
        request: SaveWeightsRequest = await self._parts.request(command)
        name = request.path or f"{command.seq_id:06}"
        if request.overwrite:
            # It may be what was loaded, which a replay needs until there is a snapshot.
            await self._snapshots.wait(command.line)
        path = await self._checkpoint(
            command,
            CheckpointPath(command.line, "weights", name),
            Saved.CHECKPOINT,
            overwrite=request.overwrite,
            ttl_s=request.ttl_seconds,
            user_metadata=request.user_metadata,
        )
        return SaveWeightsResponse(path=path, type="save_weights"), self._uses(command)

    async def _save_for_sampler(self, command: Command) -> Done:
        request: SaveWeightsForSamplerRequest = await self._parts.request(command)
        if request.path is not None:
            path = await self._checkpoint(
                command,
                CheckpointPath(command.line, "sampler_weights", request.path),
                Saved.WEIGHTS,
                ttl_s=request.ttl_seconds,
                user_metadata=request.user_metadata,
            )
            uses = self._uses(command)
            return SaveWeightsForSamplerResponseInternal(
                path=path, type="save_weights_for_sampler"
            ), uses
        known = self._parts.models.ready(command.line)
        if request.sampling_session_seq_id is None:
            raise BadRequestError("a save for a sampler needs a path or a sampling_session_seq_id")
        sampler_id = f"{command.session_id}:sample:{request.sampling_session_seq_id}"
        files = CheckpointPath.sampler(sampler_id)
        await saves.write_files(self._parts, command, files, Saved.WEIGHTS)
        await saves.keep_sampler(self._parts, command, known, sampler_id, files)
        response = SaveWeightsForSamplerResponseInternal(
            sampling_session_id=sampler_id, type="save_weights_for_sampler"
        )
        return response, ()

    async def _save_external(self, command: Command) -> Done:
        request: SaveWeightsExternalRequest = await self._parts.request(command)
        recipients = request.age_encryption_recipients or []
        path = await self._checkpoint(
            command,
            CheckpointPath(command.line, "external_weights", request.path),
            Saved.WEIGHTS,
            ttl_s=request.ttl_seconds,
            finish=(lambda folder: encrypt_files(folder, recipients)) if recipients else None,
        )
        size_bytes = await asyncio.to_thread(self._parts.store.size, CheckpointPath.parse(path))
        response = SaveWeightsExternalResponseInternal(
            path=path, size_bytes=size_bytes, type="save_weights_external"
        )
        return response, self._uses(command)

    async def _checkpoint(
        self,
        command: Command,
        path: CheckpointPath,
        saved: Saved,
        *,
        overwrite: bool = False,
        ttl_s: float | None = None,
        user_metadata: dict[str, str] | None = None,
        finish: Callable[[Path], None] | None = None,
    ) -> str:
        known = self._parts.models.ready(command.line)
        manifest = await saves.write_files(
            self._parts, command, path, saved, overwrite=overwrite, finish=finish
        )
        entry = await saves.keep_entry(
            self._parts,
            command,
            known,
            path,
            manifest,
            ttl_s=ttl_s,
            user_metadata=user_metadata,
            has_optimizer=Saved.OPTIMIZER in saved,
        )
        self._parts.statistics.count("checkpoints")
        return entry.id

    def _uses(self, command: Command) -> tuple[Use, ...]:
        base_model = self._parts.models.ready(command.line).spec.base_model
        return (use(command, "checkpoint", 1, base_model),)

    # Letting go

    async def _unload(self, command: Command) -> Done:
        await self._let_go(command.line, "was unloaded")
        return UnloadModelResponse(model_id=command.line, type="unload_model"), ()

    async def _release(self, command: Command) -> Done:
        line, parts = command.line, self._parts
        known = parts.models.get(line)
        if known is not None and known.is_ready and known.has_trained:
            await self._autosave(command)
        await self._let_go(line, ENDED)
        await self._snapshots.wait(line)
        ledger = parts.ledger
        old = await parts.ask(lambda: ledger.record_snapshot(line, LARGEST_NUMBER, None))
        try:
            if old is not None:
                await asyncio.to_thread(parts.store.delete, CheckpointPath.parse(old))
            await saves.drop_samplers(parts, command.session_id)
        except TinkerError as exc:  # the sweeper comes for what is left
            _log.warning("files of %s could not be deleted: %s", line, exc)
        return None, ()

    async def _autosave(self, command: Command) -> None:
        """Save the state of a model whose client was lost, or stopped by an error or a Ctrl-C."""
        session_id = command.session_id
        sessions = self._parts.ledger.entries(Session)
        session = await self._parts.ask(lambda: sessions.get(session_id))
        if session is None or _is_success(session.ending or {}):
            return
        path = CheckpointPath(command.line, "weights", "autosave")
        try:
            await self._checkpoint(
                command,
                path,
                Saved.CHECKPOINT,
                overwrite=True,
                ttl_s=self._parts.settings.autosave_ttl_s,
            )
        except TinkerError as exc:
            _log.warning("model %s of a lost session could not be saved: %s", command.line, exc)

    async def _let_go(self, line: LineId, why: str) -> None:
        known = self._parts.models.get(line)
        if known is not None:
            known.is_ready = False
            known.trouble = was_let_go(line, why)
        with self._parts.silence.call(f"the release of {line}"):
            await self._parts.engine.drop_adapter(AdapterId(line))
        now, entries = self._parts.ledger.now(), self._parts.ledger.entries(Model)

        def released(model: Model) -> Model:
            return msgspec.structs.replace(model, released_at=model.released_at or now)

        try:
            await self._parts.ask(lambda: entries.change(line, released))
        except UnknownEntryError:
            _log.warning("model %s has no entry", line)
        self._parts.wake()


def custom_loss_made(command: Command) -> Settlement:
    """The end of `create_custom_loss`, which was checked and kept when it came."""
    return success(command, CreateCustomLossResponse(loss_id=command.request_id))


def _is_success(ending: Mapping[str, Any]) -> bool:
    """Whether a client ended its session, and with it a program that did what it was to do."""
    reason = ending.get("reason") or {}
    return ending.get("type") == "client_finished" and reason.get("type", "success") == "success"
