"""What a tenant is held to: its own quotas, and the service's limits where it has none.

`keys.QUOTAS` names them. What is under way at this moment is `admission.py`'s; here is what the
ledger knows: sessions and models that are open, tokens of this hour, and stored checkpoints. These
are looked up again every `REMEMBERED_S`, so that a quota is kept to within what comes in that time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import TypeVar
from weakref import WeakValueDictionary

from tinsmith.errors import RateLimitError, UnprocessableEntityError
from tinsmith.ledger.base import PAGE, Ledger
from tinsmith.ledger.records import CheckpointEntry, Model, Session, Tenant, TenantId
from tinsmith.server.settings import ServerSettings

T = TypeVar("T")

REMEMBERED_S = 5.0
MOST_REMEMBERED = 10_000
LONGEST_RETRY_S = 60.0
"""Clients are told to ask again after this at the latest: a quota may be raised meanwhile."""
HOUR_S = 3600

_TOKEN_KINDS = frozenset({"training", "sampling_prefill", "sampling_sample"})


class Quotas:
    """Looks quotas up, and refuses what is beyond them. For one event loop."""

    def __init__(self, ledger: Ledger, settings: ServerSettings) -> None:
        self._ledger = ledger
        self._settings = settings
        self._quotas: dict[TenantId, tuple[float, Mapping[str, int]]] = {}
        self._tokens: dict[TenantId, tuple[float, float]] = {}
        self._turns: WeakValueDictionary[TenantId, asyncio.Lock] = WeakValueDictionary()

    def turn(self, tenant_id: TenantId) -> asyncio.Lock:
        """To be held from `check_sessions` or `check_models` until what was asked for is added.

        Without it, many that ask at the same moment would all be told that there is room.
        """
        turn = self._turns.get(tenant_id)
        if turn is None:
            turn = self._turns[tenant_id] = asyncio.Lock()
        return turn

    def forget(self) -> None:
        """Look everything up anew."""
        self._quotas.clear()
        self._tokens.clear()

    async def of(self, tenant_id: TenantId) -> Mapping[str, int]:
        """A tenant's own quotas, remembered for a moment."""
        now = self._ledger.now()
        until, quotas = self._quotas.get(tenant_id, (0.0, {}))
        if until <= now:
            tenant = await self._ledger.entries(Tenant).get(tenant_id)
            quotas = tenant.quotas if tenant is not None else {}
            _remember(self._quotas, tenant_id, (now + REMEMBERED_S, quotas))
        return quotas

    async def check_sessions(self, tenant_id: TenantId) -> None:
        """Refuse one more session if the tenant has as many open ones as it may."""
        most = (await self.of(tenant_id)).get("sessions", self._settings.most_sessions)
        if await self._ledger.entries(Session).count(tenant_id=tenant_id) >= most:
            _check_count("sessions", len(await self._open_sessions(tenant_id)), most)

    async def check_models(self, tenant_id: TenantId) -> None:
        """Refuse one more model if the tenant trains as many as it may."""
        most = (await self.of(tenant_id)).get("models", self._settings.most_models)
        models = self._ledger.entries(Model)
        # Most tenants never made as many, and then that is all there is to look at.
        if await models.count(tenant_id=tenant_id) < most:
            return
        trained = 0
        for session in await self._open_sessions(tenant_id):
            trained += sum(one.released_at is None for one in await models.of_parent(session.id))
        _check_count("models", trained, most)

    async def _open_sessions(self, tenant_id: TenantId) -> list[Session]:
        # One that was silent for longer than this has ended, or is about to be.
        since = self._ledger.now() - 2 * self._settings.session_timeout_s
        heard_of = await self._ledger.entries(Session).due(
            math.inf, since=since, tenant_id=tenant_id, limit=10 * PAGE
        )
        return [session for session in heard_of if session.ended_at is None]

    async def check_storage(self, tenant_id: TenantId) -> None:
        """Refuse a save if the tenant's checkpoints take as much as they may."""
        most = (await self.of(tenant_id)).get("storage_bytes")
        if most is None:
            return
        stored = await stored_bytes(self._ledger, tenant_id)
        if stored >= most:
            raise UnprocessableEntityError(
                f"the checkpoints take {stored} bytes and {most} are allowed",
                remedy="delete some of the checkpoints",
            )

    async def check_tokens(self, tenant_id: TenantId) -> None:
        """Refuse a command if the tenant has used up the tokens of this hour."""
        most = (await self.of(tenant_id)).get("tokens_per_hour")
        if most is None:
            return
        now = self._ledger.now()
        until, used = self._tokens.get(tenant_id, (0.0, 0.0))
        begun = now - now % HOUR_S
        if until <= now:
            rows = await self._ledger.usage(tenant_id, since=begun, before=begun + HOUR_S)
            used = sum(row.amount for row in rows if row.key.kind in _TOKEN_KINDS)
            # What was used in the last hour says nothing of the next.
            _remember(self._tokens, tenant_id, (min(now + REMEMBERED_S, begun + HOUR_S), used))
        if used >= most:
            raise RateLimitError(
                f"{used:.0f} tokens were used in this hour and {most} are allowed",
                retry_after_s=min(begun + HOUR_S - now, LONGEST_RETRY_S),
            )


async def stored_bytes(ledger: Ledger, tenant_id: TenantId) -> int:
    """What a tenant's checkpoints take together."""
    entries, total, offset = ledger.entries(CheckpointEntry), 0, 0
    while page := await entries.of_tenant(tenant_id, offset=offset):
        total += sum(entry.size_bytes for entry in page)
        offset += len(page)
        if len(page) < PAGE:
            break
    return total


def _remember(kept: dict[TenantId, T], tenant_id: TenantId, value: T) -> None:
    if len(kept) >= MOST_REMEMBERED:
        kept.clear()
    kept[tenant_id] = value


def _check_count(what: str, have: int, most: int) -> None:
    if have >= most:
        raise UnprocessableEntityError(
            f"there are {have} {what} and {most} are allowed", remedy=f"end some of the {what}"
        )
