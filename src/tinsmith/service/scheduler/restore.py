"""The start after a crash: loads each model's snapshot, and runs again what came after it.

Settled commands that changed a model run again in order; their outcomes are discarded, because the
first settlement stays. Commands that were not settled are pending again, and are claimed as if new
afterwards. Saves do not run again: their files exist.
"""

from __future__ import annotations

import asyncio
import logging
import time

from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.engine.base import AdapterParts, Engine, PassWork, TrainingWork
from tinsmith.errors import (
    AdapterLostError,
    BadRequestError,
    CheckpointUnavailableError,
    ClosedError,
    InternalServerError,
    NoReplicaError,
    TinkerError,
)
from tinsmith.service.ledger.fenced import FencedLedger
from tinsmith.service.ledger.records import Command, ModelEntry, QueueId
from tinsmith.service.ledger.recovery import ModelRecovery, recover, recover_model
from tinsmith.service.scheduler.command_queues import TRAINING, CommandQueues
from tinsmith.service.scheduler.known_models import (
    KnownModel,
    KnownModels,
    creation_failed,
    spec_of,
)
from tinsmith.service.scheduler.lost_models import LostModels
from tinsmith.service.scheduler.model_commands import ModelCommands
from tinsmith.service.scheduler.snapshots import Snapshots
from tinsmith.service.scheduler.status import SchedulerStatus
from tinsmith.service.scheduler.suspects import EngineWatchdog
from tinsmith.service.scheduler.work_reading import WorkReader, read_request
from tinsmith.wire.failures import failed_from_error

_log = logging.getLogger(__name__)

STORE_WAIT_S = 1.0
CHUNK = 128
"""How many commands are read and run at a time."""


class Restorer:
    """Restores all models. For one event loop."""

    def __init__(
        self,
        ledger: FencedLedger,
        engine: Engine,
        commands: ModelCommands,
        reader: WorkReader,
        *,
        claimer: str,
        queues: CommandQueues,
        models: KnownModels,
        snapshots: Snapshots,
        lost_models: LostModels,
        status: SchedulerStatus,
        watchdog: EngineWatchdog,
    ) -> None:
        self._ledger = ledger
        self._engine = engine
        self._commands = commands
        self._reader = reader
        self._claimer = claimer
        self._queues = queues
        self._models = models
        self._snapshots = snapshots
        self._lost_models = lost_models
        self._status = status
        self._watchdog = watchdog

    async def run(self) -> None:
        """Restore every model; one that cannot be restored is kept with the reason."""
        status, started = self._status, time.monotonic()
        status.began_at = self._ledger.now()
        found = await recover(self._ledger, self._claimer)
        repeated = sum(len(one.redo) for one in found.models)
        if repeated:
            _log.info("running %d commands of %d models again", repeated, len(found.models))
        restored = 0
        for number, recovery in enumerate(found.models):
            how_far = f"{number} of {len(found.models)} models are restored"
            status.recovery = f"the service has restarted: {how_far}"
            restored += await self._restore(recovery)
        status.is_recovered = True
        status.count("recovered_models", restored)
        status.count("redone_commands", repeated)
        status.count("recovery_s", time.monotonic() - started)
        if found.models:
            _log.info(
                "restored %d models in %.2f s (%d commands run again)",
                restored,
                time.monotonic() - started,
                repeated,
            )
        if found.released:
            _log.info(
                "%d commands were running when the service ended; they run first", found.released
            )

    async def _restore(self, recovery: ModelRecovery) -> bool:
        """Restore one model; returns whether that succeeded."""
        queue_id = QueueId(recovery.model.id)
        ended = [command.seq_id for command in recovery.ended]
        self._queues.begin(queue_id, recovery.progress.position, ended)
        known = self._models.add(spec_of(recovery.model))
        try:
            return await self._try_restore(known, recovery)
        except (AdapterLostError, NoReplicaError) as exc:
            # The others need not wait for a replica that can take this one.
            _log.info("model %s is restored later: %s", queue_id, exc)
            self._lost_models.note([queue_id])
            return False

    async def restore_lost(self, queue_id: QueueId) -> None:
        """Restore a model that was lost with its replica; its queue is not running.

        Raises:
            AdapterLostError: It was lost again.
            NoReplicaError: No replica has room for it now.
        """
        await self._snapshots.wait(queue_id)  # one that is written now is what we start from
        known = self._models.get(queue_id)
        model = await self._ledger.entries(ModelEntry).get(queue_id)
        if known is None or known.error is not None or model is None or model.released_at:
            return  # its commands fail, and need no adapter
        recovery = await recover_model(self._ledger, model)
        known.note_saved()
        if await self._try_restore(known, recovery):
            self._status.count("redone_commands", len(recovery.redo))

    async def _try_restore(self, known: KnownModel, recovery: ModelRecovery) -> bool:
        """Restore a model, or keep the reason with it; returns whether that succeeded."""
        queue_id = QueueId(recovery.model.id)
        try:
            await self._wait_for_store(known, recovery)
        except (ClosedError, AdapterLostError, NoReplicaError):
            raise  # the model is not to blame, and is restored later
        except Exception as exc:  # noqa: BLE001 - of this model and of no other
            is_foreseen = isinstance(exc, TinkerError)  # as a base model that is no longer served
            _log.error("could not restore model %s: %s", queue_id, exc, exc_info=not is_foreseen)
            self._keep_error(known, exc)
            return False
        return True

    def give_up(self, queue_id: QueueId, error: Exception) -> None:
        """Keep with a model why it cannot be restored; its commands fail with that."""
        known = self._models.get(queue_id)
        if known is not None:
            _log.error("could not restore model %s: %s each time", queue_id, error)
            self._keep_error(known, error)

    def _keep_error(self, known: KnownModel, error: Exception) -> None:
        queue_id = known.spec.adapter_id
        self._status.count("lost_models")
        known.is_ready = False
        known.error = InternalServerError(
            f"model {queue_id} could not be restored after a restart: "
            f"{failed_from_error(error).error}",
            remedy="create it again from its last checkpoint",
        )

    async def _wait_for_store(self, known: KnownModel, recovery: ModelRecovery) -> None:
        """Rebuild a model; an unavailable store is retried for as long as it takes.

        To continue without it would fail every command that the model's client is waiting for.
        """
        while True:
            try:
                await self._rebuild(known, recovery)
            except CheckpointUnavailableError as exc:
                _log.warning("model %s waits for the checkpoint store: %s", recovery.model.id, exc)
                self._status.problem = f"the checkpoint store is unavailable: {exc}"
            else:
                self._status.problem = None
                return
            await asyncio.sleep(STORE_WAIT_S)

    async def _rebuild(self, known: KnownModel, recovery: ModelRecovery) -> None:
        known.is_ready = False  # an earlier attempt may have got halfway
        if recovery.progress.snapshot is not None:
            path = CheckpointPath.parse(recovery.progress.snapshot)
            await self._commands.load_files(known, path, AdapterParts.SNAPSHOT)
            known.is_ready = known.has_trained = True
        redo = recovery.redo
        if not known.is_ready:
            if not redo or redo[0].seq_id != 0:
                self._note_failed_creation(known, recovery)
                return
            await self._commands.create(redo[0])
            redo = redo[1:]
        await self._redo(known, redo)

    def _note_failed_creation(self, known: KnownModel, recovery: ModelRecovery) -> None:
        """Keep the error of a model whose creation failed; one yet to be created has none."""
        ended = recovery.ended
        if ended and ended[0].seq_id == 0:
            queue_id = QueueId(recovery.model.id)
            known.error = creation_failed(queue_id, BadRequestError("see its first request"))

    async def _redo(self, known: KnownModel, commands: list[Command]) -> None:
        batch: list[Command] = []
        for command in commands:
            if command.kind in TRAINING:
                batch.append(command)
                if len(batch) >= CHUNK:
                    await self._train(known, batch)
                    batch = []
            elif command.kind == "load_weights":
                await self._train(known, batch)
                batch = []
                await self._commands.load_into(known, await read_request(self._ledger, command))
        await self._train(known, batch)

    async def _train(self, known: KnownModel, commands: list[Command]) -> None:
        if not commands:
            return
        read = await asyncio.gather(*(self._reader.read(command) for command in commands))
        works: list[TrainingWork] = []
        for work in read:
            if isinstance(work, BaseException):
                raise work
            if not isinstance(work, PassWork) or work.with_gradients:
                works.append(work)
        what = f"training, {len(works)} commands of {commands[0].queue_id} again"
        with self._watchdog.call(what):
            outcomes = await self._engine.train(works)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        known.note_work(len(commands), sum(one.payload_bytes for one in commands), 0.0)
