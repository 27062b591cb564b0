"""Outcomes on their way into the ledger: in their order, many at a time, and never lost.

The order matters. A model's next command may run before the last one is settled on the disk; but a
crash must never find the later one settled and the earlier one not, or a replay would run them the
wrong way round. So there is one queue for all, and a settlement is made for all that is in it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from tinsmith.errors import CheckpointError, RequestErrorCategory
from tinsmith.ledger.fenced import FencedLedger
from tinsmith.ledger.records import Command, RequestId, Settlement, Use
from tinsmith.scheduler.patience import PatientLedger
from tinsmith.types.record import Frozen, Record
from tinsmith.wire.failures import failed_from_error
from tinsmith.wire.stored import stored_failure, stored_result

_log = logging.getLogger(__name__)

LARGEST_SETTLEMENT = 512
LEASE_LOOK_S = 0.05
NOTHING = b"J{}"
"""The result of a command that has none."""


def success(
    command: Command, result: Record | Frozen | None, uses: Sequence[Use] = ()
) -> Settlement:
    """The end of a command that was done."""
    payload = NOTHING if result is None else stored_result(command.kind, result)
    return Settlement(request_id=command.request_id, payload=payload, uses=tuple(uses))


def failure(command: Command, error: BaseException) -> Settlement:
    """The end of a command that failed."""
    failed = failed_from_error(error)
    if isinstance(error, CheckpointError) and failed.category is RequestErrorCategory.Server:
        # Its client is told nothing of where the files are and what is wrong with them.
        _log.error("%s failed: %s", command.request_id, error)
    payload = stored_failure(failed)
    return Settlement(request_id=command.request_id, payload=payload, is_failed=True)


class Settler:
    """Settles what it is given, in that order. For one event loop."""

    def __init__(
        self, ledger: FencedLedger, patient: PatientLedger, *, most_unsettled: int
    ) -> None:
        self._ledger = ledger
        self._patient = patient
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
        """Settle these after all that were added before."""
        self._waiting += settlements
        self._added += len(settlements)
        if settlements:
            self._has_work.set()
            self._is_idle.clear()
        if self.unsettled >= self._most:
            self._has_room.clear()

    @property
    def unsettled(self) -> int:
        """How many are not in the ledger yet."""
        return len(self._waiting) + self._under_way

    async def wait_room(self) -> None:
        """Return when more may be made. While the ledger is gone that is not so for long.

        Nor is it while the lease is not held: its results could not be settled.
        """
        while not self._ledger.board.may_work():  # noqa: ASYNC110 - nothing tells when time is up
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
            await self._settle(batch)
            self._under_way = 0
            self._passed += len(batch)
            self._tell_passed()
            if self.unsettled < self._most:
                self._has_room.set()
            if not self._waiting:
                self._has_work.clear()
                self._is_idle.set()

    def _tell_passed(self) -> None:
        reached = [mark for count, mark in self._marks if count <= self._passed]
        self._marks = [one for one in self._marks if one[0] > self._passed]
        for mark in reached:
            if not mark.done():
                mark.set_result(None)

    async def _settle(self, batch: list[Settlement]) -> list[RequestId]:
        return await self._patient.call(lambda: self._ledger.settle(batch))
