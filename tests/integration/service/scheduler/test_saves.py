"""Saves and loads, and what becomes of a model when its session ends."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.integration.service.scheduler.bench import BASE, QUICK, Bench, bench, until
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.engine.fake.fake_settings import FakeSettings
from tinsmith.errors import CheckpointUnavailableError, RequestErrorCategory
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.model_config import write_config
from tinsmith.service.ledger.records import (
    CheckpointEntry,
    ModelEntry,
    QueueId,
    RequestId,
    SessionEntry,
    SessionId,
    Submission,
    TenantId,
)
from tinsmith.service.scheduler import model_files
from tinsmith.types import LoraConfig
from tinsmith.types.requests import (
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)

pytestmark = pytest.mark.usefixtures("each_ledger")

LINE = "session-1:train:0"
OTHER = "session-1:train:1"


async def _save(b: Bench, number: int, queue_id: str = LINE, **fields: Any) -> Any:
    request = SaveWeightsRequest(model_id=queue_id, seq_id=number, **fields)
    return await b.result(await b.submit(queue_id, number, "save_weights", request))


async def _train(b: Bench, number: int, queue_id: str = LINE) -> None:
    await b.forward_backward(queue_id, number, (number, 2, 3))
    await b.result(await b.step(queue_id, number + 1))


def test_a_saved_state_is_loaded_with_its_optimizer(tmp_path: Path) -> None:
    """A model made from it goes on exactly as the first one does."""

    async def run() -> None:
        async with bench(tmp_path) as b:
            await b.create(LINE)
            await _train(b, 1)
            saved = await _save(b, 3, path="one", ttl_seconds=3600, user_metadata={"a": "b"})
            other = "session-1:train:1"
            await b.ledger.entries(ModelEntry).add(
                ModelEntry(
                    id=other,
                    tenant_id=TenantId("tenant"),
                    created_at=0.0,
                    session_id=SessionId("session-1"),
                    base_model=BASE,
                    config=write_config(LoraConfig(rank=4), None),
                )
            )
            request = LoadWeightsRequest(
                session_id="session-1", model_seq_id=1, path=saved.path, optimizer=True
            )
            loaded = await b.result(await b.submit(other, 0, "load_weights", request))
            for queue_id in (LINE, other):
                number = 4 if queue_id == LINE else 1
                await b.forward_backward(queue_id, number, (9, 8))
                await b.result(await b.step(queue_id, number + 1))
            first, second = await b.weights(LINE, "first"), await b.weights(other, "second")
            entry = await b.ledger.entries(CheckpointEntry).get(saved.path)

        assert saved.path == f"tinker://{LINE}/weights/one"
        assert loaded.model_id == other
        assert first == second
        assert entry is not None and entry.user_metadata == {"a": "b"}
        assert entry.expires_at is not None and entry.size_bytes > 0

    asyncio.run(run())


def test_the_engine_watchdog_is_active_during_loads_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And while it makes adapters."""
    watched: dict[str, list[str]] = {}

    def watch(b: Bench, method: str) -> None:
        run = getattr(b.engine, method)

        async def noted(*arguments: Any) -> Any:
            calls = b.scheduler._watchdog._calls.values()
            watched.setdefault(method, []).extend(what for _, what in calls)
            return await run(*arguments)

        monkeypatch.setattr(b.engine, method, noted)

    async def run() -> None:
        async with bench(tmp_path) as b:
            for method in ("create_adapter", "save_adapter", "load_adapter", "load_weights"):
                watch(b, method)
            await b.create(LINE)
            saved = await _save(b, 1, path="one")
            load = LoadWeightsRequest(model_id=LINE, seq_id=2, path=saved.path)
            await b.result(await b.submit(LINE, 2, "load_weights", load))
            named = SaveWeightsForSamplerRequest(model_id=LINE, seq_id=3, path="s")
            await b.result(await b.submit(LINE, 3, "save_weights_for_sampler", named))
            await b.add_sampler("session-1:sample:0", path=f"tinker://{LINE}/sampler_weights/s")
            await b.result(await b.sample("session-1:sample:0", 0))

    asyncio.run(run())
    assert watched["create_adapter"] == [f"the creation of {LINE}"]
    assert watched["load_adapter"] == [f"the load of tinker://{LINE}/weights/one"]
    assert watched["load_weights"] == [f"the load of tinker://{LINE}/sampler_weights/s"]
    assert {f"the save of tinker://{LINE}/weights/one", f"the snapshot of {LINE}"} <= {
        *watched["save_adapter"]
    }


def test_an_existing_name_is_a_user_error_unless_overwriting_is_allowed(
    tmp_path: Path,
) -> None:
    """The failure names the remedy."""

    async def run() -> None:
        async with bench(tmp_path) as b:
            await b.create(LINE)
            await _save(b, 1, path="one", user_metadata={"old": "yes"})
            refused = await _save(b, 2, path="one")
            replaced = await _save(b, 3, path="one", overwrite=True)
            entry = await b.ledger.entries(CheckpointEntry).get(replaced.path)

        assert refused.category is RequestErrorCategory.User
        assert "overwrite=True" in refused.error
        assert entry is not None and entry.user_metadata is None

    asyncio.run(run())


def test_sampler_and_external_weights_have_their_own_paths(tmp_path: Path) -> None:
    """Each kind under its own name, with its size."""

    async def run() -> None:
        async with bench(tmp_path) as b:
            await b.create(LINE)
            named = SaveWeightsForSamplerRequest(model_id=LINE, seq_id=1, path="s")
            external = SaveWeightsExternalRequest(model_id=LINE, seq_id=2, path="e")
            first = await b.result(await b.submit(LINE, 1, "save_weights_for_sampler", named))
            second = await b.result(await b.submit(LINE, 2, "save_weights_external", external))
            await b.add_sampler("session-1:sample:0", path=first.path)
            drawn = await b.result(await b.sample("session-1:sample:0", 0))

        assert first.path == f"tinker://{LINE}/sampler_weights/s"
        assert second.path == f"tinker://{LINE}/external_weights/e"
        assert second.size_bytes > 0
        assert len(drawn.sequences) == 1

    asyncio.run(run())


def test_loading_a_missing_checkpoint_fails_and_the_model_is_unchanged(tmp_path: Path) -> None:
    """As the user's mistake."""

    async def run() -> None:
        async with bench(tmp_path) as b:
            await b.create(LINE)
            await _train(b, 1)
            before = await b.weights(LINE, "before")
            request = LoadWeightsRequest(
                model_id=LINE, seq_id=3, path=f"tinker://{LINE}/weights/none"
            )
            failed = await b.result(await b.submit(LINE, 3, "load_weights", request))
            after = await b.weights(LINE, "after")

        assert failed.category is RequestErrorCategory.User
        assert before == after

    asyncio.run(run())


def test_commands_after_the_release_of_a_model_fail_and_leave_nothing_behind(
    tmp_path: Path,
) -> None:
    """No line, no adapter, no claimed command."""

    async def run() -> None:
        async with bench(tmp_path, fake=FakeSettings(batch_s=0.5)) as b:
            await b.create(LINE)
            await b.forward_backward(LINE, 1)
            released = await _release(b, {"type": "client_finished"})
            late = await b.step(LINE, 3)
            failed = await b.result(late)
            await _wait_released(b, released)
            await until(lambda: b.scheduler.statistics()["held_commands"] == 0)
            figures = b.scheduler.statistics()

        assert failed.category is RequestErrorCategory.User
        assert (figures["lines"], figures["adapters"]) == (0, 0)

    asyncio.run(run())


async def _end(b: Bench, ending: dict[str, Any]) -> None:
    """End the session as the server does, and wait until its model is let go."""
    await _wait_released(b, await _release(b, ending))


async def _release(b: Bench, ending: dict[str, Any]) -> RequestId:
    """End the session as the server does."""

    def ended(session: SessionEntry) -> SessionEntry:
        return msgspec.structs.replace(session, ended_at=b.ledger.now(), ending=ending)

    await b.ledger.entries(SessionEntry).change("session-1", ended)
    appended = await b.ledger.append(
        Submission(
            queue_id=QueueId(LINE),
            seq_id=None,
            kind="release_model",
            tenant_id=TenantId("tenant"),
            session_id=SessionId("session-1"),
            fingerprint=b"release",
            payload=b"J{}",
        )
    )
    return appended.request_id


async def _wait_released(b: Bench, released: RequestId) -> None:
    command = await b.ledger.wait_settled(released, timeout_s=20)
    assert command.is_settled and not command.is_failed


def test_a_lost_session_saves_its_state(tmp_path: Path) -> None:
    """It is saved before the model is let go of.

    So is that of a program which an error or a Ctrl-C ended; one that ended well leaves nothing.
    """

    async def run(ending: dict[str, Any], folder: Path) -> CheckpointEntry | None:
        async with bench(folder) as b:
            await b.create(LINE)
            await _train(b, 1)
            ephemeral = SaveWeightsForSamplerRequest(
                model_id=LINE, seq_id=3, sampling_session_seq_id=5
            )
            await b.result(await b.submit(LINE, 3, "save_weights_for_sampler", ephemeral))
            await _end(b, ending)
            assert not b.engine.capacity().adapters
            assert not b.store.exists(CheckpointPath.sampler("session-1:sample:5"))
            model = await b.ledger.entries(ModelEntry).get(LINE)
            assert model is not None and model.released_at is not None
            return await b.ledger.entries(CheckpointEntry).get(f"tinker://{LINE}/weights/autosave")

    def finished(reason: str) -> CheckpointEntry | None:
        ending = {"type": "client_finished", "reason": {"type": reason}}
        return asyncio.run(run(ending, tmp_path / reason))

    lost = asyncio.run(run({"type": "cancelled"}, tmp_path / "lost"))

    assert lost is not None and lost.expires_at is not None
    assert finished("errored") is not None
    assert finished("interrupted") is not None
    assert finished("success") is None


def test_a_lost_session_saves_the_state_of_a_model_recovered_after_a_restart(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        ledger = MemoryLedger()
        async with bench(tmp_path, ledger) as first:
            await first.create(LINE)
            await _train(first, 1)
        async with bench(tmp_path, ledger) as second:
            await _end(second, {"type": "cancelled"})
            path = f"tinker://{LINE}/weights/autosave"
            assert await ledger.entries(CheckpointEntry).get(path) is not None

    asyncio.run(run())


def test_a_model_is_released_even_if_its_files_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: CheckpointPath) -> None:
        raise CheckpointUnavailableError("the store is away")

    async def run() -> None:
        async with bench(tmp_path) as b:
            await b.create(LINE)
            await _train(b, 1)
            ephemeral = SaveWeightsForSamplerRequest(
                model_id=LINE, seq_id=3, sampling_session_seq_id=5
            )
            await b.result(await b.submit(LINE, 3, "save_weights_for_sampler", ephemeral))
            monkeypatch.setattr(b.store, "delete", refuse)

            await _end(b, {"type": "client_finished", "reason": {"type": "success"}})

            assert not b.engine.capacity().adapters

    asyncio.run(run())


def test_a_save_waits_for_an_unavailable_store_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    async def run() -> None:
        async with bench(tmp_path) as b:
            await b.create(LINE)
            begin = b.store.begin

            def once(*arguments: Any, **named: Any) -> Any:
                if not told:
                    told.append(None)
                    raise CheckpointUnavailableError("no answer", reason="it is away")
                told.append(b.ledger.board.queue_state(LINE).reason)
                return begin(*arguments, **named)

            monkeypatch.setattr(b.store, "begin", once)
            assert (await _save(b, 1, path="one")).path.endswith("/one")
            assert b.ledger.board.queue_state(LINE).state == "active"
            assert await b.ledger.board.wait_store_doubt(timeout_s=0.0)

    asyncio.run(run())
    assert told[1] == "the checkpoint store is unavailable: it is away"


def test_saves_that_wait_for_the_store_hold_up_no_other_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        settings = msgspec.structs.replace(QUICK, most_singles=1)
        async with bench(tmp_path, settings=settings) as b:
            await b.create(LINE)
            is_away = True

            def check(*, writes: bool) -> None:
                if writes and is_away:
                    raise CheckpointUnavailableError("no answer")

            begin = b.store.begin

            def refuse(*arguments: Any, **named: Any) -> Any:
                check(writes=True)
                return begin(*arguments, **named)

            monkeypatch.setattr(b.store, "begin", refuse)
            monkeypatch.setattr(b.store, "check", check)
            saving = asyncio.create_task(_save(b, 1, path="one"))
            await until(lambda: b.ledger.board.queue_state(LINE).state == "paused_capacity")
            await b.result(await b.create(OTHER))
            assert not saving.done()
            is_away = False
            assert (await saving).path.endswith("/one")

    asyncio.run(run())


def test_a_load_waits_for_an_unavailable_store_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    async def run() -> None:
        async with bench(tmp_path) as b:
            await b.create(LINE)
            saved = await _save(b, 1, path="one")
            open_whole = b.store.open_whole

            def once(*arguments: Any, **named: Any) -> Any:
                if not told:
                    told.append(None)
                    raise CheckpointUnavailableError("no answer", reason="it is away")
                told.append(b.ledger.board.queue_state(LINE).reason)
                return open_whole(*arguments, **named)

            monkeypatch.setattr(b.store, "open_whole", once)
            load = LoadWeightsRequest(model_id=LINE, seq_id=2, path=saved.path, optimizer=True)
            await b.result(await b.submit(LINE, 2, "load_weights", load))
            assert b.ledger.board.queue_state(LINE).state == "active"

    asyncio.run(run())
    assert told[1] == "the checkpoint store is unavailable: it is away"


def test_a_save_fails_immediately_where_waiting_does_not_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    async def run() -> Any:
        async with bench(tmp_path) as b:
            await b.create(LINE)

            def refuse(path: CheckpointPath, **_: Any) -> Any:
                calls.append(path.kind)
                raise CheckpointUnavailableError(
                    "403 from 10.0.0.1",
                    reason="its credentials are refused",
                    is_lasting=True,
                )

            monkeypatch.setattr(b.store, "begin", refuse)
            request = SaveWeightsRequest(model_id=LINE, seq_id=1, path="one")
            return await b.result(await b.submit(LINE, 1, "save_weights", request))

    failed = asyncio.run(run())
    assert "the checkpoint store is unavailable: its credentials are refused" in str(failed)
    assert "10.0.0.1" not in str(failed)
    assert calls.count("weights") == 1


def test_a_save_is_retried_over_a_short_store_outage_and_fails_after_a_long_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is away, the store is probed, and the engine is not asked for the files again."""
    saves: list[int] = []

    async def run() -> None:
        settings = msgspec.structs.replace(QUICK, store_wait_s=1.0)
        async with bench(tmp_path, settings=settings) as b:
            begin, refusals = b.store.begin, itertools.count()
            away = CheckpointUnavailableError("the store is away")

            def begin_once(*values: Any, **named: Any) -> Any:
                saves.append(1)
                if len(saves) == 1:
                    raise away
                return begin(*values, **named)

            def check(*, writes: bool) -> None:
                assert writes
                if next(refusals) < away_for:
                    raise away

            await b.create(LINE)
            await _train(b, 1)
            monkeypatch.setattr(b.store, "begin", begin_once)
            monkeypatch.setattr(b.store, "check", check)
            away_for = 3
            saved = await _save(b, 3, path="one")
            assert len(saves) == 2
            saves.clear()
            away_for = 10**9
            failed = await _save(b, 4, path="two")
            assert len(saves) == 1

            assert saved.path == f"tinker://{LINE}/weights/one"
            assert failed.category is RequestErrorCategory.Server

    monkeypatch.setattr(model_files, "FIRST_WAIT_S", 0.01)
    asyncio.run(run())


def test_a_save_that_fails_in_the_engine_leaves_nothing_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    async def run() -> None:
        async with bench(tmp_path) as b:
            await b.create(LINE)
            await _train(b, 1)
            monkeypatch.setattr(b.engine, "save_adapter", fail)

            failed = await _save(b, 3, path="one")

            assert failed.category is RequestErrorCategory.Server
            assert list((b.store.root / "staging").iterdir()) == []
            monkeypatch.undo()

    asyncio.run(run())


def test_a_save_cannot_take_the_id_of_another_sampler(tmp_path: Path) -> None:
    async def run() -> None:
        async with bench(tmp_path) as b:
            await b.create(LINE)
            await _train(b, 1)
            await b.add_sampler("session-1:sample:5", path="tinker://other/sampler_weights/a")
            request = SaveWeightsForSamplerRequest(
                model_id=LINE, seq_id=3, sampling_session_seq_id=5
            )

            failed = await b.result(await b.submit(LINE, 3, "save_weights_for_sampler", request))

            assert failed.category is RequestErrorCategory.User
            assert "already used by another" in failed.error

    asyncio.run(run())
