"""The life of sessions: heartbeats, and the end by request or by silence.

Ending a session appends `release_model` to the queues of its models, behind everything else in
them; see docs/service.md. Silence counts from the time at which this server could hear: a session
is not ended for heartbeats that were missed because the server was down, suspended, or could not
write to the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import msgspec

from tinsmith.errors import LedgerUnavailableError
from tinsmith.service.api.lookups import Lookups
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.records import ModelEntry, QueueId, SessionEntry, Submission
from tinsmith.types.record import to_plain
from tinsmith.types.runs import SessionCancelled

_log = logging.getLogger(__name__)

RELEASE = "release_model"
RELEASE_LOOK_S = 0.02
"""How often to check whether the models of a session are released."""
_PAGE = 500


class SessionLifecycle:
    """Keeps sessions alive and ends them. For one event loop."""

    def __init__(self, ledger: Ledger, lookups: Lookups, timeout_s: float) -> None:
        self._ledger = ledger
        self._lookups = lookups
        self._timeout_s = timeout_s
        self._hears_since = self._looked_at = ledger.now()
        self._looked_until = 0.0

    async def beat(self, session: SessionEntry) -> SessionEntry:
        """Note that its client is alive; returns the session as it is now."""
        now = self._ledger.now()

        def beaten(kept: SessionEntry) -> SessionEntry:
            if kept.ended_at is not None:
                return kept
            return msgspec.structs.replace(kept, heartbeat_at=now)

        with self._telling_deafness():
            changed = await self._ledger.entries(SessionEntry).change(session.id, beaten)
        self._lookups.forget(session)
        return changed

    async def end(
        self, session_id: str, ending: dict[str, Any], *, unless_heard_since: float | None = None
    ) -> None:
        """End a session, unless it has ended, and release its models."""
        now, is_first = self._ledger.now(), False

        def ended(kept: SessionEntry) -> SessionEntry:
            nonlocal is_first
            has_beaten = unless_heard_since is not None and kept.heartbeat_at >= unless_heard_since
            is_first = kept.ended_at is None and not has_beaten
            if not is_first:
                return kept
            return msgspec.structs.replace(kept, ended_at=now, ending=ending)

        session = await self._ledger.entries(SessionEntry).change(session_id, ended)
        self._lookups.forget(session)
        if session.ended_at is not None:
            # Also if it had ended before: that may have failed before all were released.
            await self._release_models(session, is_first=is_first)

    async def wait_released(self, session_id: str) -> None:
        """Wait until all models of an ended session are released.

        A model that is saved because its session ended is listed by then.
        """
        while not await self._are_released(session_id):  # noqa: ASYNC110 - the ledger has no event
            await asyncio.sleep(RELEASE_LOOK_S)

    async def _are_released(self, session_id: str) -> bool:
        offset = 0
        while True:
            page = await self._ledger.entries(ModelEntry).of_parent(
                session_id, limit=_PAGE, offset=offset
            )
            if any(model.released_at is None for model in page):
                return False
            if len(page) < _PAGE:
                return True
            offset += len(page)

    async def end_silent(self) -> int:
        """End the sessions that were silent for too long; returns how many.

        To be called often within that time. Each call looks only at sessions that became due
        since the last.
        """
        now = self._ledger.now()
        if now > self._looked_at + self._timeout_s / 2:
            self._hears_since = now  # suspended meanwhile: heartbeats are waiting in its sockets
        self._looked_at = now
        before = now - self._timeout_s
        if before <= self._hears_since:
            return 0
        with self._telling_deafness():
            return await self._end_due(before)

    @contextlib.contextmanager
    def _telling_deafness(self) -> Iterator[None]:
        """While the ledger is unavailable no heartbeat is noted, so silence means nothing."""
        try:
            yield
        except LedgerUnavailableError:
            self._hears_since = self._ledger.now()
            raise

    async def _end_due(self, before: float) -> int:
        count, since = 0, self._looked_until
        while True:
            page = await self._ledger.entries(SessionEntry).due(before, since=since, limit=_PAGE)
            silent = [session for session in page if session.ended_at is None]
            for session in silent:
                await self._end_silent(session, before)
            count += len(silent)
            # Those just ended are due later, so the next page begins where this one did.
            if len(page) < _PAGE or (not silent and page[-1].due_at <= since):
                self._looked_until = before
                return count
            since = since if silent else page[-1].due_at

    async def _end_silent(self, session: SessionEntry, before: float) -> None:
        detail = f"no heartbeat for {self._ledger.now() - session.heartbeat_at:.0f} s"
        told = {"session": session.id, "tenant": session.tenant_id}
        _log.info("ended a session: %s", detail, extra=told)
        ending = to_plain(SessionCancelled(detail=detail))
        await self.end(session.id, ending, unless_heard_since=before)

    async def finish_endings(self) -> int:
        """Release models whose session ended without releasing them; returns how many.

        To be called at the start: a crash may have come between the two.
        """
        count, offset = 0, 0
        while True:
            page = await self._ledger.entries(ModelEntry).all(limit=_PAGE, offset=offset)
            for model in page:
                count += await self.release_if_ended(model)
            if len(page) < _PAGE:
                return count
            offset += len(page)

    async def release_if_ended(self, model: ModelEntry) -> bool:
        """Release a model whose session has ended, unless that was done; returns whether."""
        if model.released_at is not None:
            return False
        session = await self._ledger.entries(SessionEntry).get(model.session_id)
        if session is not None and session.ended_at is None:
            return False
        commands = await self._ledger.replay(QueueId(model.id))
        if any(command.kind == RELEASE for command in commands):
            return False
        await self._ledger.append(_release(model))
        return True

    async def _release_models(self, session: SessionEntry, *, is_first: bool) -> None:
        offset = 0
        while True:
            page = await self._ledger.entries(ModelEntry).of_parent(
                session.id, limit=_PAGE, offset=offset
            )
            for model in page:
                if is_first:  # also an unloaded one: this makes the ledger forget its queue
                    await self._ledger.append(_release(model))
                else:
                    await self.release_if_ended(model)
            if len(page) < _PAGE:
                return
            offset += len(page)


def _release(model: ModelEntry) -> Submission:
    return Submission(
        queue_id=QueueId(model.id),
        seq_id=None,
        kind=RELEASE,
        tenant_id=model.tenant_id,
        session_id=model.session_id,
        fingerprint=RELEASE.encode(),
        payload=b"J{}",
    )
