"""Replicas in the ledger, for operators: what the scheduler reports of them, and what they want.

`tinsmith fleet` and the API read and write these entries, as `tinsmith key` does with keys: it
works the same however many servers there are, and a wish outlives a restart. `run/fleet_reports.py`
writes the reports and grants the wishes.
"""

from __future__ import annotations

import datetime

import msgspec

from tinsmith.errors import UnknownEntryError
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.records import ReplicaEntry
from tinsmith.types.extensions import ReplicaStatus


async def list_replicas(ledger: Ledger) -> list[ReplicaStatus]:
    """All replicas that the scheduler has reported, by name."""
    found = await ledger.entries(ReplicaEntry).all()
    return [_status(one) for one in sorted(found, key=lambda one: one.id)]


async def ask_drained(ledger: Ledger, name: str, *, is_drained: bool) -> ReplicaStatus:
    """Ask for a replica to be drained, or used again; a scheduler sees it within seconds.

    Raises:
        UnknownEntryError: There is no such replica; the message names those that there are.
    """
    known = [one.name for one in await list_replicas(ledger)]
    if name not in known:
        names = ", ".join(known) or "none: the engine is not divided"
        raise UnknownEntryError(f"there is no replica {name!r:.80}", remedy=f"there are {names}")

    def changed(entry: ReplicaEntry) -> ReplicaEntry:
        return msgspec.structs.replace(entry, is_drained=is_drained, problem=None)

    return _status(await ledger.entries(ReplicaEntry).change(name, changed))


def _status(entry: ReplicaEntry) -> ReplicaStatus:
    return ReplicaStatus.model_validate(
        {
            **entry.report,
            "name": entry.id,
            "reported_at": datetime.datetime.fromtimestamp(entry.reported_at, datetime.UTC),
            "wants_drained": entry.is_drained,
            "problem": entry.problem,
        }
    )
