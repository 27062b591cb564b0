"""A tenant has so much under way and no more; what has ended makes room again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tinsmith.errors import RateLimitError
from tinsmith.ledger.clock import SteadyClock
from tinsmith.ledger.memory import MemoryLedger
from tinsmith.ledger.records import (
    LineId,
    SessionId,
    Settlement,
    Submission,
    Tenant,
    TenantId,
)
from tinsmith.server.admission import LOOK_S, Admission
from tinsmith.server.quotas import Quotas
from tinsmith.server.settings import ServerSettings

TENANT, OTHER = TenantId("t"), TenantId("other")


class Scene:
    """A ledger whose time stands still unless it is moved."""

    def __init__(self, commands: int, size: int = 10**9) -> None:
        self.time = 1000.0
        self.ledger = MemoryLedger(clock=SteadyClock(lambda: self.time, lambda: self.time))
        settings = ServerSettings(commands_in_flight=commands, bytes_in_flight=size)
        self.admission = Admission(self.ledger, settings, Quotas(self.ledger, settings))
        self._number = 0

    async def submit(self, size: int = 1, tenant_id: TenantId = TENANT) -> str:
        """Admit a command and append it."""
        await self.admission.admit(tenant_id, size)
        self._number += 1
        appended = await self.ledger.append(
            Submission(
                line=LineId("line"),
                seq_id=self._number,
                kind="asample",
                tenant_id=tenant_id,
                session_id=SessionId("s"),
                fingerprint=b"",
                payload=b"",
                is_ordered=False,
            )
        )
        self.admission.appended(tenant_id, size)
        self.admission.accepted(tenant_id, appended.request_id, size)
        return appended.request_id

    async def settle(self, *request_ids: str) -> None:
        """End commands, without a word to the server."""
        await self.ledger.settle(
            [Settlement(request_id=one, payload=b"J{}") for one in request_ids]  # type: ignore[arg-type]
        )


def play(scene: Scene, work: Callable[[Scene], Awaitable[None]]) -> None:
    """Run a test in a scene."""

    async def main() -> None:
        await work(scene)

    asyncio.run(main())


def test_commands_beyond_the_limit_are_refused_until_one_has_ended() -> None:
    """Also if nobody has fetched its result; other tenants have limits of their own."""

    async def work(scene: Scene) -> None:
        first = await scene.submit()
        await scene.submit()
        with pytest.raises(RateLimitError) as refused:
            await scene.submit()
        assert refused.value.retry_after_s == 0.5
        await scene.submit(tenant_id=OTHER)

        await scene.settle(first)
        with pytest.raises(RateLimitError):
            await scene.submit()  # the ledger is not asked at once again
        scene.time += LOOK_S

        await scene.submit()
        with pytest.raises(RateLimitError):
            await scene.submit()

    play(Scene(2), work)


def test_bytes_are_counted_and_one_large_command_may_go_alone() -> None:
    """Else it could never go."""

    async def work(scene: Scene) -> None:
        large = await scene.submit(500)
        with pytest.raises(RateLimitError, match="500 bytes"):
            await scene.submit(1)
        scene.admission.settled(TENANT, large)
        await scene.submit(60)
        await scene.submit(40)
        with pytest.raises(RateLimitError):
            await scene.submit(1)
        assert scene.admission.under_way()[TENANT] == (2, 100)

    play(Scene(100, size=100), work)


def test_settled_commands_are_found_behind_many_that_are_not() -> None:
    """A few are asked about at a time, each time others."""

    async def work(scene: Scene) -> None:
        ids = [await scene.submit() for _ in range(600)]
        await scene.settle(ids[-1])

        refusals = 0
        for _ in range(5):
            try:
                await scene.submit()
                break
            except RateLimitError:
                refusals += 1
                scene.time += LOOK_S

        assert refusals == 2

    play(Scene(600), work)


def test_a_quota_of_requests_in_a_minute_is_kept_and_refilled() -> None:
    """And says when to come back."""

    async def work(scene: Scene) -> None:
        quotas = {"requests_per_minute": 60}
        await scene.ledger.entries(Tenant).add(
            Tenant(id=TENANT, tenant_id=TENANT, created_at=0.0, name="t", quotas=quotas)
        )
        for _ in range(60):
            await scene.submit()
        with pytest.raises(RateLimitError) as refused:
            await scene.submit()
        assert refused.value.retry_after_s == pytest.approx(1.0)
        scene.time += 1.001
        await scene.submit()
        with pytest.raises(RateLimitError):
            await scene.submit()

    play(Scene(10_000), work)


def test_a_command_that_is_told_twice_counts_once() -> None:
    async def work(scene: Scene) -> None:
        for _ in range(2):
            scene.admission.accepted(TENANT, "a:1", 10)
        assert scene.admission.under_way()[TENANT] == (1, 10)
        scene.admission.settled(TENANT, "a:1")
        assert scene.admission.under_way()[TENANT] == (0, 0)

    play(Scene(10), work)


def test_a_tenant_that_was_idle_for_long_has_the_requests_of_one_minute() -> None:
    async def work(scene: Scene) -> None:
        quotas = {"requests_per_minute": 60}
        await scene.ledger.entries(Tenant).add(
            Tenant(id=TENANT, tenant_id=TENANT, created_at=0.0, name="t", quotas=quotas)
        )
        await scene.submit()
        scene.time += 3600.0
        for _ in range(60):
            await scene.submit()
        with pytest.raises(RateLimitError):
            await scene.submit()

    play(Scene(10_000), work)
