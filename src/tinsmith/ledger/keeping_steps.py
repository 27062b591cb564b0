"""What the sweep removes, and what there is, as steps for any database (`steps.py`).

Each sweep takes a bounded number of things, so that it does not hold up the writers behind it.
"""

from __future__ import annotations

from tinsmith.ledger import entry_steps
from tinsmith.ledger.records import (
    AuditEntry,
    CheckpointEntry,
    CustomLoss,
    Entry,
    LedgerStatistics,
    LineId,
    Model,
    Sampler,
    Session,
)
from tinsmith.ledger.steps import Effects, Steps

SWEPT_AT_ONCE = 500


def sweep_results(effects: Effects, before: float) -> Steps[int]:
    """Let go of results that were settled before a time."""
    rows = yield "expired_results", (before, SWEPT_AT_ONCE)
    for ordinal, file in rows:
        yield "drop_result", (ordinal,)
        effects.drop(file)
    return len(rows)


def sweep_commands(effects: Effects, before: float) -> Steps[int]:
    """Forget commands that were settled before a time and that no replay needs."""
    return (yield from _forget(effects, "forgettable_commands", (before, SWEPT_AT_ONCE)))


def _forget(effects: Effects, query: str, values: tuple[str | float, ...]) -> Steps[int]:
    rows = yield query, values
    for ordinal, payload_file, result_file in rows:
        yield "drop_payload", (ordinal,)
        yield "drop_result_of", (ordinal,)
        yield "drop_command", (ordinal,)
        effects.drop(payload_file)
        effects.drop(result_file)
    return len(rows)


def sweep_session(effects: Effects, session: Session) -> Steps[tuple[int, bool]]:
    """Remove an ended session with all that belongs to it.

    Returns how many entries that was, and whether the session went: one that has very many goes in
    several sweeps, itself with the last.
    """
    removed = 0
    kinds: tuple[type[Entry], ...] = (Model, Sampler, CustomLoss)
    for kind in kinds:
        passed = 0
        while True:
            query = ("entries_of_parent", (kind.kind, session.id, SWEPT_AT_ONCE, passed))
            page = yield from entry_steps.listed(effects, kind, query)
            for entry in page:
                if removed == SWEPT_AT_ONCE:
                    return removed, False
                if kind is Model and (yield from _is_saved(entry)):
                    passed += 1
                    continue
                yield from _drop_line(effects, LineId(entry.id))
                yield from entry_steps.remove(effects, kind, entry.id)
                removed += 1
            if len(page) < SWEPT_AT_ONCE:
                break
    yield from entry_steps.remove(effects, Session, session.id)
    return removed + 1, True


def _is_saved(model: Entry) -> Steps[bool]:
    """Whether a model has checkpoints, for which its entry is kept."""
    return bool((yield "entries_of_parent", (CheckpointEntry.kind, model.id, 1, 0)))


def _drop_line(effects: Effects, line: LineId) -> Steps[None]:
    yield from _forget(effects, "commands_of_line", (line,))
    yield "drop_line", (line,)
    yield "drop_spent", (line, 2**63 - 1)


def sweep_audit(effects: Effects, before: float) -> Steps[int]:
    """Remove audit entries from before a time."""
    query = ("entries_due", (AuditEntry.kind, before, 0.0, SWEPT_AT_ONCE))
    old = yield from entry_steps.listed(effects, AuditEntry, query)
    for entry in old:
        yield from entry_steps.remove(effects, AuditEntry, entry.id)
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
