"""Runs the scheduler, and restarts it when the engine or the lease is lost.

An engine in a process of its own is lost when that process crashes or is killed. No accepted
command is lost with it: running ones are pending again, and models are restored from the ledger and
their snapshots, as after a restart of the service. A command that kills the engine is identified
(`scheduler/suspects.py`) and fails. An engine that is lost repeatedly without such a command is
given up. Restarts of an engine that crashes whatever it runs back off: loading a model over and
over helps nobody, and the operator may fix the cause meanwhile.

A lease is lost when it cannot be renewed, or when another server has taken it over. The scheduler
then stops at once, because nothing that it does could be written any more. It restarts from the
ledger when it holds the lease again. If another server holds it, a standby loads its engine anew
and waits for its turn; any other server ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

from tinsmith.engine.base import Engine
from tinsmith.engine.fleet.replica import pause_after
from tinsmith.errors import EngineLostError, LeaseLostError, TinkerError
from tinsmith.service.ledger.board import ACTIVE, Board, QueueReport, SchedulerReport
from tinsmith.service.run.lease_keeper import LeaseKeeper
from tinsmith.service.scheduler.scheduler import Scheduler
from tinsmith.service.scheduler.suspects import Suspects

_log = logging.getLogger(__name__)

MOST_LOSSES = 3
"""How often an engine may be lost within `LOSSES_S` before it is given up."""
LOSSES_S = 600.0
SETTLE_S = 10.0
"""How long the settlement of finished work may take."""


class SchedulerSupervisor:
    """Keeps a scheduler running. For one event loop.

    Args:
        engine: The engine; it is open.
        board: Where problems are published.
        make: Makes a scheduler.
        pause: Sleeps for so many seconds.
        leasing: Holds the lease that schedulers write under, if there is one.
        prepare: Called under each lease before its scheduler is opened.
    """

    def __init__(
        self,
        engine: Engine,
        board: Board,
        make: Callable[[Suspects], Scheduler],
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
        leasing: LeaseKeeper | None = None,
        prepare: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._prepare = prepare
        self._is_engine_open = True
        self._engine = engine
        self._board = board
        self._pause = pause
        self._leasing = leasing
        self._suspects = Suspects()
        self._make = make
        self._scheduler = make(self._suspects)
        self._ending: asyncio.Task[None] | None = None
        """The end of a scheduler whose engine or lease was lost."""
        self._lost_at: deque[float] = deque(maxlen=MOST_LOSSES + 1)
        self.losses = 0
        """How often the engine has been lost."""

    async def run(self) -> None:
        """Recover and run commands until cancelled.

        Raises:
            EngineLostError: The engine was lost too often.
            LeaseHeldError: The lease was lost to another server.
            TinkerError: Recovery failed, or the engine cannot be opened again.
        """
        lost = await self._until_lost(self._open_first)
        while True:
            if isinstance(lost, LeaseLostError):
                await self._reacquire_lease(lost)
                lost = await self._until_lost(self._open)
            else:
                self._check(lost)
                lost = await self._until_lost(partial(self._restart, lost))

    async def _until_lost(self, begin: Callable[[], Awaitable[None]]) -> TinkerError:
        """Begin, and return why the engine or the lease was lost, whenever that happens."""
        tasks = [asyncio.create_task(self._begun(begin))]
        if self._leasing is not None:
            tasks.insert(0, asyncio.create_task(self._leasing.wait_lost()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(task for task in tasks if task.done()).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _begun(self, begin: Callable[[], Awaitable[None]]) -> TinkerError:
        try:
            await begin()
            return await self._engine.wait_lost()
        except (EngineLostError, LeaseLostError) as exc:
            return exc

    async def close(self, drain_s: float) -> None:
        """Finish running work within `drain_s` and close the scheduler. Cancel `run` before."""
        if self._ending is not None:
            await self._ending
        await self._scheduler.close(drain_s)

    def _check(self, lost: TinkerError) -> None:
        self.losses += 1
        to_blame = self._suspects.note_loss(str(lost.args[0]))
        if to_blame is not None:
            _log.error(
                "a command fails because the engine crashed each time it ran",
                extra={"command": to_blame},
            )
            self._lost_at.clear()
            return
        self._lost_at.append(time.monotonic())
        is_often = len(self._lost_at) > MOST_LOSSES
        if is_often and time.monotonic() - self._lost_at[0] < LOSSES_S:
            self._board.publish_report(SchedulerReport(problem=str(lost)))
            raise lost

    async def _restart(self, lost: TinkerError) -> None:
        losses = self._suspects.losses_in_a_row
        pause_s = pause_after(losses)
        what = "restarting the engine"
        if pause_s:
            what = (
                f"the engine was lost {losses} times in a row with nothing trained or sampled; "
                f"restarting it in {pause_s:g} s"
            )
        _log.log(logging.ERROR if pause_s else logging.WARNING, "%s: %s", what, lost)
        await self._end(what, lost, SETTLE_S)
        await self._pause(pause_s)
        await self._open()
        self._suspects.note_opened()
        _log.info("the engine is running again")

    async def _reacquire_lease(self, lost: LeaseLostError) -> None:
        assert self._leasing is not None
        what = "the scheduler has stopped and is waiting for its lease on the ledger"
        _log.warning("%s: %s", what, lost)
        # No drain: without the lease every settlement would be refused.
        await self._end(what, lost, 0.0)
        if self._leasing.is_standby:
            await self._open_engine()  # so that it takes over with its models loaded
        await self._leasing.acquire_again()
        _log.info("the scheduler restarts with epoch %d", self._leasing.lease.epoch)

    async def _end(self, what: str, lost: TinkerError, drain_s: float) -> None:
        """Close the scheduler and the engine."""
        if self._ending is not None:
            await asyncio.shield(self._ending)
        # Shielded: if the service is closed meanwhile, the scheduler must not be left half closed.
        self._ending = asyncio.create_task(self._scheduler.close(drain_s))
        await asyncio.shield(self._ending)
        self._board.publish_report(SchedulerReport(problem=f"{what}: {lost}"))
        self._board.set_queue_state(QueueReport("paused_capacity", what))
        await self._engine.close()
        self._is_engine_open = False

    async def _open_engine(self) -> None:
        if not self._is_engine_open:
            await self._engine.open()
            self._is_engine_open = True

    async def _open_first(self) -> None:
        await self._note_lease()
        await self._scheduler.open()

    async def _note_lease(self) -> None:
        if self._prepare is not None:
            await self._prepare()

    async def _open(self) -> None:
        """Open the engine and a new scheduler."""
        try:
            await self._open_engine()
            await self._note_lease()
            self._scheduler = self._make(self._suspects)
            await self._scheduler.open()
        finally:
            self._board.set_queue_state(ACTIVE)
