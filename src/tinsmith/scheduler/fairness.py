"""Fair shares: between tenants by what they use, between training and sampling by time.

Tenants: each has a count of what it was given. Who was given least is next. A tenant that comes
after a pause starts level with the one that has least of those at work, so that a pause is neither
saved up nor held against it. That is start-time fair queueing with equal weights: with n tenants at
work each gets 1/n, whatever the number and size of their commands, and one that asks for a single
thing has it next.

Training and sampling: on an engine that does one thing at a time, a batch may take seconds and a
step of the sampler milliseconds. Taking turns would leave the sampler one part in a hundred; here
they have equal time, when both have work.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection
from typing import Literal

from tinsmith.ledger.records import TenantId

Kind = Literal["training", "sampling"]
_OTHER: dict[Kind, Kind] = {"training": "sampling", "sampling": "training"}


class Shares:
    """What each tenant was given, of one resource."""

    def __init__(self) -> None:
        self._given: dict[TenantId, float] = {}
        self._level = 0.0

    def next(self, waiting: Collection[TenantId]) -> TenantId:
        """Who is next of those that wait: the one that was given least; of equals, the first."""
        for tenant in waiting:
            self._given[tenant] = max(self._given.get(tenant, 0.0), self._level)
        chosen = min(waiting, key=self._given.__getitem__)
        self._level = self._given[chosen]
        return chosen

    def give(self, tenant: TenantId, amount: float) -> None:
        """Count what a tenant got."""
        self._given[tenant] = max(self._given.get(tenant, 0.0), self._level) + amount


class EngineTurns:
    """Whose turn it is on an engine that does one thing at a time. For one event loop."""

    def __init__(self, *, is_shared: bool = True, clock: Callable[[], float] = time.monotonic):
        self._is_shared = is_shared
        self._clock = clock
        self._used_s: dict[Kind, float] = {"training": 0.0, "sampling": 0.0}
        self._active: set[Kind] = set()
        self._running: Kind | None = None
        self._changed = asyncio.Condition()

    @property
    def used_s(self) -> dict[Kind, float]:
        """How much time each has had."""
        return dict(self._used_s)

    async def set_active(self, kind: Kind, is_active: bool) -> None:
        """Say whether there is work of a kind. Who has none is not waited for."""
        if (kind in self._active) == is_active:
            return
        async with self._changed:
            if is_active:
                self._active.add(kind)
                other = _OTHER[kind]
                if other in self._active:
                    # Time that either had alone is nothing that it owes the other.
                    level = max(self._used_s.values())
                    self._used_s[kind] = self._used_s[other] = level
            else:
                self._active.discard(kind)
            self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def turn(self, kind: Kind) -> AsyncIterator[None]:
        """Wait for a turn, and have the engine for its time."""
        if not self._is_shared:
            yield
            return
        async with self._changed:
            await self._changed.wait_for(lambda: self._may_run(kind))
            self._running = kind
        started = self._clock()
        try:
            yield
        finally:
            self._used_s[kind] += self._clock() - started
            self._running = None
            async with self._changed:
                self._changed.notify_all()

    def _may_run(self, kind: Kind) -> bool:
        if self._running is not None:
            return False
        other = _OTHER[kind]
        return other not in self._active or self._used_s[kind] <= self._used_s[other]
