"""Snapshots: a model's whole state, saved in the background to keep a replay after a crash short.

A snapshot is taken between two commands of a model. Its queue waits only for the engine's part; the
files are made durable while the model continues. The ledger records a snapshot after everything
before it is settled: a command that a snapshot contains must never run again on top of it. Each
snapshot is an edition of its own (`checkpoints/paths.py`): no two schedulers write to one place.
"""

from __future__ import annotations

import asyncio
import logging
import time

from tinsmith.checkpoints.base import CheckpointStore, Staging
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.engine.base import AdapterId, AdapterParts, Engine
from tinsmith.errors import CheckpointError, LedgerError, ReplicaError, ValidationError
from tinsmith.observe.spans import Spans
from tinsmith.service.ledger.fenced import FencedLedger
from tinsmith.service.ledger.records import QueueId
from tinsmith.service.scheduler.command_queues import CommandQueues
from tinsmith.service.scheduler.known_models import KnownModel, KnownModels
from tinsmith.service.scheduler.scheduler_settings import SchedulerSettings
from tinsmith.service.scheduler.settling import Settler
from tinsmith.service.scheduler.status import SchedulerStatus
from tinsmith.service.scheduler.suspects import EngineWatchdog

_log = logging.getLogger(__name__)

RETRY_S = 30.0
"""How long after a failed snapshot the next is tried."""


class Snapshots:
    """Takes snapshots when they are due. For one event loop."""

    def __init__(
        self,
        ledger: FencedLedger,
        store: CheckpointStore,
        engine: Engine,
        settings: SchedulerSettings,
        *,
        queues: CommandQueues,
        models: KnownModels,
        settler: Settler,
        status: SchedulerStatus,
        watchdog: EngineWatchdog,
        spans: Spans,
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._engine = engine
        self._settings = settings
        self._queues = queues
        self._models = models
        self._settler = settler
        self._status = status
        self._watchdog = watchdog
        self._spans = spans
        self._tasks: dict[QueueId, asyncio.Task[None]] = {}
        self._not_before: dict[QueueId, float] = {}

    def consider(self, queue_id: QueueId) -> None:
        """Start a snapshot of a model if it is due and its queue is idle."""
        known = self._models.get(queue_id)
        if known is not None and known.is_ready and self._is_due(known):
            self._try_start(queue_id, known)

    def consider_idle(self) -> None:
        """Start a snapshot of each idle model that would take long to replay.

        This also retries failed snapshots: `consider` is not called for an idle model.
        """
        before = time.monotonic() - self._settings.snapshot_idle_s
        for queue_id, known in self._models.all_ready():
            is_long = known.unsaved_work_s >= self._settings.snapshot_idle_work_s
            is_idle = known.worked_at < before and known.unsaved_commands
            if is_idle and (is_long or self._is_due(known)):
                self._try_start(queue_id, known)

    async def take_all(self) -> None:
        """Snapshot each model that has changed since its last one; for the end of the service."""
        if not self._status.is_recovered:
            return  # models may be halfway through their replay
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for queue_id, known in self._models.all_ready():
            if not self._engine.has_adapter(AdapterId(queue_id)):
                continue  # the engine was lost; the model is restored from what is stored
            if known.unsaved_commands and not self._queues.is_busy(queue_id):
                self._tasks[queue_id] = self._start(queue_id, known)
                await self._tasks[queue_id]

    async def wait(self, queue_id: QueueId) -> None:
        """Return when no snapshot of a model is being written."""
        if queue_id in self._tasks:
            await asyncio.gather(self._tasks[queue_id], return_exceptions=True)

    async def stop(self) -> None:
        """Abandon the snapshots that are being written."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_due(self, known: KnownModel) -> bool:
        settings = self._settings
        return (
            known.must_save
            or known.unsaved_commands >= settings.snapshot_commands
            or known.unsaved_work_s >= settings.snapshot_work_s
            or known.unsaved_bytes >= settings.snapshot_payload_bytes
        )

    def _try_start(self, queue_id: QueueId, known: KnownModel) -> None:
        may_start = time.monotonic() >= self._not_before.get(queue_id, 0.0)
        if may_start and queue_id not in self._tasks and not self._queues.is_busy(queue_id):
            self._tasks[queue_id] = self._start(queue_id, known)

    def _start(self, queue_id: QueueId, known: KnownModel) -> asyncio.Task[None]:
        self._queues.start(queue_id)  # before the first await: no command may run in between
        task = asyncio.create_task(self._take(queue_id, known))
        task.add_done_callback(lambda ended: self._ended(queue_id, ended))
        return task

    def _ended(self, queue_id: QueueId, task: asyncio.Task[None]) -> None:
        self._tasks.pop(queue_id, None)
        # A cancelled one is not followed by another, or `stop` would never return.
        if not self._status.is_closing and not task.cancelled():
            self.consider(queue_id)  # much may have happened while it was written

    async def _take(self, queue_id: QueueId, known: KnownModel) -> None:
        position = self._queues.position(queue_id)
        path = CheckpointPath.snapshot(queue_id, position).new_edition(self._ledger.epoch)
        started, is_busy = time.monotonic(), True
        try:
            staging = await asyncio.to_thread(self._store.begin, path, origin=str(path))
            try:
                with (
                    self._watchdog.call(f"the snapshot of {queue_id}"),
                    self._spans.span("snapshot", model=queue_id),
                ):
                    adapter_id = AdapterId(queue_id)
                    await self._engine.save_adapter(
                        adapter_id, staging.folder, AdapterParts.SNAPSHOT
                    )
                known.note_saved()
                self._queues.finish(queue_id, (), time.monotonic())
                is_busy = False
                await self._commit(queue_id, staging, path)
            finally:
                await asyncio.to_thread(staging.discard)
            self._status.count("snapshots")
            self._status.count("snapshot_s", time.monotonic() - started)
        except (CheckpointError, LedgerError, ReplicaError, ValidationError, OSError) as exc:
            self._note_failed(queue_id, known, exc)
        except Exception as exc:  # noqa: BLE001 - the model itself continues without a snapshot
            _log.exception("a snapshot failed", extra={"model": queue_id})
            self._note_failed(queue_id, known, exc)
        finally:
            if is_busy:
                self._queues.finish(queue_id, (), time.monotonic())

    async def _commit(self, queue_id: QueueId, staging: Staging, path: CheckpointPath) -> None:
        await asyncio.to_thread(staging.commit, overwrite=True)
        await self._settler.wait_passed()
        old = await self._ledger.record_snapshot(queue_id, path.position, str(path))
        if old is not None:
            await asyncio.to_thread(self._store.delete, CheckpointPath.parse(old))

    def _note_failed(self, queue_id: QueueId, known: KnownModel, error: BaseException) -> None:
        _log.warning(
            "no snapshot was written, retrying in %g s: %s",
            RETRY_S,
            error,
            extra={"model": queue_id},
        )
        self._status.count("failed_snapshots")
        known.unsaved_commands = max(known.unsaved_commands, self._settings.snapshot_commands)
        self._not_before[queue_id] = time.monotonic() + RETRY_S
