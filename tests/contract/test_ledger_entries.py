"""What every ledger promises of entries, usage, keeping and coming back after a restart."""

from __future__ import annotations

import asyncio
import datetime

import msgspec
import pytest

from tests.contract.ledgers import (
    DURABLE,
    INLINE_BYTES,
    MODEL,
    SAMPLER,
    SESSION,
    TENANT,
    Place,
    a_session,
    ended,
    place,
    raised,
    sampling,
    story,
    training,
)
from tinsmith.errors import (
    CommandPassedError,
    ResultGoneError,
    UnknownEntryError,
    ValidationError,
)
from tinsmith.service.ledger import entry_steps
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.records import (
    ApiKey,
    AuditEntry,
    CheckpointEntry,
    Command,
    CustomLossEntry,
    ModelEntry,
    Retention,
    SamplerEntry,
    SessionEntry,
    Tenant,
    TenantId,
    UsageKey,
    Use,
)
from tinsmith.service.ledger.recovery import recover

__all__ = ["place"]  # a fixture, for pytest to find

LARGE = b"x" * (INLINE_BYTES * 3)
OTHER = TenantId("tenant-b")


def a_model(model_id: str = MODEL) -> ModelEntry:
    return ModelEntry(
        id=model_id, tenant_id=TENANT, created_at=1.0, session_id=SESSION, base_model="tiny"
    )


def a_sampler(sampler_id: str = SAMPLER) -> SamplerEntry:
    return SamplerEntry(
        id=sampler_id, tenant_id=TENANT, created_at=1.0, session_id=SESSION, base_model="tiny"
    )


def a_checkpoint(name: str, run: str = MODEL, expires_at: float | None = None) -> CheckpointEntry:
    return CheckpointEntry(
        id=f"tinker://{run}/weights/{name}",
        tenant_id=TENANT,
        created_at=1.0,
        run_id=run,
        checkpoint_id=f"weights/{name}",
        size_bytes=10,
        expires_at=expires_at,
    )


# Entries


@story
async def test_every_kind_of_entry_round_trips(ledger: Ledger) -> None:
    kept = [
        Tenant(id="t", tenant_id=TenantId("t"), created_at=1.5, name="T", quotas={"models": 3}),
        ApiKey(id="digest", tenant_id=TENANT, created_at=1.0, name="laptop", shown="tml-ab"),
        a_session(tags=["a"], user_metadata={"run": [1, None, "ü"]}, display_name="x"),
        a_model(),
        a_sampler(),
        a_checkpoint("one", expires_at=5.0),
        CustomLossEntry(
            id="l", tenant_id=TENANT, created_at=1.0, session_id=SESSION, name="f", graph={"n": []}
        ),
        AuditEntry(id="a", tenant_id=TENANT, created_at=1.0, event="checkpoint.created"),
    ]
    for entry in kept:
        await ledger.entries(type(entry)).add(entry)

    for entry in kept:
        assert await ledger.entries(type(entry)).get(entry.id) == entry
        for wrong in ("unknown", "", "nul\0", "half \ud800"):
            assert await ledger.entries(type(entry)).get(wrong) is None
            assert not await ledger.entries(type(entry)).remove(wrong)


@story
async def test_an_entry_can_be_added_only_once(ledger: Ledger) -> None:
    sessions = ledger.entries(SessionEntry)
    first = a_session(display_name="first")

    kept = await asyncio.gather(
        sessions.add(first), *(sessions.add(a_session(display_name="later")) for _ in range(9))
    )

    assert {session.display_name for session in kept} == {"first"}
    assert await sessions.count() == 1


@story
async def test_concurrent_changes_of_an_entry_do_not_overwrite_each_other(ledger: Ledger) -> None:
    samplers = ledger.entries(SamplerEntry)
    await samplers.add(a_sampler())

    def join(sampler: SamplerEntry) -> SamplerEntry:
        return msgspec.structs.replace(sampler, clones=sampler.clones + 1)

    joined = await asyncio.gather(*(samplers.change(SAMPLER, join) for _ in range(20)))

    assert sorted(sampler.clones for sampler in joined) == list(range(1, 21))


@story
async def test_a_change_that_raises_changes_nothing(ledger: Ledger) -> None:
    sessions = ledger.entries(SessionEntry)
    await sessions.add(a_session())

    def refuse(session: SessionEntry) -> SessionEntry:
        raise ValidationError(f"{session.id} has ended")

    def fail(session: SessionEntry) -> SessionEntry:
        raise ZeroDivisionError(f"a mistake with {session.id}")

    changes = [sessions.change(SESSION, refuse), sessions.change(SESSION, fail)]
    added = [sessions.add(a_session(f"s{number}")) for number in range(3)]
    told = await asyncio.gather(*changes, *added, return_exceptions=True)

    assert [type(one) for one in told[:2]] == [ValidationError, ZeroDivisionError]
    assert [type(one) for one in told[2:]] == [SessionEntry] * 3
    assert await sessions.get(SESSION) == a_session()
    await raised(sessions.change("unknown", lambda session: session), UnknownEntryError)


@story
async def test_entries_are_paginated_newest_first(ledger: Ledger) -> None:
    sessions = ledger.entries(SessionEntry)
    for number in range(5):
        owner = OTHER if number == 2 else TENANT
        await sessions.add(a_session(f"s{number}", tenant_id=owner, project_id=f"p{number % 2}"))
    await ledger.entries(ModelEntry).add(a_model())

    def ids(page: list[SessionEntry]) -> list[str]:
        return [session.id for session in page]

    assert ids(await sessions.all(limit=2, offset=1)) == ["s3", "s2"]
    assert ids(await sessions.of_tenant(TENANT)) == ["s4", "s3", "s1", "s0"]
    assert ids(await sessions.of_tenant(TENANT, limit=1, offset=3)) == ["s0"]
    assert ids(await sessions.of_parent("p1")) == ["s3", "s1"]
    assert (await sessions.count(), await sessions.count(tenant_id=OTHER)) == (5, 1)


@story
async def test_put_replaces_an_entry_and_makes_it_the_newest(ledger: Ledger) -> None:
    checkpoints = ledger.entries(CheckpointEntry)
    first, second = a_checkpoint("one"), a_checkpoint("two")
    assert await checkpoints.put(first) is None
    await checkpoints.add(second)
    again = msgspec.structs.replace(first, size_bytes=99)

    assert await checkpoints.put(again) == first

    assert await checkpoints.of_parent(MODEL) == [again, second]
    assert await checkpoints.remove(first.id)
    assert not await checkpoints.remove(first.id)
    assert await checkpoints.of_parent(MODEL) == [second]


@story
async def test_due_entries_are_listed_earliest_first(ledger: Ledger) -> None:
    checkpoints = ledger.entries(CheckpointEntry)
    for name, expires_at in (("c", 30.0), ("never", None), ("a", 10.0), ("b", 20.0)):
        await checkpoints.add(a_checkpoint(name, expires_at=expires_at))

    def names(found: list[CheckpointEntry]) -> list[str]:
        return [entry.checkpoint_id[-1] for entry in found]

    assert names(await checkpoints.due(30.0)) == ["a", "b"]
    assert names(await checkpoints.due(99.0, since=20.0)) == ["b", "c"]
    assert names(await checkpoints.due(99.0, limit=1)) == ["a"]
    assert await checkpoints.due(99.0, tenant_id=OTHER) == []
    path = a_checkpoint("a").id
    await checkpoints.change(path, lambda one: msgspec.structs.replace(one, expires_at=None))
    assert names(await checkpoints.due(99.0)) == ["b", "c"]


@story
async def test_an_entry_is_removed_only_if_it_is_still_due(ledger: Ledger) -> None:
    """What was put in place of an expired checkpoint must not be taken for it."""
    checkpoints = ledger.entries(CheckpointEntry)
    path = (await checkpoints.add(a_checkpoint("a", expires_at=10.0))).id

    assert not await checkpoints.remove(path, due_before=10.0)
    await checkpoints.put(a_checkpoint("a", expires_at=None))
    assert not await checkpoints.remove(path, due_before=20.0)
    await checkpoints.put(a_checkpoint("a", expires_at=19.0))
    assert await checkpoints.remove(path, due_before=20.0)
    assert not await checkpoints.remove(path, due_before=20.0)
    assert await checkpoints.get(path) is None


# Usage


@story
async def test_usage_is_summed_by_hour_and_kind(ledger: Ledger, place: Place) -> None:
    trained = UsageKey(tenant_id=TENANT, kind="training", session_id=SESSION, base_model="tiny")
    other = UsageKey(tenant_id=OTHER, kind="training")
    place.clock.wait(3600 - place.clock.wall % 3600 + 1)
    hour = int(place.clock.wall) - 1
    await ledger.add_uses([Use(key=trained, amount=5), Use(key=other, amount=9)])
    await ledger.add_uses([Use(key=trained, amount=2.5)])
    place.clock.wait(3600)
    await ledger.add_uses([Use(key=trained, amount=1)])

    rows = await ledger.usage(TENANT, since=hour, before=hour + 7200)

    assert [(row.hour, row.key, row.amount) for row in rows] == [
        (hour, trained, 7.5),
        (hour + 3600, trained, 1),
    ]
    assert await ledger.usage(TENANT, since=hour + 0.5, before=hour + 3600) == []


# Keeping

KEEP = Retention(result_s=100, command_s=200, session_s=300, audit_s=400, usage_s=7200)


@pytest.fixture
def kept(place: Place) -> Place:
    """A place where nothing is kept for long."""
    usual = place.open

    async def short(retention: Retention | None = KEEP) -> Ledger:
        return await usual(retention)

    place.open = short  # type: ignore[method-assign]
    return place


def test_results_expire_and_then_their_commands(kept: Place) -> None:
    async def tell() -> None:
        async with await kept.open() as ledger:
            sample = (await ledger.append(sampling(1))).request_id
            large = (await ledger.append(sampling(2))).request_id
            pending = (await ledger.append(sampling(3, LARGE))).request_id
            await ledger.settle([ended(sample), ended(large, LARGE)])
            kept.clock.wait(99)
            assert (await ledger.sweep()).results == 0
            kept.clock.wait(2)

            assert (await ledger.sweep()).results == 2
            await raised(ledger.result(sample), ResultGoneError)
            kept.clock.wait(100)
            assert (await ledger.sweep()).commands == 2
            await raised(ledger.command(sample), UnknownEntryError)
            assert await ledger.completions(SAMPLER, 0, after=0) == []
            kept.clock.wait(10**6)
            await ledger.sweep()
            assert await ledger.payload(pending) == LARGE
            assert (await ledger.statistics()).payload_bytes == len(LARGE)

    asyncio.run(tell())


def test_one_sweep_deletes_everything_that_is_due(
    kept: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry_steps, "SWEPT_AT_ONCE", 3)

    async def tell() -> None:
        async with await kept.open() as ledger:
            requests = [(await ledger.append(sampling(number))).request_id for number in range(10)]
            await ledger.settle([ended(one) for one in requests])
            kept.clock.wait(10**6)

            swept = await ledger.sweep()

            assert (swept.results, swept.commands) == (10, 10)

    asyncio.run(tell())


def test_a_queue_whose_commands_were_all_swept_accepts_new_ones(kept: Place) -> None:
    async def tell() -> None:
        async with await kept.open() as ledger:
            for number in range(3):
                await ledger.append(training(number))
            await ledger.settle([ended(f"{MODEL}:{number}") for number in range(3)])
            await ledger.record_snapshot(MODEL, 3, "snapshot")
            kept.clock.wait(10**6)
            await ledger.sweep()

            appended = await ledger.append(training(None))

            assert appended.request_id == f"{MODEL}:3"

    asyncio.run(tell())


def test_commands_that_a_replay_needs_are_kept(kept: Place) -> None:
    async def tell() -> None:
        async with await kept.open() as ledger:
            for number in range(3):
                await ledger.append(training(number))
            await ledger.settle([ended(f"{MODEL}:{number}") for number in range(3)])
            await ledger.record_snapshot(MODEL, 1, "snapshot")
            kept.clock.wait(10**6)

            await ledger.sweep()

            assert [one.seq_id for one in await ledger.replay(MODEL)] == [1, 2]
            assert await ledger.payload(f"{MODEL}:1") == b"pass"
            await raised(ledger.command(f"{MODEL}:0"), UnknownEntryError)
            # Though forgotten, it is not taken for a new one.
            await raised(ledger.append(training(0)), CommandPassedError)

    asyncio.run(tell())


def test_an_ended_session_is_swept_with_everything_that_belongs_to_it(kept: Place) -> None:
    async def tell() -> None:
        async with await kept.open() as ledger:
            saved = "session-0:train:1"
            await ledger.entries(SessionEntry).add(a_session(ended_at=kept.clock.wall))
            await ledger.entries(SessionEntry).add(a_session("alive"))
            await ledger.entries(ModelEntry).add(a_model())
            await ledger.entries(ModelEntry).add(a_model(saved))
            await ledger.entries(SamplerEntry).add(a_sampler())
            await ledger.entries(CheckpointEntry).add(a_checkpoint("one", saved))
            await ledger.append(training(1, LARGE))
            await ledger.spend(MODEL, 2)
            await ledger.pass_over(MODEL, 1)
            kept.clock.wait(299)
            assert (await ledger.sweep()).sessions == 0
            kept.clock.wait(2)

            swept = await ledger.sweep()

            assert (swept.sessions, swept.entries) == (1, 3)
            assert [one.id for one in await ledger.entries(SessionEntry).all()] == ["alive"]
            assert [one.id for one in await ledger.entries(ModelEntry).all()] == [saved]
            assert await ledger.entries(SamplerEntry).all() == []
            assert await ledger.claim("s", limit=5) == []
            assert await ledger.spent(MODEL) == []
            assert (await ledger.statistics()).payload_bytes == 0

    asyncio.run(tell())


def test_a_session_with_more_than_a_thousand_entries_is_swept_completely(kept: Place) -> None:
    """A client that makes samplers without end must not leave any behind for ever."""

    async def tell() -> None:
        async with await kept.open() as ledger:
            await ledger.entries(SessionEntry).add(a_session(ended_at=kept.clock.wall))
            saved = [f"session-0:train:{number}" for number in range(3)]
            for model in saved:
                await ledger.entries(ModelEntry).add(a_model(model))
                await ledger.entries(CheckpointEntry).add(a_checkpoint("one", model))
            samplers = [a_sampler(f"session-0:sample:{number}") for number in range(1100)]
            await asyncio.gather(*(ledger.entries(SamplerEntry).add(one) for one in samplers))
            kept.clock.wait(301)

            swept = [await ledger.sweep() for _ in range(4)]

            assert sum(one.sessions for one in swept) == 1
            assert sum(one.entries for one in swept) == 1101
            assert await ledger.entries(SamplerEntry).count() == 0
            assert await ledger.entries(SessionEntry).count() == 0
            assert await ledger.entries(ModelEntry).count() == 3

    asyncio.run(tell())


def test_audit_and_usage_entries_are_kept_for_their_retention_time(kept: Place) -> None:
    async def tell() -> None:
        async with await kept.open() as ledger:
            now = kept.clock.wall
            entry = AuditEntry(id="a", tenant_id=TENANT, created_at=now, event="key.created")
            await ledger.entries(AuditEntry).add(entry)
            await ledger.add_uses([Use(key=UsageKey(tenant_id=TENANT, kind="x"), amount=1)])
            kept.clock.wait(399)
            await ledger.sweep()
            assert await ledger.entries(AuditEntry).count() == 1
            kept.clock.wait(2)
            await ledger.sweep()
            assert await ledger.entries(AuditEntry).count() == 0
            assert len(await ledger.usage(TENANT, since=0, before=1e12)) == 1
            kept.clock.wait(3 * 3600)
            await ledger.sweep()
            assert await ledger.usage(TENANT, since=0, before=1e12) == []

    asyncio.run(tell())


def test_jumps_of_the_wall_clock_expire_nothing(kept: Place) -> None:
    """The ledger's time is that of its opening, moved on by a clock that nobody can set."""

    async def tell() -> None:
        async with await kept.open() as ledger:
            request = (await ledger.append(sampling(1))).request_id
            await ledger.settle([ended(request)])
            for jump in (10**9, -2 * 10**9):
                kept.clock.wall += jump
                await ledger.sweep()
                assert await ledger.result(request) is not None
                later = (await ledger.append(sampling(2))).request_id
                assert (await ledger.command(later)).created_at == 1_000_000

            kept.clock.ticks += 101
            assert (await ledger.sweep()).results == 1

    asyncio.run(tell())


# Restarts


@pytest.mark.parametrize("place", DURABLE, indirect=True)
def test_everything_is_still_there_after_a_restart(place: Place) -> None:
    async def before() -> list[Command]:
        async with await place.open() as ledger:
            await ledger.entries(SessionEntry).add(a_session())
            for number in range(4):
                await ledger.append(training(number, LARGE if number % 2 else b"pass"))
            await ledger.append(sampling(0))
            await ledger.claim("scheduler", limit=3)
            await ledger.settle([ended(f"{MODEL}:0", LARGE)])
            await ledger.cancel(ended(f"{MODEL}:1", fail=True))
            await ledger.spend(MODEL, 9)
            await ledger.record_snapshot(MODEL, 1, "snapshot")
            return await ledger.commands_of(SESSION)

    async def after() -> list[Command]:
        place.clock.wall -= 10**6  # a clock set back while we were away
        async with await place.open() as ledger:
            result = await ledger.result(f"{MODEL}:0")
            assert result is not None
            assert result.payload == LARGE
            assert await ledger.payload(f"{MODEL}:3") == LARGE
            assert await ledger.entries(SessionEntry).get(SESSION) == a_session()
            assert await ledger.take_cancelled("scheduler") == [f"{MODEL}:1"]
            assert await ledger.spent(MODEL) == [9]
            assert (await ledger.queue(MODEL)).snapshot == "snapshot"
            assert ledger.now() >= 1_000_000, "time must not run backwards"
            commands = await ledger.commands_of(SESSION)
            assert not (await ledger.append(training(2))).is_new
            assert (await ledger.append(training(4))).is_new
            return commands

    assert asyncio.run(before()) == asyncio.run(after())


@story
async def test_a_scheduler_gets_everything_that_it_needs_to_resume(ledger: Ledger) -> None:
    await ledger.entries(ModelEntry).add(a_model())
    await ledger.entries(ModelEntry).add(a_model("new"))
    released = msgspec.structs.replace(a_model("old"), released_at=2.0)
    await ledger.entries(ModelEntry).add(released)
    for number in range(6):
        await ledger.append(training(number))
    await ledger.append(sampling(0))
    await ledger.claim("scheduler", limit=4)
    await ledger.settle([ended(f"{MODEL}:{number}", fail=number == 2) for number in range(4)])
    await ledger.claim("scheduler", limit=2)
    await ledger.record_snapshot(MODEL, 1, "snapshot")

    for _again in range(2):
        recovery = await recover(ledger, "scheduler")

        first, second = recovery.models
        assert (first.model.id, first.progress.snapshot) == (MODEL, "snapshot")
        assert [one.seq_id for one in first.redo] == [1, 3]
        assert (second.model.id, second.redo, second.progress.position) == ("new", [], 0)
    pending = await ledger.claim("scheduler", limit=9)
    assert [one.request_id for one in pending] == [f"{MODEL}:4", f"{MODEL}:5", f"{SAMPLER}:0"]


def test_audit_entries_can_be_listed_by_day(place: Place) -> None:
    async def tell() -> None:
        async with await place.open() as ledger:
            day = datetime.datetime(2026, 5, 1, tzinfo=datetime.UTC).timestamp()
            for number, owner in enumerate((TENANT, OTHER, TENANT)):
                at = day + number * 12 * 3600
                entry = AuditEntry(id=str(number), tenant_id=owner, created_at=at, event="key.made")
                await ledger.entries(AuditEntry).add(entry)
            found = await ledger.entries(AuditEntry).due(day + 86400, since=day, tenant_id=TENANT)
            assert [entry.id for entry in found] == ["0"]

    asyncio.run(tell())
