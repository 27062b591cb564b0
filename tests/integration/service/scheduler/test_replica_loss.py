"""A scheduler on a fleet: what the loss of one replica does, and to whom."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.service.scheduler.bench import BASE, QUICK, WAIT_S, Bench, until
from tinsmith.engine.base import AdapterId
from tinsmith.engine.fake.fake_settings import FakeSettings
from tinsmith.engine.fleet.fleet_engine import FleetEngine
from tinsmith.engine.fleet.replica import Duty, ReplicaSpec
from tinsmith.engine.process.engine_spec import EngineSpec, ModelSource
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.records import RequestId
from tinsmith.service.scheduler.scheduler import Scheduler
from tinsmith.service.scheduler.scheduler_settings import SchedulerSettings
from tinsmith.types.futures import RequestFailedResponse
from tinsmith.types.requests import UnloadModelRequest

MODELS = [f"s:train:{number}" for number in range(6)]
ROUNDS = 8


def killer(flag: str = "") -> Any:
    """A fake engine that dies of a pass with a token 666, if there is such a file."""
    from tinsmith.engine.base import PassWork, TrainingOutcome, TrainingWork
    from tinsmith.engine.fake.engine import FakeEngine, fake_model

    class Killer(FakeEngine):
        async def train(self, batch: Any) -> list[TrainingOutcome]:
            for work in batch:
                if _is_deadly(work):
                    os.kill(os.getpid(), signal.SIGKILL)
            return await super().train(batch)

    def _is_deadly(work: TrainingWork) -> bool:
        is_bad = isinstance(work, PassWork) and 666 in work.data[0].model_input.to_ints()
        return is_bad and (not flag or Path(flag).exists())

    return Killer([fake_model(BASE), fake_model("test/other")], FakeSettings(batch_s=0.01))


def _specs(
    fake: FakeSettings, duties: tuple[Duty, ...], engine: str = "fake", flag: str = ""
) -> list[ReplicaSpec]:
    models = (ModelSource(BASE, BASE), ModelSource("test/other", "test/other"))
    spec = EngineSpec(engine=engine, models=models, fake=fake)
    if ":" in engine:
        spec = EngineSpec(engine=engine, options={"flag": flag})
    return [
        ReplicaSpec(name=f"r{number}", duty=duty, engine=spec) for number, duty in enumerate(duties)
    ]


@contextlib.asynccontextmanager
async def fleet_bench(
    folder: Path,
    *,
    fake: FakeSettings | None = None,
    duties: tuple[Duty, ...] = ("both", "both", "both"),
    settings: SchedulerSettings = QUICK,
    engine: str = "fake",
    silence_s: float = 0.0,
    flag: str = "",
) -> AsyncIterator[tuple[Bench, FleetEngine]]:
    """A scheduler on a fleet of replicas in processes."""
    made = Bench(folder, MemoryLedger(), settings=settings)
    fleet = FleetEngine(
        _specs(fake or FakeSettings(), duties, engine, flag),
        folder=folder / "fleet",
        silence_s=silence_s,
    )
    made.engine = fleet
    made.scheduler = Scheduler(made.ledger, fleet, made.store, settings)
    async with asyncio.timeout(2 * WAIT_S):
        await made.open()
        try:
            yield made, fleet
        finally:
            await made.close()


def _kill(fleet: FleetEngine, name: str) -> None:
    [pid] = [one.pid for one in fleet.replicas() if one.name == name]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def _train_all(bench: Bench, rounds: int = ROUNDS) -> list[RequestId]:
    """Submit the whole training of all models; returns the ids in order."""
    ids = [await bench.create(model) for model in MODELS]
    for turn in range(rounds):
        for model in MODELS:
            tokens = [1 + turn, 2, 3 + len(model)]
            ids.append(await bench.forward_backward(model, 1 + 2 * turn, tokens))
            ids.append(await bench.step(model, 2 + 2 * turn))
    return ids


async def _outcome(bench: Bench, ids: list[RequestId], name: str) -> tuple[list[Any], list[Any]]:
    """All results, and the whole state of all models."""
    results = [await bench.result(one) for one in ids]
    assert not [one for one in results if isinstance(one, RequestFailedResponse)]
    told = [getattr(one, "metrics", None) for one in results]
    states = [await bench.weights(model, f"{name}-{number}") for number, model in enumerate(MODELS)]
    return told, states


@pytest.mark.parametrize("snapshot_commands", [2000, 3])
def test_a_killed_replica_costs_its_models_nothing_but_time(
    tmp_path: Path, snapshot_commands: int
) -> None:
    """Losses and weights are those of the undisturbed run, bit for bit."""
    settings = SchedulerSettings(snapshot_commands=snapshot_commands)
    slow = FakeSettings(batch_s=0.02)

    async def test() -> None:
        async with fleet_bench(tmp_path / "a", fake=slow, settings=settings) as (bench, _):
            undisturbed = await _outcome(bench, await _train_all(bench), "a")
        async with fleet_bench(tmp_path / "b", fake=slow, settings=settings) as (bench, fleet):
            ids = await _train_all(bench)
            for name in ("r1", "r0", "r1"):
                await bench.result(ids[len(MODELS) + 5])
                await asyncio.sleep(0.05)
                _kill(fleet, name)
                await until(lambda: sum(one.losses for one in fleet.replicas()) > 0)
            disturbed = await _outcome(bench, ids, "b")
            losses = {one.name: one.losses for one in fleet.replicas()}
            held = {one.name: len(one.adapters) for one in fleet.replicas()}

        assert losses["r2"] == 0 < losses["r1"]
        assert sum(held.values()) == len(MODELS)
        assert disturbed == undisturbed

    asyncio.run(test())


def test_outcomes_that_are_not_in_the_ledger_yet_are_not_forgotten(tmp_path: Path) -> None:
    """A model is restored after they are settled, since they are part of what it is."""

    async def run(folder: Path, *, is_disturbed: bool) -> dict[str, bytes]:
        async with fleet_bench(folder, duties=("both", "both")) as (bench, fleet):
            model = MODELS[0]
            await bench.result(await bench.create(model))
            may_settle, settle = asyncio.Event(), bench.ledger.settle

            async def settle_later(*settled: Any, **more: Any) -> Any:
                await may_settle.wait()
                return await settle(*settled, **more)

            bench.ledger.settle = settle_later  # type: ignore[method-assign]
            ids = [await bench.forward_backward(model, 1), await bench.step(model, 2)]
            await until(lambda: bench.scheduler.statistics()["unsettled"] == 2)
            if is_disturbed:
                home = fleet.replica_of(AdapterId(model))
                _kill(fleet, home)
                await until(lambda: fleet._pool[home].losses == 1)
                await until(lambda: fleet._pool[home].is_running)
                await asyncio.sleep(0.2)
            may_settle.set()
            for one in ids:
                await bench.result(one)
            await bench.result(await bench.forward_backward(model, 3))
            return await bench.weights(model, "x")

    async def test() -> None:
        calm = await run(tmp_path / "a", is_disturbed=False)
        assert await run(tmp_path / "b", is_disturbed=True) == calm

    asyncio.run(test())


def test_a_model_is_restored_from_the_snapshot_that_is_being_written(tmp_path: Path) -> None:
    """Not from the one before it, which is deleted once the new one is recorded."""

    async def test() -> None:
        often = SchedulerSettings(snapshot_commands=2)
        async with fleet_bench(tmp_path, duties=("both", "both"), settings=often) as (bench, fleet):
            model = MODELS[0]
            await bench.result(await bench.create(model))
            await bench.result(await bench.forward_backward(model, 1))
            await until(lambda: bench.scheduler.statistics().get("snapshots", 0) == 1)
            ledger, is_read, is_writing = bench.ledger, asyncio.Event(), asyncio.Event()
            record, queue = ledger.record_snapshot, ledger.queue

            async def record_later(*given: Any, **more: Any) -> Any:
                is_writing.set()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(is_read.wait(), 2.0)
                try:
                    return await record(*given, **more)
                finally:
                    is_writing.clear()

            async def queue_while_writing(queue_id: Any) -> Any:
                progress = await queue(queue_id)
                is_read.set()
                if is_writing.is_set():  # too early: what it names is gone by the time it is read
                    await until(lambda: not is_writing.is_set())
                    await asyncio.sleep(0.2)
                return progress

            ledger.record_snapshot = record_later  # type: ignore[method-assign]
            ledger.queue = queue_while_writing  # type: ignore[method-assign]
            await bench.result(await bench.step(model, 2))
            await bench.result(await bench.forward_backward(model, 3))
            await is_writing.wait()
            _kill(fleet, fleet.replica_of(AdapterId(model)))
            after = await bench.forward_backward(model, 4)

            assert not isinstance(await bench.result(after), RequestFailedResponse)

    asyncio.run(test())


def test_other_models_go_on_while_one_replica_s_models_wait(tmp_path: Path) -> None:
    """Theirs are settled before the lost ones are restored; nobody waits for anybody."""

    async def test() -> None:
        async with fleet_bench(tmp_path, fake=FakeSettings(batch_s=0.01)) as (bench, fleet):
            for model in MODELS:
                await bench.result(await bench.create(model))
            homes = {model: fleet.replica_of(AdapterId(model)) for model in MODELS}
            assert sorted(homes.values()) == ["r0", "r0", "r1", "r1", "r2", "r2"]
            stopped = fleet._pool["r1"].engine
            # Its successor must not come back while we look.
            held = asyncio.Event()
            connect = stopped._connect

            async def connect_later() -> Any:
                await held.wait()
                return await connect()

            stopped._connect = connect_later
            _kill(fleet, "r1")
            await until(lambda: fleet._pool["r1"].losses == 1)
            ids = {model: await bench.forward_backward(model, 1) for model in MODELS}
            for model, one in ids.items():
                if homes[model] != "r1":
                    await bench.result(one)
            waiting = [model for model in MODELS if homes[model] == "r1"]
            states = {bench.ledger.board.queue_state(model).state for model in waiting}
            reports = [await bench.ledger.command(ids[model]) for model in waiting]
            assert not any(one.is_settled for one in reports)
            assert states == {"paused_capacity"}
            held.set()
            for one in ids.values():
                await bench.result(one)
            assert {bench.ledger.board.queue_state(model).state for model in MODELS} == {"active"}

    asyncio.run(test())


def test_samples_of_a_killed_replica_are_drawn_elsewhere_with_the_same_tokens(
    tmp_path: Path,
) -> None:
    """No client sees an error."""

    async def drawn(folder: Path, *, is_killed: bool) -> list[Any]:
        slow = FakeSettings(step_s=0.02, tokens_per_step=1)
        async with fleet_bench(folder, fake=slow) as (bench, fleet):
            await bench.add_sampler("s:sample:0")
            ids = [
                await bench.sample("s:sample:0", n, prompt=(n, 2), max_tokens=60, seed=n)
                for n in range(12)
            ]
            if is_killed:
                await until(lambda: all(one.samples for one in fleet.replicas()))
                await asyncio.sleep(0.1)
                _kill(fleet, "r1")
                await until(lambda: fleet._pool["r1"].losses == 1)
            results = [await bench.result(one) for one in ids]
            return [one.sequences[0].tokens for one in results]

    async def test() -> None:
        calm = await drawn(tmp_path / "a", is_killed=False)
        disturbed = await drawn(tmp_path / "b", is_killed=True)
        assert disturbed == calm

    asyncio.run(test())


def test_a_stream_whose_replica_is_killed_starts_again(tmp_path: Path) -> None:
    """Whoever reads it is told, and then gets every token once."""

    async def test() -> None:
        slow = FakeSettings(step_s=0.02, tokens_per_step=1)
        async with fleet_bench(tmp_path, fake=slow, duties=("both", "both")) as (bench, fleet):
            await bench.add_sampler("s:sample:0")
            board, request_id = bench.ledger.board, "s:sample:0:0"
            assert board.watch(request_id)
            await bench.sample("s:sample:0", 0, max_tokens=60, seed=1)
            while not (early := await board.wait_tokens(request_id, 0, timeout_s=1.0)):
                pass
            before = board.restarts(request_id)
            [home] = [one.name for one in fleet.replicas() if one.samples]
            _kill(fleet, home)
            result = await bench.result(request_id)
            pieces = await board.wait_tokens(request_id, 0, timeout_s=0)
            restarts = board.restarts(request_id)
            board.unwatch(request_id)

            tokens = result.sequences[0].tokens
            assert restarts == before + 1
            assert [one for piece in pieces for one in piece.tokens] == tokens
            assert list(early[0].tokens) == tokens[: len(early[0].tokens)]

    asyncio.run(test())


def test_a_command_that_kills_its_replica_fails_alone(tmp_path: Path) -> None:
    """Those of other models on the same replica run, and no other replica is lost."""

    async def test() -> None:
        engine = f"{__name__}:killer"
        async with fleet_bench(tmp_path, engine=engine) as (bench, fleet):
            for model in MODELS:
                await bench.result(await bench.create(model))
            bad = MODELS[0]
            home = fleet.replica_of(AdapterId(bad))
            ids = {model: await bench.forward_backward(model, 1) for model in MODELS[1:]}
            deadly = await bench.forward_backward(bad, 1, [666, 1, 2])
            after = await bench.forward_backward(bad, 2)
            steps = [await bench.step(model, 2) for model in MODELS[1:]]

            failed = await bench.result(deadly)
            assert isinstance(failed, RequestFailedResponse)
            assert "crashed 3 times while it ran" in failed.error
            for one in [*ids.values(), *steps, after]:
                assert not isinstance(await bench.result(one), RequestFailedResponse)
            losses = {one.name: one.losses for one in fleet.replicas()}
            assert losses.pop(home) == 3
            assert set(losses.values()) == {0}

    asyncio.run(test())


def test_a_model_whose_replay_kills_its_replica_is_given_up(tmp_path: Path) -> None:
    """Its commands fail with the reason; the models beside it are restored and go on."""

    async def test() -> None:
        flag = tmp_path / "flag"
        engine = f"{__name__}:killer"
        async with fleet_bench(tmp_path, engine=engine, flag=str(flag)) as (bench, fleet):
            for model in MODELS:
                await bench.result(await bench.create(model))
            bad = MODELS[0]
            await bench.result(await bench.forward_backward(bad, 1, [666, 1, 2]))
            home = fleet.replica_of(AdapterId(bad))
            await asyncio.to_thread(flag.touch)
            _kill(fleet, home)
            ids = {
                model: await bench.forward_backward(model, 2 if model == bad else 1)
                for model in MODELS
            }
            results = {model: await bench.result(one) for model, one in ids.items()}

            failed = results.pop(bad)
            assert isinstance(failed, RequestFailedResponse)
            assert "could not be restored" in failed.error
            assert not [one for one in results.values() if isinstance(one, RequestFailedResponse)]
            assert [one.losses for one in fleet.replicas() if one.name != home] == [0, 0]

    asyncio.run(test())


def test_a_hanging_replica_is_killed_alone(tmp_path: Path) -> None:
    """One that is stopped answers nothing; its work is done by its successor."""

    async def test() -> None:
        async with fleet_bench(tmp_path, silence_s=0.5) as (bench, fleet):
            for model in MODELS:
                await bench.result(await bench.create(model))
            home = fleet.replica_of(AdapterId(MODELS[0]))
            [pid] = [one.pid for one in fleet.replicas() if one.name == home]
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            ids = [await bench.forward_backward(model, 1) for model in MODELS]
            for one in ids:
                assert not isinstance(await bench.result(one), RequestFailedResponse)
            losses = {one.name: one.losses for one in fleet.replicas()}
            assert losses.pop(home) == 1
            assert set(losses.values()) == {0}

    asyncio.run(test())


def test_draining_under_load_fails_nothing_and_changes_no_bit(tmp_path: Path) -> None:
    """Its models move between their commands; then its process is gone, until it is resumed."""

    async def run(folder: Path, *, is_drained: bool) -> tuple[list[Any], list[Any]]:
        async with fleet_bench(folder, fake=FakeSettings(batch_s=0.01)) as (bench, fleet):
            ids = await _train_all(bench)
            if is_drained:
                await bench.result(ids[len(MODELS) + 3])
                fleet.drain("r1")
                await until(lambda: fleet.replicas()[1].state == "drained")
                drained = fleet.replicas()[1]
                assert (drained.pid, drained.adapters, drained.losses) == (None, (), 0)
                assert len(fleet.replicas()[0].adapters) + len(fleet.replicas()[2].adapters) == 6
            outcome = await _outcome(bench, ids, "x")
            if is_drained:
                fleet.drain("r1", is_drained=False)
                await until(lambda: [len(one.adapters) for one in fleet.replicas()] == [2, 2, 2])
            return outcome

    async def test() -> None:
        calm = await run(tmp_path / "a", is_drained=False)
        assert await run(tmp_path / "b", is_drained=True) == calm

    asyncio.run(test())


def test_a_model_waits_for_a_replica_that_serves_its_base_and_has_room(tmp_path: Path) -> None:
    """Rather than failing; others are created meanwhile."""

    async def test() -> None:
        small = FakeSettings(most_adapters=1)
        async with fleet_bench(tmp_path, fake=small, duties=("both", "both")) as (bench, fleet):
            fleet.drain("r1")  # only one place is left
            first = await bench.create(MODELS[0])
            await bench.result(first)
            second = await bench.create(MODELS[1])
            await until(
                lambda: bench.ledger.board.queue_state(MODELS[1]).state == "paused_capacity"
            )
            fleet.drain("r1", is_drained=False)
            await bench.result(second)
            assert fleet.replica_of(AdapterId(MODELS[1])) == "r1"

    asyncio.run(test())


def test_after_a_restart_with_fewer_places_the_models_without_one_wait(tmp_path: Path) -> None:
    """The service works for the others; a model is restored once there is room."""

    async def test() -> None:
        two = FakeSettings(most_adapters=1)
        async with fleet_bench(tmp_path, fake=two, duties=("both", "both")) as (bench, _):
            ledger = bench.ledger
            for model in MODELS[:2]:
                await bench.result(await bench.create(model))
        made = Bench(tmp_path, ledger)
        fleet = FleetEngine(_specs(two, ("both",)), folder=tmp_path / "fleet")
        made.engine, made.scheduler = fleet, Scheduler(ledger, fleet, made.store, QUICK)
        async with asyncio.timeout(WAIT_S):
            await made.open()
            try:
                first, second = MODELS[0], MODELS[1]
                await made.result(await made.forward_backward(first, 1))
                late = await made.forward_backward(second, 1)
                assert ledger.board.queue_state(second).state == "paused_capacity"
                await made.submit(first, 2, "unload_model", UnloadModelRequest(model_id=first))
                assert not isinstance(await made.result(late), RequestFailedResponse)
            finally:
                await made.close()

    asyncio.run(test())
