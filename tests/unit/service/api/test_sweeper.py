"""The sweeper: what it takes away, what it leaves, and what it counts."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.contract.ledgers import SetClock
from tinsmith.checkpoints.folder_store import FolderStore
from tinsmith.checkpoints.manifest import Manifest
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.errors import CheckpointUnavailableError
from tinsmith.service.api.sweeper import (
    EVERY_S,
    LONGEST_COUNT_S,
    ORPHANED_S,
    ROOM_EVERY_S,
    SHORT_BYTES,
    UNUSED_S,
    Sweeper,
)
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.records import (
    AuditEntry,
    CheckpointEntry,
    ModelEntry,
    QueueId,
    SamplerEntry,
    SessionEntry,
    SessionId,
    Settlement,
    Submission,
    TenantId,
)

Test = Callable[..., Coroutine[Any, Any, None]]

ALICE = TenantId("alice")
RUN = "s:train:0"
SIZE_BYTES = 1000


class House:
    """A ledger and a store, with a clock that tests set."""

    def __init__(self, folder: Path) -> None:
        self.clock = SetClock()
        self.ledger: Ledger = MemoryLedger(clock=self.clock.steady())
        self.store = FolderStore(folder)
        self.sweeper = Sweeper(self.ledger, self.store)

    def write(self, path: CheckpointPath, origin: str = "") -> Manifest:
        with self.store.begin(path, origin=origin) as staging:
            (staging.folder / "adapter_model.safetensors").write_bytes(bytes(SIZE_BYTES))
            return staging.commit(overwrite=True)

    async def save(
        self, name: str, expires_at: float | None = None, run_id: str = RUN, **fields: Any
    ) -> CheckpointPath:
        path = CheckpointPath(run_id, "weights", name)
        manifest = self.write(path)
        entry = CheckpointEntry(
            id=str(path),
            tenant_id=ALICE,
            created_at=self.ledger.now(),
            run_id=run_id,
            checkpoint_id=path.checkpoint_id,
            size_bytes=manifest.size_bytes,
            expires_at=expires_at,
            details={"version": manifest.version},
            **fields,
        )
        await self.ledger.entries(CheckpointEntry).put(entry)
        return path

    async def add_model(self, run_id: str = RUN, **fields: Any) -> None:
        given = {"session_id": SessionId("s"), "base_model": "tiny", **fields}
        model = ModelEntry(id=run_id, tenant_id=ALICE, created_at=self.ledger.now(), **given)
        await self.ledger.entries(ModelEntry).put(model)

    async def add_session(self, **fields: Any) -> None:
        now = self.ledger.now()
        session = SessionEntry(
            id="s", tenant_id=ALICE, created_at=now, project_id="p", heartbeat_at=now, **fields
        )
        await self.ledger.entries(SessionEntry).put(session)

    async def add_sampler(self, number: int) -> CheckpointPath:
        """One without a name, and its weights."""
        sampler = SamplerEntry(
            id=f"s:sample:{number}",
            tenant_id=ALICE,
            created_at=self.ledger.now(),
            session_id=SessionId("s"),
            base_model="tiny",
        )
        await self.ledger.entries(SamplerEntry).add(sampler)
        path = CheckpointPath.sampler(sampler.id)
        self.write(path)
        return path

    async def sample(self, path: CheckpointPath) -> None:
        """Ask for something of a sampler."""
        submission = Submission(
            queue_id=QueueId(path.run_id),
            seq_id=None,
            kind="asample",
            tenant_id=ALICE,
            session_id=SessionId("s"),
            fingerprint=b"f",
            payload=b"J{}",
            is_ordered=False,
        )
        await self.ledger.append(submission)

    async def is_named(self, path: CheckpointPath) -> bool:
        return await self.ledger.entries(CheckpointEntry).get(str(path)) is not None

    async def storage(self) -> float:
        rows = await self.ledger.usage(ALICE, since=0.0, before=self.ledger.now() + 3600)
        return sum(row.amount for row in rows if row.key.kind == "storage")


def in_a_loop(test: Test) -> Callable[..., None]:
    """Run a test's coroutine."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


# Expiry


@in_a_loop
async def test_an_expired_checkpoint_is_deleted_with_its_files_and_audited(house: House) -> None:
    await house.add_model()
    expired = await house.save("old", house.ledger.now() + 10)
    kept = await house.save("new", house.ledger.now() + 1000)
    for_ever = await house.save("ever")
    house.clock.wait(11)

    report = await house.sweeper.sweep()

    assert (report.expired, report.problems) == (1, ())
    assert not await house.is_named(expired)
    assert not house.store.exists(expired)
    assert await house.is_named(kept)
    assert house.store.exists(kept)
    assert house.store.exists(for_ever)
    (noted,) = await house.ledger.entries(AuditEntry).all()
    assert (noted.event, noted.tinker_path) == ("checkpoint.expired", str(expired))


@in_a_loop
async def test_a_sweep_killed_between_files_and_entry_is_completed(house: House) -> None:
    path = await house.save("old", house.ledger.now() - 1)
    house.store.delete(path)

    report = await house.sweeper.sweep()

    assert report.expired == 1
    assert not await house.is_named(path)


@in_a_loop
async def test_a_checkpoint_that_is_being_saved_again_is_not_swept(house: House) -> None:
    """Its new files are there, its new entry is not."""
    path = await house.save("c", house.ledger.now() - 1)
    queue_id = QueueId(RUN)
    appended = await house.ledger.append(
        Submission(
            queue_id=queue_id,
            seq_id=1,
            kind="save_weights",
            tenant_id=ALICE,
            session_id=SessionId("s"),
            fingerprint=b"f",
            payload=b"J{}",
        )
    )
    house.write(path, origin=appended.request_id)

    assert (await house.sweeper.sweep()).expired == 0
    await house.ledger.entries(CheckpointEntry).change(
        str(path), lambda old: msgspec.structs.replace(old, details={})
    )
    assert (await house.sweeper.sweep()).expired == 0
    assert house.store.exists(path)
    await house.ledger.settle([Settlement(request_id=appended.request_id, payload=b"J{}")])
    assert (await house.sweeper.sweep()).expired == 1


@in_a_loop
async def test_a_checkpoint_that_was_saved_again_is_kept(house: House) -> None:
    path = await house.save("c", house.ledger.now() - 1)
    await house.save("c", None)

    assert (await house.sweeper.sweep()).expired == 0
    assert await house.is_named(path)
    assert house.store.exists(path)


@in_a_loop
async def test_a_run_kept_only_for_its_checkpoints_is_deleted_with_the_last_one(
    house: House,
) -> None:
    """One that was made to hold a copy, or whose session has been forgotten."""
    await house.add_session()
    await house.add_model()
    await house.save("c", house.ledger.now() - 1)
    for run_id, session_id in (("copy-1", ""), ("old:train:0", "old")):
        await house.add_model(run_id, session_id=SessionId(session_id))
        await house.save("c", house.ledger.now() - 1, run_id=run_id)

    await house.sweeper.sweep()

    models = await house.ledger.entries(ModelEntry).all()
    assert [model.id for model in models] == [RUN]


# Files that the ledger does not ask for


@in_a_loop
async def test_files_unknown_to_the_ledger_are_kept_and_reported(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    """A ledger that was restored from a backup must not cost the newest checkpoints."""
    paths = [
        CheckpointPath(RUN, "weights", "newer-than-the-backup"),
        CheckpointPath.sampler("another:sample:0"),
        CheckpointPath.snapshot("another:train:0", 7),
    ]
    for path in paths:
        house.write(path)

    for _ in range(3):
        house.clock.wait(2 * ORPHANED_S)
        report = await house.sweeper.sweep()

    assert (report.abandoned, report.unknown) == (0, 3)
    assert all(house.store.exists(path) for path in paths)
    assert sum("the ledger does not know" in queue_id for queue_id in caplog.messages) == 1


@in_a_loop
async def test_editions_are_deleted_once_the_ledger_names_one_of_a_later_epoch(
    house: House,
) -> None:
    """Of those that a scheduler wrote which was replaced before it could name them."""
    await house.add_model()
    await house.add_session()
    sampler = await house.add_sampler(0)
    places = [await house.save("c"), CheckpointPath.snapshot(RUN, 5), sampler]
    editions = [[place.new_edition(epoch) for epoch in (4, 5, 6)] for place in places]
    for edition in (edition for some in editions for edition in some):
        house.write(edition)
    named = [some[1] for some in editions]
    await house.ledger.entries(CheckpointEntry).change(
        str(places[0]), lambda kept: msgspec.structs.replace(kept, edition=named[0].edition)
    )
    await house.ledger.record_snapshot(QueueId(RUN), 5, str(named[1]))
    await house.ledger.entries(SamplerEntry).change(
        sampler.run_id, lambda kept: msgspec.structs.replace(kept, model_path=str(named[2]))
    )

    for _ in range(3):
        await house.sweeper.sweep()
        house.clock.wait(ORPHANED_S)

    for some in editions:
        assert [house.store.exists(edition) for edition in some] == [False, True, True]
    assert not house.store.exists(places[0])


@in_a_loop
async def test_a_sweeper_that_lost_its_lease_evicts_no_weights(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says first in the ledger that they are given up, which is refused."""
    await house.add_session()
    path = await house.add_sampler(0)
    monkeypatch.setattr(house.store, "free_bytes", lambda: 0)
    lost = await house.ledger.acquire_lease("first")
    newest = await house.ledger.acquire_lease("second")
    house.clock.wait(2 * UNUSED_S)

    refused = await Sweeper(house.ledger, house.store, lambda: lost.epoch).sweep()
    is_there = house.store.exists(path)
    swept = await Sweeper(house.ledger, house.store, lambda: newest.epoch).sweep()

    assert is_there and any("unused samplers" in problem for problem in refused.problems)
    assert swept.unused == 1 and not house.store.exists(path)
    sampler = await house.ledger.entries(SamplerEntry).get(path.run_id)
    assert sampler is not None and sampler.dropped_at == house.ledger.now()


@in_a_loop
async def test_weights_of_an_ephemeral_sampler_are_deleted_when_its_session_ends(
    house: House,
) -> None:
    await house.add_session()
    path = await house.add_sampler(0)

    for _ in range(3):
        await house.sweeper.sweep()
        house.clock.wait(ORPHANED_S)
    assert house.store.exists(path)
    await house.add_session(ended_at=house.ledger.now())
    for _ in range(3):
        await house.sweeper.sweep()
        house.clock.wait(ORPHANED_S)

    assert not house.store.exists(path)


@in_a_loop
async def test_a_nearly_full_disk_evicts_the_least_recently_used_samplers(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as it takes. Those that are in use stay, and so does what has a name."""
    await house.add_session()
    paths = []
    for number in range(5):
        paths.append(await house.add_sampler(number))
        house.clock.wait(1)
    kept = await house.save("c")
    free = [SHORT_BYTES]
    monkeypatch.setattr(house.store, "free_bytes", lambda: free.pop(0) if free[1:] else free[0])

    house.clock.wait(UNUSED_S / 2)
    await house.sample(paths[3])
    house.clock.wait(UNUSED_S / 2 - 1)
    await house.sample(paths[0])
    house.clock.wait(2)
    has_room = await house.sweeper.sweep()
    free[:] = [SHORT_BYTES - 1] * 3 + [SHORT_BYTES]
    had_little = await house.sweeper.sweep()
    first = [house.store.exists(path) for path in paths]
    free[:] = [0]
    too_soon = await house.sweeper.sweep()
    house.clock.wait(ROOM_EVERY_S)
    had_none = await house.sweeper.sweep()

    assert (has_room.unused, had_little.unused, had_none.unused) == (0, 2, 1)
    assert too_soon.unused == 0, "all files were looked through just before"
    assert first == [True, False, False, True, True]
    assert [house.store.exists(path) for path in paths] == [True, False, False, True, False]
    assert house.store.exists(kept)


@in_a_loop
async def test_snapshots_are_deleted_when_their_model_is_released(house: House) -> None:
    await house.add_model()
    path = CheckpointPath.snapshot(RUN, 5)
    house.write(path)

    for _ in range(3):
        await house.sweeper.sweep()
        house.clock.wait(ORPHANED_S)
    assert house.store.exists(path)
    await house.add_model(released_at=1.0)
    for _ in range(3):
        await house.sweeper.sweep()
        house.clock.wait(ORPHANED_S)

    assert not house.store.exists(path)


# Storage


@in_a_loop
async def test_storage_is_counted_by_hour_and_owner(house: House) -> None:
    await house.add_model()
    await house.save("a")
    await house.save("b")
    await house.sweeper.sweep()
    assert await house.storage() == 0.0

    house.clock.wait(EVERY_S / 2)
    await house.sweeper.sweep()
    assert await house.storage() == 0.0
    house.clock.wait(EVERY_S)
    report = await house.sweeper.sweep()
    await house.sweeper.sweep()

    expected = 2 * SIZE_BYTES / 1e9 * 1.5
    assert report.gigabyte_hours == pytest.approx(expected)
    assert await house.storage() == pytest.approx(expected)
    (row,) = await house.ledger.usage(ALICE, since=0.0, before=house.ledger.now() + 3600)
    assert (row.key.session_id, row.key.base_model) == ("s", "tiny")


@in_a_loop
async def test_two_servers_count_storage_once(house: House) -> None:
    other = Sweeper(house.ledger, house.store)
    await house.save("a")
    for _ in range(3):
        await house.sweeper.sweep()
        await other.sweep()
        house.clock.wait(EVERY_S)

    assert await house.storage() == pytest.approx(SIZE_BYTES / 1e9 * 2)


@in_a_loop
async def test_storage_during_a_long_downtime_is_counted_only_up_to_a_limit(house: House) -> None:
    await house.save("a")
    await house.sweeper.sweep()
    house.clock.wait(10 * LONGEST_COUNT_S)

    await house.sweeper.sweep()

    assert await house.storage() == pytest.approx(SIZE_BYTES / 1e9 * LONGEST_COUNT_S / 3600)


# Trouble


@in_a_loop
async def test_a_failure_is_logged_and_the_rest_of_the_sweep_continues(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await house.save("old", house.ledger.now() - 1)

    def unavailable(_: CheckpointPath) -> Manifest:
        raise CheckpointUnavailableError("the disk does not answer")

    with monkeypatch.context() as broken:
        broken.setattr(house.store, "info", unavailable)
        report = await house.sweeper.sweep()

    assert "the disk does not answer" in report.problems[0]
    assert len(report.problems) == 1
    assert await house.is_named(path)
    assert (await house.sweeper.sweep()).expired == 1


@in_a_loop
async def test_a_service_without_a_store_is_swept_too(house: House) -> None:
    sweeper = Sweeper(house.ledger, None)

    assert (await sweeper.sweep()).problems == ()
