"""Operations on entries, queues and usage, and sweeps, as steps for any database (`steps.py`).

Each sweep takes a bounded number of rows, so that it does not delay the writers behind it for long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from tinsmith.errors import UnknownEntryError
from tinsmith.service.ledger.records import (
    AuditEntry,
    CheckpointEntry,
    Command,
    CustomLossEntry,
    Entry,
    LedgerStatistics,
    ModelEntry,
    QueueId,
    QueueProgress,
    SamplerEntry,
    SessionEntry,
    TenantId,
    UsageKey,
    UsageRow,
    is_storable,
)
from tinsmith.service.ledger.steps import Effects, Query, Steps, Value, command_of

E = TypeVar("E", bound=Entry)


def add(_: Effects, entry: E) -> Steps[E]:
    """`Entries.add`."""
    added = yield "add_entry", _columns(entry)
    if added:
        return entry
    rows = yield "entry", (entry.kind, entry.id)
    return msgspec.json.decode(rows[0][0], type=type(entry))


def put(_: Effects, entry: E) -> Steps[E | None]:
    """`Entries.put`."""
    columns = _columns(entry)  # which may fail, so before the first change
    rows = yield "remove_entry", (entry.kind, entry.id)
    yield "add_entry", columns
    return msgspec.json.decode(rows[0][0], type=type(entry)) if rows else None


def get(_: Effects, kind: type[E], entry_id: str) -> Steps[E | None]:
    """`Entries.get`."""
    if not is_storable(entry_id):
        return None
    rows = yield "entry", (kind.kind, entry_id)
    return msgspec.json.decode(rows[0][0], type=kind) if rows else None


def change(effects: Effects, kind: type[E], entry_id: str, how: Callable[[E], E]) -> Steps[E]:
    """`Entries.change`."""
    old = yield from get(effects, kind, entry_id)
    if old is None:
        raise UnknownEntryError(f"there is no {kind.kind} {entry_id!r:.200}")
    new = how(old)
    assert new.id == entry_id, "an entry keeps its id"
    yield "change_entry", _columns(new)
    return new


def remove(
    effects: Effects, kind: type[E], entry_id: str, due_before: float | None = None
) -> Steps[bool]:
    """`Entries.remove`."""
    if not is_storable(entry_id):
        return False
    if due_before is not None:
        entry = yield from get(effects, kind, entry_id)
        if entry is None or entry.due_at is None or entry.due_at >= due_before:
            return False
    return bool((yield "remove_entry", (kind.kind, entry_id)))


def listed(_: Effects, kind: type[E], query: Query) -> Steps[list[E]]:
    """The entries that a query gives."""
    rows = yield query
    return [msgspec.json.decode(body, type=kind) for (body,) in rows]


def count(_: Effects, kind: type[Entry], tenant_id: TenantId | None) -> Steps[int]:
    """`Entries.count`."""
    if tenant_id is None:
        [(number,)] = yield "count_entries", (kind.kind,)
    else:
        [(number,)] = yield "count_entries_of_tenant", (kind.kind, tenant_id)
    return int(number)


def _columns(entry: Entry) -> tuple[Value, ...]:
    body = msgspec.json.encode(entry).decode()
    return entry.kind, entry.id, entry.tenant_id, entry.parent_id, entry.due_at, body


# Queues


def queue(_: Effects, name: QueueId) -> Steps[QueueProgress]:
    """`Ledger.queue`."""
    rows = yield "line", (name,)
    newest = yield "newest_in_line", (name,)
    position, snapshot_position, snapshot = rows[0] if rows else (0, 0, None)
    return QueueProgress(
        queue_id=name,
        position=position,
        snapshot_position=snapshot_position,
        snapshot=snapshot,
        asked_at=newest[0][0] if newest else None,
    )


def pass_over(_: Effects, name: QueueId, position: int) -> Steps[None]:
    """`Ledger.pass_over`."""
    yield "pass_over", (name, position)


def record_snapshot(
    effects: Effects, name: QueueId, position: int, reference: str | None
) -> Steps[str | None]:
    """`Ledger.record_snapshot`."""
    old = yield from queue(effects, name)
    if position < old.snapshot_position:
        return reference if reference != old.snapshot else None
    yield "set_snapshot", (name, max(position, old.position), position, reference)
    covered = yield "covered_payloads", (name, position)
    yield "drop_payload", [(command,) for command, _ in covered]
    for _, file in covered:
        effects.drop(file)
    yield "drop_spent", (name, position)
    return old.snapshot if old.snapshot != reference else None


def replay(_: Effects, name: QueueId) -> Steps[list[Command]]:
    """`Ledger.replay`."""
    return [command_of(row) for row in (yield "replay", (name,))]


def touch(_: Effects) -> Steps[None]:
    """A change, and its reversal, of a queue that no client has."""
    yield "spend", ("", 0)
    yield "drop_spent", ("", 1)


def spend(_: Effects, name: QueueId, number: int) -> Steps[None]:
    """`Ledger.spend`."""
    yield "spend", (name, number)


def spent(_: Effects, name: QueueId) -> Steps[list[int]]:
    """`Ledger.spent`."""
    return [number for (number,) in (yield "spent", (name,))]


def usage(_: Effects, tenant_id: TenantId, since: int, before: int) -> Steps[list[UsageRow]]:
    """`Ledger.usage`."""
    rows = yield "usage", (tenant_id, since, before)
    return [
        UsageRow(
            key=UsageKey(
                tenant_id=tenant_id,
                kind=kind,
                session_id=session_id,
                queue_id=name,
                base_model=base_model,
            ),
            hour=hour,
            amount=amount,
        )
        for hour, kind, session_id, name, base_model, amount in rows
    ]


SWEPT_AT_ONCE = 500


def sweep_results(effects: Effects, before: float) -> Steps[int]:
    """Let go of results that were settled before a time."""
    rows = yield "expired_results", (before, SWEPT_AT_ONCE)
    yield "drop_result", [(ordinal,) for ordinal, _ in rows]
    for _, file in rows:
        effects.drop(file)
    return len(rows)


def sweep_commands(effects: Effects, before: float) -> Steps[int]:
    """Forget commands that were settled before a time and that no replay needs."""
    return (yield from _forget(effects, "forgettable_commands", (before, SWEPT_AT_ONCE)))


def _forget(effects: Effects, query: str, values: tuple[str | float, ...]) -> Steps[int]:
    rows = yield query, values
    ordinals: list[tuple[Value, ...]] = [(ordinal,) for ordinal, _, _ in rows]
    for table in ("drop_payload", "drop_result_of", "drop_command"):
        yield table, ordinals
    for _, payload_file, result_file in rows:
        effects.drop(payload_file)
        effects.drop(result_file)
    return len(rows)


def sweep_session(effects: Effects, session: SessionEntry) -> Steps[tuple[int, bool]]:
    """Remove an ended session with all that belongs to it.

    Returns how many entries that was, and whether the session went: one that has very many goes in
    several sweeps, itself with the last.
    """
    removed = 0
    kinds: tuple[type[Entry], ...] = (ModelEntry, SamplerEntry, CustomLossEntry)
    for kind in kinds:
        passed = 0
        while True:
            query = ("entries_of_parent", (kind.kind, session.id, SWEPT_AT_ONCE, passed))
            page = yield from listed(effects, kind, query)
            for entry in page:
                if removed == SWEPT_AT_ONCE:
                    return removed, False
                if kind is ModelEntry and (yield from _is_saved(entry)):
                    passed += 1
                    continue
                yield from _drop_queue(effects, QueueId(entry.id))
                yield from remove(effects, kind, entry.id)
                removed += 1
            if len(page) < SWEPT_AT_ONCE:
                break
    yield from remove(effects, SessionEntry, session.id)
    return removed + 1, True


def _is_saved(model: Entry) -> Steps[bool]:
    """Whether a model has checkpoints, which keep its entry from being deleted."""
    return bool((yield "entries_of_parent", (CheckpointEntry.kind, model.id, 1, 0)))


def _drop_queue(effects: Effects, queue_id: QueueId) -> Steps[None]:
    yield from _forget(effects, "commands_of_line", (queue_id,))
    yield "drop_line", (queue_id,)
    yield "drop_spent", (queue_id, 2**63 - 1)


def sweep_audit(effects: Effects, before: float) -> Steps[int]:
    """Remove audit entries from before a time."""
    query = ("entries_due", (AuditEntry.kind, before, 0.0, SWEPT_AT_ONCE))
    old = yield from listed(effects, AuditEntry, query)
    for entry in old:
        yield from remove(effects, AuditEntry, entry.id)
    return len(old)


def sweep_usage(_: Effects, before: float) -> Steps[None]:
    """Remove usage from before a time."""
    yield "drop_usage", (int(before),)


def unnamed(_: Effects, files: list[str]) -> Steps[list[str]]:
    """Those of these files that no row names."""
    found = set(files)
    for file in files:
        if (yield "file_is_named", (file,)):
            found.remove(file)
    return sorted(found)


def latest_time(_: Effects) -> Steps[float]:
    """The newest time of a command or a result; 0 if there is none."""
    [(moment,)] = yield "latest_time", ()
    return float(moment or 0.0)


def unsettled(_: Effects) -> Steps[dict[TenantId, tuple[int, int]]]:
    """`Ledger.unsettled`."""
    found: dict[TenantId, tuple[int, int]] = {}
    for tenant_id, count, size_bytes in (yield "unsettled_by_tenant", ()):
        counted, summed = found.get(tenant_id, (0, 0))
        found[tenant_id] = counted + count, summed + int(size_bytes)
    return found


def statistics(
    _: Effects, now: float, stored_bytes: int, commits: int, writes: int
) -> Steps[LedgerStatistics]:
    """`Ledger.statistics`."""
    [(pending, claimed, oldest)] = yield "unsettled_totals", ()
    [(payload_bytes, payload_files)] = yield "kept_totals", ()
    return LedgerStatistics(
        pending=pending,
        claimed=claimed,
        oldest_pending_s=0.0 if oldest is None else max(0.0, now - oldest),
        payload_bytes=int(payload_bytes),
        payload_files=payload_files,
        stored_bytes=stored_bytes,
        commits=commits,
        writes=writes,
    )
