"""The loop that trains: chooses a batch, reads it, runs it, settles it.

While a batch runs, the next commands gather. A command that fails is settled with its error, and
later ones of its model still run; if a whole engine call fails, all of its commands do.

Each replica of the engine has batches of its own, which run concurrently. If a replica is lost, its
commands are not settled: they run again once their models are restored (`lost_models.py`).

An uploaded loss may compute for minutes. Whether a command has one is known once it is read: its
queue then leaves the batch and runs in a *side batch*, one per tenant at a time, while the loop
continues with the others. Queues for which there is no side slot wait for one. A side batch has as
many commands as should take a few seconds, judging by the tenant's last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Sequence

import msgspec

from tinsmith.engine.base import (
    AdapterId,
    Engine,
    PassWork,
    TrainingOutcome,
    TrainingWork,
    has_uploaded_loss,
)
from tinsmith.errors import AdapterLostError, ClosedError, TinkerError
from tinsmith.observe.spans import Spans
from tinsmith.service.ledger.fenced import FencedLedger
from tinsmith.service.ledger.records import Command, QueueId, RequestId, Settlement, TenantId
from tinsmith.service.scheduler.batching import Batch, choose_batch
from tinsmith.service.scheduler.command_queues import (
    TRAINING,
    CommandQueues,
    EngineArbiter,
    TenantShares,
)
from tinsmith.service.scheduler.known_models import KnownModels
from tinsmith.service.scheduler.lost_models import LostModels
from tinsmith.service.scheduler.scheduler_settings import SchedulerSettings
from tinsmith.service.scheduler.settling import Settler, failure, success, usage
from tinsmith.service.scheduler.snapshots import Snapshots
from tinsmith.service.scheduler.status import SchedulerStatus
from tinsmith.service.scheduler.suspects import EngineWatchdog, Suspects
from tinsmith.service.scheduler.work_reading import ReadWork, WorkReader, log_fields
from tinsmith.types.training import OptimStepResponse

_log = logging.getLogger(__name__)

MOST_SIDE_BATCHES = 2
"""How many side batches run at a time, each of another tenant."""
SIDE_BATCH_S = 5.0
"""How long a side batch should take; a single command may take longer."""


class TrainingLoop:
    """Runs training commands on the engine, batch by batch. For one event loop."""

    def __init__(
        self,
        ledger: FencedLedger,
        engine: Engine,
        settings: SchedulerSettings,
        reader: WorkReader,
        *,
        queues: CommandQueues,
        models: KnownModels,
        snapshots: Snapshots,
        settler: Settler,
        arbiter: EngineArbiter,
        suspects: Suspects,
        lost_models: LostModels,
        status: SchedulerStatus,
        watchdog: EngineWatchdog,
        spans: Spans,
    ) -> None:
        self._ledger = ledger
        self._engine = engine
        self._settings = settings
        self._reader = reader
        self._queues = queues
        self._models = models
        self._snapshots = snapshots
        self._settler = settler
        self._arbiter = arbiter
        self._suspects = suspects
        self._lost_models = lost_models
        self._status = status
        self._watchdog = watchdog
        self._spans = spans
        self._shares: dict[str, TenantShares] = {}
        """What each tenant was given of each replica."""
        self._batches: dict[str, asyncio.Task[None]] = {}
        """The batch that each replica is running."""
        self._running: dict[RequestId, Command] = {}
        self._side: dict[TenantId, asyncio.Task[None]] = {}
        self._waiting_side: dict[QueueId, TenantId] = {}
        """Queues that wait for a side slot, in the order in which they began to."""
        self._side_command_s: dict[TenantId, float] = {}
        """How long a command of a tenant's last side batch took."""

    async def run(self) -> None:
        """Train until cancelled, or until the scheduler closes and nothing is running."""
        try:
            await self._run_batches()
            await asyncio.gather(*self._batches.values(), *self._side.values())
        finally:
            tasks = [*self._batches.values(), *self._side.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_batches(self) -> None:
        failed: list[BaseException] = []
        while not self._status.is_closing:
            self._queues.training_ready.clear()
            await self._settler.wait_room()
            for replica in self._replicas_with_work():
                task = asyncio.create_task(self._run_replica(replica))
                self._batches[replica] = task
                task.add_done_callback(functools.partial(self._batch_ended, replica, failed))
            if not self._batches:
                await self._arbiter.set_active("training", False)
            await self._queues.training_ready.wait()
            if failed:
                raise failed[0]
        if not self._batches:
            await self._arbiter.set_active("training", False)

    def _batch_ended(
        self, replica: str, failed: list[BaseException], task: asyncio.Task[None]
    ) -> None:
        del self._batches[replica]
        if not task.cancelled() and (error := task.exception()) is not None:
            failed.append(error)
        self._queues.training_ready.set()

    def _replicas_with_work(self) -> list[str]:
        """The replicas that are not running a batch, and could."""
        blocked, found = self._blocked(), dict[str, None]()
        for queue_id in self._queues.ready():
            if queue_id not in blocked and self._queues.head(queue_id).kind in TRAINING:
                found.setdefault(self._engine.replica_of(AdapterId(queue_id)))
        return [replica for replica in found if replica not in self._batches]

    async def _run_replica(self, replica: str) -> None:
        """Run one batch of a replica."""
        suspects = self._suspects.of(replica)
        while suspects.must_wait:
            # Not active meanwhile: sampling must not wait for training to use its share.
            await self._arbiter.set_active("training", False)
            await suspects.wait_alone()
        if self._status.is_closing:
            return
        batch = self._choose(replica)
        if batch is None:
            return
        suspects.enter(command.request_id for command in batch.commands)
        await self._arbiter.set_active("training", True)
        await self._run_batch(batch)
        if suspects.are_apart:
            await asyncio.sleep(0)  # whoever waits to be alone in the engine goes first

    def is_repeating(self) -> bool:
        """Whether a running command was accepted before this scheduler started."""
        began_at = self._status.began_at
        return any(command.created_at < began_at for command in self._running.values())

    def _blocked(self) -> set[QueueId]:
        """The queues that wait for a side slot while there is none."""
        return {
            queue_id
            for queue_id, tenant in self._waiting_side.items()
            if not self._has_side_slot(tenant)
        }

    def _choose(self, replica: str) -> Batch | None:
        settings = self._settings
        return choose_batch(
            self._queues,
            self._shares.setdefault(replica, TenantShares()),
            self._base_model,
            without=self._blocked(),
            is_fitting=lambda one: self._engine.replica_of(AdapterId(one)) == replica,
            most_tokens=min(self._engine.capacity().batch_tokens, settings.most_batch_tokens),
            most_commands=1
            if self._suspects.of(replica).are_apart
            else settings.most_batch_commands,
        )

    def _base_model(self, queue_id: QueueId) -> str:
        known = self._models.get(queue_id)
        return "" if known is None else known.spec.base_model

    async def _run_batch(self, batch: Batch) -> None:
        for queue_id in batch.by_queue:
            self._queues.start(queue_id)
        read = await asyncio.gather(*(self._reader.read(command) for command in batch.commands))
        works = dict(zip((one.request_id for one in batch.commands), read, strict=True))
        together, side = _split(batch, works)
        waited = list(self._waiting_side)  # whoever had to wait comes first
        for tenant in sorted(side, key=lambda one: _place(waited, side[one])):
            if self._has_side_slot(tenant):
                most = max(1, int(SIDE_BATCH_S / self._side_command_s.get(tenant, 1.0)))
                begun, side[tenant] = side[tenant][:most], side[tenant][most:]
                own = {command.request_id: works[command.request_id] for command in begun}
                self._begin_side_batch(tenant, Batch(batch.base_model, begun), own)
            self._put_back(side[tenant])
        if together.commands:
            await self._run_works(together, works)

    # Side batches

    def _has_side_slot(self, tenant: TenantId) -> bool:
        """Whether a side batch of a tenant may run now."""
        return tenant not in self._side and len(self._side) < MOST_SIDE_BATCHES

    def _begin_side_batch(
        self, tenant: TenantId, batch: Batch, works: dict[RequestId, ReadWork]
    ) -> None:
        for queue_id in batch.by_queue:
            self._waiting_side.pop(queue_id, None)
        task = self._side[tenant] = asyncio.create_task(self._run_side_batch(tenant, batch, works))
        task.add_done_callback(lambda _: self._side_batch_ended(tenant))

    def _put_back(self, commands: Sequence[Command]) -> None:
        """Let commands wait until there is a side slot for them."""
        self._suspects.put_back(command.request_id for command in commands)
        for command in commands:
            # Behind an earlier command that runs, the queue is busy anyway.
            if command.seq_id == self._queues.position(command.queue_id):
                self._waiting_side.setdefault(command.queue_id, command.tenant_id)
                self._queues.finish(command.queue_id, (), time.monotonic())

    async def _run_side_batch(
        self, tenant: TenantId, batch: Batch, works: dict[RequestId, ReadWork]
    ) -> None:
        started = time.monotonic()
        try:
            await self._run_works(batch, works, is_side=True)
        except ClosedError as exc:
            self._status.note_engine_lost(exc)
        except Exception as exc:  # noqa: BLE001 - reported, as the end of the loop would be
            _log.exception("a batch with uploaded losses was lost")
            self._status.problem = f"a batch with uploaded losses was lost: {type(exc).__name__}"
        self._side_command_s[tenant] = max(0.01, time.monotonic() - started) / len(batch.commands)

    def _side_batch_ended(self, tenant: TenantId) -> None:
        del self._side[tenant]
        self._waiting_side = {
            queue_id: one
            for queue_id, one in self._waiting_side.items()
            if self._queues.knows(queue_id)
        }
        self._queues.training_ready.set()

    # Running and settling

    async def _run_works(
        self, batch: Batch, works: dict[RequestId, ReadWork], *, is_side: bool = False
    ) -> None:
        read = [works[command.request_id] for command in batch.commands]
        self._running |= {command.request_id: command for command in batch.commands}
        started, started_at = time.monotonic(), self._ledger.now()
        outcomes = await self._train(
            [work for work in read if not isinstance(work, BaseException)], is_side=is_side
        )
        work_s = (time.monotonic() - started) / max(1, len(batch.by_queue))
        for command in batch.commands:
            del self._running[command.request_id]
        batch, read = self._without_lost(batch, read, outcomes)
        self._suspects.leave(command.request_id for command in batch.commands)
        if not batch.commands:
            return
        self._settle(batch, read, outcomes, started_at)
        for queue_id, commands in batch.by_queue.items():
            known = self._models.get(queue_id)
            if known is not None and known.is_ready:
                known.note_work(len(commands), sum(one.payload_bytes for one in commands), work_s)
            self._queues.finish(queue_id, commands, time.monotonic())
            self._snapshots.consider(queue_id)
        self._status.count("batches")
        self._status.count("batched_commands", len(batch.commands))

    def _without_lost(
        self, batch: Batch, read: Sequence[ReadWork], outcomes: dict[str, TrainingOutcome]
    ) -> tuple[Batch, list[ReadWork]]:
        """Put back the commands of models that were lost with their replica.

        From the first lost command of a model on: later ones must not be settled before it.
        """
        lost: dict[QueueId, list[Command]] = {}
        kept: list[tuple[Command, ReadWork]] = []
        for command, work in zip(batch.commands, read, strict=True):
            outcome = outcomes.get(command.request_id)
            error = work if isinstance(work, BaseException) else outcome and outcome.error
            if command.queue_id in lost or isinstance(error, AdapterLostError):
                lost.setdefault(command.queue_id, []).append(command)
            else:
                kept.append((command, work))
        kept_queues = {command.queue_id for command, _ in kept}
        for queue_id, commands in lost.items():
            self._suspects.put_back(command.request_id for command in commands)
            self._lost_models.note([queue_id])
            if queue_id not in kept_queues:
                self._queues.finish(queue_id, (), time.monotonic())
        works = [work for _, work in kept]
        return Batch(batch.base_model, [command for command, _ in kept]), works

    async def _train(
        self, works: Sequence[TrainingWork], *, is_side: bool
    ) -> dict[str, TrainingOutcome]:
        if not works:
            return {}
        reserved = contextlib.nullcontext() if is_side else self._arbiter.reserve("training")
        try:
            async with reserved:
                what = f"training, {len(works)} commands from {works[0].work_id} on"
                with (
                    self._watchdog.call(what),
                    self._spans.span("batch", kind="training", commands=len(works)),
                ):
                    outcomes = await self._engine.train(works)
        except ClosedError:
            raise
        except Exception as exc:  # noqa: BLE001 - the batch fails, the loop continues
            _log.exception("a batch failed as a whole: %s", ", ".join(w.work_id for w in works))
            self._status.count("failed_batches")
            outcomes = [TrainingOutcome(work_id=work.work_id, error=exc) for work in works]
        for replica in {self._engine.replica_of(work.adapter_id) for work in works}:
            self._suspects.of(replica).note_return()
        return {outcome.work_id: outcome for outcome in outcomes}

    def _settle(
        self,
        batch: Batch,
        read: Sequence[ReadWork],
        outcomes: dict[str, TrainingOutcome],
        started_at: float,
    ) -> None:
        name = batch.commands[0].request_id  # no other batch has the same first command
        for command, work in zip(batch.commands, read, strict=True):
            if isinstance(work, BaseException):
                settlement = failure(command, work)
            else:
                settlement = self._settlement(command, work, outcomes.get(command.request_id))
            self._status.count("failed_commands" if settlement.is_failed else "done_commands")
            self._settler.add(
                msgspec.structs.replace(settlement, started_at=started_at, batch=name)
            )

    def _settlement(
        self, command: Command, work: TrainingWork, outcome: TrainingOutcome | None
    ) -> Settlement:
        if outcome is None or (outcome.error is None and outcome.result is None):
            return failure(command, RuntimeError("the engine returned no outcome"))
        if outcome.error is not None:
            if not isinstance(outcome.error, TinkerError):
                _log.error("a command failed", extra=log_fields(command), exc_info=outcome.error)
            return failure(command, outcome.error)
        uses = []
        self._note_progress(command, work, outcome)
        if isinstance(work, PassWork):
            uses = [usage(command, "training", work.tokens, self._base_model(command.queue_id))]
            self._status.count("trained_tokens", work.tokens)
        return success(command, outcome.result, uses)

    def _note_progress(
        self, command: Command, work: TrainingWork, outcome: TrainingOutcome
    ) -> None:
        runs, result = self._ledger.board.runs, outcome.result
        if isinstance(result, OptimStepResponse):
            runs.note_step(command.queue_id, result.metrics)
        elif isinstance(work, PassWork) and work.with_gradients and result is not None:
            runs.note_pass(command.queue_id, result.loss_per_token, work.tokens)


def _split(
    batch: Batch, works: dict[RequestId, ReadWork]
) -> tuple[Batch, dict[TenantId, list[Command]]]:
    """The queues that run together, and by tenant those that have an uploaded loss."""
    together: list[Command] = []
    side: dict[TenantId, list[Command]] = {}
    for commands in batch.by_queue.values():
        read = [works[command.request_id] for command in commands]
        found = [one for one in read if not isinstance(one, BaseException)]
        is_side = has_uploaded_loss(found)
        (side.setdefault(commands[0].tenant_id, []) if is_side else together).extend(commands)
    return Batch(batch.base_model, together), side


def _place(waited: Sequence[QueueId], commands: Sequence[Command]) -> int:
    """The best place of their queues among those that waited; behind all if none has."""
    places = [waited.index(one.queue_id) for one in commands if one.queue_id in waited]
    return min(places, default=len(waited))
