"""Runs the commands of models that are neither training nor samples: creations, loads, saves.

Each runs as a task while its queue waits; the queues of other models continue. `model_commands.py`
has what each of them does. Whatever it raises becomes the failure that the command is settled with.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Set

import msgspec

from tinsmith.engine.base import AdapterId, Engine
from tinsmith.errors import ClosedError, NoReplicaError, ReplicaError, TinkerError
from tinsmith.service.ledger.board import ACTIVE, QueueReport
from tinsmith.service.ledger.fenced import FencedLedger
from tinsmith.service.ledger.records import Command, QueueId, Settlement
from tinsmith.service.scheduler.command_queues import TRAINING, CommandQueues
from tinsmith.service.scheduler.known_models import KnownModels, creation_failed, model_unloaded
from tinsmith.service.scheduler.lost_models import LostModels
from tinsmith.service.scheduler.model_commands import ENDED, RELEASE, ModelCommands
from tinsmith.service.scheduler.settling import Settler, failure, success
from tinsmith.service.scheduler.snapshots import Snapshots
from tinsmith.service.scheduler.status import SchedulerStatus
from tinsmith.service.scheduler.suspects import Suspects
from tinsmith.service.scheduler.work_reading import log_fields

_log = logging.getLogger(__name__)

FULL = (
    "no more models fit (limits.adapters); waiting until one is unloaded: when a client closes, or "
    "is silent for session_timeout_s"
)


class ModelLoop:
    """Runs the commands at the heads of queues that are not batched. For one event loop."""

    def __init__(
        self,
        ledger: FencedLedger,
        engine: Engine,
        commands: ModelCommands,
        *,
        most_running: int,
        waiting: Set[QueueId],
        queues: CommandQueues,
        models: KnownModels,
        snapshots: Snapshots,
        settler: Settler,
        suspects: Suspects,
        lost_models: LostModels,
        status: SchedulerStatus,
    ) -> None:
        self._ledger = ledger
        self._engine = engine
        self._commands = commands
        self._most_running = most_running
        self._waiting = waiting
        self._queues = queues
        self._models = models
        self._snapshots = snapshots
        self._settler = settler
        self._suspects = suspects
        self._lost_models = lost_models
        self._status = status
        self._tasks: dict[asyncio.Task[None], QueueId] = {}
        self._creating = 0
        self._paused: set[QueueId] = set()
        self._held: set[QueueId] = set()
        """Queues whose next command found no replica with room."""

    async def run(self) -> None:
        """Start what may run, until cancelled or the scheduler closes."""
        while not self._status.is_closing:
            self._queues.other_ready.clear()
            for queue_id in self._queues.ready():
                self._consider(queue_id)
            await self._queues.other_ready.wait()

    async def wait(self) -> None:
        """Return when nothing is running."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Abandon what is running. It was not settled and will run again."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def retry_held(self) -> None:
        """Try the commands again that found no replica with room."""
        held, self._held = self._held, set()
        for queue_id in held:
            self._ledger.board.set_queue_state(ACTIVE, queue_id)
            self._queues.release(queue_id, time.monotonic())

    def _hold(self, command: Command, error: NoReplicaError) -> None:
        """Let a command wait until a replica has room for its model."""
        queue_id = command.queue_id
        self._held.add(queue_id)
        self._queues.hold(queue_id)
        reason = f"waiting for a replica: {error.args[0]}"
        self._ledger.board.set_queue_state(QueueReport("paused_capacity", reason), queue_id)

    def _consider(self, queue_id: QueueId) -> None:
        command = self._queues.head(queue_id)
        # Saves that wait for the store take no one's place: creations need no store.
        running = sum(queue not in self._waiting for queue in self._tasks.values())
        if command.kind in TRAINING or running >= self._most_running:
            return
        is_creation = _is_creation(command)
        if is_creation and not self._has_place():
            if queue_id not in self._paused:
                self._paused.add(queue_id)
                self._ledger.board.set_queue_state(QueueReport("paused_capacity", FULL), queue_id)
            return
        if queue_id in self._paused:
            self._paused.discard(queue_id)
            self._ledger.board.set_queue_state(ACTIVE, queue_id)
        self._queues.start(queue_id)
        self._creating += is_creation
        task = asyncio.create_task(self._run(command, is_creation=is_creation))
        self._tasks[task] = queue_id
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self._queues.other_ready.set()  # there is room for another task

    def _has_place(self) -> bool:
        capacity = self._engine.capacity()
        return capacity.adapters + self._creating < capacity.most_adapters

    async def _run(self, command: Command, *, is_creation: bool) -> None:
        try:
            await self._settler.wait_room()
            suspects = self._suspects.of(self._engine.replica_of(AdapterId(command.queue_id)))
            await suspects.wait_alone()
            if self._status.is_closing:
                return  # the engine may be gone, and nothing more may enter it
            suspects.enter([command.request_id])
            started_at = self._ledger.now()
            settlement = await self._settlement(command)
        except ClosedError as exc:
            self._status.note_engine_lost(exc)
            return
        except ReplicaError as exc:
            # It has not run, or what it did is lost: it runs again.
            self._suspects.put_back([command.request_id])
            if isinstance(exc, NoReplicaError):
                self._hold(command, exc)
            else:
                self._lost_models.note([command.queue_id])
            self._queues.finish(command.queue_id, (), time.monotonic())
            return
        finally:
            self._creating -= is_creation
        self._suspects.leave([command.request_id])
        self._settler.add(msgspec.structs.replace(settlement, started_at=started_at))
        self._status.count("failed_commands" if settlement.is_failed else "done_commands")
        self._queues.finish(command.queue_id, [command], time.monotonic())
        if command.kind == RELEASE and not settlement.is_failed:
            self._forget(command.queue_id)
        else:
            self._snapshots.consider(command.queue_id)

    def _forget(self, queue_id: QueueId) -> None:
        """Close the queue of a model that was released; commands behind that fail."""
        error = model_unloaded(queue_id, ENDED)
        late = self._queues.waiting(queue_id)
        self._settler.add(*(failure(one, error) for one in late))
        self._queues.forget(queue_id)
        self._models.forget(queue_id)

    async def _settlement(self, command: Command) -> Settlement:
        try:
            self._suspects.check(command.request_id)
            return success(command, *await self._commands.run(command))
        except (ClosedError, ReplicaError):
            raise
        except TinkerError as exc:
            error: BaseException = exc
        except Exception as exc:  # noqa: BLE001 - of this command and of no other
            _log.exception("a command failed", extra=log_fields(command))
            error = exc
        if _is_creation(command):
            known = self._models.get(command.queue_id)
            if known is not None and not known.is_ready:
                known.error = creation_failed(command.queue_id, error)
        return failure(command, error)


def _is_creation(command: Command) -> bool:
    """Whether it creates the model whose queue it begins."""
    return command.seq_id == 0 and command.kind in ("create_model", "load_weights")
