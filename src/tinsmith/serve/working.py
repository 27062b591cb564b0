"""A scheduler at work on an engine that may be lost; both begin anew when it is.

An engine in a process of its own is lost when that process crashes or is killed. Nothing that was
accepted goes with it: what was under way is pending again, and models come back from the ledger and
their snapshots, as after a restart of the service. A command that kills the engine is found
(`scheduler/suspects.py`) and fails. An engine that is lost again and again without one is given up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from tinsmith.engines.base import Engine
from tinsmith.errors import EngineLostError, TinkerError
from tinsmith.ledger.board import ACTIVE, Board, QueueReport, SchedulerReport
from tinsmith.scheduler.loop import Scheduler
from tinsmith.scheduler.suspects import Suspects

_log = logging.getLogger(__name__)

MOST_LOSSES = 3
"""How often an engine may be lost within `LOSSES_S` and is opened anew."""
LOSSES_S = 600.0
SETTLE_S = 10.0
"""How long what the engine has done before may take to be settled."""


class Working:
    """See the top of the module. For one event loop."""

    def __init__(self, engine: Engine, board: Board, make: Callable[[Suspects], Scheduler]) -> None:
        self._engine = engine
        self._board = board
        self._suspects = Suspects()
        self._make = make
        self._scheduler = make(self._suspects)
        self._ending: asyncio.Task[None] | None = None
        """Of a scheduler whose engine was lost."""
        self._lost_at: deque[float] = deque(maxlen=MOST_LOSSES + 1)

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
        to_blame = self._suspects.note_loss()
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
        problem = f"the engine is being started anew: {lost}"
        _log.warning("%s", problem)
        # Shielded: a close of the service meanwhile must find it ended, not halfway.
        self._ending = asyncio.create_task(self._scheduler.close(SETTLE_S))
        await asyncio.shield(self._ending)
        self._board.scheduler = SchedulerReport(problem=problem)
        self._board.hold(QueueReport("paused_capacity", "the engine is being started anew"))
        try:
            await self._engine.close()
            await self._engine.open()
            self._scheduler = self._make(self._suspects)
            await self._scheduler.open()
        finally:
            self._board.hold(ACTIVE)
        _log.info("the engine works again")
