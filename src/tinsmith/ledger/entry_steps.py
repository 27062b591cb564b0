"""What happens to entries and lines, as steps for any database (`steps.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from tinsmith.errors import UnknownEntryError
from tinsmith.ledger.command_steps import command_of
from tinsmith.ledger.records import (
    Command,
    Entry,
    Line,
    LineId,
    TenantId,
    UsageKey,
    UsageRow,
    is_storable,
)
from tinsmith.ledger.steps import Effects, Query, Steps, Value

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


# Lines


def line(_: Effects, name: LineId) -> Steps[Line]:
    """`Ledger.line`."""
    rows = yield "line", (name,)
    newest = yield "newest_in_line", (name,)
    position, snapshot_position, snapshot = rows[0] if rows else (0, 0, None)
    return Line(
        line=name,
        position=position,
        snapshot_position=snapshot_position,
        snapshot=snapshot,
        asked_at=newest[0][0] if newest else None,
    )


def pass_over(_: Effects, name: LineId, position: int) -> Steps[None]:
    """`Ledger.pass_over`."""
    yield "pass_over", (name, position)


def record_snapshot(
    effects: Effects, name: LineId, position: int, reference: str | None
) -> Steps[str | None]:
    """`Ledger.record_snapshot`."""
    old = yield from line(effects, name)
    if position < old.snapshot_position:
        return reference if reference != old.snapshot else None
    yield "set_snapshot", (name, max(position, old.position), position, reference)
    for command, file in (yield "covered_payloads", (name, position)):
        yield "drop_payload", (command,)
        effects.drop(file)
    yield "drop_spent", (name, position)
    return old.snapshot if old.snapshot != reference else None


def replay(_: Effects, name: LineId) -> Steps[list[Command]]:
    """`Ledger.replay`."""
    return [command_of(row) for row in (yield "replay", (name,))]


def touch(_: Effects) -> Steps[None]:
    """A change, and its opposite, to a line that nobody has."""
    yield "spend", ("", 0)
    yield "drop_spent", ("", 1)


def spend(_: Effects, name: LineId, number: int) -> Steps[None]:
    """`Ledger.spend`."""
    yield "spend", (name, number)


def spent(_: Effects, name: LineId) -> Steps[list[int]]:
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
                line=name,
                base_model=base_model,
            ),
            hour=hour,
            amount=amount,
        )
        for hour, kind, session_id, name, base_model, amount in rows
    ]
