"""Limits of one tenant: what it has in flight, requests per minute, and its quotas.

Counted are the request ids that this server gave out and has not seen settled. A result that is
fetched, or reported in a feed, is taken off the count; when a tenant reaches its limit, the ledger
is asked about its oldest requests. So the count costs nothing while it is low, and starts at zero
after a restart.

Where several servers share the ledger, each counts what the ledger knew at its last look, and what
it has accepted since. It looks every second, and before each command of a tenant that is near its
limit. So a limit can be exceeded by what other servers accept within a few milliseconds.

**Quotas** are the tenant's own, or the service's limits where it has none. `keys.QUOTAS` names
them. Checked here is what the ledger knows: open sessions and models, tokens of this hour, and
stored checkpoints. These are cached for `REMEMBERED_S`, so a quota can be exceeded by what arrives
within that time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

import msgspec

from tinsmith.errors import RateLimitError, UnknownEntryError, UnprocessableEntityError
from tinsmith.service.api.api_settings import ApiSettings
from tinsmith.service.ledger.base import PAGE, Ledger
from tinsmith.service.ledger.records import (
    CheckpointEntry,
    ModelEntry,
    RequestPace,
    SessionEntry,
    Tenant,
    TenantId,
)

T = TypeVar("T")

REMEMBERED_S = 5.0
MOST_REMEMBERED = 10_000
LONGEST_RETRY_S = 60.0
"""The longest time after which clients are told to retry: a quota may be raised meanwhile."""
HOUR_S = 3600

_TOKEN_KINDS = frozenset({"training", "sampling_prefill", "sampling_sample"})


class Quotas:
    """Looks up quotas and refuses what exceeds them. For one event loop."""

    def __init__(self, ledger: Ledger, settings: ApiSettings) -> None:
        self._ledger = ledger
        self._settings = settings
        self._quotas: dict[TenantId, tuple[float, Mapping[str, int]]] = {}
        self._tokens: dict[TenantId, tuple[float, float]] = {}

    def turn(self, tenant_id: TenantId) -> AbstractAsyncContextManager[object]:
        """A lock to hold from `check_sessions` or `check_models` until the new entry is added.

        Without it, simultaneous requests would all find room for one more.
        """
        return self._ledger.alone(f"quota of {tenant_id}")

    def forget(self) -> None:
        """Drop what is cached."""
        self._quotas.clear()
        self._tokens.clear()

    async def of(self, tenant_id: TenantId) -> Mapping[str, int]:
        """A tenant's own quotas, cached for a moment."""
        now = self._ledger.now()
        until, quotas = self._quotas.get(tenant_id, (0.0, {}))
        if until <= now:
            tenant = await self._ledger.entries(Tenant).get(tenant_id)
            quotas = tenant.quotas if tenant is not None else {}
            _remember(self._quotas, tenant_id, (now + REMEMBERED_S, quotas))
        return quotas

    async def check_sessions(self, tenant_id: TenantId) -> None:
        """Refuse one more session if the tenant has reached its limit of open ones."""
        most = (await self.of(tenant_id)).get("sessions", self._settings.most_sessions)
        if await self._ledger.entries(SessionEntry).count(tenant_id=tenant_id) >= most:
            _check_count("sessions", len(await self._open_sessions(tenant_id)), most)

    async def check_models(self, tenant_id: TenantId) -> None:
        """Refuse one more model if the tenant has reached its limit."""
        most = (await self.of(tenant_id)).get("models", self._settings.most_models)
        models = self._ledger.entries(ModelEntry)
        # Most tenants never made that many, so this one count settles it.
        if await models.count(tenant_id=tenant_id) < most:
            return
        trained = 0
        for session in await self._open_sessions(tenant_id):
            trained += sum(one.released_at is None for one in await models.of_parent(session.id))
        _check_count("models", trained, most)

    async def _open_sessions(self, tenant_id: TenantId) -> list[SessionEntry]:
        # One that was silent for longer than this has ended, or is about to be ended.
        since = self._ledger.now() - 2 * self._settings.session_timeout_s
        heard_of = await self._ledger.entries(SessionEntry).due(
            math.inf, since=since, tenant_id=tenant_id, limit=10 * PAGE
        )
        return [session for session in heard_of if session.ended_at is None]

    async def check_storage(self, tenant_id: TenantId, further_bytes: int = 0) -> None:
        """Refuse a save if the tenant's checkpoints and these bytes use up its storage."""
        most = (await self.of(tenant_id)).get("storage_bytes")
        if most is None:
            return
        stored = await stored_bytes(self._ledger, tenant_id) + further_bytes
        if stored >= most:
            raise UnprocessableEntityError(
                f"the checkpoints take {stored} bytes; the quota is {most}",
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
            # Usage of the last hour does not count in the next.
            _remember(self._tokens, tenant_id, (min(now + REMEMBERED_S, begun + HOUR_S), used))
        if used >= most:
            raise RateLimitError(
                f"{used:.0f} tokens were used in this hour; the quota is {most}",
                retry_after_s=min(begun + HOUR_S - now, LONGEST_RETRY_S),
            )


async def stored_bytes(ledger: Ledger, tenant_id: TenantId) -> int:
    """How many bytes a tenant's checkpoints take."""
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
            f"there are {have} {what}; the maximum is {most}", remedy=f"end some of the {what}"
        )


RETRY_AFTER_S = 0.5
LOOK_S = 0.1
"""The shortest time between two queries to the ledger for a tenant at its limit."""
_ASKED_AT_ONCE = 256
FRESH_S = 1.0
"""How often the ledger is asked what tenants have in flight, where servers share it."""
NEAR = 64
"""A tenant with room for so many more commands is near its limit: the ledger is asked for each."""
NEAR_LOOK_S = 0.02
"""The shortest time between two such queries."""
_MINUTE_S = 60.0


class Admission:
    """Counts what tenants have in flight and enforces the limits. For one event loop."""

    def __init__(self, ledger: Ledger, settings: ApiSettings, quotas: Quotas) -> None:
        self._ledger = ledger
        self._settings = settings
        self._quotas = quotas
        self._tenants: dict[TenantId, _UnderWay] = {}
        self._looked_at = -FRESH_S
        self._looking = asyncio.Lock()

    async def admit(self, tenant_id: TenantId, size: int) -> None:
        """Admit one more command, and count it until `appended` is called.

        Raises:
            RateLimitError: The tenant has too much in flight, sends too often, or has used up
                its tokens.
        """
        quotas = await self._quotas.of(tenant_id)
        await self._quotas.check_tokens(tenant_id)
        under_way = self._under_way(tenant_id)
        await self._check_pace(tenant_id, under_way, quotas)
        most = quotas.get("commands_in_flight", self._settings.commands_in_flight)
        most_bytes = quotas.get("bytes_in_flight", self._settings.bytes_in_flight)
        if self._ledger.is_shared:
            await self._look_at_all(under_way, most, most_bytes)
        if not under_way.has_room(most, most_bytes, size):
            await self._look_again(under_way)
            if not under_way.has_room(most, most_bytes, size):
                raise RateLimitError(
                    f"{under_way.count} commands with {under_way.total_bytes} bytes are in "
                    f"flight; the maximum is {most} with {most_bytes} bytes",
                    retry_after_s=RETRY_AFTER_S,
                )
        under_way.coming += 1
        under_way.coming_bytes += size

    def appended(self, tenant_id: TenantId, size: int) -> None:
        """An admitted command has been appended, or was refused after all."""
        under_way = self._under_way(tenant_id)
        under_way.coming -= 1
        under_way.coming_bytes -= size

    def accepted(self, tenant_id: TenantId, request_id: str, size: int) -> None:
        """Count a command."""
        under_way = self._under_way(tenant_id)
        if self._ledger.is_shared:
            under_way.since += 1
            under_way.total_bytes += size
        else:
            under_way.add(request_id, size)

    def settled(self, tenant_id: TenantId, request_id: str) -> None:
        """Take a command off the count."""
        under_way = self._tenants.get(tenant_id)
        if under_way is not None:
            under_way.remove(request_id)

    def under_way(self) -> dict[TenantId, tuple[int, int]]:
        """Commands and bytes in flight, by tenant."""
        return {
            tenant_id: (found.count, found.total_bytes)
            for tenant_id, found in self._tenants.items()
        }

    def _under_way(self, tenant_id: TenantId) -> _UnderWay:
        found = self._tenants.get(tenant_id)
        if found is None:
            found = self._tenants[tenant_id] = _UnderWay()
        return found

    async def _check_pace(
        self, tenant_id: TenantId, under_way: _UnderWay, quotas: Mapping[str, int]
    ) -> None:
        most = quotas.get("requests_per_minute")
        if most is None:
            return
        if self._ledger.is_shared:
            wait_s = await self._take_shared_turn(tenant_id, most)
        else:
            under_way.turns, wait_s = take_turn(under_way.turns, self._ledger.now(), most)
        if wait_s > 0:
            raise RateLimitError(f"more than {most} requests in a minute", retry_after_s=wait_s)

    async def _take_shared_turn(self, tenant_id: TenantId, most: int) -> float:
        """As `take_turn`, from what all servers share."""
        paces, now, wait_s = self._ledger.entries(RequestPace), self._ledger.now(), 0.0

        def taken(pace: RequestPace) -> RequestPace:
            nonlocal wait_s
            (turns, counted_at), wait_s = take_turn((pace.turns, pace.counted_at), now, most)
            return msgspec.structs.replace(pace, turns=turns, counted_at=counted_at)

        try:
            await paces.change(tenant_id, taken)
        except UnknownEntryError:
            await paces.add(
                RequestPace(
                    id=tenant_id, tenant_id=tenant_id, created_at=now, turns=0.0, counted_at=0.0
                )
            )
            await paces.change(tenant_id, taken)
        return wait_s

    # Looking at the ledger

    async def _look_at_all(self, under_way: _UnderWay, most: int, most_bytes: int) -> None:
        """Ask the ledger what tenants have in flight, if that was long ago, or if it matters."""
        is_near = under_way.is_near(most, most_bytes)
        asked_at = self._ledger.now()
        if asked_at < self._looked_at + (0.0 if is_near else FRESH_S):
            return
        async with self._looking:
            if self._looked_at > asked_at:
                return  # another one has looked meanwhile, and counts for all
            await asyncio.sleep(max(0.0, self._looked_at + NEAR_LOOK_S - asked_at))
            for one in self._tenants.values():
                one.since = 0
            looked_at = self._ledger.now()
            found = await self._ledger.unsettled()
            self._looked_at = looked_at
            for tenant_id, one in self._tenants.items():
                one.known, known_bytes = found.get(tenant_id, (0, 0))
                one.total_bytes = known_bytes

    async def _look_again(self, under_way: _UnderWay) -> None:
        """Ask the ledger about those not asked about for the longest time."""
        if self._ledger.is_shared:
            return  # it was asked about all
        now = self._ledger.now()
        if now < under_way.looked_at + LOOK_S:
            return  # a tenant that is refused again and again must not slow down others
        under_way.looked_at = now
        for request_id in list(under_way.sizes)[:_ASKED_AT_ONCE]:
            try:
                command = await self._ledger.command(request_id)
            except UnknownEntryError:
                under_way.remove(request_id)
                continue
            size = under_way.remove(request_id)
            if not command.is_settled:
                under_way.add(request_id, size)  # at the end: the others are asked about next


class _UnderWay:
    """What one tenant has in flight, oldest first."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.known = 0
        """So many the ledger knew of at the last look, where servers share it."""
        self.since = 0
        """So many were accepted here since then."""
        self.total_bytes = 0
        self.coming = 0
        self.coming_bytes = 0
        self.looked_at = -LOOK_S
        self.turns = (0.0, 0.0)

    @property
    def count(self) -> int:
        """How many commands are in flight, as far as this server knows."""
        return len(self.sizes) + self.known + self.since

    def has_room(self, most: int, most_bytes: int, size: int) -> bool:
        # A single command larger than the limit is admitted alone.
        count, total_bytes = self.count + self.coming, self.total_bytes + self.coming_bytes
        return count < most and (not count or total_bytes + size <= most_bytes)

    def is_near(self, most: int, most_bytes: int) -> bool:
        """Whether the limit may be reached soon."""
        count, total_bytes = self.count + self.coming, self.total_bytes + self.coming_bytes
        return count + NEAR >= most or 2 * total_bytes > most_bytes

    def add(self, request_id: str, size: int) -> None:
        if request_id not in self.sizes:
            self.sizes[request_id] = size
            self.total_bytes += size

    def remove(self, request_id: str) -> int:
        size = self.sizes.pop(request_id, 0)
        self.total_bytes -= size
        return size


def take_turn(
    counted: tuple[float, float], now: float, per_minute: int
) -> tuple[tuple[float, float], float]:
    """Take one of the requests of a minute.

    Args:
        counted: How many were left, and when that was; 0 if never.
        now: The time.
        per_minute: How many there may be.

    Returns:
        How many are left now, and how long to wait if there was none.
    """
    turns, counted_at = counted
    pace = per_minute / _MINUTE_S
    gained = max(0.0, now - counted_at) * pace if counted_at else float(per_minute)
    turns = min(float(per_minute), turns + gained)
    if turns < 1:
        return (turns, now), (1 - turns) / pace if pace > 0 else _MINUTE_S
    return (turns - 1, now), 0.0
