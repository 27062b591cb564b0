"""Calls of the ledger that wait out its troubles: a full disk, a database that is gone.

What a scheduler has computed must not be lost because it cannot be written down now. So a call that
the ledger refuses as unavailable is made again, until it succeeds or the scheduler is closed; every
call of the ledger may be made twice. While one waits, the board says so.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tinsmith.errors import LedgerUnavailableError, without_frames
from tinsmith.ledger.board import ACTIVE, Board, QueueReport

_log = logging.getLogger(__name__)

FIRST_WAIT_S = 0.02
LONGEST_WAIT_S = 1.0

T = TypeVar("T")
Sleep = Callable[[float], Awaitable[None]]


class PatientLedger:
    """Makes calls until they succeed. For one event loop."""

    def __init__(self, board: Board, *, sleep: Sleep = asyncio.sleep) -> None:
        self._board = board
        self._sleep = sleep
        self._troubled = 0
        self._error: LedgerUnavailableError | None = None
        self.outages = 0
        """How often the ledger was found unavailable by somebody who had found it well before."""

    @property
    def problem(self) -> str | None:
        """What is wrong with the ledger, while a call waits for it to come back."""
        return f"the ledger is unavailable: {self._error}" if self._troubled else None

    async def call(self, make: Callable[[], Awaitable[T]]) -> T:
        """What the call gives, in the end."""
        try:
            return await make()
        except LedgerUnavailableError as exc:
            self._begin_trouble(without_frames(exc))
        try:
            return await self._insist(make)
        finally:
            self._end_trouble()

    async def _insist(self, make: Callable[[], Awaitable[T]]) -> T:
        wait_s = FIRST_WAIT_S
        while True:
            # A little apart from each other: all of them failed at the same moment.
            await self._sleep(wait_s * random.uniform(0.5, 1.0))  # noqa: S311 - not for secrets
            wait_s = min(LONGEST_WAIT_S, 2 * wait_s)
            try:
                return await make()
            except LedgerUnavailableError as exc:
                self._error = without_frames(exc)
                _log.debug("the ledger is still unavailable: %s", exc)

    def _begin_trouble(self, error: LedgerUnavailableError) -> None:
        self._troubled += 1
        self._error = error
        if self._troubled == 1:
            self.outages += 1
            _log.warning("the ledger is unavailable, results are held until it is back: %s", error)
            why = error.reason or "it does not answer"
            told = f"the service cannot use its ledger: {why}"
            self._board.hold(QueueReport("paused_capacity", told))

    def _end_trouble(self) -> None:
        self._troubled -= 1
        if not self._troubled:
            _log.info("the ledger is available again")
            self._board.hold(ACTIVE)
