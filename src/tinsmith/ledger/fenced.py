"""A ledger as one scheduler sees it: everything that it writes is conditional on its epoch.

The scheduler and the sweeper are given this and nothing else, so that none of their writes can
forget the epoch. Reading needs none. What servers write (submissions, cancellations, refused
numbers) is not here to be called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tinsmith.ledger.base import Entries, Ledger
from tinsmith.ledger.board import Board
from tinsmith.ledger.records import (
    Command,
    Entry,
    Line,
    LineId,
    RequestId,
    Settlement,
    Swept,
    Use,
)

E = TypeVar("E", bound=Entry)


class FencedLedger:
    """A ledger bound to the epoch of a lease. Methods mean what they mean in `Ledger`.

    Attributes:
        epoch: The epoch; files that are written under it say so in their edition. None in tests of
            a scheduler that has its ledger to itself: nothing is conditional then.
        board: The ledger's board.
    """

    def __init__(self, ledger: Ledger, epoch: int | None) -> None:
        self._ledger = ledger
        self.epoch = epoch
        self.board: Board = ledger.board
        # Reading, and what changes nothing that a newer epoch could have changed:
        self.now: Callable[[], float] = ledger.now
        self.command = ledger.command
        self.payload = ledger.payload
        self.replay = ledger.replay
        self.spent = ledger.spent
        self.check_writable = ledger.check_writable

    def entries(self, kind: type[E]) -> Entries[E]:
        """`Ledger.entries`."""
        return self._ledger.entries(kind, epoch=self.epoch)

    async def line(self, line: LineId) -> Line:
        """`Ledger.line`."""
        return await self._ledger.line(line)

    async def sweep(self) -> Swept:
        """`Ledger.sweep`. What it removes, retention alone decides: it is the same for all."""
        return await self._ledger.sweep()

    async def claim(self, claimer: str, *, limit: int) -> list[Command]:
        """`Ledger.claim`."""
        return await self._ledger.claim(claimer, limit=limit, epoch=self.epoch)

    async def wait_claim(self, claimer: str, *, limit: int, timeout_s: float) -> list[Command]:
        """`Ledger.wait_claim`."""
        return await self._ledger.wait_claim(
            claimer, limit=limit, timeout_s=timeout_s, epoch=self.epoch
        )

    async def release_claims(self, claimer: str) -> int:
        """`Ledger.release_claims`."""
        return await self._ledger.release_claims(claimer, epoch=self.epoch)

    async def take_cancelled(self, claimer: str) -> list[RequestId]:
        """`Ledger.take_cancelled`."""
        return await self._ledger.take_cancelled(claimer, epoch=self.epoch)

    async def settle(self, settlements: Sequence[Settlement]) -> list[RequestId]:
        """`Ledger.settle`."""
        return await self._ledger.settle(settlements, epoch=self.epoch)

    async def pass_over(self, line: LineId, position: int) -> None:
        """`Ledger.pass_over`."""
        await self._ledger.pass_over(line, position, epoch=self.epoch)

    async def record_snapshot(
        self, line: LineId, position: int, reference: str | None
    ) -> str | None:
        """`Ledger.record_snapshot`."""
        return await self._ledger.record_snapshot(line, position, reference, epoch=self.epoch)

    async def add_uses(self, uses: Sequence[Use]) -> None:
        """`Ledger.add_uses`."""
        await self._ledger.add_uses(uses, epoch=self.epoch)
