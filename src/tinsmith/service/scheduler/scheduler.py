"""The scheduler: claims commands, keeps each model's order, makes batches, settles.

    claims.py          claims commands, puts them into queues, removes cancelled ones
    training_loop.py   training batches
    model_loop.py      other commands of models: creations, loads, saves
    sample_loop.py     samples: admission, sampler steps
    settling.py        outcomes into the ledger, in order
    snapshots.py       keep a replay short
    restore.py         the start after a crash
    lost_models.py     models that were lost with a replica of the engine

Each loop is a task of its own and waits for events that concern it, so that none delays another;
the event loop never waits for the engine. The API and the scheduler meet only in the ledger and on
its board.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from types import TracebackType
from typing import Self

from tinsmith.checkpoints.base import CheckpointStore
from tinsmith.engine.base import AdapterId, Engine
from tinsmith.errors import LeaseLostError, LedgerError
from tinsmith.observe.spans import Spans
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.board import ACTIVE, QueueReport, SchedulerReport
from tinsmith.service.ledger.fenced import FencedLedger
from tinsmith.service.ledger.records import QueueId
from tinsmith.service.ledger.scheduler_lease import Lease
from tinsmith.service.scheduler.claims import Claimer, GapLoop
from tinsmith.service.scheduler.command_queues import (
    TRAINING,
    CommandQueues,
    EngineArbiter,
    SampleQueue,
)
from tinsmith.service.scheduler.known_models import KnownModels
from tinsmith.service.scheduler.lost_models import LostModels
from tinsmith.service.scheduler.model_commands import ModelCommands
from tinsmith.service.scheduler.model_files import ModelFiles
from tinsmith.service.scheduler.model_loop import ModelLoop
from tinsmith.service.scheduler.restore import Restorer
from tinsmith.service.scheduler.sample_loop import SampleLoop
from tinsmith.service.scheduler.scheduler_settings import SchedulerSettings
from tinsmith.service.scheduler.settling import Settler
from tinsmith.service.scheduler.snapshots import Snapshots
from tinsmith.service.scheduler.status import InFlight, OutageRetry, SchedulerStatus
from tinsmith.service.scheduler.suspects import EngineWatchdog, Suspects
from tinsmith.service.scheduler.training_loop import TrainingLoop
from tinsmith.service.scheduler.weights_loader import WeightsLoader
from tinsmith.service.scheduler.work_reading import WorkReader

_log = logging.getLogger(__name__)

BUSY = "queued: the engine is running other work"
BUSY_AGAIN = "queued: the engine is repeating work that the last restart interrupted"
REPORT_S = 1.0
"""How often the report on the board is renewed."""


class Scheduler:
    """Runs the ledger's commands on one engine. For one event loop.

    The ledger, the engine and the store are open before, and are closed by their owner after.

    Everything that it writes is conditional on the lease. Without a lease nothing is: for a
    scheduler that has its ledger to itself, as in tests.
    """

    def __init__(
        self,
        ledger: Ledger,
        engine: Engine,
        store: CheckpointStore,
        settings: SchedulerSettings | None = None,
        spans: Spans | None = None,
        suspects: Suspects | None = None,
        lease: Lease | None = None,
    ) -> None:
        self._settings = settings = settings or SchedulerSettings()
        spans = spans or Spans()
        epoch = None if lease is None else lease.epoch
        self._unretried = FencedLedger(ledger, epoch)
        self._retry = OutageRetry(ledger.board)
        self._ledger = fenced = FencedLedger(ledger, epoch, self._retry)
        self._engine = engine
        self._board = ledger.board
        self._suspects = suspects = suspects or Suspects()
        self._status = status = SchedulerStatus()
        self._queues = queues = CommandQueues()
        self._samples = SampleQueue()
        self._in_flight = in_flight = InFlight(settings.most_claimed)
        self._settler = settler = Settler(fenced, in_flight, most_unsettled=settings.most_unsettled)
        self._arbiter = arbiter = EngineArbiter(is_shared=not engine.samples_concurrently)
        self._watchdog = watchdog = EngineWatchdog(settings.engine_silence_s)
        models = KnownModels()
        self._lost_models = lost_models = LostModels(
            ledger.board,
            queues=queues,
            settler=settler,
            suspects=suspects,
            status=status,
            replica_of=lambda queue_id: engine.replica_of(AdapterId(queue_id)),
        )
        files = ModelFiles(
            fenced,
            store,
            engine,
            watchdog,
            store_wait_s=settings.store_wait_s,
            on_wait=queues.other_ready.set,
        )
        reader = WorkReader(fenced, models, suspects)
        self._snapshots = snapshots = Snapshots(
            fenced,
            store,
            engine,
            settings,
            queues=queues,
            models=models,
            settler=settler,
            status=status,
            watchdog=watchdog,
            spans=spans,
        )
        self._training = TrainingLoop(
            fenced,
            engine,
            settings,
            reader,
            queues=queues,
            models=models,
            snapshots=snapshots,
            settler=settler,
            arbiter=arbiter,
            suspects=suspects,
            lost_models=lost_models,
            status=status,
            watchdog=watchdog,
            spans=spans,
        )
        commands = ModelCommands(
            fenced,
            store,
            engine,
            files,
            models=models,
            snapshots=snapshots,
            status=status,
            watchdog=watchdog,
            autosave_ttl_s=settings.autosave_ttl_s,
            on_unloaded=self._note_room,
        )
        self._model_loop = ModelLoop(
            fenced,
            engine,
            commands,
            most_running=settings.most_singles,
            waiting=files.waiting,
            queues=queues,
            models=models,
            snapshots=snapshots,
            settler=settler,
            suspects=suspects,
            lost_models=lost_models,
            status=status,
        )
        self._sampling = SampleLoop(
            fenced,
            engine,
            samples=self._samples,
            weights=WeightsLoader(
                fenced,
                engine,
                files,
                most_loaded=settings.most_sampler_weights,
                status=status,
                watchdog=watchdog,
            ),
            settler=settler,
            arbiter=arbiter,
            suspects=suspects,
            status=status,
            watchdog=watchdog,
        )
        self._claimer = Claimer(
            fenced,
            settings.claimer,
            queues=queues,
            samples=self._samples,
            sampling=self._sampling,
            in_flight=in_flight,
            settler=settler,
            suspects=suspects,
            status=status,
        )
        self._gaps = GapLoop(
            fenced, queues, status, wait_s=settings.gap_wait_s, look_s=settings.gap_look_s
        )
        self._restorer = Restorer(
            fenced,
            engine,
            commands,
            reader,
            claimer=settings.claimer,
            queues=queues,
            models=models,
            snapshots=snapshots,
            lost_models=lost_models,
            status=status,
            watchdog=watchdog,
        )
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_ready = False

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Restore all models, then start to work in the background; the board says when.

        Raises:
            ClosedError: The engine was lost meanwhile; `close` this scheduler, and open another.
        """
        self._board.clear_queue_states()
        self._suspects.clear()
        self._report()
        self._lost_models.begin(
            self._restorer.restore_lost,
            self._restorer.give_up,
            [self._note_room, self._samples.changed.set],
        )
        self._engine.watch_replicas(self._lost_models.replica_changed)
        self._start("settling", self._settler.run())
        self._start("reporting", self._keep_reporting())  # also while recovery waits
        self._start("ledger checks", self._check_ledger())
        try:
            await self._restorer.run()
            self._board.set_queue_state(ACTIVE)
        except Exception as exc:
            self._status.problem = f"recovery failed: {type(exc).__name__}: {exc}"
            self._report()
            raise
        self._is_ready = True
        loops = {
            "claiming": self._claimer.run(),
            "gaps": self._gaps.run(),
            "training": self._training.run(),
            "models": self._model_loop.run(),
            "admission": self._sampling.admit(),
            "sampling": self._sampling.step(),
        }
        for name, loop in loops.items():
            self._start(name, loop)
        self._report()

    async def close(self, drain_s: float = 10.0) -> None:
        """Claim no more, finish what is running within `drain_s`, take snapshots, release claims.

        Samples are abandoned: the next scheduler draws them again, with the same seeds. May be
        called again.
        """
        if self._status.is_closing:
            return
        self._status.is_closing = True
        self._is_ready = False
        self._report()
        self._queues.training_ready.set()  # the training loop finishes its batch and ends
        await self._sampling.stop()
        self._suspects.clear()  # what waits to enter the engine now sees that it may not
        await self._drain(drain_s)
        self._suspects.clear()  # what was late is not in the engine either
        # Nothing may be settled out of order, and nothing is: everything that settles has ended.
        await self._stop("settling")
        if not self._board.may_work():
            return  # the next holder of the lease releases the claims of all before it
        try:
            await self._unretried.release_claims(self._settings.claimer)
        except LedgerError as exc:
            _log.warning("claims could not be released now; the next start releases them: %s", exc)

    async def _drain(self, drain_s: float) -> None:
        try:
            async with asyncio.timeout(drain_s):
                await self._stop("claiming", "gaps", "admission", "sampling", "models")
                if "training" in self._tasks:
                    await asyncio.gather(self._tasks["training"], return_exceptions=True)
                await self._model_loop.wait()
                await self._snapshots.take_all()
                await self._settler.wait_settled()
        except TimeoutError:
            _log.warning(
                "commands were still running after %g s; they run again after the next start",
                drain_s,
            )
        await self._stop("training", "reporting", "ledger checks")
        await self._model_loop.stop()
        await self._lost_models.stop()
        await self._snapshots.stop()
        await self._claimer.stop()

    def statistics(self) -> dict[str, float]:
        """Figures for metrics, by name; names ending in `_s` are seconds."""
        capacity = self._engine.capacity()
        used_s = self._arbiter.used_s
        return {
            **self._status.counts(),
            "held_commands": float(self._in_flight.count),
            "queued_commands": float(len(self._queues)),
            "queued_samples": float(len(self._samples)),
            "samples_under_way": float(self._sampling.running),
            "lines": float(self._queues.count()),
            "gapped_lines": float(len(self._queues.gaps())),
            "unsettled": float(self._settler.unsettled),
            "ledger_outages": float(self._retry.outages),
            "engine_silence_s": self._watchdog.longest_s(),
            "adapters": float(capacity.adapters),
            "most_adapters": float(capacity.most_adapters),
            "training_s": used_s["training"],
            "sampling_s": used_s["sampling"],
        }

    def _note_room(self) -> None:
        """The engine may have room for another adapter."""
        self._model_loop.retry_held()
        self._queues.other_ready.set()

    # Loops

    def _start(self, name: str, loop: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(loop, name=f"scheduler {name}")
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._ended(name, done))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        """Report a loop that ended by itself: the service cannot work without it."""
        if task.cancelled() or self._status.is_closing:
            return
        error = task.exception()
        if isinstance(error, LeaseLostError):  # whoever keeps the lease notices it too
            _log.warning("the scheduler stops: %s", error)
            self._status.problem = str(error)
        else:
            _log.error("the scheduler's %s loop has failed", name, exc_info=error)
            self._status.problem = f"the scheduler's {name} loop has failed: {type(error).__name__}"
        self._report()

    async def _stop(self, *names: str) -> None:
        tasks = [self._tasks.pop(name) for name in names if name in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _check_ledger(self) -> None:
        """When the API could not write a command: retry until the ledger is writable again."""
        while True:
            await self._board.wait_ledger_doubt()
            await self._ledger.check_writable()

    # Reports

    async def _keep_reporting(self) -> None:
        reported: set[QueueId] = set()
        while True:
            await asyncio.sleep(REPORT_S)
            self._report()
            if self._status.is_recovered:
                reported = self._report_waits(reported)
                self._snapshots.consider_idle()
                self._model_loop.retry_held()
            else:
                self._report_recovery()

    def _report_recovery(self) -> None:
        """Say that all queues wait for recovery, once it has taken long."""
        recovery, began_at = self._status.recovery, self._status.began_at
        if recovery and self._ledger.now() - began_at > self._settings.told_after_s:
            self._board.set_queue_state(QueueReport("paused_capacity", recovery))

    def _report_waits(self, reported: set[QueueId]) -> set[QueueId]:
        """Say of queues that have waited long that the engine is busy; returns those queues."""
        before = self._ledger.now() - self._settings.told_after_s
        waiting = self._samples.waiting_since(before)
        for queue_id in self._queues.ready():
            head = self._queues.head(queue_id)
            if head.created_at < before and head.kind in TRAINING:
                waiting.add(queue_id)
        for queue_id in reported - waiting:
            self._board.set_queue_state(ACTIVE, queue_id)
        reason = BUSY_AGAIN if self._training.is_repeating() else BUSY
        for queue_id in waiting:
            self._board.set_queue_state(QueueReport("paused_capacity", reason), queue_id)
        return waiting

    def _report(self) -> None:
        problem = (
            self._status.problem
            or self._retry.problem
            or self._watchdog.problem()
            or (None if self._status.is_recovered else self._status.recovery)
        )
        report = SchedulerReport(
            is_ready=self._is_ready and problem is None,
            problem=problem,
            figures=self.statistics(),
        )
        self._board.publish_report(report)
