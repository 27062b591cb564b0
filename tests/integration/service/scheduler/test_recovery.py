"""Schedulers that end without a word, and those that come after them (S-requirement: recovery)."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from tests.integration.service.scheduler.bench import QUICK, WAIT_S, Bench, bench, until
from tinsmith.checkpoints.base import Reading
from tinsmith.checkpoints.folder_store import FolderStaging
from tinsmith.checkpoints.manifest import Manifest
from tinsmith.checkpoints.paths import SNAPSHOTS, CheckpointPath
from tinsmith.engine.base import AdapterId, TrainingOutcome, TrainingWork
from tinsmith.engine.fake.fake_settings import FakeSettings
from tinsmith.errors import CheckpointUnavailableError, LedgerUnavailableError
from tinsmith.service.ledger import audit
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.records import AuditEntry, CheckpointEntry, QueueId
from tinsmith.service.ledger.sqlite import SqliteLedger
from tinsmith.service.scheduler import restore, scheduler, snapshots
from tinsmith.service.scheduler.model_files import ModelFiles
from tinsmith.service.scheduler.scheduler_settings import SchedulerSettings
from tinsmith.types.futures import RequestFailedResponse
from tinsmith.types.requests import (
    LoadWeightsRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)

LINES = ["session-1:train:0", "session-2:train:0", "session-2:train:1"]
SOON = SchedulerSettings(gap_wait_s=30, gap_look_s=0.02, snapshot_commands=7)


async def _submit(b: Bench, queue_id: str, number: int) -> str:
    """One command of a run that does a little of everything; its effect depends on its place."""
    if number == 0:
        return await b.create(queue_id)
    if number == 11:
        request = SaveWeightsRequest(model_id=queue_id, seq_id=number, path="eleven")
        return await b.submit(queue_id, number, "save_weights", request)
    if number == 17:
        load = LoadWeightsRequest(
            model_id=queue_id,
            seq_id=number,
            path=f"tinker://{queue_id}/weights/eleven",
            optimizer=True,
        )
        return await b.submit(queue_id, number, "load_weights", load)
    if number == 20:
        ephemeral = SaveWeightsForSamplerRequest(
            model_id=queue_id, seq_id=number, sampling_session_seq_id=int(queue_id[-1])
        )
        return await b.submit(queue_id, number, "save_weights_for_sampler", ephemeral)
    if number % 3 == 0:
        return await b.step(queue_id, number)
    return await b.forward_backward(queue_id, number, (number, 2, 3), weight=number)


LENGTH = 26


async def _undisturbed(folder: Path) -> list[dict[str, bytes]]:
    async with bench(folder) as b:
        for queue_id in LINES:
            for number in range(LENGTH):
                await b.result(await _submit(b, queue_id, number))
        return [
            await b.weights(queue_id, queue_id[-7:].replace(":", "-") + queue_id[8])
            for queue_id in LINES
        ]


@pytest.mark.parametrize("seed", range(4))
def test_weights_after_crashes_equal_those_of_an_undisturbed_run(tmp_path: Path, seed: int) -> None:
    """Killed at random moments, every command settles once and well, and nothing is lost."""
    chance = random.Random(seed)

    async def life(todo: list[tuple[str, int]]) -> None:
        """One process: it submits what is left, runs, and is killed."""
        ledger = await SqliteLedger.open(tmp_path / "ledger")
        b = Bench(tmp_path / "data", ledger, settings=SOON)
        await b.open()
        some = todo[: chance.randint(1, 25)]
        del todo[: len(some)]
        for queue_id, seq in some:
            await _submit(b, queue_id, seq)
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random() * 0.02)
        await asyncio.sleep(chance.random() * 0.1)
        await b.kill()
        await ledger.close()

    async def last() -> list[dict[str, bytes]]:
        ledger = await SqliteLedger.open(tmp_path / "ledger")
        async with bench(tmp_path / "data", ledger, settings=SOON) as b:
            for queue_id in LINES:
                for number in range(LENGTH):
                    result = await b.result(f"{queue_id}:{number}")
                    assert not isinstance(result, RequestFailedResponse), (queue_id, number, result)
            found = [await b.weights(queue_id, queue_id.replace(":", "-")) for queue_id in LINES]
        await ledger.close()
        return found

    todo = [(queue_id, number) for number in range(LENGTH) for queue_id in LINES]
    # Within a window they come in any order, as chunks that are sent side by side do.
    for start in range(0, len(todo), 9):
        window = todo[start : start + 9]
        chance.shuffle(window)
        todo[start : start + 9] = window if start else todo[start : start + 9]
    lives = 0
    while todo:
        asyncio.run(life(todo))
        lives += 1

    found = asyncio.run(last())

    assert lives > 2
    assert found == asyncio.run(_undisturbed(tmp_path / "other"))


def test_a_model_that_was_idle_before_a_crash_is_not_trained_again(tmp_path: Path) -> None:
    """A service that has many of them is ready soon, however long each of them was trained."""
    idle = SchedulerSettings(snapshot_idle_s=0.05, snapshot_idle_work_s=0.0)

    async def trained_and_killed() -> None:
        ledger = await SqliteLedger.open(tmp_path / "ledger")
        b = Bench(tmp_path / "data", ledger, settings=idle)
        await b.open()
        for queue_id in LINES:
            for number in range(5):
                await b.result(await _submit(b, queue_id, number))
        await until(lambda: b.scheduler.statistics().get("snapshots", 0) >= len(LINES))
        await b.kill()
        await ledger.close()

    async def redone() -> float:
        ledger = await SqliteLedger.open(tmp_path / "ledger")
        async with bench(tmp_path / "data", ledger, settings=idle) as b:
            await until(lambda: b.scheduler.statistics()["recovered_models"] == len(LINES))
            commands = b.scheduler.statistics()["redone_commands"]
        await ledger.close()
        return commands

    asyncio.run(trained_and_killed())

    assert asyncio.run(redone()) == 0


def test_a_failed_snapshot_of_an_idle_model_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "RETRY_S", 0.3)
    monkeypatch.setattr(scheduler, "REPORT_S", 0.02)
    idle = SchedulerSettings(snapshot_idle_s=0.05, snapshot_idle_work_s=1e-9)
    commit, failed = FolderStaging.commit, list[FolderStaging]()

    def commit_later(staging: FolderStaging, **options: Any) -> Manifest:
        if not failed:
            failed.append(staging)
            raise CheckpointUnavailableError("the disk is away")
        return commit(staging, **options)

    monkeypatch.setattr(FolderStaging, "commit", commit_later)

    async def run() -> None:
        async with bench(tmp_path, settings=idle) as b:
            for number in range(3):
                await b.result(await _submit(b, LINES[0], number))
            await until(lambda: b.scheduler.statistics().get("failed_snapshots", 0) == 1)
            await until(lambda: b.scheduler.statistics().get("snapshots", 0) == 1)

    asyncio.run(run())


@pytest.mark.parametrize("cut_off", ["before its entry", "before its note", "after both"])
def test_an_interrupted_save_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_off: str
) -> None:
    """Killed after its files were there and before it was settled, it settles after the start."""
    add_entry = ModelFiles.add_entry

    async def run() -> None:
        ledger = await SqliteLedger.open(tmp_path / "ledger")
        first = Bench(tmp_path, ledger)
        await first.open()
        queue_id = LINES[0]
        await first.create(queue_id)
        await first.result(await first.forward_backward(queue_id, 1))
        reached = asyncio.Event()

        kept: list[CheckpointEntry] = []

        async def stuck(*values: Any, **named: Any) -> None:
            if cut_off == "after both":
                kept.append(await add_entry(*values, **named))
            reached.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patch:
            if cut_off == "before its note":
                patch.setattr(audit, "note", stuck)
            else:
                patch.setattr(ModelFiles, "add_entry", stuck)
            request = SaveWeightsRequest(model_id=queue_id, seq_id=2, path="x")
            request_id = await first.submit(queue_id, 2, "save_weights", request)
            await asyncio.wait_for(reached.wait(), WAIT_S)
            await first.kill()
        await ledger.close()

        ledger = await SqliteLedger.open(tmp_path / "ledger")
        async with bench(tmp_path, ledger) as second:
            saved = await second.result(request_id)
            entry = await ledger.entries(CheckpointEntry).get(saved.path)
            noted = await ledger.entries(AuditEntry).all()
        await ledger.close()

        assert saved.path == f"tinker://{queue_id}/weights/x"
        assert entry is not None
        assert kept in ([], [entry])
        assert [one.event for one in noted] == [audit.CHECKPOINT_CREATED]

    asyncio.run(run())


def test_a_loaded_checkpoint_is_replayed_after_a_crash_even_if_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay needs it until a snapshot is on the disk, which takes long for a large adapter."""
    queue_id, may_commit = LINES[0], threading.Event()
    commit = FolderStaging.commit

    def slowly(staging: FolderStaging, *, overwrite: bool = False) -> Manifest:
        if staging.path.kind == SNAPSHOTS:
            may_commit.wait()
        return commit(staging, overwrite=overwrite)

    def save(number: int) -> SaveWeightsRequest:
        return SaveWeightsRequest(model_id=queue_id, seq_id=number, path="last", overwrite=True)

    async def train(b: Bench, number: int) -> None:
        await b.forward_backward(queue_id, number)
        await b.result(await b.step(queue_id, number + 1))

    async def run() -> None:
        ledger = MemoryLedger()
        first = Bench(tmp_path, ledger)
        await first.open()
        await first.create(queue_id)
        await train(first, 1)
        saved = await first.result(await first.submit(queue_id, 3, "save_weights", save(3)))
        load = LoadWeightsRequest(model_id=queue_id, seq_id=4, path=saved.path, optimizer=True)
        monkeypatch.setattr(FolderStaging, "commit", slowly)
        await first.submit(queue_id, 4, "load_weights", load)
        await train(first, 5)
        before = await first.weights(queue_id, "before")
        last = await first.submit(queue_id, 7, "save_weights", save(7))
        await ledger.wait_settled(last, timeout_s=0.5)
        await first.kill()
        may_commit.set()

        async with bench(tmp_path, ledger) as second:
            await second.result(last)
            after = await second.weights(queue_id, "after")

        assert before == after

    asyncio.run(run())


def test_a_skipped_seq_id_stays_skipped_after_a_crash(tmp_path: Path) -> None:
    """A replay sees the order that was run."""

    async def run() -> None:
        queue_id = LINES[0]
        ledger = await SqliteLedger.open(tmp_path / "ledger")
        first = Bench(tmp_path, ledger, settings=SchedulerSettings(gap_wait_s=0, gap_look_s=0.01))
        await first.open()
        await first.create(queue_id)
        await first.result(await first.forward_backward(queue_id, 2))
        await first.result(await first.step(queue_id, 3))
        before = await first.weights(queue_id, "before")
        await first.kill()
        await ledger.close()

        ledger = await SqliteLedger.open(tmp_path / "ledger")
        async with bench(tmp_path, ledger) as second:
            after = await second.weights(queue_id, "after")
            await second.result(await second.forward_backward(queue_id, 4))
        await ledger.close()

        assert before == after

    asyncio.run(run())


def test_a_model_that_failed_to_be_created_stays_failed_after_a_crash(tmp_path: Path) -> None:
    """Its later commands still fail, and others are not held up."""

    async def run() -> None:
        ledger = MemoryLedger()
        first = Bench(tmp_path, ledger)
        await first.open()
        await first.result(await first.create(LINES[0], base="unknown/model"))
        await first.kill()
        async with bench(tmp_path, ledger) as second:
            failed = await second.result(await second.forward_backward(LINES[0], 1))

        assert isinstance(failed, RequestFailedResponse)
        assert "could not be created" in failed.error

    asyncio.run(run())


def test_weights_damaged_at_startup_fail_only_their_own_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says which file it is, in one line; the model's client is told no folder."""

    async def run() -> RequestFailedResponse:
        ledger, queue_id = MemoryLedger(), LINES[0]
        async with bench(tmp_path, ledger) as first:
            await first.create(queue_id)
            await first.result(await first.forward_backward(queue_id, 1))
        _damage(tmp_path)
        async with bench(tmp_path, ledger) as second:
            assert second.scheduler.statistics()["recovered_models"] == 0
            failed: RequestFailedResponse = await second.result(await second.step(queue_id, 2))
            return failed

    failed = asyncio.run(run())

    assert "corrupt" in failed.error
    assert str(tmp_path) not in failed.error
    [told] = [one for one in caplog.records if "could not restore model" in one.getMessage()]
    assert "adapter_model.safetensors" in told.getMessage()
    assert not told.exc_info


def test_a_command_that_fails_on_replay_fails_its_model_instead_of_being_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(works: Sequence[TrainingWork]) -> list[TrainingOutcome]:
        return [TrainingOutcome(work_id=work.work_id, error=RuntimeError()) for work in works]

    async def run() -> RequestFailedResponse:
        ledger, queue_id = MemoryLedger(), LINES[0]
        first = Bench(tmp_path, ledger)
        await first.open()
        await first.create(queue_id)
        await first.result(await first.forward_backward(queue_id, 1))
        await first.kill()
        second = Bench(tmp_path, ledger)
        with monkeypatch.context() as patch:
            patch.setattr(second.engine, "train", fail)
            await second.open()
        failed: RequestFailedResponse = await second.result(await second.step(queue_id, 2))
        await second.close()
        return failed

    assert "could not be restored" in asyncio.run(run()).error


def _damage(folder: Path) -> None:
    for weights in folder.rglob("adapter_model.safetensors"):
        weights.write_bytes(b"no weights")


def test_a_damaged_checkpoint_is_logged_for_the_operator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> RequestFailedResponse:
        queue_id = LINES[0]
        async with bench(tmp_path) as b:
            await b.create(queue_id)
            save = SaveWeightsRequest(model_id=queue_id, seq_id=1, path="one")
            await b.result(await b.submit(queue_id, 1, "save_weights", save))
            _damage(tmp_path)
            load = LoadWeightsRequest(
                model_id=queue_id, seq_id=2, path=f"tinker://{queue_id}/weights/one", optimizer=True
            )
            failed: RequestFailedResponse = await b.result(
                await b.submit(queue_id, 2, "load_weights", load)
            )
            return failed

    failed = asyncio.run(run())

    assert "corrupt" in failed.error
    assert any("adapter_model.safetensors" in message for message in caplog.messages)


def test_an_unavailable_store_at_startup_loses_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for, and the commands with it; readiness says what for."""

    async def run() -> None:
        ledger, queue_id = MemoryLedger(), LINES[0]
        async with bench(tmp_path, ledger) as first:
            await first.create(queue_id)
            await first.result(await first.forward_backward(queue_id, 1))
        impatient = msgspec.structs.replace(QUICK, store_wait_s=0.0)
        second = Bench(tmp_path, ledger, settings=impatient)
        there, is_back = second.store.open, threading.Event()

        def away(path: CheckpointPath) -> Reading:
            if not is_back.is_set():
                raise CheckpointUnavailableError("the disk is not mounted")
            return there(path)

        monkeypatch.setattr(second.store, "open", away)
        monkeypatch.setattr(restore, "STORE_WAIT_S", 0.01)
        opening = asyncio.create_task(second.open())
        await until(lambda: "is not mounted" in str(ledger.board.report.problem))
        is_back.set()
        await opening
        await until(lambda: ledger.board.report.problem is None)
        done = await second.result(await second.step(queue_id, 2))
        await second.close()

        assert done.metrics["tinsmith/step"] == 1

    asyncio.run(run())


def test_interrupted_samples_are_sampled_again(tmp_path: Path) -> None:
    """With the same tokens: without a seed of their own their id is their seed."""

    async def run() -> None:
        sampler = "session-1:sample:0"
        ledger = MemoryLedger()
        slow = FakeSettings(step_s=0.01, tokens_per_step=1)
        first = Bench(tmp_path, ledger, fake=slow)
        await first.open()
        await first.add_sampler(sampler)
        cut = await first.sample(sampler, 0, max_tokens=1000)
        await until(lambda: first.engine.capacity().samples == 1)
        await first.kill()
        async with bench(tmp_path, ledger) as second:
            result = await second.result(cut)

        assert len(result.sequences[0].tokens) == 1000

    asyncio.run(run())


def test_replay_progress_after_a_crash_is_reported_to_waiting_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the restore of models, then the pass that the crash interrupted."""
    monkeypatch.setattr(scheduler, "REPORT_S", 0.01)
    mine, other = LINES[:2]

    async def run() -> None:
        ledger, slow = MemoryLedger(), FakeSettings(batch_s=0.5)
        first = Bench(tmp_path, ledger, fake=slow)
        await first.open()
        for queue_id in (mine, other):
            await first.result(await first.create(queue_id))
        await first.result(await first.forward_backward(mine, 1))
        broken_off = await first.forward_backward(mine, 2)
        await until(lambda: first.scheduler.statistics()["queued_commands"] > 0)
        await first.kill()

        second = Bench(tmp_path, ledger, settings=SchedulerSettings(told_after_s=0.0), fake=slow)
        opening, board = asyncio.create_task(second.open()), ledger.board
        await until(lambda: "has restarted" in (board.queue_state(mine).reason or ""))
        await until(lambda: "of 2 models are restored" in (board.report.problem or ""))
        await opening
        assert board.report.problem is None
        await until(second.scheduler._training.is_repeating)
        waiting = await second.forward_backward(other, 1)
        await until(lambda: board.queue_state(other).reason == scheduler.BUSY_AGAIN)
        for request_id in (broken_off, waiting):
            await second.result(request_id)
        await until(lambda: board.queue_state(other).state == "active")
        await second.close()

    asyncio.run(run())


class Flaky:
    """A ledger that is unavailable while it is told to be."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.is_gone = False
        self.is_settling = True
        self.refused = 0

    def __getattr__(self, name: str) -> object:
        found = getattr(self._ledger, name)
        if name not in ("settle", "wait_claim", "payload", "take_cancelled", "check_writable"):
            return found

        async def call(*args: object, **kwargs: object) -> object:
            if self.is_gone or (name == "settle" and not self.is_settling):
                self.refused += 1
                raise LedgerUnavailableError("the disk is full")
            work: Callable[..., Awaitable[object]] = found
            return await work(*args, **kwargs)

        return call


def test_an_unwritable_ledger_is_reported_until_it_is_writable_again(tmp_path: Path) -> None:
    """Nothing is to be settled, so that the scheduler would not notice by itself."""

    async def run() -> None:
        flaky = Flaky(MemoryLedger())
        async with bench(tmp_path, cast(Ledger, flaky)) as b:
            board = b.ledger.board
            assert board.report.is_ready
            flaky.is_gone = True

            board.doubt_ledger()

            await until(lambda: not board.report.is_ready)
            assert board.report.problem == "the ledger is unavailable: the disk is full"
            flaky.is_gone = False
            await until(lambda: board.report.is_ready)

    asyncio.run(run())


def test_outcomes_are_kept_while_the_ledger_is_unavailable(tmp_path: Path) -> None:
    """The board says so; when it is back everything settles."""

    async def run() -> None:
        flaky = Flaky(MemoryLedger())
        slow = FakeSettings(batch_s=0.05)
        async with bench(tmp_path, cast(Ledger, flaky), fake=slow) as b:
            queue_id, board = LINES[0], b.ledger.board
            await b.result(await b.create(queue_id))
            ids = [await b.forward_backward(queue_id, 1), await b.step(queue_id, 2)]
            await until(lambda: b.scheduler.statistics()["queued_commands"] > 0)
            flaky.is_gone = True
            await until(lambda: board.queue_state(queue_id).state == "paused_capacity")
            await until(lambda: flaky.refused > 3)
            flaky.is_gone = False

            results = [await b.result(request_id) for request_id in ids]

            assert not any(isinstance(result, RequestFailedResponse) for result in results)
            await until(lambda: board.queue_state(queue_id).state == "active")
            assert b.scheduler.statistics()["ledger_outages"] >= 1

    asyncio.run(run())


def test_a_new_snapshot_deletes_the_old_one_and_the_commands_it_covers(tmp_path: Path) -> None:
    """Only one is kept, and the commands before it are not replayed."""

    async def run() -> None:
        async with bench(tmp_path, settings=SOON) as b:
            queue_id = QueueId(LINES[0])
            await b.create(queue_id)
            for number in range(1, 30):
                await b.result(await _submit(b, queue_id, number))
            async with asyncio.timeout(WAIT_S):
                while (kept := await b.ledger.queue(queue_id)).snapshot_position < 22:  # noqa: ASYNC110 - nobody tells of it
                    await asyncio.sleep(0.01)
            replayed = await b.ledger.replay(queue_id)
            await until(lambda: len(b.store.snapshots(queue_id)) == 1)

        assert kept.snapshot is not None
        assert len(replayed) < 10

    asyncio.run(run())


def test_a_snapshot_is_recorded_only_once_its_commands_are_settled(
    tmp_path: Path,
) -> None:
    """Else a crash would find a line whose snapshot is ahead of its commands."""

    async def run() -> None:
        flaky = Flaky(MemoryLedger())
        soon = SchedulerSettings(snapshot_commands=1)
        async with bench(tmp_path, cast(Ledger, flaky), settings=soon) as b:
            queue_id = QueueId(LINES[0])
            await b.result(await b.create(queue_id))
            before = (await b.ledger.queue(queue_id)).snapshot_position
            flaky.is_settling = False
            request_id = await b.forward_backward(queue_id, 1)
            await until(lambda: any(path.position > before for path in b.store.snapshots(queue_id)))
            await until(lambda: flaky.refused > 3)
            during = (await b.ledger.queue(queue_id)).snapshot_position
            flaky.is_settling = True
            await b.result(request_id)
            async with asyncio.timeout(WAIT_S):
                while (await b.ledger.queue(queue_id)).snapshot_position == before:  # noqa: ASYNC110 - nobody tells of it
                    await asyncio.sleep(0.01)

        assert during == before

    asyncio.run(run())


@pytest.mark.parametrize(
    "limit", ["snapshot_commands", "snapshot_work_s", "snapshot_payload_bytes"]
)
def test_exceeding_any_replay_limit_triggers_a_snapshot(tmp_path: Path, limit: str) -> None:
    rare: dict[str, Any] = {
        "snapshot_commands": 1000,
        "snapshot_work_s": 1e9,
        "snapshot_payload_bytes": 10**12,
    }
    often = SchedulerSettings(**{**rare, limit: 1 if limit != "snapshot_work_s" else 1e-9})

    async def run() -> None:
        async with bench(tmp_path, settings=often, fake=FakeSettings(batch_s=0.001)) as b:
            queue_id = QueueId(LINES[0])
            await b.create(queue_id)
            await b.result(await b.forward_backward(queue_id, 1))
            await until(lambda: len(b.store.snapshots(queue_id)) > 0)

    asyncio.run(run())


def test_a_failed_snapshot_is_not_retried_with_each_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[CheckpointPath] = []

    def refuse(path: CheckpointPath, **_: object) -> None:
        tries.append(path)
        raise CheckpointUnavailableError("the disk is away")

    async def run() -> None:
        soon = SchedulerSettings(snapshot_commands=2)
        async with bench(tmp_path, settings=soon) as b:
            queue_id = LINES[0]
            await b.result(await b.create(queue_id))
            with monkeypatch.context() as patch:
                patch.setattr(b.store, "begin", refuse)
                for number in range(1, 30):
                    await b.result(await b.forward_backward(queue_id, number))

    monkeypatch.setattr(snapshots, "RETRY_S", 3600.0)
    asyncio.run(run())

    assert len(tries) == 1


def test_an_interrupted_start_changes_nothing(tmp_path: Path) -> None:
    """Models that were halfway back are not saved as if they were where their lines are."""

    async def run() -> None:
        ledger, queue_id = MemoryLedger(), LINES[0]
        first = Bench(tmp_path, ledger)
        await first.open()
        await first.create(queue_id)
        for number in range(1, 10):
            await first.result(await _submit(first, queue_id, number))
        before = await first.weights(queue_id, "before")
        await first.kill()

        broken = Bench(tmp_path, ledger, fake=FakeSettings(batch_s=5))
        await broken.engine.open()
        opening = asyncio.create_task(broken.scheduler.open())
        await until(lambda: broken.engine.has_adapter(AdapterId(queue_id)))
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await broken.close()

        async with bench(tmp_path, ledger) as last:
            assert await last.weights(queue_id, "after") == before

    asyncio.run(run())
