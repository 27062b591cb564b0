"""A scheduler at work on an engine and under a lease; when either is lost, it begins anew.

An engine in a process of its own is lost when that process crashes or is killed. Nothing that was
accepted goes with it: what was under way is pending again, and models come back from the ledger and
their snapshots, as after a restart of the service. A command that kills the engine is found
(`scheduler/suspects.py`) and fails. An engine that is lost again and again without one is given up.
An engine that ends with whatever it is given is opened anew after pauses that grow: to load a model
over and over heats the machine and helps nobody, and its operator may mend what ails it meanwhile.

A lease is lost when it cannot be renewed, or when another server has taken it over. The scheduler
then stops at once: nothing that it still does could be written. It begins anew, from the ledger,
when the lease is its own again; if another server holds it, this one ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

from tinsmith.engines.base import Engine
from tinsmith.errors import EngineLostError, LeaseLostError, TinkerError
from tinsmith.ledger.board import ACTIVE, Board, QueueReport, SchedulerReport
from tinsmith.scheduler.loop import Scheduler
from tinsmith.scheduler.suspects import Suspects
from tinsmith.serve.leasing import Leasing

_log = logging.getLogger(__name__)

MOST_LOSSES = 3
"""How often an engine may be lost within `LOSSES_S` and is opened anew."""
LOSSES_S = 600.0
LOSSES_AT_ONCE = 3
"""How often an engine may be lost in a row, with nothing trained or sampled, and is opened anew at
once. So often is it lost to the first command that ends it."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0
SETTLE_S = 10.0
"""How long what the engine has done before may take to be settled."""


class Working:
    """See the top of the module. For one event loop.

    Args:
        engine: It is open.
        board: Where it is said how things are.
        make: Makes a scheduler.
        pause: Waits for so many seconds.
        leasing: Holds the lease under which schedulers are made, if there is one.
    """

    def __init__(
        self,
        engine: Engine,
        board: Board,
        make: Callable[[Suspects], Scheduler],
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
        leasing: Leasing | None = None,
    ) -> None:
        self._engine = engine
        self._board = board
        self._pause = pause
        self._leasing = leasing
        self._suspects = Suspects()
        self._make = make
        self._scheduler = make(self._suspects)
        self._ending: asyncio.Task[None] | None = None
        """Of a scheduler whose engine was lost."""
        self._lost_at: deque[float] = deque(maxlen=MOST_LOSSES + 1)
        self.losses = 0
        """How often the engine was lost so far."""

    async def run(self) -> None:
        """Recover and work until cancelled.

        Raises:
            EngineLostError: The engine was lost too often.
            LeaseHeldError: The lease was lost to another server.
            TinkerError: The recovery failed, or the engine cannot be opened anew.
        """
        lost = await self._until_lost(self._scheduler.open)
        while True:
            if isinstance(lost, LeaseLostError):
                await self._take_lease_again(lost)
                lost = await self._until_lost(self._open)
            else:
                self._check(lost)
                lost = await self._until_lost(partial(self._begin_anew, lost))

    async def _until_lost(self, begin: Callable[[], Awaitable[None]]) -> TinkerError:
        """Begin, and return why the engine or the lease was lost, at whatever point."""
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
        """Let what runs end; see `Scheduler.close`. `run` was cancelled before."""
        if self._ending is not None:
            await self._ending
        await self._scheduler.close(drain_s)

    def _check(self, lost: TinkerError) -> None:
        self.losses += 1
        to_blame = self._suspects.note_loss(str(lost.args[0]))
        if to_blame is not None:
            _log.error(
                "a command is given up, because it ends the engine each time",
                extra={"command": to_blame},
            )
            self._lost_at.clear()
            return
        self._lost_at.append(time.monotonic())
        is_often = len(self._lost_at) > MOST_LOSSES
        if is_often and time.monotonic() - self._lost_at[0] < LOSSES_S:
            self._board.scheduler = SchedulerReport(problem=str(lost))
            raise lost

    async def _begin_anew(self, lost: TinkerError) -> None:
        losses = self._suspects.losses_in_a_row
        pause_s = pause_after(losses)
        what = "the engine is being started anew"
        if pause_s:
            what = (
                f"the engine has ended {losses} times in a row with nothing trained or sampled, "
                f"and is started anew after {pause_s:g} s"
            )
        _log.log(logging.ERROR if pause_s else logging.WARNING, "%s: %s", what, lost)
        await self._end(what, lost, SETTLE_S)
        await self._pause(pause_s)
        await self._open()
        self._suspects.note_opened()
        _log.info("the engine works again")

    async def _take_lease_again(self, lost: LeaseLostError) -> None:
        assert self._leasing is not None
        what = "the scheduler has stopped, and waits for its lease on the ledger"
        _log.warning("%s: %s", what, lost)
        # Nothing is waited for to be settled: all of it would be refused.
        await self._end(what, lost, 0.0)
        await self._leasing.acquire_again()
        _log.info("the scheduler begins anew, with epoch %d", self._leasing.lease.epoch)

    async def _end(self, what: str, lost: TinkerError, drain_s: float) -> None:
        """End the scheduler and close the engine."""
        if self._ending is not None:
            await asyncio.shield(self._ending)
        # Shielded: a close of the service meanwhile must find it ended, not halfway.
        self._ending = asyncio.create_task(self._scheduler.close(drain_s))
        await asyncio.shield(self._ending)
        self._board.scheduler = SchedulerReport(problem=f"{what}: {lost}")
        self._board.hold(QueueReport("paused_capacity", what))
        await self._engine.close()

    async def _open(self) -> None:
        """Open the engine, and a new scheduler on it."""
        try:
            await self._engine.open()
            self._scheduler = self._make(self._suspects)
            await self._scheduler.open()
        finally:
            self._board.hold(ACTIVE)


def pause_after(losses_in_a_row: int) -> float:
    """How long to leave an engine closed that was lost so often with nothing done, in seconds."""
    beyond = losses_in_a_row - LOSSES_AT_ONCE
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(beyond - 1, 32)) if beyond > 0 else 0.0
