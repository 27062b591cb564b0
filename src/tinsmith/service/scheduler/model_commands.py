"""What a model's commands besides training do: create it, load into it, save it, unload it.

`model_loop.py` runs them, and settles what each returns or raises. Recovery creates and loads
models by the same steps (`restore.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tinsmith.checkpoints.base import CheckpointStore
from tinsmith.checkpoints.encryption import encrypt_files
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.engine.base import AdapterId, AdapterParts, Engine
from tinsmith.errors import (
    BadRequestError,
    ReplicaError,
    TinkerError,
    UnknownEntryError,
)
from tinsmith.service.ledger.fenced import FencedLedger
from tinsmith.service.ledger.records import (
    LARGEST_NUMBER,
    CheckpointEntry,
    Command,
    ModelEntry,
    QueueId,
    SessionEntry,
    Use,
)
from tinsmith.service.scheduler.known_models import (
    KnownModel,
    KnownModels,
    model_unloaded,
    spec_of,
)
from tinsmith.service.scheduler.model_files import ModelFiles
from tinsmith.service.scheduler.settling import usage
from tinsmith.service.scheduler.snapshots import Snapshots
from tinsmith.service.scheduler.status import SchedulerStatus
from tinsmith.service.scheduler.suspects import EngineWatchdog
from tinsmith.service.scheduler.work_reading import read_request
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

Answer = tuple[Record | None, tuple[Use, ...]]
"""The response of a command, and what it used."""


class ModelCommands:
    """Runs the commands of models. For one event loop.

    Args:
        ledger: Entries of models, samplers and checkpoints.
        store: Where snapshots are deleted.
        engine: Creates, loads and drops adapters.
        files: Reads and writes the files of models.
        models: The models that commands are for.
        snapshots: Waited for before a model is unloaded or a checkpoint overwritten.
        status: Counts checkpoints.
        watchdog: Watches engine calls.
        autosave_ttl_s: How long the checkpoint of a lost session is kept.
        on_unloaded: Called when the engine has room for another adapter.
    """

    def __init__(
        self,
        ledger: FencedLedger,
        store: CheckpointStore,
        engine: Engine,
        files: ModelFiles,
        *,
        models: KnownModels,
        snapshots: Snapshots,
        status: SchedulerStatus,
        watchdog: EngineWatchdog,
        autosave_ttl_s: float,
        on_unloaded: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._engine = engine
        self._files = files
        self._models = models
        self._snapshots = snapshots
        self._status = status
        self._watchdog = watchdog
        self._autosave_ttl_s = autosave_ttl_s
        self._on_unloaded = on_unloaded
        self._runners: dict[str, Callable[[Command], Awaitable[Answer]]] = {
            "create_model": self._create,
            "load_weights": self._load,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
            "unload_model": self._unload,
            RELEASE: self._release,
        }

    async def run(self, command: Command) -> Answer:
        """Run a command; returns its response and what it used.

        Raises:
            BadRequestError: There is no such command, or the model cannot do what it asks for.
        """
        runner = self._runners.get(command.kind)
        if runner is None:
            raise BadRequestError(f"there is no command {command.kind!r}")
        return await runner(command)

    # Creating and loading

    async def create(self, command: Command) -> KnownModel:
        """Create a model's adapter, as the first command of its queue asks."""
        model = await self._ledger.entries(ModelEntry).get(command.queue_id)
        if model is None:
            raise BadRequestError(f"there is no model {command.queue_id}")
        known = self._models.add(spec_of(model))
        if command.kind == "create_model":
            with self._watchdog.call(f"the creation of {command.queue_id}"):
                await self._engine.create_adapter(known.spec)
        else:
            await self.load_into(known, await read_request(self._ledger, command))
        known.is_ready = True
        known.unsaved_commands += 1
        return known

    async def load_into(self, known: KnownModel, request: LoadWeightsRequest) -> None:
        """Load a checkpoint into a model's adapter."""
        parts = AdapterParts.CHECKPOINT if request.optimizer else AdapterParts.WEIGHTS
        path = CheckpointPath.parse(request.path)
        await self.load_files(known, path, parts)
        # A replay must not need the checkpoint: it may be deleted or overwritten by then.
        known.must_save = True

    async def load_files(
        self, known: KnownModel, path: CheckpointPath, parts: AdapterParts
    ) -> None:
        """Load an adapter from the store."""
        queue_id = QueueId(known.spec.adapter_id)
        async with self._files.open(path, queue_id) as folder:
            await self._engine.load_adapter(known.spec, folder, parts)

    async def _create(self, command: Command) -> Answer:
        await self.create(command)
        self._ledger.board.runs.begin(command.queue_id)
        return CreateModelResponse(model_id=command.queue_id), ()

    async def _load(self, command: Command) -> Answer:
        request: LoadWeightsRequest = await read_request(self._ledger, command)
        if command.seq_id == 0:
            await self.create(command)
            self._ledger.board.runs.begin(command.queue_id)
        else:
            await self.load_into(self._models.ready(command.queue_id), request)
        response = LoadWeightsResponse(
            path=request.path, model_id=command.queue_id, type="load_weights"
        )
        return response, ()

    # Saving

    async def _save(self, command: Command) -> Answer:
        request: SaveWeightsRequest = await read_request(self._ledger, command)
        name = request.path or f"{command.seq_id:06}"
        if request.overwrite:
            # It may be what was loaded, and a replay needs that until there is a snapshot.
            await self._snapshots.wait(command.queue_id)
        entry = await self._checkpoint(
            command,
            CheckpointPath(command.queue_id, "weights", name),
            AdapterParts.CHECKPOINT,
            overwrite=request.overwrite,
            ttl_s=request.ttl_seconds,
            user_metadata=request.user_metadata,
        )
        return SaveWeightsResponse(path=entry.id, type="save_weights"), self._uses(command)

    async def _save_for_sampler(self, command: Command) -> Answer:
        request: SaveWeightsForSamplerRequest = await read_request(self._ledger, command)
        if request.path is not None:
            entry = await self._checkpoint(
                command,
                CheckpointPath(command.queue_id, "sampler_weights", request.path),
                AdapterParts.WEIGHTS,
                ttl_s=request.ttl_seconds,
                user_metadata=request.user_metadata,
            )
            uses = self._uses(command)
            return SaveWeightsForSamplerResponseInternal(
                path=entry.id, type="save_weights_for_sampler"
            ), uses
        known = self._models.ready(command.queue_id)
        if request.sampling_session_seq_id is None:
            raise BadRequestError("a save for a sampler needs a path or a sampling_session_seq_id")
        sampler_id = f"{command.session_id}:sample:{request.sampling_session_seq_id}"
        await self._files.save_sampler(command, known, sampler_id)
        response = SaveWeightsForSamplerResponseInternal(
            sampling_session_id=sampler_id, type="save_weights_for_sampler"
        )
        return response, ()

    async def _save_external(self, command: Command) -> Answer:
        request: SaveWeightsExternalRequest = await read_request(self._ledger, command)
        recipients = request.age_encryption_recipients or []
        entry = await self._checkpoint(
            command,
            CheckpointPath(command.queue_id, "external_weights", request.path),
            AdapterParts.WEIGHTS,
            ttl_s=request.ttl_seconds,
            user_metadata=request.user_metadata,
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
        saved: AdapterParts,
        *,
        overwrite: bool = False,
        ttl_s: float | None = None,
        user_metadata: dict[str, str] | None = None,
        finish: Callable[[Path], None] | None = None,
    ) -> CheckpointEntry:
        known = self._models.ready(command.queue_id)
        found = await self._files.find_entry(command, path, overwrite=overwrite)
        if found is not None:
            return found
        place = path.new_edition(self._ledger.epoch)
        manifest = await self._files.write(command, place, saved, finish=finish)
        entry = await self._files.add_entry(
            command,
            known,
            place,
            manifest,
            ttl_s=ttl_s,
            user_metadata=user_metadata,
            has_optimizer=AdapterParts.OPTIMIZER in saved,
        )
        self._status.count("checkpoints")
        return entry

    def _uses(self, command: Command) -> tuple[Use, ...]:
        base_model = self._models.ready(command.queue_id).spec.base_model
        return (usage(command, "checkpoint", 1, base_model),)

    # Unloading

    async def _unload(self, command: Command) -> Answer:
        await self._drop(command.queue_id, "was unloaded")
        return UnloadModelResponse(model_id=command.queue_id, type="unload_model"), ()

    async def _release(self, command: Command) -> Answer:
        """Unload a model whose session has ended, and delete what only a replay would need."""
        queue_id = command.queue_id
        known = self._models.get(queue_id)
        if known is not None and known.is_ready and known.has_trained:
            await self._autosave(command)
        await self._drop(queue_id, ENDED)
        await self._snapshots.wait(queue_id)
        old = await self._ledger.record_snapshot(queue_id, LARGEST_NUMBER, None)
        try:
            if old is not None:
                await asyncio.to_thread(self._store.delete, CheckpointPath.parse(old))
            await self._files.delete_samplers(command.session_id)
        except TinkerError as exc:  # the sweeper deletes what is left
            _log.warning("could not delete files of %s: %s", queue_id, exc)
        return None, ()

    async def _autosave(self, command: Command) -> None:
        """Save the state of a model whose client was lost, or stopped by an error or a Ctrl-C."""
        session = await self._ledger.entries(SessionEntry).get(command.session_id)
        if session is None or _is_success(session.ending or {}):
            return
        path = CheckpointPath(command.queue_id, "weights", "autosave")
        try:
            await self._checkpoint(
                command,
                path,
                AdapterParts.CHECKPOINT,
                overwrite=True,
                ttl_s=self._autosave_ttl_s,
            )
        except ReplicaError:
            raise  # it is saved once it is restored
        except TinkerError as exc:
            _log.warning("could not save model %s of a lost session: %s", command.queue_id, exc)

    async def _drop(self, queue_id: QueueId, why: str) -> None:
        self._ledger.board.runs.end(queue_id, why)
        known = self._models.get(queue_id)
        if known is not None:
            known.is_ready = False
            known.error = model_unloaded(queue_id, why)
        with self._watchdog.call(f"unloading {queue_id}"):
            await self._engine.drop_adapter(AdapterId(queue_id))
        now = self._ledger.now()

        def released(model: ModelEntry) -> ModelEntry:
            return msgspec.structs.replace(model, released_at=model.released_at or now)

        try:
            await self._ledger.entries(ModelEntry).change(queue_id, released)
        except UnknownEntryError:
            _log.warning("model %s has no entry in the ledger", queue_id)
        self._on_unloaded()


def _is_success(ending: Mapping[str, Any]) -> bool:
    """Whether the client ended its session because its program had finished."""
    reason = ending.get("reason") or {}
    return ending.get("type") == "client_finished" and reason.get("type", "success") == "success"
