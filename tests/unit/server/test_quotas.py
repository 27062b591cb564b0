"""What tenants are held to, over every kind of ledger that needs no server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from tinsmith.errors import RateLimitError, UnprocessableEntityError
from tinsmith.ledger.base import Ledger
from tinsmith.ledger.clock import SteadyClock
from tinsmith.ledger.memory import MemoryLedger
from tinsmith.ledger.records import (
    CheckpointEntry,
    Model,
    Session,
    SessionId,
    TenantId,
    UsageKey,
    Use,
)
from tinsmith.ledger.sqlite import SqliteLedger
from tinsmith.server.keys import add_tenant
from tinsmith.server.quotas import HOUR_S, REMEMBERED_S, Quotas
from tinsmith.server.settings import ServerSettings

A, B = TenantId("a"), TenantId("b")
HALF_PAST = 1_000_000 * HOUR_S + 1800.0
Work = Callable[[Ledger, "Ticks"], Awaitable[None]]


class Ticks:
    """The ledger's time, moved by the test."""

    def __init__(self) -> None:
        self.now = HALF_PAST

    def clock(self) -> SteadyClock:
        return SteadyClock(lambda: self.now, lambda: self.now)


@pytest.fixture(params=["memory", "sqlite"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Work], None]:
    """Runs a test's work on an empty ledger with the tenants a and b."""

    async def all_of(work: Work) -> None:
        ticks = Ticks()
        ledger: Ledger = (
            MemoryLedger(clock=ticks.clock())
            if request.param == "memory"
            else await SqliteLedger.open(tmp_path, clock=ticks.clock())
        )
        async with ledger:
            for tenant in (A, B):
                await add_tenant(ledger, tenant)
            await work(ledger, ticks)

    return lambda work: asyncio.run(all_of(work))


def a_session(ledger: Ledger, tenant: TenantId, number: int) -> Session:
    return Session(
        id=f"{tenant}-{number}",
        tenant_id=tenant,
        created_at=ledger.now(),
        project_id="p",
        heartbeat_at=ledger.now(),
    )


def test_sessions_that_ended_or_fell_silent_make_room(run: Callable[[Work], None]) -> None:
    async def work(ledger: Ledger, ticks: Ticks) -> None:
        quotas = Quotas(ledger, ServerSettings(most_sessions=2, session_timeout_s=60))
        sessions = ledger.entries(Session)
        await quotas.check_sessions(A)
        for number in range(2):
            await sessions.add(a_session(ledger, A, number))
        with pytest.raises(UnprocessableEntityError, match="2 sessions and 2 are allowed"):
            await quotas.check_sessions(A)
        await quotas.check_sessions(B)

        await sessions.change(
            "a-0", lambda old: msgspec.structs.replace(old, ended_at=ledger.now())
        )
        await quotas.check_sessions(A)

        await sessions.add(a_session(ledger, A, 3))
        with pytest.raises(UnprocessableEntityError):
            await quotas.check_sessions(A)
        ticks.now += 121
        await quotas.check_sessions(A)

    run(work)


def test_models_that_were_released_make_room(run: Callable[[Work], None]) -> None:
    async def work(ledger: Ledger, ticks: Ticks) -> None:
        await add_tenant(ledger, A, {"models": 1})
        quotas = Quotas(ledger, ServerSettings())
        models = ledger.entries(Model)
        for tenant in (A, B):
            session = await ledger.entries(Session).add(a_session(ledger, tenant, 0))
            await models.add(
                Model(
                    id=f"{tenant}:train:0",
                    tenant_id=tenant,
                    created_at=ticks.now,
                    session_id=SessionId(session.id),
                    base_model="m",
                )
            )
        with pytest.raises(UnprocessableEntityError, match="1 models and 1 are allowed"):
            await quotas.check_models(A)
        await quotas.check_models(B)

        await models.change(
            "a:train:0", lambda old: msgspec.structs.replace(old, released_at=ticks.now)
        )

        await quotas.check_models(A)

    run(work)


def test_a_save_needs_room_for_checkpoints(run: Callable[[Work], None]) -> None:
    async def work(ledger: Ledger, ticks: Ticks) -> None:
        await add_tenant(ledger, A, {"storage_bytes": 100})
        quotas = Quotas(ledger, ServerSettings())
        for number, tenant in enumerate((A, A, B)):
            await ledger.entries(CheckpointEntry).add(
                CheckpointEntry(
                    id=f"tinker://r/weights/{number}",
                    tenant_id=tenant,
                    created_at=ticks.now,
                    run_id="r",
                    checkpoint_id=f"weights/{number}",
                    size_bytes=60,
                )
            )
        with pytest.raises(UnprocessableEntityError, match="120 bytes and 100 are allowed"):
            await quotas.check_storage(A)
        await quotas.check_storage(B)

        await ledger.entries(CheckpointEntry).remove("tinker://r/weights/0")

        await quotas.check_storage(A)

    run(work)


def test_tokens_are_counted_by_the_hour(run: Callable[[Work], None]) -> None:
    def used(tenant: TenantId, kind: str, amount: float) -> Use:
        return Use(key=UsageKey(tenant_id=tenant, kind=kind), amount=amount)

    async def work(ledger: Ledger, ticks: Ticks) -> None:
        await add_tenant(ledger, A, {"tokens_per_hour": 100})
        quotas = Quotas(ledger, ServerSettings())
        await ledger.add_uses([used(A, "training", 60), used(A, "checkpoint", 1000)])
        await ledger.add_uses([used(B, "training", 1000), used(A, "sampling_prefill_cached", 500)])
        await quotas.check_tokens(A)
        await ledger.add_uses([used(A, "sampling_prefill", 20), used(A, "sampling_sample", 20)])

        ticks.now += REMEMBERED_S
        with pytest.raises(RateLimitError, match="100 tokens were used") as caught:
            await quotas.check_tokens(A)
        assert caught.value.retry_after_s == 60
        await quotas.check_tokens(B)

        ticks.now += HOUR_S / 2
        await quotas.check_tokens(A)

    run(work)


def test_at_the_turn_of_the_hour_nobody_waits_for_what_is_remembered(
    run: Callable[[Work], None],
) -> None:
    async def work(ledger: Ledger, ticks: Ticks) -> None:
        await add_tenant(ledger, A, {"tokens_per_hour": 1})
        quotas = Quotas(ledger, ServerSettings())
        ticks.now += 1799
        key = UsageKey(tenant_id=A, kind="training")
        await ledger.add_uses([Use(key=key, amount=5)])
        with pytest.raises(RateLimitError) as caught:
            await quotas.check_tokens(A)

        ticks.now += caught.value.retry_after_s or 0

        await quotas.check_tokens(A)

    run(work)


def test_a_changed_quota_is_seen_within_the_time(run: Callable[[Work], None]) -> None:
    async def work(ledger: Ledger, ticks: Ticks) -> None:
        quotas = Quotas(ledger, ServerSettings())
        assert await quotas.of(A) == {}
        await add_tenant(ledger, A, {"models": 1})
        assert await quotas.of(A) == {}

        ticks.now += REMEMBERED_S

        assert await quotas.of(A) == {"models": 1}
        assert await quotas.of(TenantId("nobody")) == {}

    run(work)
