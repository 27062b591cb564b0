"""What a model's commands besides training do: it is made, loaded into, saved, and let go of.

`singles.py` runs them, and settles what each gives or raises. A start after a crash makes and loads
models by the same steps (`recovering.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tinsmith.checkpoints.encryption import encrypt_files
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.engines.base import AdapterId, Saved
from tinsmith.errors import (
    BadRequestError,
    TinkerError,
    UnknownEntryError,
)
from tinsmith.ledger.records import (
    LARGEST_NUMBER,
    CheckpointEntry,
    Command,
    LineId,
    Model,
    Session,
    Use,
)
from tinsmith.scheduler import saves
from tinsmith.scheduler.models import KnownModel, spec_of, was_let_go
from tinsmith.scheduler.parts import Parts, use
from tinsmith.scheduler.snapshots import Snapshots
from tinsmith.types.record import Record
from tinsmith.types.requests import (
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinsmith.types.training import (
    CreateModelResponse,
    LoadWeightsResponse,
    SaveWeightsExternalResponseInternal,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsResponse,
    UnloadModelResponse,
)

_log = logging.getLogger(__name__)

RELEASE = "release_model"
ENDED = "was unloaded when its session ended"

Done = tuple[Record | None, tuple[Use, ...]]
"""The answer, and what was used."""


class ModelCommands:
    """Carries them out. For one event loop."""

    def __init__(self, parts: Parts, snapshots: Snapshots) -> None:
        self._parts = parts
        self._snapshots = snapshots
        self._runners: dict[str, Callable[[Command], Awaitable[Done]]] = {
            "create_model": self._create,
            "load_weights": self._load,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
            "unload_model": self._unload,
            RELEASE: self._release,
        }

    async def run(self, command: Command) -> Done:
        """Do what a command asks for; returns its answer and what it used.

        Raises:
            BadRequestError: There is no such command, or it asks for what cannot be done.
        """
        runner = self._runners.get(command.kind)
        if runner is None:
            raise BadRequestError(f"there is no command {command.kind!r}")
        return await runner(command)

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
        line = LineId(known.spec.adapter_id)
        async with saves.files_of(self._parts, path, line) as folder:
            await self._parts.engine.load_adapter(known.spec, folder, parts)

    async def _create(self, command: Command) -> Done:
        await self.make(command)
        self._parts.ledger.board.runs.begin(command.line)
        return CreateModelResponse(model_id=command.line), ()

    async def _load(self, command: Command) -> Done:
        request: LoadWeightsRequest = await self._parts.request(command)
        if command.seq_id == 0:
            await self.make(command)
            self._parts.ledger.board.runs.begin(command.line)
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
        entry = await self._checkpoint(
            command,
            CheckpointPath(command.line, "weights", name),
            Saved.CHECKPOINT,
            overwrite=request.overwrite,
            ttl_s=request.ttl_seconds,
            user_metadata=request.user_metadata,
        )
        return SaveWeightsResponse(path=entry.id, type="save_weights"), self._uses(command)

    async def _save_for_sampler(self, command: Command) -> Done:
        request: SaveWeightsForSamplerRequest = await self._parts.request(command)
        if request.path is not None:
            entry = await self._checkpoint(
                command,
                CheckpointPath(command.line, "sampler_weights", request.path),
                Saved.WEIGHTS,
                ttl_s=request.ttl_seconds,
                user_metadata=request.user_metadata,
            )
            uses = self._uses(command)
            return SaveWeightsForSamplerResponseInternal(
                path=entry.id, type="save_weights_for_sampler"
            ), uses
        known = self._parts.models.ready(command.line)
        if request.sampling_session_seq_id is None:
            raise BadRequestError("a save for a sampler needs a path or a sampling_session_seq_id")
        sampler_id = f"{command.session_id}:sample:{request.sampling_session_seq_id}"
        await saves.save_sampler(self._parts, command, known, sampler_id)
        response = SaveWeightsForSamplerResponseInternal(
            sampling_session_id=sampler_id, type="save_weights_for_sampler"
        )
        return response, ()

    async def _save_external(self, command: Command) -> Done:
        request: SaveWeightsExternalRequest = await self._parts.request(command)
        recipients = request.age_encryption_recipients or []
        entry = await self._checkpoint(
            command,
            CheckpointPath(command.line, "external_weights", request.path),
            Saved.WEIGHTS,
            ttl_s=request.ttl_seconds,
            finish=(lambda folder: encrypt_files(folder, recipients)) if recipients else None,
        )
        response = SaveWeightsExternalResponseInternal(
            path=entry.id, size_bytes=entry.size_bytes, type="save_weights_external"
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
    ) -> CheckpointEntry:
        known = self._parts.models.ready(command.line)
        found = await saves.find_entry(self._parts, command, path, overwrite=overwrite)
        if found is not None:
            return found
        place = path.new_edition(self._parts.ledger.epoch)
        manifest = await saves.write_files(self._parts, command, place, saved, finish=finish)
        entry = await saves.keep_entry(
            self._parts,
            command,
            known,
            place,
            manifest,
            ttl_s=ttl_s,
            user_metadata=user_metadata,
            has_optimizer=Saved.OPTIMIZER in saved,
        )
        self._parts.statistics.count("checkpoints")
        return entry

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
        self._parts.ledger.board.runs.end(line, why)
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


def _is_success(ending: Mapping[str, Any]) -> bool:
    """Whether a client ended its session, and with it a program that did what it was to do."""
    reason = ending.get("reason") or {}
    return ending.get("type") == "client_finished" and reason.get("type", "success") == "success"
