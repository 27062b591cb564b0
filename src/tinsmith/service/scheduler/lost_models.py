"""Models that were lost with a replica of the engine: held, restored, and let go on.

When a replica is lost, the queues of its models are held at once, so that nothing of them runs.
Each model is then restored from its last snapshot and the commands after it, as all are after a
restart (`restore.py`), on the replica's successor or on another one, while all other models
continue. Commands that were running on the replica were not settled, and run again after that.

A command that did no harm before may crash the replica when it is repeated, and take down whatever
else is there. So restorations are suspects like commands (`suspects.py`), and a model whose
restoration is to blame is given up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from tinsmith.engine.base import ReplicaChange
from tinsmith.errors import AdapterLostError, ClosedError, InternalServerError, NoReplicaError
from tinsmith.service.ledger.board import ACTIVE, Board, QueueReport
from tinsmith.service.ledger.records import QueueId, RequestId
from tinsmith.service.scheduler.command_queues import CommandQueues
from tinsmith.service.scheduler.settling import Settler
from tinsmith.service.scheduler.status import SchedulerStatus
from tinsmith.service.scheduler.suspects import Suspects

_log = logging.getLogger(__name__)

RETRY_S = 1.0
"""How long to wait for a replica that can take a model, unless one says earlier that it can."""

Restore = Callable[[QueueId], Awaitable[None]]
GiveUp = Callable[[QueueId, Exception], None]


class LostModels:
    """Restores lost models. For one event loop.

    Args:
        board: Where clients see why a model waits.
        queues: Which are held.
        settler: What it has must be settled before a model is restored.
        suspects: Which commands were in a replica that was lost.
        status: Counts losses.
        replica_of: Gives the name of the replica that holds a model, or lost it.
    """

    def __init__(
        self,
        board: Board,
        *,
        queues: CommandQueues,
        settler: Settler,
        suspects: Suspects,
        status: SchedulerStatus,
        replica_of: Callable[[QueueId], str],
    ) -> None:
        self._board = board
        self._queues = queues
        self._settler = settler
        self._suspects = suspects
        self._status = status
        self._replica_of = replica_of
        self._restore: Restore | None = None
        self._give_up: GiveUp = lambda *_: None
        self._tasks: dict[QueueId, asyncio.Task[None]] = {}
        self._again: set[QueueId] = set()
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], object]] = []

    def begin(
        self, restore: Restore, give_up: GiveUp, on_change: Iterable[Callable[[], object]]
    ) -> None:
        """Restore models from now on.

        Args:
            restore: Restores one model, or keeps with it why that cannot be done.
            give_up: Keeps with a model why its commands fail.
            on_change: Called whenever a replica was lost, can be used, or has room again.
        """
        self._restore, self._give_up = restore, give_up
        self._listeners += on_change

    def replica_changed(self, change: ReplicaChange) -> None:
        """Take note of a replica that was lost, or can be used again."""
        suspects = self._suspects.of(change.replica)
        if change.lost is None:
            suspects.note_opened()
        else:
            self._status.count("lost_replicas")
            _log.warning(
                "replica %s was lost with %d models: %s",
                change.replica,
                len(change.adapters),
                change.lost,
            )
            to_blame = suspects.note_loss(change.lost)
            if to_blame is not None:
                _log.error(
                    "a command fails because the replica crashed each time it ran",
                    extra={"command": to_blame},
                )
            self.note(QueueId(one) for one in change.adapters)
        self._changed.set()
        for tell in self._listeners:
            tell()

    def note(self, queue_ids: Iterable[QueueId]) -> None:
        """Hold the queues of lost models, and restore each."""
        for queue_id in queue_ids:
            self._queues.hold(queue_id)
            if queue_id in self._tasks:
                self._again.add(queue_id)
            elif self._restore is not None and not self._status.is_closing:
                task = asyncio.create_task(self._bring_back(queue_id))
                self._tasks[queue_id] = task

    async def stop(self) -> None:
        """Abandon what is being restored; the next scheduler restores it."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait(self) -> None:
        """Return when no model is being restored."""
        while self._tasks:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _bring_back(self, queue_id: QueueId) -> None:
        try:
            await self._queues.wait_idle(queue_id)
            if not self._queues.knows(queue_id):
                return
            self._queues.start(queue_id)
            try:
                await self._restore_until_done(queue_id)
            finally:
                self._queues.finish(queue_id, (), time.monotonic())
                self._queues.release(queue_id, time.monotonic())
        except ClosedError as exc:
            self._status.note_engine_lost(exc)
        finally:
            del self._tasks[queue_id]

    async def _restore_until_done(self, queue_id: QueueId) -> None:
        started = time.monotonic()
        reason = "the model is being restored: the replica that held it was lost"
        self._board.set_queue_state(QueueReport("paused_capacity", reason), queue_id)
        try:
            while not await self._is_restored(queue_id):
                pass
        finally:
            self._board.set_queue_state(ACTIVE, queue_id)
        took_s = time.monotonic() - started
        self._status.count("restored_models")
        self._status.count("restore_s", took_s)
        _log.info("restored model %s in %.2f s", queue_id, took_s)

    async def _is_restored(self, queue_id: QueueId) -> bool:
        """Try once to restore a model; False if that has to be repeated."""
        assert self._restore is not None
        self._changed.clear()
        self._again.discard(queue_id)
        # Outcomes of commands that ran before the loss are part of the model's state.
        await self._settler.wait_passed()
        restoration = RequestId(f"the restoration of {queue_id}")
        try:
            self._suspects.check(restoration)
            while (suspects := self._suspects.of(self._replica_of(queue_id))).must_wait:
                await suspects.wait_alone()
            suspects.enter([restoration])
            await self._restore(queue_id)
        except AdapterLostError as exc:
            _log.info("model %s is not restored yet: %s", queue_id, exc)
            self._suspects.put_back([restoration])
            return False
        except NoReplicaError as exc:
            _log.info("model %s is not restored yet: %s", queue_id, exc)
            self._suspects.put_back([restoration])
            await self._wait_change()
            return False
        except InternalServerError as exc:
            self._give_up(queue_id, exc)
        self._suspects.leave([restoration])
        return queue_id not in self._again

    async def _wait_change(self) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), RETRY_S)
        except TimeoutError:
            return
