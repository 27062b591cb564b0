"""What every ledger promises. `tests/contract/test_ledger.py` holds each variant to it.

The API appends commands and reads results; the scheduler claims commands and settles them. The
ledger holds four things:

- *commands*, each identified by (queue_id, seq_id), with payload, state and result;
- *queues*: how far each ordered one has come, and from where it is replayed;
- *entries*, looked up by id: tenants, keys, sessions, models, samplers, checkpoints, …;
- *usage*, amounts by tenant, kind and hour.

True of every method that changes something, unless it says otherwise:

- When it returns, the change survives `kill -9` and a power cut (in memory: nothing does).
- It is atomic, also when the caller is cancelled or the process dies. A caller that got no answer
  does not know whether it happened, so every change may be made twice.
- Changes are serialized, in an order that all callers agree on, and are visible to every read that
  starts after they returned.
- If the disk is full, or the database locked or gone, it raises `LedgerUnavailableError`; the same
  call may be made again. After `close`, every method raises that.

**One scheduler at a time.** Any number of servers may append, cancel and change entries. Only the
holder of the *lease* runs commands. Each lease has an *epoch*, a number that only rises. Everything
that a scheduler writes is fenced by its epoch: one transaction checks that the epoch is the newest
and makes the change, or else raises `LeaseLostError` and changes nothing. So a scheduler that was
paused, or cut off from the database, cannot write once another has taken over. `fenced.py` binds a
ledger to an epoch, so that no write can forget it.

A ledger belongs to the event loop in which it was opened.
"""

from __future__ import annotations

import abc
import asyncio
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import ClassVar, Generic, Self, TypeVar
from weakref import WeakValueDictionary

from tinsmith.service.ledger.board import Board
from tinsmith.service.ledger.memory_board import MemoryBoard
from tinsmith.service.ledger.records import (
    Appended,
    Command,
    Completion,
    Entry,
    LedgerStatistics,
    QueueId,
    QueueProgress,
    RequestId,
    Result,
    SessionId,
    Settlement,
    Submission,
    Swept,
    TenantId,
    UsageRow,
    Use,
)
from tinsmith.service.ledger.scheduler_lease import LEASE_S, Lease

E = TypeVar("E", bound=Entry)

PAGE = 1000
"""How many entries a listing returns unless asked for more."""


class Entries(abc.ABC, Generic[E]):
    """All entries of one kind, by id. Listings are newest first, in the order of `add`."""

    @abc.abstractmethod
    async def add(self, entry: E) -> E:
        """Keep an entry, unless there is one with its id.

        Returns:
            The stored entry: this one, or the one that existed before. So a retried
            creation gets what the first one made.
        """

    @abc.abstractmethod
    async def put(self, entry: E) -> E | None:
        """Keep an entry in place of the one with its id, as the newest; returns the old one."""

    @abc.abstractmethod
    async def get(self, entry_id: str) -> E | None:
        """The entry with this id."""

    @abc.abstractmethod
    async def change(self, entry_id: str, change: Callable[[E], E]) -> E:
        """Replace an entry by what `change` makes of it, with nothing happening in between.

        Args:
            entry_id: Which one. It keeps its id and its place in listings.
            change: A pure function. It may be called more than once, on another thread, and must
                not wait for anything. What it raises reaches the caller, and nothing changes.

        Returns:
            The new entry.

        Raises:
            UnknownEntryError: There is no such entry.
        """

    @abc.abstractmethod
    async def remove(self, entry_id: str, *, due_before: float | None = None) -> bool:
        """Forget an entry; False if there was none, which is no error.

        With `due_before`, only if its `due_at` is before that: an entry that was put in place of
        the one that the caller means stays.
        """

    @abc.abstractmethod
    async def all(self, *, limit: int = PAGE, offset: int = 0) -> list[E]:
        """A page of all of them."""

    @abc.abstractmethod
    async def of_tenant(
        self, tenant_id: TenantId, *, limit: int = PAGE, offset: int = 0
    ) -> list[E]:
        """A page of a tenant's."""

    @abc.abstractmethod
    async def of_parent(self, parent_id: str, *, limit: int = PAGE, offset: int = 0) -> list[E]:
        """A page of those whose `parent_id` this is."""

    @abc.abstractmethod
    async def due(
        self,
        before: float,
        *,
        since: float = 0.0,
        tenant_id: TenantId | None = None,
        limit: int = PAGE,
    ) -> list[E]:
        """Those whose `due_at` is in [since, before), the earliest first; without one, never."""

    @abc.abstractmethod
    async def count(self, *, tenant_id: TenantId | None = None) -> int:
        """How many there are, or how many of a tenant's."""


class Ledger(abc.ABC):
    """The durable record of a service.

    Attributes:
        is_shared: Whether other servers may use it at the same time.
    """

    is_shared: ClassVar[bool] = False

    @functools.cached_property
    def board(self) -> Board:
        """What the scheduler publishes without storing it; in memory unless overridden."""
        return MemoryBoard()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # The lease

    @abc.abstractmethod
    async def acquire_lease(
        self, owner: str, *, lease_s: float = LEASE_S, wait_s: float = 0.0
    ) -> Lease:
        """Acquire the right to claim and settle, under a new epoch.

        In a database that several servers share, this waits for a lease that another one holds: it
        ends when it is released, or expires `lease_s` after its last renewal, by the database's
        clock. Where opening the ledger excludes all others, earlier holders have ended, and their
        lease is taken over at once.

        Args:
            owner: Who acquires it, for messages.
            lease_s: How long it lasts unless it is renewed.
            wait_s: How long to wait for another holder.

        Raises:
            LeaseHeldError: Another server holds it, and has not released it within `wait_s`.
        """

    @abc.abstractmethod
    async def renew_lease(self, lease: Lease) -> None:
        """Extend a lease to `lease_s` from now on; sets `lease.ends_at`.

        Raises:
            LeaseLostError: There is a newer epoch.
        """

    @abc.abstractmethod
    async def release_lease(self, lease: Lease) -> None:
        """Release a lease, so that the next holder need not wait. A lost one is left alone."""

    # Life

    @abc.abstractmethod
    async def close(self) -> None:
        """Finish pending writes, wake all who wait, and disconnect from the database.

        May be called again. Running calls succeed or raise `LedgerUnavailableError`.
        """

    @abc.abstractmethod
    def now(self) -> float:
        """The ledger's time (`SteadyClock`), which all times in it are of."""

    @abc.abstractmethod
    async def statistics(self) -> LedgerStatistics:
        """Counts and sizes. Cheap, however many commands have been settled."""

    @abc.abstractmethod
    async def unsettled(self) -> dict[TenantId, tuple[int, int]]:
        """How many commands of each tenant are not settled, and the bytes of their payloads."""

    def alone(self, what: str) -> AbstractAsyncContextManager[object]:
        """Exclude all others, of every server, that ask for the same while the block runs."""
        turn = self._turns_alone.get(what)
        if turn is None:
            turn = self._turns_alone[what] = asyncio.Lock()
        return turn

    @functools.cached_property
    def _turns_alone(self) -> WeakValueDictionary[str, asyncio.Lock]:
        return WeakValueDictionary()

    @abc.abstractmethod
    async def check_writable(self) -> None:
        """Write as much as a large command takes, and undo it.

        Shows whether an outage is over; it costs as much as an append.

        Raises:
            LedgerUnavailableError: It cannot be written now.
        """

    @abc.abstractmethod
    async def sweep(self) -> Swept:
        """Remove what `Retention` no longer asks to keep, and payload files that nothing names.

        Never removed: a command that is not settled; a command that its queue's replay needs; an
        entry other than an ended session and what belongs to it, an audit entry, or a custom loss
        or sampler of a session that is gone. A run that has checkpoints stays. Checkpoints are
        never removed here: their files are deleted first. Each call removes a bounded number, so
        that it does not block others for long.
        """

    @abc.abstractmethod
    def entries(self, kind: type[E], *, epoch: int | None = None) -> Entries[E]:
        """The entries of one kind: `ledger.entries(Session)`.

        With an epoch all changes made through what is returned are conditional on it.
        """

    # Commands, as the server sees them

    @abc.abstractmethod
    async def append(self, submission: Submission) -> Appended:
        """Accept a command. Returns when it is durable, including its payload.

        The same submission again, whenever and from wherever, gives the same request id with
        `is_new` False, and changes nothing; also if both are made at the same moment, and also
        when the command has been settled. Numbers of a queue may come in any order.

        Raises:
            CommandConflictError: Its identity belongs to another request, by kind or fingerprint.
            CommandPassedError: Its number is below the position of its queue, which is ordered.
        """

    @abc.abstractmethod
    async def spend(self, queue_id: QueueId, seq_id: int) -> None:
        """Note that a number was refused, so that its queue need not wait for it.

        A later `append` with this number is accepted, while the queue has not passed it.
        """

    @abc.abstractmethod
    async def command(self, request_id: str) -> Command:
        """A command as it stands; raises `UnknownEntryError`."""

    @abc.abstractmethod
    async def commands_of(
        self, session_id: SessionId, *, after: int = 0, limit: int = PAGE
    ) -> list[Command]:
        """The commands of a session with an ordinal above `after`, oldest first."""

    @abc.abstractmethod
    async def result(self, request_id: str) -> Result | None:
        """How a command ended; None if it has not. May be read again and again.

        Raises:
            UnknownEntryError: There is no such command.
            ResultGoneError: The result was acknowledged or has expired.
            LedgerDamagedError: The bytes are not those that were written.
        """

    @abc.abstractmethod
    async def wait_settled(
        self, request_id: str, *, timeout_s: float, tenant_id: TenantId | None = None
    ) -> Command:
        """The command, as soon as it is settled, or as it stands when the time is up.

        Waiting costs nothing: it is ended by the settlement, also one made by another process.

        Raises:
            UnknownEntryError: There is no such command, or it is of another tenant than is named.
        """

    @abc.abstractmethod
    async def acknowledge(self, request_ids: Iterable[str]) -> None:
        """Drop results that their client has received; others are left alone."""

    @abc.abstractmethod
    async def completions(
        self, queue_id: QueueId, clone: int, *, after: int, limit: int = PAGE
    ) -> list[Completion]:
        """What ended in a feed after a cursor, in the order of settlement; 0 is the start.

        Cursors rise; they have gaps. An entry is given again to whoever asks with an earlier
        cursor, until its command is swept away, whether or not its result was acknowledged.
        """

    @abc.abstractmethod
    async def wait_completions(
        self, queue_id: QueueId, clone: int, *, after: int, timeout_s: float, limit: int = PAGE
    ) -> list[Completion]:
        """As `completions`, as soon as there is one; nothing when the time is up."""

    @abc.abstractmethod
    async def cancel(self, settlement: Settlement) -> bool:
        """Settle a command on behalf of its client; False if it is settled already, or unknown.

        If it was claimed, its claimer learns of it from `take_cancelled`.
        """

    # Commands, as the scheduler sees them
    #
    # With `epoch`, each of these that changes something raises `LeaseLostError` and changes nothing
    # if there is a newer one. Without, it is unconditional: for tests and tools.

    @abc.abstractmethod
    async def claim(self, claimer: str, *, limit: int, epoch: int | None = None) -> list[Command]:
        """Claim pending commands, oldest first. Each goes to one claimer only.

        A claim lasts until the command is settled or `release_claims` gives it back; it outlives
        the claimer's process. A power cut may undo it: a start releases all claims anyway.
        Commands come in the order in which they were appended; the order within a queue is up to
        the claimer.
        """

    @abc.abstractmethod
    async def release_claims(self, claimer: str, *, epoch: int | None = None) -> int:
        """Make the commands that this claimer holds pending again; returns how many.

        For a start after a crash. Claimed again, they come in their original order.
        """

    @abc.abstractmethod
    async def wait_for_commands(self, claimer: str, *, timeout_s: float) -> bool:
        """Whether there is something to claim, or a cancelled claim, within the time.

        Returns at once if there is, otherwise as soon as there is.
        """

    async def wait_claim(
        self, claimer: str, *, limit: int, timeout_s: float, epoch: int | None = None
    ) -> list[Command]:
        """As `claim`, as soon as there is something to claim.

        Empty if a claimed command was cancelled meanwhile, if another claimer was faster, and when
        the time is up.
        """
        await self.wait_for_commands(claimer, timeout_s=timeout_s)
        return await self.claim(claimer, limit=limit, epoch=epoch)

    @abc.abstractmethod
    async def take_cancelled(self, claimer: str, *, epoch: int | None = None) -> list[RequestId]:
        """The claimed commands that were cancelled since the last call; each is returned once."""

    @abc.abstractmethod
    async def payload(self, request_id: str) -> bytes:
        """What was submitted. Kept until settled; in an ordered queue, until a snapshot covers it.

        Raises:
            UnknownEntryError: There is no such command, or its payload has been deleted.
            LedgerDamagedError: The bytes are not those that were written.
        """

    @abc.abstractmethod
    async def settle(
        self, settlements: Sequence[Settlement], *, epoch: int | None = None
    ) -> list[RequestId]:
        """End commands, all in one change, with what they used. The first end of each stays.

        Returns:
            The commands that this call settled. Commands that were settled before, or are unknown,
            are skipped together with their uses. So a settlement may be repeated after a crash or
            an error.
        """

    # Queues

    @abc.abstractmethod
    async def queue(self, queue_id: QueueId) -> QueueProgress:
        """How far a queue has come; an unknown one is at its start."""

    @abc.abstractmethod
    async def pass_over(
        self, queue_id: QueueId, position: int, *, epoch: int | None = None
    ) -> None:
        """Refuse from now on every number below `position` that has not arrived.

        Call it before running a command whose predecessors are missing, so that a replay sees the
        same order. Positions only rise; a lower one changes nothing.
        """

    @abc.abstractmethod
    async def record_snapshot(
        self, queue_id: QueueId, position: int, reference: str | None, *, epoch: int | None = None
    ) -> str | None:
        """Note that a durable snapshot holds all commands below `position`.

        Drops their payloads, and passes over the numbers below. `LARGEST_NUMBER` with no reference
        closes a queue that is never replayed again. A position older than the last one changes
        nothing.

        Returns:
            The reference that is no longer needed: the previous one, or this one if it is older;
            None if it is the same or there was none.
        """

    @abc.abstractmethod
    async def replay(self, queue_id: QueueId) -> list[Command]:
        """The commands that no snapshot contains, by number, in any state."""

    @abc.abstractmethod
    async def spent(self, queue_id: QueueId) -> list[int]:
        """The refused numbers that no snapshot covers and no command has used since, in order."""

    # Usage

    @abc.abstractmethod
    async def add_uses(self, uses: Sequence[Use], *, epoch: int | None = None) -> None:
        """Count usage that belongs to no command. Called twice, it is counted twice."""

    @abc.abstractmethod
    async def usage(self, tenant_id: TenantId, *, since: float, before: float) -> list[UsageRow]:
        """A tenant's usage by hour, for hours that begin in [since, before); oldest first."""
