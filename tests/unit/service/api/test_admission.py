"""A tenant has so much under way and no more; what has ended makes room again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from tinsmith.errors import RateLimitError, UnprocessableEntityError
from tinsmith.service.api.admission import HOUR_S, LOOK_S, REMEMBERED_S, Admission, Quotas
from tinsmith.service.api.api_settings import ApiSettings
from tinsmith.service.api.keys import add_tenant
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.records import (
    CheckpointEntry,
    ModelEntry,
    QueueId,
    SessionEntry,
    SessionId,
    Settlement,
    Submission,
    Tenant,
    TenantId,
    UsageKey,
    Use,
)
from tinsmith.service.ledger.scheduler_lease import SteadyClock
from tinsmith.service.ledger.sqlite import SqliteLedger

TENANT, OTHER = TenantId("t"), TenantId("other")


class Scene:
    """A ledger whose time stands still unless it is moved."""

    def __init__(self, commands: int, size: int = 10**9) -> None:
        self.time = 1000.0
        self.ledger = MemoryLedger(clock=SteadyClock(lambda: self.time, lambda: self.time))
        settings = ApiSettings(commands_in_flight=commands, bytes_in_flight=size)
        self.admission = Admission(self.ledger, settings, Quotas(self.ledger, settings))
        self._number = 0

    async def submit(self, size: int = 1, tenant_id: TenantId = TENANT) -> str:
        """Admit a command and append it."""
        await self.admission.admit(tenant_id, size)
        self._number += 1
        appended = await self.ledger.append(
            Submission(
                queue_id=QueueId("line"),
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


def test_commands_beyond_the_limit_are_rejected_until_one_is_settled() -> None:
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


def test_bytes_are_counted_and_a_single_large_command_is_allowed() -> None:
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


def test_settled_commands_are_found_behind_many_pending_ones() -> None:
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


def test_a_requests_per_minute_quota_is_enforced_and_refilled() -> None:
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


def test_a_command_reported_twice_counts_once() -> None:
    async def work(scene: Scene) -> None:
        for _ in range(2):
            scene.admission.accepted(TENANT, "a:1", 10)
        assert scene.admission.under_way()[TENANT] == (1, 10)
        scene.admission.settled(TENANT, "a:1")
        assert scene.admission.under_way()[TENANT] == (0, 0)

    play(Scene(10), work)


def test_a_long_idle_tenant_can_burst_one_minute_of_requests() -> None:
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


def a_session(ledger: Ledger, tenant: TenantId, number: int) -> SessionEntry:
    return SessionEntry(
        id=f"{tenant}-{number}",
        tenant_id=tenant,
        created_at=ledger.now(),
        project_id="p",
        heartbeat_at=ledger.now(),
    )


def test_ended_and_silent_sessions_do_not_count_against_the_quota(
    run: Callable[[Work], None],
) -> None:
    async def work(ledger: Ledger, ticks: Ticks) -> None:
        quotas = Quotas(ledger, ApiSettings(most_sessions=2, session_timeout_s=60))
        sessions = ledger.entries(SessionEntry)
        await quotas.check_sessions(A)
        for number in range(2):
            await sessions.add(a_session(ledger, A, number))
        with pytest.raises(UnprocessableEntityError, match="2 sessions; the maximum is 2"):
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


def test_released_models_do_not_count_against_the_quota(run: Callable[[Work], None]) -> None:
    async def work(ledger: Ledger, ticks: Ticks) -> None:
        await add_tenant(ledger, A, {"models": 1})
        quotas = Quotas(ledger, ApiSettings())
        models = ledger.entries(ModelEntry)
        for tenant in (A, B):
            session = await ledger.entries(SessionEntry).add(a_session(ledger, tenant, 0))
            await models.add(
                ModelEntry(
                    id=f"{tenant}:train:0",
                    tenant_id=tenant,
                    created_at=ticks.now,
                    session_id=SessionId(session.id),
                    base_model="m",
                )
            )
        with pytest.raises(UnprocessableEntityError, match="1 models; the maximum is 1"):
            await quotas.check_models(A)
        await quotas.check_models(B)

        await models.change(
            "a:train:0", lambda old: msgspec.structs.replace(old, released_at=ticks.now)
        )

        await quotas.check_models(A)

    run(work)


def test_a_save_needs_free_checkpoint_quota(run: Callable[[Work], None]) -> None:
    async def work(ledger: Ledger, ticks: Ticks) -> None:
        await add_tenant(ledger, A, {"storage_bytes": 100})
        quotas = Quotas(ledger, ApiSettings())
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
        with pytest.raises(UnprocessableEntityError, match="120 bytes; the quota is 100"):
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
        quotas = Quotas(ledger, ApiSettings())
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


def test_the_token_quota_resets_at_the_full_hour_despite_caching(
    run: Callable[[Work], None],
) -> None:
    async def work(ledger: Ledger, ticks: Ticks) -> None:
        await add_tenant(ledger, A, {"tokens_per_hour": 1})
        quotas = Quotas(ledger, ApiSettings())
        ticks.now += 1799
        key = UsageKey(tenant_id=A, kind="training")
        await ledger.add_uses([Use(key=key, amount=5)])
        with pytest.raises(RateLimitError) as caught:
            await quotas.check_tokens(A)

        ticks.now += caught.value.retry_after_s or 0

        await quotas.check_tokens(A)

    run(work)


def test_a_changed_quota_takes_effect_within_the_recheck_interval(
    run: Callable[[Work], None],
) -> None:
    async def work(ledger: Ledger, ticks: Ticks) -> None:
        quotas = Quotas(ledger, ApiSettings())
        assert await quotas.of(A) == {}
        await add_tenant(ledger, A, {"models": 1})
        assert await quotas.of(A) == {}

        ticks.now += REMEMBERED_S

        assert await quotas.of(A) == {"models": 1}
        assert await quotas.of(TenantId("nobody")) == {}

    run(work)
