"""A scheduler at work on an engine that may be lost; both begin anew when it is.

An engine in a process of its own is lost when that process crashes or is killed. Nothing that was
accepted goes with it: what was under way is pending again, and models come back from the ledger and
their snapshots, as after a restart of the service. A command that kills the engine is found
(`scheduler/suspects.py`) and fails. An engine that is lost again and again without one is given up.
An engine that ends with whatever it is given is opened anew after pauses that grow: to load a model
over and over heats the machine and helps nobody, and its operator may mend what ails it meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

from tinsmith.engines.base import Engine
from tinsmith.errors import EngineLostError, TinkerError
from tinsmith.ledger.board import ACTIVE, Board, QueueReport, SchedulerReport
from tinsmith.scheduler.loop import Scheduler
from tinsmith.scheduler.suspects import Suspects

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
    """

    def __init__(
        self,
        engine: Engine,
        board: Board,
        make: Callable[[Suspects], Scheduler],
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._engine = engine
        self._board = board
        self._pause = pause
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
            TinkerError: The recovery failed, or the engine cannot be opened anew.
        """
        try:
            await self._scheduler.open()
            lost = await self._engine.wait_lost()
        except EngineLostError as exc:
            lost = exc
        while True:
            self._check(lost)
            try:
                await self._begin_anew(lost)
                lost = await self._engine.wait_lost()
            except EngineLostError as exc:
                lost = exc

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
        problem = f"{what}: {lost}"
        _log.log(logging.ERROR if pause_s else logging.WARNING, "%s", problem)
        # Shielded: a close of the service meanwhile must find it ended, not halfway.
        self._ending = asyncio.create_task(self._scheduler.close(SETTLE_S))
        await asyncio.shield(self._ending)
        self._board.scheduler = SchedulerReport(problem=problem)
        self._board.hold(QueueReport("paused_capacity", what))
        try:
            await self._engine.close()
            await self._pause(pause_s)
            await self._engine.open()
            self._scheduler = self._make(self._suspects)
            await self._scheduler.open()
            self._suspects.note_opened()
        finally:
            self._board.hold(ACTIVE)
        _log.info("the engine works again")


def pause_after(losses_in_a_row: int) -> float:
    """How long to leave an engine closed that was lost so often with nothing done, in seconds."""
    beyond = losses_in_a_row - LOSSES_AT_ONCE
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(beyond - 1, 32)) if beyond > 0 else 0.0
