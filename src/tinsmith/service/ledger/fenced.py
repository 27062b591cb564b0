"""A ledger as one scheduler sees it: everything that it writes is conditional on its epoch.

The scheduler and the sweeper are given this and nothing else, so that none of their writes can
forget the epoch. Reading needs none. What API servers write (submissions, cancellations, refused
numbers) is not here to be called.

The scheduler also passes a `Retry`, which repeats a call while the ledger is unavailable: every
call may be made twice. The sweeper has none: it fails, and sweeps again later.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from tinsmith.service.ledger.base import PAGE, Entries, Ledger
from tinsmith.service.ledger.board import Board
from tinsmith.service.ledger.records import (
    Command,
    Entry,
    QueueId,
    QueueProgress,
    RequestId,
    Settlement,
    Swept,
    TenantId,
    Use,
)

E = TypeVar("E", bound=Entry)
T = TypeVar("T")

RETRIED_WAIT_S = 1.0
"""A repeated wait for commands returns soon: until it does, the ledger counts as unavailable."""


class Retry(Protocol):
    """Makes a call, again if need be, and returns what it returns in the end."""

    async def __call__(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make the call."""
        ...


async def call_once(call: Callable[[], Awaitable[T]]) -> T:
    """The `Retry` that does not."""
    return await call()


class FencedLedger:
    """A ledger bound to the epoch of a lease. Methods mean what they mean in `Ledger`.

    Attributes:
        epoch: The epoch; files that are written under it say so in their edition. None in tests of
            a scheduler that has its ledger to itself: nothing is conditional then.
        board: The ledger's board.
    """

    def __init__(self, ledger: Ledger, epoch: int | None, retry: Retry = call_once) -> None:
        self._ledger = ledger
        self._retry = retry
        self.epoch = epoch
        self.board: Board = ledger.board
        self.now: Callable[[], float] = ledger.now

    # Reading, and what changes nothing that a newer epoch could have changed

    async def command(self, request_id: str) -> Command:
        """`Ledger.command`."""
        return await self._retry(lambda: self._ledger.command(request_id))

    async def payload(self, request_id: str) -> bytes:
        """`Ledger.payload`."""
        return await self._retry(lambda: self._ledger.payload(request_id))

    async def queue(self, queue_id: QueueId) -> QueueProgress:
        """`Ledger.queue`."""
        return await self._retry(lambda: self._ledger.queue(queue_id))

    async def replay(self, queue_id: QueueId) -> list[Command]:
        """`Ledger.replay`."""
        return await self._retry(lambda: self._ledger.replay(queue_id))

    async def spent(self, queue_id: QueueId) -> list[int]:
        """`Ledger.spent`."""
        return await self._retry(lambda: self._ledger.spent(queue_id))

    async def check_writable(self) -> None:
        """`Ledger.check_writable`."""
        await self._retry(self._ledger.check_writable)

    async def sweep(self) -> Swept:
        """`Ledger.sweep`. Retention alone decides what it removes, whatever the epoch."""
        return await self._retry(self._ledger.sweep)

    # Writing

    def entries(self, kind: type[E]) -> Entries[E]:
        """`Ledger.entries`."""
        entries = self._ledger.entries(kind, epoch=self.epoch)
        return entries if self._retry is call_once else _RetriedEntries(entries, self._retry)

    async def wait_claim(self, claimer: str, *, limit: int, timeout_s: float) -> list[Command]:
        """`Ledger.wait_claim`."""
        waits_s = itertools.chain([timeout_s], itertools.repeat(RETRIED_WAIT_S))
        return await self._retry(
            lambda: self._ledger.wait_claim(
                claimer, limit=limit, timeout_s=next(waits_s), epoch=self.epoch
            )
        )

    async def release_claims(self, claimer: str) -> int:
        """`Ledger.release_claims`."""
        return await self._retry(lambda: self._ledger.release_claims(claimer, epoch=self.epoch))

    async def take_cancelled(self, claimer: str) -> list[RequestId]:
        """`Ledger.take_cancelled`."""
        return await self._retry(lambda: self._ledger.take_cancelled(claimer, epoch=self.epoch))

    async def settle(self, settlements: Sequence[Settlement]) -> list[RequestId]:
        """`Ledger.settle`."""
        return await self._retry(lambda: self._ledger.settle(settlements, epoch=self.epoch))

    async def pass_over(self, queue_id: QueueId, position: int) -> None:
        """`Ledger.pass_over`."""
        await self._retry(lambda: self._ledger.pass_over(queue_id, position, epoch=self.epoch))

    async def record_snapshot(
        self, queue_id: QueueId, position: int, reference: str | None
    ) -> str | None:
        """`Ledger.record_snapshot`."""
        return await self._retry(
            lambda: self._ledger.record_snapshot(queue_id, position, reference, epoch=self.epoch)
        )

    async def add_uses(self, uses: Sequence[Use]) -> None:
        """`Ledger.add_uses`. Never retried: an outage may have lost only the answer."""
        await self._ledger.add_uses(uses, epoch=self.epoch)


class _RetriedEntries(Entries[E]):
    """Entries whose every call goes through a `Retry`."""

    def __init__(self, entries: Entries[E], retry: Retry) -> None:
        self._entries = entries
        self._retry = retry

    async def add(self, entry: E) -> E:
        return await self._retry(lambda: self._entries.add(entry))

    async def put(self, entry: E) -> E | None:
        return await self._retry(lambda: self._entries.put(entry))

    async def get(self, entry_id: str) -> E | None:
        return await self._retry(lambda: self._entries.get(entry_id))

    async def change(self, entry_id: str, change: Callable[[E], E]) -> E:
        return await self._retry(lambda: self._entries.change(entry_id, change))

    async def remove(self, entry_id: str, *, due_before: float | None = None) -> bool:
        return await self._retry(lambda: self._entries.remove(entry_id, due_before=due_before))

    async def all(self, *, limit: int = PAGE, offset: int = 0) -> list[E]:
        return await self._retry(lambda: self._entries.all(limit=limit, offset=offset))

    async def of_tenant(
        self, tenant_id: TenantId, *, limit: int = PAGE, offset: int = 0
    ) -> list[E]:
        return await self._retry(
            lambda: self._entries.of_tenant(tenant_id, limit=limit, offset=offset)
        )

    async def of_parent(self, parent_id: str, *, limit: int = PAGE, offset: int = 0) -> list[E]:
        return await self._retry(
            lambda: self._entries.of_parent(parent_id, limit=limit, offset=offset)
        )

    async def due(
        self,
        before: float,
        *,
        since: float = 0.0,
        tenant_id: TenantId | None = None,
        limit: int = PAGE,
    ) -> list[E]:
        return await self._retry(
            lambda: self._entries.due(before, since=since, tenant_id=tenant_id, limit=limit)
        )

    async def count(self, *, tenant_id: TenantId | None = None) -> int:
        return await self._retry(lambda: self._entries.count(tenant_id=tenant_id))
