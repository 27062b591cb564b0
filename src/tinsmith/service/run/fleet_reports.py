"""Reports the engine's replicas to operators, and does what they want with them.

Both are entries of the ledger, which operators read and write (`ledger/replicas.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from tinsmith.engine.base import Engine, ReplicaReport
from tinsmith.errors import TinkerError
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.records import ReplicaEntry, TenantId

_log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often wishes are looked for and changes are reported."""
REPEAT_S = 15.0
"""How often a report is repeated that has not changed, but for its load."""


class FleetReports:
    """Reports replicas and grants wishes. For one event loop.

    Args:
        ledger: Where the entries are.
        engine: Whose replicas they are.
        epoch: Gives the epoch that writes are conditional on.
    """

    def __init__(
        self, ledger: Ledger, engine: Engine, epoch: Callable[[], int | None] = lambda: None
    ) -> None:
        self._ledger = ledger
        self._engine = engine
        self._epoch = epoch
        self._has_looked = False
        self._wanted: dict[str, bool] = {}
        self._reported: dict[str, tuple[ReplicaReport, float]] = {}

    async def look(self) -> None:
        """Grant new wishes, and report what has changed."""
        reports = self._engine.replicas()
        if not reports and self._has_looked:
            return
        self._has_looked = True
        entries = self._ledger.entries(ReplicaEntry, epoch=self._epoch())
        found = {one.id: one for one in await entries.all()}
        for name in found.keys() - {one.name for one in reports}:
            await entries.remove(name)  # of an earlier configuration
        for report in reports:
            entry = found.get(report.name)
            problem = self._grant(report.name, entry is not None and entry.is_drained)
            now = self._ledger.now()
            if entry is None:
                await entries.add(_new_entry(report, now))
            if problem is not None or self._is_news(report, now):
                self._reported[report.name] = report, now
                await entries.change(report.name, _reporter(report, now, problem))

    def _grant(self, name: str, is_drained: bool) -> str | None:
        """Do as the operator wants; returns why that is refused."""
        if self._wanted.get(name, False) == is_drained:
            return None
        self._wanted[name] = is_drained
        try:
            self._engine.drain(name, is_drained=is_drained)
        except TinkerError as exc:
            _log.warning("replica %s is not drained: %s", name, exc)
            self._wanted[name] = False
            return str(exc)
        _log.info("replica %s is %s", name, "being drained" if is_drained else "used again")
        return None

    def _is_news(self, report: ReplicaReport, now: float) -> bool:
        last, at = self._reported.get(report.name, (None, 0.0))
        if last is None or now - at > REPEAT_S:
            return True
        blurred = {"load": 0.0, "restarts_in_s": None, "samples": 0}
        same = msgspec.structs.replace(last, **blurred)
        return same != msgspec.structs.replace(report, **blurred)


def _new_entry(report: ReplicaReport, now: float) -> ReplicaEntry:
    return ReplicaEntry(
        id=report.name,
        tenant_id=TenantId(""),
        created_at=now,
        report=msgspec.to_builtins(report),
        reported_at=now,
    )


def _reporter(
    report: ReplicaReport, now: float, problem: str | None
) -> Callable[[ReplicaEntry], ReplicaEntry]:
    plain: dict[str, Any] = msgspec.to_builtins(report)

    def changed(entry: ReplicaEntry) -> ReplicaEntry:
        return msgspec.structs.replace(
            entry,
            report=plain,
            reported_at=now,
            is_drained=entry.is_drained and problem is None,
            problem=problem if problem is not None or entry.is_drained else entry.problem,
        )

    return changed
