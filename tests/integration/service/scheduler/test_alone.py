"""Commands that wait to be alone in the engine, because some are suspected to end it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.integration.service.scheduler.bench import BASE, QUICK, Bench, until
from tinsmith.engine.base import AdapterId, AdapterParts, SampleEvent
from tinsmith.engine.fake.engine import FakeEngine, fake_model
from tinsmith.engine.fake.fake_settings import FakeSettings
from tinsmith.errors import EngineLostError
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.records import RequestId
from tinsmith.service.scheduler.scheduler import Scheduler
from tinsmith.service.scheduler.suspects import Suspects
from tinsmith.types.requests import SaveWeightsRequest

OTHER = RequestId("o:1")


class Losable(FakeEngine):
    """Saves and draws nothing once it `is_gone`."""

    def __init__(self) -> None:
        super().__init__([fake_model(BASE)], FakeSettings())
        self.is_gone = False

    async def save_adapter(self, adapter_id: AdapterId, folder: Path, parts: AdapterParts) -> None:
        if self.is_gone:
            raise EngineLostError("it has ended")
        await super().save_adapter(adapter_id, folder, parts)

    async def step_sampler(self) -> list[SampleEvent]:
        if self.is_gone:
            raise EngineLostError("it has ended")
        return await super().step_sampler()


@asynccontextmanager
async def suspicious(
    folder: Path, *suspected: str
) -> AsyncIterator[tuple[Bench, Losable, Suspects]]:
    """A scheduler that runs one command at a time, because these were in at two losses."""
    made, engine, suspects = Bench(folder, MemoryLedger()), Losable(), Suspects()
    for _ in range(2):
        suspects.enter(RequestId(one) for one in suspected)
        suspects.note_loss("it has ended")
    made.engine = engine
    made.scheduler = Scheduler(made.ledger, engine, made.store, QUICK, None, suspects)
    await made.open()
    try:
        yield made, engine, suspects
    finally:
        await made.close()


def test_continuous_training_does_not_starve_samples(tmp_path: Path) -> None:
    async def test() -> None:
        async with suspicious(tmp_path, OTHER) as (bench, _, _):
            await bench.result(await bench.create("s:train:0"))
            await bench.add_sampler("s:sample:0")
            steps = [await bench.step("s:train:0", number) for number in range(1, 201)]
            sample = await bench.sample("s:sample:0", 1)

            await bench.result(sample)

            last = await bench.ledger.wait_settled(steps[-1], timeout_s=0.0)
            assert not last.is_settled
            await bench.result(steps[-1])

    asyncio.run(test())


def test_a_suspect_still_waiting_to_run_alone_is_not_blamed_for_a_failed_restart(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        saves = [f"s:train:{number}:1" for number in range(2)]
        async with suspicious(tmp_path, *saves) as (bench, engine, suspects):
            for number in range(2):
                line = f"s:train:{number}"
                await bench.result(await bench.create(line))
            suspects.enter([OTHER])
            for number in range(2):
                line = f"s:train:{number}"
                request = SaveWeightsRequest(model_id=line, path="a", seq_id=1)
                await bench.submit(line, 1, "save_weights", request)
            await until(lambda: len(suspects._waiting) >= 2)
            engine.is_gone = True
            blamed = [suspects.note_loss("it has ended")]
            await bench.scheduler.close()
            # As when it is lost again while it is opened.
            blamed.append(suspects.note_loss("it has ended"))

            assert blamed == [None, None]

    asyncio.run(test())


def test_training_does_not_wait_for_a_lost_sampler(tmp_path: Path) -> None:
    """It sees for itself that the engine is lost; waiting for a turn, it delayed the next start."""

    async def test() -> None:
        async with suspicious(tmp_path) as (bench, engine, _):
            await bench.result(await bench.create("s:train:0"))
            await bench.add_sampler("s:sample:0")
            engine.is_gone = True
            await bench.sample("s:sample:0", 1)
            await until(lambda: bench.ledger.board.report.problem is not None)

            for number in (1, 2, 3):
                await bench.result(await bench.step("s:train:0", number), timeout_s=5.0)

    asyncio.run(test())
