"""Snapshots: a model's whole state, saved behind the work so that a replay after a crash is short.

A snapshot is taken between two commands of a model. Only the engine's part holds up its line; the
files are made durable while the model goes on. It is noted in the ledger after everything before it
is settled there: a command that a snapshot holds must never be run again on top of it. Each is an
edition of its own (`checkpoints/paths.py`): no two schedulers write to one place.
"""

from __future__ import annotations

import asyncio
import logging
import time

from tinsmith.checkpoints.base import Staging
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.engines.base import AdapterId, Saved
from tinsmith.errors import CheckpointError, LedgerError, ValidationError
from tinsmith.ledger.records import LineId
from tinsmith.scheduler.models import KnownModel
from tinsmith.scheduler.parts import Parts

_log = logging.getLogger(__name__)

RETRY_S = 30.0
"""After a snapshot that could not be written, the next is tried no earlier."""


class Snapshots:
    """Takes them when they are due. For one event loop."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._tasks: dict[LineId, asyncio.Task[None]] = {}
        self._not_before: dict[LineId, float] = {}

    def consider(self, line: LineId) -> None:
        """Start a snapshot of a model if it is due and nothing of it runs."""
        known = self._parts.models.get(line)
        if known is not None and known.is_ready and self._is_due(known):
            self._try_start(line, known)

    def consider_idle(self) -> None:
        """Start a snapshot of each model that has nothing to do and would take long to replay.

        One that failed is retried here: with nothing to do, `consider` is not called.
        """
        settings = self._parts.settings
        before = time.monotonic() - settings.snapshot_idle_s
        for line, known in self._parts.models.all_ready():
            is_long = known.unsaved_work_s >= settings.snapshot_idle_work_s
            is_idle = known.worked_at < before and known.unsaved_commands
            if is_idle and (is_long or self._is_due(known)):
                self._try_start(line, known)

    def _is_due(self, known: KnownModel) -> bool:
        settings = self._parts.settings
        return (
            known.must_save
            or known.unsaved_commands >= settings.snapshot_commands
            or known.unsaved_work_s >= settings.snapshot_work_s
            or known.unsaved_bytes >= settings.snapshot_payload_bytes
        )

    def _try_start(self, line: LineId, known: KnownModel) -> None:
        is_late = time.monotonic() >= self._not_before.get(line, 0.0)
        if is_late and line not in self._tasks and not self._parts.order.is_busy(line):
            self._tasks[line] = self._start(line, known)

    def _start(self, line: LineId, known: KnownModel) -> asyncio.Task[None]:
        self._parts.order.start(line)  # before the first wait: no command may slip in between
        task = asyncio.create_task(self._take(line, known))
        task.add_done_callback(lambda ended: self._ended(line, ended))
        return task

    def _ended(self, line: LineId, task: asyncio.Task[None]) -> None:
        self._tasks.pop(line, None)
        # Not one that was cancelled: whoever ends all of them would never come to an end.
        if not self._parts.is_closing and not task.cancelled():
            self.consider(line)  # much may have been done while it was written

    async def take_all(self) -> None:
        """Take one of each model that has changed since its last; for the end of the service."""
        if not self._parts.is_recovered:
            return  # models may be halfway to where their lines are
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for line, known in self._parts.models.all_ready():
            if not self._parts.engine.has_adapter(AdapterId(line)):
                continue  # the engine was lost, and the model is made again from what is kept
            if known.unsaved_commands and not self._parts.order.is_busy(line):
                self._tasks[line] = self._start(line, known)
                await self._tasks[line]

    async def wait(self, line: LineId) -> None:
        """Return when no snapshot of a model is being written."""
        if line in self._tasks:
            await asyncio.gather(self._tasks[line], return_exceptions=True)

    async def stop(self) -> None:
        """Abandon what is being written."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, line: LineId, known: KnownModel) -> None:
        position = self._parts.order.position(line)
        path = CheckpointPath.snapshot(line, position).new_edition(self._parts.ledger.epoch)
        started, is_held = time.monotonic(), True
        try:
            staging = await asyncio.to_thread(self._parts.store.begin, path, origin=str(path))
            try:
                folder = staging.folder
                with (
                    self._parts.silence.call(f"the snapshot of {line}"),
                    self._parts.spans.span("snapshot", model=line),
                ):
                    await self._parts.engine.save_adapter(AdapterId(line), folder, Saved.SNAPSHOT)
                known.note_saved()
                self._go_on(line)
                is_held = False
                await self._keep(line, staging, path)
            finally:
                await asyncio.to_thread(staging.discard)
            self._parts.statistics.count("snapshots")
            self._parts.statistics.count("snapshot_s", time.monotonic() - started)
        except (CheckpointError, LedgerError, ValidationError, OSError) as exc:
            self._failed(line, known, exc)
        except Exception as exc:  # noqa: BLE001 - whatever it is, others go on
            _log.exception("a snapshot failed", extra={"model": line})
            self._failed(line, known, exc)
        finally:
            if is_held:
                self._go_on(line)

    def _go_on(self, line: LineId) -> None:
        self._parts.order.finish(line, (), time.monotonic())
        self._parts.wake()

    async def _keep(self, line: LineId, staging: Staging, path: CheckpointPath) -> None:
        await asyncio.to_thread(staging.commit, overwrite=True)
        await self._parts.settler.wait_passed()
        ledger = self._parts.ledger
        old = await self._parts.ask(lambda: ledger.record_snapshot(line, path.position, str(path)))
        if old is not None:
            await asyncio.to_thread(self._parts.store.delete, CheckpointPath.parse(old))

    def _failed(self, line: LineId, known: KnownModel, error: BaseException) -> None:
        _log.warning("no snapshot could be written: %s", error, extra={"model": line})
        self._parts.statistics.count("failed_snapshots")
        known.unsaved_commands = max(known.unsaved_commands, self._parts.settings.snapshot_commands)
        self._not_before[line] = time.monotonic() + RETRY_S
