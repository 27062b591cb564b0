"""The scheduler's state and counters, its limit on claims, and retries during outages.

`OutageRetry` repeats calls of the ledger while it is unavailable: a full disk, a database that is
gone. Results that were computed must not be lost because they cannot be written now. A call that
the ledger refuses as unavailable is repeated until it succeeds or the scheduler is closed.
Meanwhile the board says that all queues are paused.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tinsmith.errors import LedgerUnavailableError, without_frames
from tinsmith.service.ledger.board import ACTIVE, Board, QueueReport


class SchedulerStatus:
    """The state of one scheduler. For one event loop.

    Attributes:
        problem: What keeps the scheduler from working, unless it is the ledger or a slow engine.
        recovery: How far recovery is, while it runs.
        is_recovered: Whether every model is in the state that its queue says.
        began_at: When the scheduler started, by the ledger's clock. Older commands were accepted
            before that.
        is_closing: Whether the loops are to end.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        self.recovery: str | None = None
        self.is_recovered = False
        self.began_at = 0.0
        self.is_closing = False
        self._counts: Counter[str] = Counter()

    def note_engine_lost(self, error: BaseException) -> None:
        """Commands that ran are not to blame: they stay claimed, and run after the next start."""
        self.problem = f"the engine is gone: {error}"

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter of the metrics."""
        self._counts[name] += amount  # type: ignore[assignment]  # seconds are counted as well

    def counts(self) -> dict[str, float]:
        """All counters by name."""
        return {name: float(amount) for name, amount in self._counts.items()}


class InFlight:
    """Commands that are claimed and have not ended: the limit of how many more may be claimed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._ended = asyncio.Event()
        self.count = 0

    def add(self, commands: int) -> None:
        """Count commands that were claimed."""
        self.count += commands

    def finish(self, commands: int = 1) -> None:
        """Count commands that have ended, and let the claimer take others."""
        self.count -= commands
        self._ended.set()

    async def wait_room(self) -> int:
        """Return how many more commands may be claimed, as soon as one may."""
        while self.count >= self._most:
            self._ended.clear()
            await self._ended.wait()
        return self._most - self.count


_log = logging.getLogger(__name__)

FIRST_WAIT_S = 0.02
LONGEST_WAIT_S = 1.0

T = TypeVar("T")
Sleep = Callable[[float], Awaitable[None]]


class OutageRetry:
    """A `Retry` for a `FencedLedger`, which backs off between attempts. For one event loop."""

    def __init__(self, board: Board, *, sleep: Sleep = asyncio.sleep) -> None:
        self._board = board
        self._sleep = sleep
        self._waiting = 0
        self._error: LedgerUnavailableError | None = None
        self.outages = 0
        """How often the ledger became unavailable."""

    @property
    def problem(self) -> str | None:
        """What is wrong with the ledger, while a call is being repeated."""
        return f"the ledger is unavailable: {self._error}" if self._waiting else None

    async def __call__(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call until the ledger answers."""
        try:
            return await call()
        except LedgerUnavailableError as exc:
            self._begin_outage(without_frames(exc))
        try:
            return await self._repeat(call)
        finally:
            self._end_outage()

    async def _repeat(self, call: Callable[[], Awaitable[T]]) -> T:
        wait_s = FIRST_WAIT_S
        while True:
            # Jitter, because all waiting calls failed at the same moment.
            await self._sleep(wait_s * random.uniform(0.5, 1.0))  # noqa: S311 - not for secrets
            wait_s = min(LONGEST_WAIT_S, 2 * wait_s)
            try:
                return await call()
            except LedgerUnavailableError as exc:
                self._error = without_frames(exc)
                _log.debug("the ledger is still unavailable: %s", exc)

    def _begin_outage(self, error: LedgerUnavailableError) -> None:
        self._waiting += 1
        self._error = error
        if self._waiting == 1:
            self.outages += 1
            _log.warning(
                "the ledger is unavailable; finished results are kept in memory until it is back: "
                "%s",
                error,
            )
            why = error.reason or "it does not answer"
            reason = f"the service cannot use its ledger: {why}"
            self._board.set_queue_state(QueueReport("paused_capacity", reason))

    def _end_outage(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            _log.info("the ledger is available again")
            self._board.set_queue_state(ACTIVE)
