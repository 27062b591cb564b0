"""Commands that run by themselves, one by one: all that are neither training nor samples.

Each runs as a task while its line waits; lines of other models go on. `model_commands.py` has what
each of them does. Whatever it raises becomes the failure that it is settled with.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from tinsmith.errors import ClosedError, TinkerError
from tinsmith.ledger.board import ACTIVE, QueueReport
from tinsmith.ledger.records import Command, LineId, Settlement
from tinsmith.scheduler.model_commands import ENDED, RELEASE, ModelCommands
from tinsmith.scheduler.models import could_not_be_made, was_let_go
from tinsmith.scheduler.order import TRAINING
from tinsmith.scheduler.parts import Parts
from tinsmith.scheduler.settling import failure, success
from tinsmith.scheduler.snapshots import Snapshots

_log = logging.getLogger(__name__)

FULL = (
    "all places for models are taken (limits.adapters); it goes on when one is let go of: a client "
    "is closed, or silent for session_timeout_s"
)


class Singles:
    """Runs them. For one event loop."""

    def __init__(self, parts: Parts, snapshots: Snapshots, commands: ModelCommands) -> None:
        self._parts = parts
        self._snapshots = snapshots
        self._commands = commands
        self._tasks: set[asyncio.Task[None]] = set()
        self._creating = 0
        self._held: set[LineId] = set()

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
        is_creation = _is_creation(command)
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
            await parts.settler.wait_room()
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
        try:
            self._parts.suspects.check(command.request_id)
            return success(command, *await self._commands.run(command))
        except ClosedError:
            raise
        except TinkerError as exc:
            error: BaseException = exc
        except Exception as exc:  # noqa: BLE001 - whatever it is, others go on
            _log.exception("command %s of tenant %s failed", command.request_id, command.tenant_id)
            error = exc
        if _is_creation(command):
            known = self._parts.models.get(command.line)
            if known is not None and not known.is_ready:
                known.trouble = could_not_be_made(command.line, error)
        return failure(command, error)


def _is_creation(command: Command) -> bool:
    """Whether it makes the model whose line it begins."""
    return command.seq_id == 0 and command.kind in ("create_model", "load_weights")
