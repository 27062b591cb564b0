"""Writes outcomes to the ledger: in order, many at a time, and never losing one.

The order matters. A model's next command may run before the previous one is settled on disk; but a
crash must never find the later one settled and the earlier one not, or a replay would run them in
the wrong order. So there is one queue for all, and each settlement takes everything that is in it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from tinsmith.errors import CheckpointError, RequestErrorCategory
from tinsmith.service.ledger.fenced import FencedLedger
from tinsmith.service.ledger.records import Command, Settlement, UsageKey, Use
from tinsmith.service.scheduler.status import InFlight
from tinsmith.types.record import Frozen, Record
from tinsmith.wire.failures import failed_from_error
from tinsmith.wire.stored import stored_failure, stored_result

_log = logging.getLogger(__name__)

LARGEST_SETTLEMENT = 512
LEASE_LOOK_S = 0.05
NOTHING = b"J{}"
"""The stored result of a command that returns nothing."""


def success(
    command: Command, result: Record | Frozen | None, uses: Sequence[Use] = ()
) -> Settlement:
    """The settlement of a command that succeeded."""
    payload = NOTHING if result is None else stored_result(command.kind, result)
    return Settlement(request_id=command.request_id, payload=payload, uses=tuple(uses))


def failure(command: Command, error: BaseException) -> Settlement:
    """The settlement of a command that failed."""
    failed = failed_from_error(error)
    if isinstance(error, CheckpointError) and failed.category is RequestErrorCategory.Server:
        # Where the files are and what is wrong with them is for the operator, not for the client.
        _log.error("%s failed: %s", command.request_id, error)
    payload = stored_failure(failed)
    return Settlement(request_id=command.request_id, payload=payload, is_failed=True)


def usage(command: Command, kind: str, amount: float, base_model: str) -> Use:
    """An amount that a command used."""
    key = UsageKey(
        tenant_id=command.tenant_id,
        kind=kind,
        session_id=command.session_id,
        queue_id=command.queue_id,
        base_model=base_model,
    )
    return Use(key=key, amount=amount)


class Settler:
    """Settles what it is given, in that order. For one event loop.

    Args:
        ledger: Waits out outages, so that nothing is lost while the database is gone.
        in_flight: The claimed commands; each that is added here is one less.
        most_unsettled: How many outcomes may wait before `wait_room` blocks.
    """

    def __init__(self, ledger: FencedLedger, in_flight: InFlight, *, most_unsettled: int) -> None:
        self._ledger = ledger
        self._in_flight = in_flight
        self._most = most_unsettled
        self._waiting: list[Settlement] = []
        self._under_way = 0
        self._has_work = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._added = 0
        self._passed = 0
        self._marks: list[tuple[int, asyncio.Future[None]]] = []

    def add(self, *settlements: Settlement) -> None:
        """Settle these after everything that was added before."""
        self._waiting += settlements
        self._added += len(settlements)
        self._in_flight.finish(len(settlements))
        if settlements:
            self._has_work.set()
            self._is_idle.clear()
        if self.unsettled >= self._most:
            self._has_room.clear()

    @property
    def unsettled(self) -> int:
        """How many outcomes are not in the ledger yet."""
        return len(self._waiting) + self._under_way

    async def wait_room(self) -> None:
        """Return when more outcomes may be made: backpressure for everything that runs.

        Blocks while too many are unsettled, and while the lease is not held: results could not be
        settled without it.
        """
        while not self._ledger.board.may_work():  # noqa: ASYNC110 - a lease expires silently
            await asyncio.sleep(LEASE_LOOK_S)
        await self._has_room.wait()

    async def wait_settled(self) -> None:
        """Return when everything that was added is in the ledger."""
        await self._is_idle.wait()

    async def wait_passed(self) -> None:
        """Return when everything that was added until now is in the ledger."""
        if self._passed < self._added:
            mark = asyncio.get_running_loop().create_future()
            self._marks.append((self._added, mark))
            await mark

    async def run(self) -> None:
        """Settle until cancelled."""
        while True:
            await self._has_work.wait()
            batch = self._waiting[:LARGEST_SETTLEMENT]
            del self._waiting[: len(batch)]
            self._under_way = len(batch)
            await self._ledger.settle(batch)
            self._under_way = 0
            self._passed += len(batch)
            self._wake_passed()
            if self.unsettled < self._most:
                self._has_room.set()
            if not self._waiting:
                self._has_work.clear()
                self._is_idle.set()

    def _wake_passed(self) -> None:
        reached = [mark for count, mark in self._marks if count <= self._passed]
        self._marks = [one for one in self._marks if one[0] > self._passed]
        for mark in reached:
            if not mark.done():
                mark.set_result(None)
