"""Entries by id, within the tenant that asks.

An entry of another tenant is answered exactly like one that does not exist: the same error, with
the same words. Handlers look up every id through here.

Models, samplers and sessions are cached for a moment, because every submission names them. Changes
by this server take effect at once, changes by another server on the same database after
`REMEMBERED_S`.
"""

from __future__ import annotations

from typing import TypeVar

from tinsmith.errors import BadRequestError, NotFoundError, UnknownEntryError
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.records import (
    CheckpointEntry,
    Command,
    CustomLossEntry,
    Entry,
    ModelEntry,
    SamplerEntry,
    SessionEntry,
    TenantId,
)

E = TypeVar("E", bound=Entry)

REMEMBERED_S = 2.0
MOST_REMEMBERED = 1_000

_NAMES = {
    SessionEntry: "session",
    ModelEntry: "training run",
    SamplerEntry: "sampler",
    CheckpointEntry: "checkpoint",
    CustomLossEntry: "custom loss",
}


def unknown(what: str, entry_id: str) -> NotFoundError:
    """The error for an entry that does not exist, or is another tenant's."""
    return NotFoundError(f"there is no {what} {entry_id!r:.200}")


class Lookups:
    """Finds entries of a tenant. For one event loop."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._remembered: dict[tuple[type[Entry], str], tuple[float, Entry]] = {}

    async def session(self, tenant_id: TenantId, session_id: str) -> SessionEntry:
        """A tenant's session; raises `NotFoundError`."""
        return await self._known(SessionEntry, tenant_id, session_id)

    async def open_session(self, tenant_id: TenantId, session_id: str) -> SessionEntry:
        """A tenant's session that has not ended.

        Raises:
            NotFoundError: There is none.
            BadRequestError: It has ended.
        """
        session = await self.session(tenant_id, session_id)
        if session.ended_at is not None:
            raise BadRequestError(
                f"session {session_id} has ended; create a new client to continue",
            )
        return session

    async def model(self, tenant_id: TenantId, model_id: str) -> ModelEntry:
        """A tenant's model, which is also a training run; raises `NotFoundError`."""
        return await self._known(ModelEntry, tenant_id, model_id)

    async def sampler(self, tenant_id: TenantId, sampler_id: str) -> SamplerEntry:
        """A tenant's sampler; raises `NotFoundError`."""
        return await self._known(SamplerEntry, tenant_id, sampler_id)

    async def custom_loss(self, tenant_id: TenantId, loss_id: str) -> CustomLossEntry:
        """A tenant's uploaded loss; raises `NotFoundError`."""
        return await self._known(CustomLossEntry, tenant_id, loss_id)

    async def checkpoint(self, tenant_id: TenantId, path: str) -> CheckpointEntry:
        """A tenant's own checkpoint; raises `NotFoundError`."""
        found = await self._ledger.entries(CheckpointEntry).get(path)
        return self._of_tenant(CheckpointEntry, found, tenant_id, path)

    async def readable_checkpoint(
        self, tenant_id: TenantId, path: str, *, also_of: TenantId | None = None
    ) -> CheckpointEntry:
        """A checkpoint that the tenant may read: its own, a published one, or one of `also_of`.

        Raises:
            NotFoundError: There is none, or it has expired.
        """
        found = await self._ledger.entries(CheckpointEntry).get(path)
        if found is not None and found.expires_at is not None:
            found = found if found.expires_at > self._ledger.now() else None
        if found is not None and (found.is_published or found.tenant_id == also_of):
            return found
        return self._of_tenant(CheckpointEntry, found, tenant_id, path)

    async def command(self, tenant_id: TenantId, request_id: str) -> Command:
        """A tenant's command; raises `NotFoundError`."""
        try:
            found = await self._ledger.command(request_id)
        except UnknownEntryError:
            raise unknown("request", request_id) from None
        if found.tenant_id != tenant_id:
            raise unknown("request", request_id)
        return found

    async def settled_command(
        self, tenant_id: TenantId, request_id: str, *, timeout_s: float
    ) -> Command:
        """A tenant's command once it is settled, or after the timeout; raises `NotFoundError`."""
        try:
            return await self._ledger.wait_settled(
                request_id, timeout_s=timeout_s, tenant_id=tenant_id
            )
        except UnknownEntryError:
            raise unknown("request", request_id) from None

    def forget(self, entry: Entry) -> None:
        """Drop a cached entry that was changed."""
        self._remembered.pop((type(entry), entry.id), None)

    async def _known(self, kind: type[E], tenant_id: TenantId, entry_id: str) -> E:
        now = self._ledger.now()
        until, entry = self._remembered.get((kind, entry_id), (0.0, None))
        if until > now and isinstance(entry, kind):
            return self._of_tenant(kind, entry, tenant_id, entry_id)
        found = await self._ledger.entries(kind).get(entry_id)
        if found is not None:
            if len(self._remembered) >= MOST_REMEMBERED:
                self._remembered.clear()
            self._remembered[kind, entry_id] = (now + REMEMBERED_S, found)
        return self._of_tenant(kind, found, tenant_id, entry_id)

    def _of_tenant(self, kind: type[E], found: E | None, tenant_id: TenantId, entry_id: str) -> E:
        if found is None or found.tenant_id != tenant_id:
            raise unknown(_NAMES[kind], entry_id)
        return found
