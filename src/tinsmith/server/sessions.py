"""The life of sessions: they beat, and they end, by their client's word or by its silence.

Whoever ends a session appends `release_model` to the lines of its models, behind everything else in
them; see docs/service.md. Silence is counted from the start of this server at the earliest: a
session is not to blame for the time in which there was nobody to beat to.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from tinsmith.ledger.base import Ledger
from tinsmith.ledger.records import LineId, Model, Session, Submission
from tinsmith.server.lookups import Lookups
from tinsmith.types.record import to_plain
from tinsmith.types.runs import SessionCancelled

_log = logging.getLogger(__name__)

RELEASE = "release_model"
_PAGE = 500


class Sessions:
    """Keeps sessions alive and ends them. For one event loop."""

    def __init__(self, ledger: Ledger, lookups: Lookups, timeout_s: float) -> None:
        self._ledger = ledger
        self._lookups = lookups
        self._timeout_s = timeout_s
        self._started_at = ledger.now()
        self._looked_until = 0.0

    async def beat(self, session: Session) -> Session:
        """Note that its client still runs; returns the session as it stands."""
        now = self._ledger.now()

        def beaten(kept: Session) -> Session:
            if kept.ended_at is not None:
                return kept
            return msgspec.structs.replace(kept, heartbeat_at=now)

        changed = await self._ledger.entries(Session).change(session.id, beaten)
        self._lookups.forget(session)
        return changed

    async def end(self, session_id: str, ending: dict[str, Any]) -> None:
        """End a session, unless it has ended, and have its models released."""
        now = self._ledger.now()

        def ended(kept: Session) -> Session:
            if kept.ended_at is not None:
                return kept
            return msgspec.structs.replace(kept, ended_at=now, ending=ending)

        session = await self._ledger.entries(Session).change(session_id, ended)
        self._lookups.forget(session)
        if session.ended_at == now:
            await self._release_models(session)

    async def end_silent(self) -> int:
        """End the sessions that were silent for too long; returns how many.

        To be called now and then. Each call looks only at what became due since the last.
        """
        before = self._ledger.now() - self._timeout_s
        if before <= self._started_at:
            return 0
        count = 0
        for session in await self._silent(before):
            silent_s = self._ledger.now() - session.heartbeat_at
            detail = f"no heartbeat for {silent_s:.0f} s"
            told = {"session": session.id, "tenant": session.tenant_id}
            _log.info("a session is ended: %s", detail, extra=told)
            await self.end(session.id, to_plain(SessionCancelled(detail=detail)))
            count += 1
        self._looked_until = before
        return count

    async def _silent(self, before: float) -> list[Session]:
        found: list[Session] = []
        since = self._looked_until
        while True:
            page = await self._ledger.entries(Session).due(before, since=since, limit=_PAGE)
            found += [session for session in page if session.ended_at is None]
            if len(page) < _PAGE or page[-1].due_at <= since:
                return found
            since = page[-1].due_at

    async def _release_models(self, session: Session) -> None:
        offset = 0
        while True:
            page = await self._ledger.entries(Model).of_parent(
                session.id, limit=_PAGE, offset=offset
            )
            for model in page:
                if model.released_at is None:
                    await self._ledger.append(_release(model))
            if len(page) < _PAGE:
                return
            offset += len(page)


def _release(model: Model) -> Submission:
    return Submission(
        line=LineId(model.id),
        seq_id=None,
        kind=RELEASE,
        tenant_id=model.tenant_id,
        session_id=model.session_id,
        fingerprint=RELEASE.encode(),
        payload=b"J{}",
    )
