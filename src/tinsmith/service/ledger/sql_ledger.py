"""The ledger over a database: what SQLite and PostgreSQL share.

Every method is an operation from `steps.py` or `entry_steps.py`, which the variant runs in `_write`
or `_read`. A payload is stored before the row that names it.
"""

from __future__ import annotations

import abc
import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from tinsmith.errors import LedgerDamagedError, LedgerUnavailableError
from tinsmith.service.ledger import entry_steps, steps
from tinsmith.service.ledger.appending import Appending
from tinsmith.service.ledger.base import PAGE, Entries, Ledger
from tinsmith.service.ledger.payloads import INLINE_BYTES, Ended, Kept, Remembered, inline
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
    Retention,
    SessionEntry,
    SessionId,
    Settlement,
    Submission,
    Swept,
    TenantId,
    UsageRow,
    Use,
    of_tenant,
)
from tinsmith.service.ledger.scheduler_lease import SteadyClock
from tinsmith.service.ledger.steps import Effects, Operation, Query, Steps, fenced
from tinsmith.service.ledger.wakeups import NEW_WORK, Wakeups, feed_topic, settled_topic

T = TypeVar("T")
E = TypeVar("E", bound=Entry)

CHECKED_BYTES = 8 * 1024 * 1024
"""What `check_writable` writes; a chunk of training data is not larger."""


class SqlLedger(Ledger):
    """All promises but durability and isolation, which are the variant's."""

    def __init__(self, retention: Retention, clock: SteadyClock) -> None:
        self._retention = retention
        self._clock = clock
        self._wakeups = Wakeups()
        self._appending = Appending(self._write)
        self._payloads: Remembered[bytes] = Remembered()
        self._ended: Remembered[Ended] = Remembered()
        self._large: set[asyncio.Task[Any]] = set()
        self._inline_bytes = INLINE_BYTES

    # What a variant adds

    @abc.abstractmethod
    async def _write(self, operation: Operation[T], *, is_soft: bool = False) -> T:
        """Run an operation after all earlier ones; returns when it is durable.

        One that is soft may be undone by a power cut, though not by the end of the process.
        """

    async def _write_fenced(
        self, operation: Operation[T], epoch: int | None, *, is_soft: bool = False
    ) -> T:
        """As `_write`, in one transaction with a look at the epoch, if one is given."""
        return await self._write(fenced(operation, epoch), is_soft=is_soft)

    @abc.abstractmethod
    async def _read(self, operation: Operation[T]) -> T:
        """Run an operation that changes nothing, on what is durable now."""

    async def _look(self, operation: Operation[T]) -> T:
        """As `_read`, for an operation that finds a row or a few by their key."""
        return await self._read(operation)

    @abc.abstractmethod
    async def _keep_file(self, payload: bytes) -> Kept:
        """Write a large payload, so that it survives a crash."""

    @abc.abstractmethod
    async def _discard(self, kept: Sequence[Kept], *, is_named: bool) -> None:
        """A row names these files now, or none ever will."""

    @abc.abstractmethod
    async def _fetch_file(self, kept: Kept) -> bytes:
        """Read a large payload."""

    @abc.abstractmethod
    async def _stored_bytes(self) -> int:
        """What the database takes."""

    @abc.abstractmethod
    def _written(self) -> tuple[int, int]:
        """How many commits there were, and how many writes in them."""

    def _lock_seconds(self) -> tuple[float, float]:
        """How long changes have waited for other servers, and kept those waiting."""
        return 0.0, 0.0

    @abc.abstractmethod
    async def _sweep_files(self) -> int:
        """Delete payload files that nothing names."""

    # Life

    def now(self) -> float:
        """`Ledger.now`."""
        return self._clock.now()

    async def statistics(self) -> LedgerStatistics:
        """`Ledger.statistics`."""
        commits, writes = self._written()
        stored_bytes = await self._stored_bytes()
        figures = await self._read(
            lambda effects: entry_steps.statistics(
                effects, self.now(), stored_bytes, commits, writes
            )
        )
        waited_s, held_s = self._lock_seconds()
        return msgspec.structs.replace(figures, lock_waited_s=waited_s, lock_held_s=held_s)

    async def unsettled(self) -> dict[TenantId, tuple[int, int]]:
        """`Ledger.unsettled`."""
        return await self._read(entry_steps.unsettled)

    async def check_writable(self) -> None:
        """`Ledger.check_writable`."""
        if self._inline_bytes < CHECKED_BYTES:
            kept = await self._keep_file(bytes(CHECKED_BYTES))
            await self._discard([kept], is_named=False)
        await self._write(entry_steps.touch)

    async def _sweep_all(self, some: Operation[int]) -> int:
        """Some at a time, so that others' writes go in between."""
        count = 0
        while (swept := await self._write(some)) > 0:
            count += swept
            if swept < entry_steps.SWEPT_AT_ONCE:
                break
        return count

    async def sweep(self) -> Swept:
        """`Ledger.sweep`."""
        now, keep = self.now(), self._retention
        results = await self._sweep_all(
            partial(entry_steps.sweep_results, before=now - keep.result_s)
        )
        commands = await self._sweep_all(
            partial(entry_steps.sweep_commands, before=now - keep.command_s)
        )
        sessions = entries = 0
        for session in await self.entries(SessionEntry).due(now - keep.session_s):
            if session.ended_at is not None:
                removed, is_gone = await self._write(
                    partial(entry_steps.sweep_session, session=session)
                )
                entries, sessions = entries + removed, sessions + is_gone
        entries += await self._sweep_all(
            partial(entry_steps.sweep_audit, before=now - keep.audit_s)
        )
        await self._write(partial(entry_steps.sweep_usage, before=now - keep.usage_s))
        files = await self._sweep_files()
        self._payloads.forget_all()
        self._ended.forget_all()
        return Swept(
            results=results, commands=commands, sessions=sessions, entries=entries, files=files
        )

    def entries(self, kind: type[E], *, epoch: int | None = None) -> Entries[E]:
        """`Ledger.entries`."""
        return _SqlEntries(self, kind, epoch)

    # Commands

    async def append(self, submission: Submission) -> Appended:
        """`Ledger.append`."""
        if len(submission.payload) > self._inline_bytes:
            return await self._finish(self._append_large(submission))
        return await self._appending.append(submission, inline(submission.payload), self.now())

    async def _append_large(self, submission: Submission) -> Appended:
        kept = await self._keep_file(submission.payload)
        is_named = False
        try:
            appended = await self._appending.append(submission, kept, self.now())
            is_named = appended.is_new
        except LedgerUnavailableError:
            is_named = True  # perhaps; the sweep will see
            raise
        finally:
            await self._discard([kept], is_named=is_named)
        return appended

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work to its end even if its caller is cancelled: files and rows must agree."""
        task = asyncio.get_running_loop().create_task(work)
        self._large.add(task)
        task.add_done_callback(self._large.discard)
        return await asyncio.shield(task)

    async def _wait_large(self) -> None:
        await asyncio.gather(*self._large, return_exceptions=True)

    async def spend(self, queue_id: QueueId, seq_id: int) -> None:
        """`Ledger.spend`."""
        await self._write(lambda effects: entry_steps.spend(effects, queue_id, seq_id))

    async def command(self, request_id: str) -> Command:
        """`Ledger.command`."""
        return await self._look(lambda effects: steps.command(effects, request_id))

    async def commands_of(
        self, session_id: SessionId, *, after: int = 0, limit: int = PAGE
    ) -> list[Command]:
        """`Ledger.commands_of`."""
        return await self._read(
            lambda effects: steps.commands_of(effects, session_id, after, limit)
        )

    async def result(self, request_id: str) -> Result | None:
        """`Ledger.result`."""
        ended = self._ended.take(request_id)
        if ended is not None and ended.payload is not None:
            return Result(payload=ended.payload, is_failed=ended.is_failed)
        try:
            return await self._result(request_id)
        except LedgerDamagedError:
            # It may have been acknowledged between row and file; the row knows.
            return await self._result(request_id)

    async def _result(self, request_id: str) -> Result | None:
        found = await self._look(lambda effects: steps.result(effects, request_id))
        if found is None:
            return None
        kept, is_failed = found
        return Result(payload=await self._fetch(kept), is_failed=is_failed)

    async def _fetch(self, kept: Kept) -> bytes:
        if kept.file is None:
            return kept.content or b""
        return await self._fetch_file(kept)

    async def wait_settled(
        self, request_id: str, *, timeout_s: float, tenant_id: TenantId | None = None
    ) -> Command:
        """`Ledger.wait_settled`."""
        seen: Command | None = None

        async def look() -> Command:
            nonlocal seen
            ended = self._ended.see(request_id)
            if seen is None or ended is None:
                seen = of_tenant(await self.command(request_id), tenant_id)
            else:
                seen = ended.applied_to(seen)
            return seen

        return await self._wakeups.wait_until(
            settled_topic(request_id), look, lambda command: command.is_settled, timeout_s
        )

    def _tell(self, effects: Effects) -> None:
        """What was written is durable: tell those who wait."""
        for request_id, payload in effects.appended:
            self._payloads.keep(request_id, payload)
        for ended in effects.ended:
            self._payloads.take(ended.request_id)
            if self._wakeups.is_waited_for(settled_topic(ended.request_id)):
                self._ended.keep(ended.request_id, ended)
        self._wakeups.tell(effects.topics)

    async def acknowledge(self, request_ids: Iterable[str]) -> None:
        """`Ledger.acknowledge`."""
        wanted = list(request_ids)
        if wanted:
            await self._write(lambda effects: steps.acknowledge(effects, wanted))
        for one in wanted:
            self._ended.take(one)

    async def completions(
        self, queue_id: QueueId, clone: int, *, after: int, limit: int = PAGE
    ) -> list[Completion]:
        """`Ledger.completions`."""
        return await self._look(
            lambda effects: steps.completions(effects, queue_id, clone, after, limit)
        )

    async def wait_completions(
        self, queue_id: QueueId, clone: int, *, after: int, timeout_s: float, limit: int = PAGE
    ) -> list[Completion]:
        """`Ledger.wait_completions`."""
        return await self._wakeups.wait_until(
            feed_topic(queue_id, clone),
            lambda: self.completions(queue_id, clone, after=after, limit=limit),
            bool,
            timeout_s,
        )

    async def cancel(self, settlement: Settlement) -> bool:
        """`Ledger.cancel`."""
        return bool(await self._settle([settlement], is_cancel=True))

    async def claim(self, claimer: str, *, limit: int, epoch: int | None = None) -> list[Command]:
        """`Ledger.claim`."""
        return await self._write(self._claiming(claimer, limit, epoch), is_soft=True)

    def _claiming(self, claimer: str, limit: int, epoch: int | None) -> Operation[list[Command]]:
        def claim(effects: Effects) -> Steps[list[Command]]:
            return steps.claim(effects, claimer, limit, self.now(), epoch)

        return fenced(claim, epoch)

    async def release_claims(self, claimer: str, *, epoch: int | None = None) -> int:
        """`Ledger.release_claims`."""
        return await self._write_fenced(partial(steps.release_claims, claimer=claimer), epoch)

    async def wait_for_commands(self, claimer: str, *, timeout_s: float) -> bool:
        """`Ledger.wait_for_commands`."""
        return await self._wakeups.wait_until(
            NEW_WORK,
            lambda: self._look(partial(steps.has_work, claimer=claimer)),
            bool,
            timeout_s,
        )

    async def take_cancelled(self, claimer: str, *, epoch: int | None = None) -> list[RequestId]:
        """`Ledger.take_cancelled`."""
        return await self._write_fenced(
            lambda effects: steps.take_cancelled(effects, claimer), epoch, is_soft=True
        )

    async def payload(self, request_id: str) -> bytes:
        """`Ledger.payload`."""
        payload = self._payloads.take(request_id)
        if payload is not None:
            return payload
        try:
            return await self._payload(request_id)
        except LedgerDamagedError:
            return await self._payload(request_id)  # as in `result`

    async def _payload(self, request_id: str) -> bytes:
        kept = await self._look(lambda effects: steps.payload(effects, request_id))
        return await self._fetch(kept)

    async def settle(
        self, settlements: Sequence[Settlement], *, epoch: int | None = None
    ) -> list[RequestId]:
        """`Ledger.settle`."""
        return await self._settle(settlements, epoch=epoch)

    async def _settle(
        self,
        settlements: Sequence[Settlement],
        *,
        is_cancel: bool = False,
        epoch: int | None = None,
    ) -> list[RequestId]:
        if any(len(one.payload) > self._inline_bytes for one in settlements):
            return await self._finish(self._settle_large(settlements, is_cancel, epoch))
        kept = [(one, inline(one.payload)) for one in settlements]
        return await self._settle_kept(kept, is_cancel, epoch)

    async def _settle_kept(
        self, kept: list[tuple[Settlement, Kept]], is_cancel: bool, epoch: int | None
    ) -> list[RequestId]:
        now = self.now()
        return await self._write_fenced(
            lambda effects: steps.settle(effects, kept, now, is_cancel=is_cancel, epoch=epoch),
            epoch,
        )

    async def _settle_large(
        self, settlements: Sequence[Settlement], is_cancel: bool, epoch: int | None
    ) -> list[RequestId]:
        kept: list[tuple[Settlement, Kept]] = []
        try:
            for one in settlements:
                is_small = len(one.payload) <= self._inline_bytes
                kept.append(
                    (one, inline(one.payload) if is_small else await self._keep_file(one.payload))
                )
            return await self._settle_kept(kept, is_cancel, epoch)
        finally:
            # Those that no row names were dropped by the settlement itself, or will be swept.
            await self._discard([place for _, place in kept], is_named=True)

    # Queues and usage

    async def queue(self, queue_id: QueueId) -> QueueProgress:
        """`Ledger.queue`."""
        return await self._look(lambda effects: entry_steps.queue(effects, queue_id))

    async def pass_over(
        self, queue_id: QueueId, position: int, *, epoch: int | None = None
    ) -> None:
        """`Ledger.pass_over`."""
        await self._write_fenced(
            lambda effects: entry_steps.pass_over(effects, queue_id, position), epoch
        )

    async def record_snapshot(
        self, queue_id: QueueId, position: int, reference: str | None, *, epoch: int | None = None
    ) -> str | None:
        """`Ledger.record_snapshot`."""
        return await self._write_fenced(
            lambda effects: entry_steps.record_snapshot(effects, queue_id, position, reference),
            epoch,
        )

    async def replay(self, queue_id: QueueId) -> list[Command]:
        """`Ledger.replay`."""
        return await self._read(lambda effects: entry_steps.replay(effects, queue_id))

    async def spent(self, queue_id: QueueId) -> list[int]:
        """`Ledger.spent`."""
        return await self._read(lambda effects: entry_steps.spent(effects, queue_id))

    async def add_uses(self, uses: Sequence[Use], *, epoch: int | None = None) -> None:
        """`Ledger.add_uses`."""
        now = self.now()
        await self._write_fenced(lambda effects: steps.add_uses(effects, uses, now), epoch)

    async def usage(self, tenant_id: TenantId, *, since: float, before: float) -> list[UsageRow]:
        """`Ledger.usage`."""
        hours = math.ceil(since), math.ceil(before)  # an hour begins on a whole second
        return await self._read(lambda effects: entry_steps.usage(effects, tenant_id, *hours))


class _SqlEntries(Entries[E]):
    """The entries of one kind in a database."""

    def __init__(self, ledger: SqlLedger, kind: type[E], epoch: int | None) -> None:
        self._ledger = ledger
        self._kind = kind
        self._epoch = epoch

    async def _write(self, operation: Operation[T]) -> T:
        return await self._ledger._write_fenced(operation, self._epoch)

    async def add(self, entry: E) -> E:
        return await self._write(lambda effects: entry_steps.add(effects, entry))

    async def put(self, entry: E) -> E | None:
        return await self._write(lambda effects: entry_steps.put(effects, entry))

    async def get(self, entry_id: str) -> E | None:
        return await self._ledger._look(
            lambda effects: entry_steps.get(effects, self._kind, entry_id)
        )

    async def change(self, entry_id: str, change: Callable[[E], E]) -> E:
        return await self._write(
            lambda effects: entry_steps.change(effects, self._kind, entry_id, change)
        )

    async def remove(self, entry_id: str, *, due_before: float | None = None) -> bool:
        return await self._write(
            lambda effects: entry_steps.remove(effects, self._kind, entry_id, due_before)
        )

    async def all(self, *, limit: int = PAGE, offset: int = 0) -> list[E]:
        return await self._listed(("all_entries", (self._kind.kind, limit, offset)))

    async def of_tenant(
        self, tenant_id: TenantId, *, limit: int = PAGE, offset: int = 0
    ) -> list[E]:
        values = (self._kind.kind, tenant_id, limit, offset)
        return await self._listed(("entries_of_tenant", values))

    async def of_parent(self, parent_id: str, *, limit: int = PAGE, offset: int = 0) -> list[E]:
        values = (self._kind.kind, parent_id, limit, offset)
        return await self._listed(("entries_of_parent", values))

    async def due(
        self,
        before: float,
        *,
        since: float = 0.0,
        tenant_id: TenantId | None = None,
        limit: int = PAGE,
    ) -> list[E]:
        values = (self._kind.kind, before, since, limit)
        if tenant_id is None:
            return await self._listed(("entries_due", values))
        return await self._listed(("entries_due_of_tenant", (*values, tenant_id)))

    async def count(self, *, tenant_id: TenantId | None = None) -> int:
        return await self._ledger._read(
            lambda effects: entry_steps.count(effects, self._kind, tenant_id)
        )

    async def _listed(self, query: Query) -> list[E]:
        return await self._ledger._read(
            lambda effects: entry_steps.listed(effects, self._kind, query)
        )
