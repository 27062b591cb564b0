"""A fleet of fakes in processes: placement, moves, spread weights, losses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tinsmith.engine.base import (
    AdapterId,
    AdapterParts,
    AdapterSpec,
    PassWork,
    ReplicaChange,
    SampleOutcome,
    SampleWork,
    StepWork,
    TrainingWork,
    WeightsId,
)
from tinsmith.engine.fake.fake_settings import FakeSettings
from tinsmith.engine.fleet.fleet_engine import FleetEngine
from tinsmith.engine.fleet.replica import Duty, ReplicaSpec
from tinsmith.engine.process.engine_spec import EngineSpec, ModelSource
from tinsmith.engine.process.process_engine import ProcessEngine
from tinsmith.errors import (
    AdapterLostError,
    BadRequestError,
    NoReplicaError,
    NotFoundError,
    ValidationError,
)
from tinsmith.types import (
    AdamOptimizerConfig,
    AdamParams,
    Datum,
    LoraConfig,
    ModelInput,
    SamplingParams,
)
from tinsmith.types.requests import SampleRequest

WAIT_S = 60.0
X, Y = "test/x", "test/y"
A, B, C = AdapterId("a"), AdapterId("b"), AdapterId("c")


def _replica(
    name: str,
    *models: str,
    duty: Duty = "both",
    most_adapters: int = 8,
    step_s: float = 0.0,
) -> ReplicaSpec:
    sources = tuple(ModelSource(one, one) for one in models or (X, Y))
    fake = FakeSettings(most_adapters=most_adapters, step_s=step_s, tokens_per_step=1)
    return ReplicaSpec(
        name=name, duty=duty, engine=EngineSpec(engine="fake", models=sources, fake=fake)
    )


@contextlib.asynccontextmanager
async def fleet(*specs: ReplicaSpec) -> AsyncIterator[FleetEngine]:
    """An open fleet."""
    async with asyncio.timeout(WAIT_S), FleetEngine(specs) as engine:
        yield engine


def _spec(adapter: AdapterId = A, base: str = X) -> AdapterSpec:
    return AdapterSpec(
        adapter_id=adapter,
        base_model=base,
        lora=LoraConfig(rank=4, seed=1),
        optimizer=AdamOptimizerConfig(),
    )


def _works(adapter: AdapterId) -> list[TrainingWork]:
    inputs = {"target_tokens": [2, 3], "weights": [1.0, 1.0]}
    return [
        PassWork(
            work_id=f"{adapter}-p",
            adapter_id=adapter,
            data=(Datum(ModelInput.from_ints([1, 2]), inputs),),
            loss_fn="cross_entropy",
        ),
        StepWork(work_id=f"{adapter}-s", adapter_id=adapter, params=AdamParams()),
    ]


def _sample(
    work_id: str, weights: str | None = None, *, prompt: int = 1, max_tokens: int = 4, base: str = X
) -> SampleWork:
    request = SampleRequest(
        prompt=ModelInput.from_ints([prompt] * 200),
        sampling_params=SamplingParams(max_tokens=max_tokens, seed=7, stop=[]),
    )
    return SampleWork(
        work_id=work_id,
        base_model=base,
        weights_id=None if weights is None else WeightsId(weights),
        request=request,
    )


async def _drawn(engine: FleetEngine, count: int) -> dict[str, SampleOutcome]:
    found: dict[str, SampleOutcome] = {}
    while len(found) < count:
        for event in await engine.step_sampler():
            if isinstance(event, SampleOutcome):
                found[event.work_id] = event
    return found


async def _until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - what is looked at tells nobody
        await asyncio.sleep(0.01)


def _held(engine: FleetEngine) -> dict[str, tuple[str, ...]]:
    return {one.name: one.adapters for one in engine.replicas()}


def test_an_adapter_moves_to_make_room_for_one_that_fits_nowhere_else(tmp_path: Path) -> None:
    """It keeps every bit: weights, moments, gradients."""

    async def test() -> None:
        narrow = _replica("narrow", X, most_adapters=1)
        async with fleet(narrow, _replica("wide", most_adapters=1)) as engine:
            await engine.create_adapter(_spec(A, X))
            await engine.create_adapter(_spec(B, X))
            assert _held(engine) == {"narrow": ("a",), "wide": ("b",)}
            await engine.drop_adapter(A)
            [passed, stepped] = await engine.train(_works(B))
            assert passed.error is stepped.error is None
            await engine.train(_works(B)[:1])  # with gradients that are not applied yet
            before = await _saved(engine, B, tmp_path / "before")
            await engine.create_adapter(_spec(C, Y))

            assert _held(engine) == {"narrow": ("b",), "wide": ("c",)}
            assert await _saved(engine, B, tmp_path / "after") == before
            with pytest.raises(NoReplicaError, match="has room"):
                await engine.create_adapter(_spec(A, X))

    asyncio.run(test())


def _flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [_flip_a_bit, _truncate, Path.unlink])
def test_damaged_files_end_a_move_and_the_adapter_stays_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object]
) -> None:
    """No file of a move is left behind, nor of one that an earlier process did not complete."""
    place = tmp_path / "fleet"
    (place / "moves" / "move-earlier").mkdir(parents=True)

    class Damaging(ProcessEngine):
        async def save_to_move(self, adapter_id: AdapterId, folder: Path) -> str:
            digest = await super().save_to_move(adapter_id, folder)
            damage(folder / "adapter_model.safetensors")
            return digest

    async def test() -> None:
        engine = FleetEngine([_replica("r0"), _replica("r1")], make=Damaging, folder=place)
        async with asyncio.timeout(WAIT_S), engine:
            await engine.create_adapter(_spec(A))
            await engine.train(_works(A))
            before = await _saved(engine, A, tmp_path / "before")
            engine.drain("r0")
            await _until(lambda: "not move" in caplog.text or not engine.replicas()[0].adapters)
            engine.drain("r0", is_drained=False)
            assert _held(engine) == {"r0": ("a",), "r1": ()}
            assert "the saved files are damaged" in caplog.text
            assert await _saved(engine, A, tmp_path / "after") == before
            await _until(lambda: not list((place / "moves").iterdir()))

    asyncio.run(test())


async def _saved(engine: FleetEngine, adapter: AdapterId, place: Path) -> dict[str, bytes]:
    place.mkdir()  # noqa: ASYNC240 - in a test
    await engine.save_adapter(adapter, place, AdapterParts.SNAPSHOT)
    return _contents(place)


def _contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def test_duties_and_base_models_are_respected(tmp_path: Path) -> None:
    """Adapters go to trainers, samples to samplers, and models that nobody has are refused."""

    async def test() -> None:
        trainer = _replica("trainer", duty="train")
        async with fleet(trainer, _replica("sampler", X, duty="sample")) as engine:
            assert [one.name for one in engine.base_models()] == [X, Y]
            await engine.create_adapter(_spec(A))
            await _saved(engine, A, tmp_path / "w")
            await engine.load_weights(WeightsId("w"), X, tmp_path / "w")
            engine.admit(_sample("s", "w"))
            assert engine.replica_for(_sample("t", "w")) == "sampler"
            assert (await _drawn(engine, 1))["s"].result is not None
            assert _held(engine) == {"trainer": ("a",), "sampler": ()}
            with pytest.raises(ValidationError, match="no replica samples from test/y"):
                await engine.load_weights(WeightsId("v"), Y, tmp_path / "w")
            with pytest.raises((NotFoundError, BadRequestError)):
                await engine.create_adapter(_spec(B, "nobody/nothing"))
            with pytest.raises(ValidationError, match="only one that trains"):
                engine.drain("trainer")
            with pytest.raises(NotFoundError, match="no replica 'x'"):
                engine.drain("x")

    asyncio.run(test())


def test_weights_are_on_as_many_replicas_as_their_samples_keep_busy(tmp_path: Path) -> None:
    """One at first; others load them from the files that were kept, though the source is gone."""

    async def test() -> None:
        specs = [_replica(f"r{number}", step_s=0.01) for number in range(3)]
        async with fleet(*specs) as engine:
            await engine.create_adapter(_spec(A))
            await _saved(engine, A, tmp_path / "w")
            await engine.load_weights(WeightsId("w"), X, tmp_path / "w")
            for file in (tmp_path / "w").iterdir():
                file.unlink()
            holders = [sum(one.weights for one in engine.replicas())]
            for number in range(30):
                engine.admit(_sample(f"s{number}", "w", prompt=number + 1, max_tokens=20))
                await asyncio.sleep(0.02)
            holders.append(sum(one.weights for one in engine.replicas()))
            drawn = await _drawn(engine, 30)

            assert holders == [1, 3]
            assert all(one.result is not None for one in drawn.values())
            await engine.drop_weights(WeightsId("w"))
            assert not engine.has_weights(WeightsId("w"))
            assert sum(one.weights for one in engine.replicas()) == 0

    asyncio.run(test())


def test_prompts_with_the_same_beginning_are_drawn_on_one_replica() -> None:
    async def test() -> None:
        specs = [_replica(f"r{number}", step_s=0.01) for number in range(3)]
        async with fleet(*specs) as engine:
            for number in range(6):
                engine.admit(_sample(f"s{number}", prompt=1 + number % 2, max_tokens=20))
            busy = sorted(one.samples for one in engine.replicas())
            await _drawn(engine, 6)

            assert busy == [0, 3, 3]

    asyncio.run(test())


def test_a_loss_is_told_before_any_call_fails_and_concerns_its_own_adapters_only() -> None:
    """Until they are made again; samples of the replica have an outcome that says so."""

    async def test() -> None:
        async with fleet(_replica("r0", step_s=0.01), _replica("r1", step_s=0.01)) as engine:
            told: list[ReplicaChange] = []
            engine.watch_replicas(told.append)
            for adapter in (A, B):
                await engine.create_adapter(_spec(adapter))
            lost = engine.replica_of(A)
            assert engine.replica_of(B) != lost
            engine.admit(_sample("x", prompt=1, max_tokens=10_000))
            engine.admit(_sample("y", prompt=2, max_tokens=10_000))
            [pid] = [one.pid for one in engine.replicas() if one.name == lost]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            a_pass, _, b_pass, _ = await engine.train([*_works(A), *_works(B)])
            changes = list(told)
            [(work_id, outcome)] = (await _drawn(engine, 1)).items()

            assert isinstance(a_pass.error, AdapterLostError)
            assert b_pass.error is None
            assert [(one.replica, one.adapters) for one in changes] == [(lost, frozenset({A}))]
            assert isinstance(outcome.error, AdapterLostError)
            assert work_id in ("x", "y")
            assert not engine.has_adapter(A) and engine.has_adapter(B)
            assert engine.replica_of(A) == lost
            with pytest.raises(NoReplicaError, match="being restarted"):
                await engine.create_adapter(_spec(A))
            await _until(lambda: len(told) > 1)
            await engine.create_adapter(_spec(A))
            [again, _] = await engine.train(_works(A))
            assert again.error is None
            assert engine.replica_of(A) == lost
            assert told[1] == ReplicaChange(replica=lost)

    asyncio.run(test())


def test_a_resumed_replica_is_restarted_after_a_loss_like_any_other() -> None:
    async def test() -> None:
        async with fleet(_replica("r0"), _replica("r1")) as engine:
            engine.drain("r0")
            engine.drain("r0", is_drained=False)
            engine.drain("r0")
            await _until(lambda: engine.replicas()[0].state == "drained")
            engine.drain("r0", is_drained=False)
            await _until(lambda: engine.replicas()[0].state == "running")
            pid = engine.replicas()[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await _until(lambda: engine.replicas()[0].losses == 1)
            await _until(lambda: engine.replicas()[0].state == "running")
            assert engine.replicas()[0].pid != pid

    asyncio.run(test())


def test_a_replica_that_cannot_be_opened_ends_the_start() -> None:
    """With its reason, and without a process left behind."""

    async def test() -> None:
        good = _replica("good")
        bad = ReplicaSpec(name="bad", engine=EngineSpec(engine="no.such.module:engine"))
        engine = FleetEngine([good, bad])
        with pytest.raises(Exception, match=r"no\.such|No module"):
            await engine.open()
        assert [one.pid for one in engine.replicas()] == [None, None]

    asyncio.run(test())


def test_a_replica_that_keeps_dying_is_restarted_with_growing_pauses() -> None:
    """While the others work."""
    paused: list[float] = []

    async def pause(seconds: float) -> None:
        paused.append(seconds)
        await asyncio.sleep(0)

    async def test() -> None:
        engine = FleetEngine([_replica("r0"), _replica("r1")], pause=pause)
        async with asyncio.timeout(WAIT_S), engine:
            for loss in range(5):
                await _until(lambda: engine.replicas()[0].state == "running")
                pid = engine.replicas()[0].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                await _until(lambda: engine.replicas()[0].losses > loss)  # noqa: B023
            await _until(lambda: engine.replicas()[0].state == "running")
            await engine.create_adapter(_spec(A))

        assert paused == [1.0, 2.0]

    asyncio.run(test())
