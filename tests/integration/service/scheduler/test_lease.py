"""A scheduler whose lease is another's: what it was at, it can neither write nor replace."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.integration.service.scheduler.bench import Bench, bench, until
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.engine.base import AdapterId, AdapterParts
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.records import (
    CheckpointEntry,
    CommandState,
    QueueId,
    RequestId,
    SamplerEntry,
)
from tinsmith.types.requests import (
    LoadWeightsRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)

LINE = "session-1:train:0"
SAMPLER = "session-1:sample:3"


async def _train(b: Bench, number: int) -> None:
    await b.forward_backward(LINE, number, (number, 2, 3))
    await b.result(await b.step(LINE, number + 1))


async def _save(b: Bench, number: int) -> RequestId:
    request = SaveWeightsRequest(model_id=LINE, seq_id=number, path="latest", overwrite=True)
    return await b.submit(LINE, number, "save_weights", request)


async def _save_for_sampler(b: Bench, number: int) -> RequestId:
    request = SaveWeightsForSamplerRequest(model_id=LINE, seq_id=number, sampling_session_seq_id=3)
    return await b.submit(LINE, number, "save_weights_for_sampler", request)


async def _entry(ledger: Ledger) -> CheckpointEntry:
    entry = await ledger.entries(CheckpointEntry).get(f"tinker://{LINE}/weights/latest")
    assert entry is not None
    return entry


class Held:
    """Keeps an engine's saves from ending until it is let go of."""

    def __init__(self, b: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_saving = asyncio.Event()
        self.goes_on = asyncio.Event()
        self._save = b.engine.save_adapter
        monkeypatch.setattr(b.engine, "save_adapter", self._held)

    async def _held(self, adapter_id: AdapterId, folder: Path, saved: AdapterParts) -> Any:
        self.is_saving.set()
        await self.goes_on.wait()
        return await self._save(adapter_id, folder, saved)


@pytest.mark.parametrize("save", [_save, _save_for_sampler])
def test_a_save_in_progress_when_the_lease_was_lost_is_redone_by_the_next_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any
) -> None:
    """Its files are written and named by nobody; those that the ledger names stay as they are."""

    async def run() -> None:
        ledger = MemoryLedger()
        lost = await ledger.acquire_lease("first")
        before = Bench(tmp_path, ledger, lease=lost)
        await before.open()
        await before.create(LINE)
        await _train(before, 1)
        await before.result(await _save(before, 3))
        await _train(before, 4)
        named = await _entry(ledger)
        kept = before.store.info(named.files)
        held = Held(before, monkeypatch)
        asked = await save(before, 6)
        await held.is_saving.wait()

        newest = await ledger.acquire_lease("second")
        held.goes_on.set()
        await until(
            lambda: len([one for one in before.store.paths() if one.kind != "snapshots"]) > 1
        )
        await until(lambda: not ledger.board.report.is_ready)
        assert await _entry(ledger) == named
        with before.store.open_whole(named.files) as reading:
            assert reading.manifest == kept
        assert await ledger.entries(SamplerEntry).get(SAMPLER) is None
        assert not (await ledger.command(asked)).is_settled
        await before.kill()

        async with bench(tmp_path, ledger, lease=newest) as after:
            await after.result(asked)
            made = (await _entry(ledger)).files
            if save is _save_for_sampler:
                sampler = await ledger.entries(SamplerEntry).get(SAMPLER)
                assert sampler is not None and sampler.own_files is not None
                made = sampler.own_files
            assert made.epoch == newest.epoch
            with after.store.open_whole(made) as reading:
                assert reading.manifest.origin == asked

    asyncio.run(run())


def test_a_scheduler_that_lost_its_lease_stops_and_writes_nothing_on_close(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        ledger = MemoryLedger()
        lost = await ledger.acquire_lease("first")
        async with bench(tmp_path, ledger, lease=lost) as before:
            await before.create(LINE)
            await _train(before, 1)
            newest = await ledger.acquire_lease("second")
            asked = await before.step(LINE, 3)
            await until(lambda: not ledger.board.report.is_ready)
            assert str(newest.epoch) in str(ledger.board.report.problem)
            [claimed] = await ledger.claim("scheduler", limit=9, epoch=newest.epoch)
        assert claimed.request_id == asked
        assert (await ledger.command(asked)).claimed_by == "scheduler"
        assert (await ledger.queue(QueueId(LINE))).snapshot is None

    asyncio.run(run())


def test_a_scheduler_with_an_expired_lease_leaves_its_claims_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database may be away, and nobody waits for it then."""

    async def run() -> None:
        ledger = MemoryLedger()
        made = Bench(tmp_path, ledger, lease=await ledger.acquire_lease("first"))
        await made.open()
        await made.create(LINE)
        await _train(made, 1)
        held = Held(made, monkeypatch)
        asked = await _save(made, 3)
        await held.is_saving.wait()

        ledger.board.may_work = lambda: False
        await made.close(0.0)

        assert (await ledger.command(asked)).state is CommandState.CLAIMED

    asyncio.run(run())


def test_checkpoints_and_snapshots_from_before_leases_stay_usable(tmp_path: Path) -> None:
    async def run() -> None:
        ledger = MemoryLedger()
        async with bench(tmp_path, ledger) as before:
            await before.create(LINE)
            await _train(before, 1)
            await before.result(await _save(before, 3))
            await before.result(await _save_for_sampler(before, 4))
            old = (await _entry(ledger)).files
        assert not old.edition
        snapshot = (await ledger.queue(QueueId(LINE))).snapshot
        assert snapshot is not None and "#" not in snapshot

        lease = await ledger.acquire_lease("newer")
        async with bench(tmp_path, ledger, lease=lease) as after:
            path = f"tinker://{LINE}/weights/latest"
            request = LoadWeightsRequest(model_id=LINE, seq_id=5, path=path, optimizer=True)
            loaded = await after.result(await after.submit(LINE, 5, "load_weights", request))
            sampled = await after.result(await after.sample(SAMPLER, 0))
            await after.result(await _save(after, 6))
            assert not after.store.exists(old)
        assert loaded.path == path
        assert sampled.sequences
        assert (await _entry(ledger)).files.epoch == lease.epoch
        newest = CheckpointPath.parse(str((await ledger.queue(QueueId(LINE))).snapshot))
        assert newest.epoch == lease.epoch

    asyncio.run(run())
