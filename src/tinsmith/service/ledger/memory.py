"""The ledger in memory: for tests, and for a service whose loss is no loss.

It keeps every promise of `base.py` but durability. It is written for itself, not on top of the
databases' steps, so that comparing the two means something.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from tinsmith.errors import LedgerUnavailableError, ResultGoneError, UnknownEntryError
from tinsmith.service.ledger.appending import decide
from tinsmith.service.ledger.base import PAGE, Entries, Ledger
from tinsmith.service.ledger.memory_commands import KeptCommand, MemoryCommands, MemoryEntries
from tinsmith.service.ledger.records import (
    Appended,
    AuditEntry,
    CheckpointEntry,
    Command,
    CommandState,
    Completion,
    CustomLossEntry,
    Entry,
    LedgerStatistics,
    ModelEntry,
    QueueId,
    QueueProgress,
    RequestId,
    Result,
    Retention,
    SamplerEntry,
    SessionEntry,
    SessionId,
    Settlement,
    Submission,
    Swept,
    TenantId,
    UsageKey,
    UsageRow,
    Use,
    of_tenant,
    request_id,
)
from tinsmith.service.ledger.scheduler_lease import LEASE_S, Lease, SteadyClock, lease_lost
from tinsmith.service.ledger.steps import hour_of
from tinsmith.service.ledger.wakeups import NEW_WORK, Wakeups, feed_topic, settled_topic

T = TypeVar("T")
E = TypeVar("E", bound=Entry)


class MemoryLedger(Ledger):
    """A ledger that ends with its process."""

    def __init__(
        self, *, retention: Retention | None = None, clock: SteadyClock | None = None
    ) -> None:
        self._retention = retention or Retention()
        self._clock = clock or SteadyClock()
        self._wakeups = Wakeups()
        self._commands = MemoryCommands()
        self._queues: dict[QueueId, QueueProgress] = {}
        self._spent: set[tuple[QueueId, int]] = set()
        self._entries: dict[str, MemoryEntries[Any]] = {}
        self._usage: dict[tuple[int, UsageKey], float] = {}
        self._ordinal = 0
        self._cursor = 0
        self._writes = 0
        self._epoch = 0
        self._is_closed = False

    async def close(self) -> None:
        """`Ledger.close`."""
        self._is_closed = True
        self._wakeups.tell_all()

    def now(self) -> float:
        """`Ledger.now`."""
        return self._clock.now()

    async def _turn(self) -> None:
        """Let others run, as a ledger that waits for a disk does."""
        await asyncio.sleep(0)
        if self._is_closed:
            raise LedgerUnavailableError("the ledger is closed")

    async def _write(self, epoch: int | None = None) -> None:
        await self._turn()
        if epoch is not None and epoch != self._epoch:
            raise lease_lost(epoch, self._epoch)
        self._writes += 1

    async def acquire_lease(
        self, owner: str, *, lease_s: float = LEASE_S, wait_s: float = 0.0
    ) -> Lease:
        """`Ledger.acquire_lease`."""
        del wait_s  # nobody else can hold it
        await self._write()
        self._epoch += 1
        return Lease(owner, self._epoch, lease_s, math.inf)

    async def renew_lease(self, lease: Lease) -> None:
        """`Ledger.renew_lease`."""
        await self._write(lease.epoch)

    async def release_lease(self, lease: Lease) -> None:
        """`Ledger.release_lease`."""

    async def statistics(self) -> LedgerStatistics:
        """`Ledger.statistics`."""
        await self._turn()
        pending, now = self._commands.pending(), self.now()
        return LedgerStatistics(
            pending=len(pending),
            claimed=len(self._commands.claimed()),
            oldest_pending_s=now - pending[0].command.created_at if pending else 0.0,
            payload_bytes=self._commands.kept_bytes,
            payload_files=0,
            stored_bytes=0,
            commits=self._writes,
            writes=self._writes,
        )

    async def unsettled(self) -> dict[TenantId, tuple[int, int]]:
        """`Ledger.unsettled`."""
        await self._turn()
        found: dict[TenantId, tuple[int, int]] = {}
        for kept in (*self._commands.pending(), *self._commands.claimed()):
            count, size = found.get(kept.command.tenant_id, (0, 0))
            found[kept.command.tenant_id] = count + 1, size + kept.command.payload_bytes
        return found

    async def check_writable(self) -> None:
        """`Ledger.check_writable`."""
        await self._turn()

    def entries(self, kind: type[E], *, epoch: int | None = None) -> Entries[E]:
        """`Ledger.entries`."""
        found: MemoryEntries[E] = self._shelf(kind)
        return found if epoch is None else found.written_with(partial(self._write, epoch))

    def _shelf(self, kind: type[E]) -> MemoryEntries[E]:
        if kind.kind not in self._entries:
            self._entries[kind.kind] = MemoryEntries(kind, self._write, self._turn)
        return self._entries[kind.kind]

    # Commands, as the server sees them

    async def append(self, submission: Submission) -> Appended:
        """`Ledger.append`."""
        await self._write()
        queue_id, number = submission.queue_id, submission.seq_id
        if number is None:
            number = (
                max((k.command.seq_id for k in self._commands.of_queue(queue_id)), default=-1) + 1
            )
            number = max(number, self._queue(queue_id).position)  # those before it may be swept
        request = request_id(queue_id, number)
        known = self._commands.find(request)
        position = self._queue(queue_id).position if submission.is_ordered else 0
        same = None if known is None else (known.command.kind, known.command.fingerprint)
        outcome = decide(submission, number, same, position)
        if not isinstance(outcome, Appended):
            raise outcome
        if not outcome.is_new:
            return outcome
        self._ordinal += 1
        command = Command(
            ordinal=self._ordinal,
            queue_id=queue_id,
            seq_id=number,
            kind=submission.kind,
            tenant_id=submission.tenant_id,
            session_id=submission.session_id,
            clone=submission.clone,
            is_ordered=submission.is_ordered,
            fingerprint=submission.fingerprint,
            payload_bytes=len(submission.payload),
            created_at=self.now(),
        )
        self._commands.add(command, submission.payload)
        self._wakeups.tell([NEW_WORK])
        return outcome

    async def spend(self, queue_id: QueueId, seq_id: int) -> None:
        """`Ledger.spend`."""
        await self._write()
        self._spent.add((queue_id, seq_id))

    async def command(self, request_id: str) -> Command:
        """`Ledger.command`."""
        await self._turn()
        return self._commands.known(request_id).command

    async def commands_of(
        self, session_id: SessionId, *, after: int = 0, limit: int = PAGE
    ) -> list[Command]:
        """`Ledger.commands_of`."""
        await self._turn()
        found = [k.command for k in self._commands.all() if k.command.session_id == session_id]
        return [command for command in found if command.ordinal > after][:limit]

    async def result(self, request_id: str) -> Result | None:
        """`Ledger.result`."""
        await self._turn()
        kept = self._commands.known(request_id)
        if not kept.command.is_settled:
            return None
        if kept.result is None:
            raise ResultGoneError(
                f"the result of {request_id} has been deleted", request_id=request_id
            )
        return Result(payload=kept.result, is_failed=kept.command.is_failed)

    async def wait_settled(
        self, request_id: str, *, timeout_s: float, tenant_id: TenantId | None = None
    ) -> Command:
        """`Ledger.wait_settled`."""

        async def look() -> Command:
            return of_tenant(await self.command(request_id), tenant_id)

        return await self._wakeups.wait_until(
            settled_topic(request_id),
            look,
            lambda command: command.is_settled,
            timeout_s,
        )

    async def acknowledge(self, request_ids: Iterable[str]) -> None:
        """`Ledger.acknowledge`."""
        await self._write()
        for one in request_ids:
            kept = self._commands.find(one)
            if kept is not None and kept.command.is_settled:
                self._commands.drop_result(kept)

    async def completions(
        self, queue_id: QueueId, clone: int, *, after: int, limit: int = PAGE
    ) -> list[Completion]:
        """`Ledger.completions`."""
        await self._turn()
        ended = [
            kept
            for kept in self._commands.of_queue(queue_id)
            if kept.command.clone == clone and kept.cursor > after
        ]
        return [
            Completion(
                cursor=kept.cursor,
                request_id=kept.command.request_id,
                is_failed=kept.command.is_failed,
                result_bytes=kept.command.result_bytes,
            )
            for kept in sorted(ended, key=lambda kept: kept.cursor)[:limit]
        ]

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
        await self._write()
        kept = self._commands.find(settlement.request_id)
        if kept is None or kept.command.is_settled:
            return False
        if kept.command.state is CommandState.CLAIMED:
            self._commands.cancelled[kept.command.request_id] = kept
            self._wakeups.tell([NEW_WORK])
        self._end(kept, settlement)
        return True

    # Commands, as the scheduler sees them

    async def claim(self, claimer: str, *, limit: int, epoch: int | None = None) -> list[Command]:
        """`Ledger.claim`."""
        await self._write(epoch)
        taken = self._commands.pending()[:limit]
        for kept in taken:
            self._commands.move(
                kept, CommandState.CLAIMED, claimed_by=claimer, claimed_at=self.now()
            )
        return [kept.command for kept in taken]

    async def release_claims(self, claimer: str, *, epoch: int | None = None) -> int:
        """`Ledger.release_claims`."""
        await self._write(epoch)
        held = [kept for kept in self._commands.claimed() if kept.command.claimed_by == claimer]
        for kept in held:
            self._commands.move(kept, CommandState.PENDING, claimed_by=None, claimed_at=None)
        self._wakeups.tell([NEW_WORK])
        return len(held)

    async def wait_for_commands(self, claimer: str, *, timeout_s: float) -> bool:
        """`Ledger.wait_for_commands`."""
        return await self._wakeups.wait_until(
            NEW_WORK, lambda: self._has_work(claimer), bool, timeout_s
        )

    async def _has_work(self, claimer: str) -> bool:
        await self._turn()
        return bool(self._commands.pending() or self._cancelled(claimer))

    def _cancelled(self, claimer: str) -> list[KeptCommand]:
        cancelled = self._commands.cancelled.values()
        held = [kept for kept in cancelled if kept.command.claimed_by == claimer]
        return sorted(held, key=lambda kept: kept.command.ordinal)

    async def take_cancelled(self, claimer: str, *, epoch: int | None = None) -> list[RequestId]:
        """`Ledger.take_cancelled`."""
        await self._write(epoch)
        told = self._cancelled(claimer)
        for kept in told:
            del self._commands.cancelled[kept.command.request_id]
        return [kept.command.request_id for kept in told]

    async def payload(self, request_id: str) -> bytes:
        """`Ledger.payload`."""
        await self._turn()
        payload = self._commands.known(request_id).payload
        if payload is None:
            raise UnknownEntryError(f"the payload of {request_id} has been deleted")
        return payload

    async def settle(
        self, settlements: Sequence[Settlement], *, epoch: int | None = None
    ) -> list[RequestId]:
        """`Ledger.settle`."""
        await self._write(epoch)
        ended = []
        for settlement in settlements:
            kept = self._commands.find(settlement.request_id)
            if kept is not None and not kept.command.is_settled:
                self._end(kept, settlement)
                ended.append(settlement.request_id)
        return ended

    def _end(self, kept: KeptCommand, settlement: Settlement) -> None:
        self._cursor += 1
        kept.cursor = self._cursor
        self._commands.keep_result(kept, settlement.payload)
        self._commands.move(
            kept,
            CommandState.SETTLED,
            settled_at=self.now(),
            is_failed=settlement.is_failed,
            result_bytes=len(settlement.payload),
            started_at=settlement.started_at,
            batch=settlement.batch,
        )
        command = kept.command
        if not command.is_ordered:
            self._commands.drop_payload(kept)
        self._count(settlement.uses)
        topics = [settled_topic(settlement.request_id)]
        if command.clone is not None:
            topics.append(feed_topic(command.queue_id, command.clone))
        self._wakeups.tell(topics)

    # Queues and usage

    async def queue(self, queue_id: QueueId) -> QueueProgress:
        """`Ledger.queue`."""
        await self._turn()
        newest = max(
            self._commands.of_queue(queue_id), key=lambda kept: kept.command.seq_id, default=None
        )
        asked_at = None if newest is None else newest.command.created_at
        return msgspec.structs.replace(self._queue(queue_id), asked_at=asked_at)

    def _queue(self, queue_id: QueueId) -> QueueProgress:
        return self._queues.get(queue_id) or QueueProgress(queue_id=queue_id, position=0)

    async def pass_over(
        self, queue_id: QueueId, position: int, *, epoch: int | None = None
    ) -> None:
        """`Ledger.pass_over`."""
        await self._write(epoch)
        old = self._queue(queue_id)
        self._queues[queue_id] = msgspec.structs.replace(old, position=max(old.position, position))

    async def record_snapshot(
        self, queue_id: QueueId, position: int, reference: str | None, *, epoch: int | None = None
    ) -> str | None:
        """`Ledger.record_snapshot`."""
        await self._write(epoch)
        old = self._queue(queue_id)
        if position < old.snapshot_position:
            return reference if reference != old.snapshot else None
        self._queues[queue_id] = QueueProgress(
            queue_id=queue_id,
            position=max(old.position, position),
            snapshot_position=position,
            snapshot=reference,
        )
        for kept in self._commands.of_queue(queue_id):
            if kept.command.seq_id < position and kept.command.is_settled:
                self._commands.drop_payload(kept)
        self._spent = {one for one in self._spent if one[0] != queue_id or one[1] >= position}
        return old.snapshot if old.snapshot != reference else None

    async def replay(self, queue_id: QueueId) -> list[Command]:
        """`Ledger.replay`."""
        await self._turn()
        start = self._queue(queue_id).snapshot_position
        found = [k.command for k in self._commands.of_queue(queue_id) if k.command.is_ordered]
        later = [command for command in found if command.seq_id >= start]
        return sorted(later, key=lambda command: command.seq_id)

    async def spent(self, queue_id: QueueId) -> list[int]:
        """`Ledger.spent`."""
        await self._turn()
        return sorted(
            number
            for name, number in self._spent
            if name == queue_id and self._commands.find(request_id(name, number)) is None
        )

    async def add_uses(self, uses: Sequence[Use], *, epoch: int | None = None) -> None:
        """`Ledger.add_uses`."""
        await self._write(epoch)
        self._count(uses)

    def _count(self, uses: Sequence[Use]) -> None:
        hour = hour_of(self.now())
        for use in uses:
            self._usage[hour, use.key] = self._usage.get((hour, use.key), 0.0) + use.amount

    async def usage(self, tenant_id: TenantId, *, since: float, before: float) -> list[UsageRow]:
        """`Ledger.usage`."""
        await self._turn()
        rows = [
            UsageRow(key=key, hour=hour, amount=amount)
            for (hour, key), amount in self._usage.items()
            if key.tenant_id == tenant_id and since <= hour < before
        ]
        return sorted(
            rows,
            key=lambda r: (r.hour, r.key.kind, r.key.session_id, r.key.queue_id, r.key.base_model),
        )

    # Keeping

    async def sweep(self) -> Swept:
        """`Ledger.sweep`."""
        await self._write()
        now, keep = self.now(), self._retention
        ended = [k for k in self._commands.all() if k.command.settled_at is not None]
        old = [
            k for k in ended if k.result is not None and k.was_settled_before(now - keep.result_s)
        ]
        for kept in old:
            self._commands.drop_result(kept)
        forgotten = [
            k
            for k in ended
            if k.was_settled_before(now - keep.command_s)
            and (
                not k.command.is_ordered
                or k.command.seq_id < self._queue(k.command.queue_id).snapshot_position
            )
        ]
        for kept in forgotten:
            self._commands.forget(kept)
        sessions, entries = self._sweep_sessions(now - keep.session_s)
        audit = self._shelf(AuditEntry)
        entries += audit.drop_due(now - keep.audit_s)
        self._usage = {k: v for k, v in self._usage.items() if k[0] >= int(now - keep.usage_s)}
        return Swept(results=len(old), commands=len(forgotten), sessions=sessions, entries=entries)

    def _sweep_sessions(self, before: float) -> tuple[int, int]:
        sessions = entries = 0
        for session in self._shelf(SessionEntry).kept():
            if session.ended_at is None or session.ended_at >= before:
                continue
            saved = {entry.run_id for entry in self._shelf(CheckpointEntry).kept()}
            kinds: tuple[type[Entry], ...] = (ModelEntry, SamplerEntry, CustomLossEntry)
            for kind in kinds:
                for entry in self._shelf(kind).kept():
                    if entry.parent_id == session.id and not (
                        kind is ModelEntry and entry.id in saved
                    ):
                        self._drop_queue(QueueId(entry.id))
                        self._shelf(kind).drop(entry.id)
                        entries += 1
            self._shelf(SessionEntry).drop(session.id)
            sessions, entries = sessions + 1, entries + 1
        return sessions, entries

    def _drop_queue(self, queue_id: QueueId) -> None:
        for kept in self._commands.of_queue(queue_id):
            self._commands.forget(kept)
        self._queues.pop(queue_id, None)
        self._spent = {one for one in self._spent if one[0] != queue_id}
