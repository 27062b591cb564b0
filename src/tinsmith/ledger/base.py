"""What every ledger promises. `tests/contract/test_ledger.py` holds each variant to it.

The ledger is where the server and the scheduler meet: the server appends commands and reads
results, the scheduler claims commands and settles them. It holds four things:

- *commands*, each under its identity (line, seq_id), with payload, state and result;
- *lines*, how far the ordered ones are and from where they are replayed;
- *entries*, things looked up by id: tenants, keys, sessions, models, samplers, checkpoints, …;
- *usage*, amounts by tenant, kind and hour.

True of every method that changes something, unless it says otherwise:

- When it returns, the change survives `kill -9` and a power cut (in memory: nothing does).
- It happens whole or not at all, also when the caller is cancelled or the process dies; which of
  the two is not known to a caller that got no answer, so every change may be asked for twice.
- Changes happen one after another, in an order that all callers agree on, and are seen by every
  read that starts after they returned.
- If the disk is full, the database locked or gone, it raises `LedgerUnavailableError`. Nothing was
  promised; the same call may be made again. After `close`, that is what every method raises.

**One scheduler at a time.** Any number of servers may append, cancel and change entries. Commands
are run by the holder of the *lease*. Each lease has an *epoch*, a number that only rises. What a
scheduler writes names the epoch of its lease and is conditional on it: the change is made in the
same transaction in which the epoch is found to be the newest, else it raises `LeaseLostError` and
changes nothing. So a scheduler that was paused, or cut off from the database, cannot write once
another one has taken over. `fenced.py` binds a ledger to an epoch, so that no write can forget it.

A ledger belongs to the event loop in which it was opened.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Generic, Self, TypeVar

from tinsmith.ledger.board import Board
from tinsmith.ledger.lease import LEASE_S, Lease
from tinsmith.ledger.records import (
    Appended,
    Command,
    Completion,
    Entry,
    LedgerStatistics,
    Line,
    LineId,
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

E = TypeVar("E", bound=Entry)

PAGE = 1000
"""The most that a listing gives unless it is asked for more."""


class Entries(abc.ABC, Generic[E]):
    """All entries of one kind, by id. Listings are newest first, in the order of `add`."""

    @abc.abstractmethod
    async def add(self, entry: E) -> E:
        """Keep an entry, unless there is one with its id.

        Returns:
            The entry that is kept now: this one, or the one that was there before. So a retried
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
    """The durable record of a service."""

    @functools.cached_property
    def board(self) -> Board:
        """What is told while it happens and is not kept; see `board.py`."""
        return Board()

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
        """Become the one whose scheduler claims and settles, under a new epoch.

        In a database that several servers can reach, a lease that another one holds is waited for:
        it ends when it is released, or `lease_s` after its last renewal, by the database's clock.
        Where opening the ledger keeps all others out, earlier holders have ended, and their lease
        is taken over at once.

        Args:
            owner: Who takes it, for messages.
            lease_s: How long it lasts unless it is renewed.
            wait_s: How long to wait for another holder.

        Raises:
            LeaseHeldError: Another one holds it, and has not let go of it within `wait_s`.
        """

    @abc.abstractmethod
    async def renew_lease(self, lease: Lease) -> None:
        """Have a lease last `lease_s` from now on; `lease.ends_at` moves with it.

        Raises:
            LeaseLostError: There is a newer epoch.
        """

    @abc.abstractmethod
    async def release_lease(self, lease: Lease) -> None:
        """Let go of a lease, so that the next one need not wait. A lost one is left alone."""

    # Life

    @abc.abstractmethod
    async def close(self) -> None:
        """Finish what is being written, wake all who wait, and let go of the database.

        May be called again. Calls under way end well or with `LedgerUnavailableError`.
        """

    @abc.abstractmethod
    def now(self) -> float:
        """The ledger's time (`clock.py`), which all times in it are of."""

    @abc.abstractmethod
    async def statistics(self) -> LedgerStatistics:
        """How much there is and what it takes. Cheap, however many commands have been settled."""

    @abc.abstractmethod
    async def check_writable(self) -> None:
        """Write as much as a large command takes, and take it back.

        For whoever was refused and wants to know when it is over: it costs what an append does.

        Raises:
            LedgerUnavailableError: It cannot be written now.
        """

    @abc.abstractmethod
    async def sweep(self) -> Swept:
        """Remove what `Retention` no longer asks to keep, and payload files that nothing names.

        Never removed: a command that is not settled; a command that its line's replay needs; an
        entry other than an ended session and what belongs to it, an audit entry, or a custom loss
        or sampler of a session that is gone. A run that has checkpoints stays. Checkpoints are
        never removed here: their files go first. To be called now and then; a call removes a
        bounded number of each, so that it does not hold up others.
        """

    @abc.abstractmethod
    def entries(self, kind: type[E], *, epoch: int | None = None) -> Entries[E]:
        """The entries of one kind: `ledger.entries(Session)`.

        With an epoch all changes made through what is returned are conditional on it.
        """

    # Commands, as the server sees them

    @abc.abstractmethod
    async def append(self, submission: Submission) -> Appended:
        """Accept a command. Returns only when it is durable, its payload included.

        The same submission again, whenever and from wherever, gives the same request id with
        `is_new` False, and changes nothing; also if both are made at the same moment, and also
        when the command has been settled. Numbers of a line may come in any order.

        Raises:
            CommandConflictError: Its identity belongs to another request, by kind or fingerprint.
            CommandPassedError: Its number is below the position of its line, which is ordered.
        """

    @abc.abstractmethod
    async def spend(self, line: LineId, seq_id: int) -> None:
        """Note that a number was refused, so that its line need not wait for it.

        A later `append` with this number is accepted, while the line has not passed it.
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
        """Let go of results that their client has. Unknown and unsettled ones are left alone."""

    @abc.abstractmethod
    async def completions(
        self, line: LineId, clone: int, *, after: int, limit: int = PAGE
    ) -> list[Completion]:
        """What ended in a feed after a cursor, in the order of settlement; 0 is the start.

        Cursors rise; they have gaps. An entry is given again to whoever asks with an earlier
        cursor, until its command is swept away, whether or not its result was acknowledged.
        """

    @abc.abstractmethod
    async def wait_completions(
        self, line: LineId, clone: int, *, after: int, timeout_s: float, limit: int = PAGE
    ) -> list[Completion]:
        """As `completions`, as soon as there is one; nothing when the time is up."""

    @abc.abstractmethod
    async def cancel(self, settlement: Settlement) -> bool:
        """Settle a command for its client, whoever holds it; False if it was settled or unknown.

        If it was claimed, its claimer learns of it from `take_cancelled`.
        """

    # Commands, as the scheduler sees them
    #
    # With `epoch`, each of these that changes something raises `LeaseLostError` and changes nothing
    # if there is a newer one. Without, it is unconditional: for tests and tools.

    @abc.abstractmethod
    async def claim(self, claimer: str, *, limit: int, epoch: int | None = None) -> list[Command]:
        """Take pending commands, oldest first. Each goes to one claimer only.

        A claim lasts until the command is settled or `release_claims` gives it back; it outlives
        the claimer's process. A power cut may undo it: whoever starts then releases all claims
        anyway. Order within a line is the claimer's matter: commands are given in
        the order in which they were appended.
        """

    @abc.abstractmethod
    async def release_claims(self, claimer: str, *, epoch: int | None = None) -> int:
        """Make pending again what this claimer holds; returns how many. For a start after a crash.

        Claimed anew they come in their first order, before what was appended later.
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

        Empty if a claimed command was cancelled meanwhile, if somebody else was quicker, and when
        the time is up.
        """
        await self.wait_for_commands(claimer, timeout_s=timeout_s)
        return await self.claim(claimer, limit=limit, epoch=epoch)

    @abc.abstractmethod
    async def take_cancelled(self, claimer: str, *, epoch: int | None = None) -> list[RequestId]:
        """The claimed commands that were cancelled since this was last asked; each is told once."""

    @abc.abstractmethod
    async def payload(self, request_id: str) -> bytes:
        """What was submitted. Kept until settled; in an ordered line, until a snapshot covers it.

        Raises:
            UnknownEntryError: There is no such command, or its payload is no longer kept.
            LedgerDamagedError: The bytes are not those that were written.
        """

    @abc.abstractmethod
    async def settle(
        self, settlements: Sequence[Settlement], *, epoch: int | None = None
    ) -> list[RequestId]:
        """End commands, all in one change, with what they used. The first end of each stays.

        Returns:
            Those that this call ended. A command that had ended before, or is not known (any
            more), is passed by, and the uses given for it are not counted. So a settlement may be
            made again after a crash or an error.
        """

    # Lines

    @abc.abstractmethod
    async def line(self, line: LineId) -> Line:
        """How far a line is; one that nothing is known of is at its start."""

    @abc.abstractmethod
    async def pass_over(self, line: LineId, position: int, *, epoch: int | None = None) -> None:
        """Refuse from now on every number below `position` that has not come.

        To be called before a command runs whose predecessors are missing: a replay then sees the
        same order. Positions never go back; a lower one changes nothing.
        """

    @abc.abstractmethod
    async def record_snapshot(
        self, line: LineId, position: int, reference: str | None, *, epoch: int | None = None
    ) -> str | None:
        """Note that a durable snapshot holds all commands below `position`.

        Lets go of their payloads, and passes over the numbers below. `LARGEST_NUMBER` with no
        reference closes a line that is never to be replayed. An older position than the last one
        changes nothing.

        Returns:
            The reference that is not needed any more: the one before, or this one if it is older;
            None if it is the same or there was none.
        """

    @abc.abstractmethod
    async def replay(self, line: LineId) -> list[Command]:
        """The commands that no snapshot holds, by number, in whatever state."""

    @abc.abstractmethod
    async def spent(self, line: LineId) -> list[int]:
        """The refused numbers that no snapshot holds and that no command took since, in order."""

    # Usage

    @abc.abstractmethod
    async def add_uses(self, uses: Sequence[Use], *, epoch: int | None = None) -> None:
        """Count something that no command stands for. Asked for twice, it is counted twice."""

    @abc.abstractmethod
    async def usage(self, tenant_id: TenantId, *, since: float, before: float) -> list[UsageRow]:
        """What a tenant used, by hour, for hours that begin in [since, before); oldest first."""
