"""A recovery that fails or hangs is told to whoever asks how the service is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.service.scheduler.bench import BASE, Bench, until
from tinsmith.checkpoints.registry import open_store
from tinsmith.engine.base import AdapterSpec, TrainingOutcome, TrainingWork
from tinsmith.engine.fake.engine import FakeEngine, fake_model
from tinsmith.engine.registry import make_engine
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.scheduler.restore import Restorer
from tinsmith.service.scheduler.scheduler import Scheduler
from tinsmith.service.scheduler.scheduler_settings import SchedulerSettings


def test_the_board_says_why_commands_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: Restorer) -> None:
        raise RuntimeError("no such snapshot")

    monkeypatch.setattr(Restorer, "run", fail)

    async def run() -> None:
        async with MemoryLedger() as ledger, make_engine("fake", ["tiny"]) as engine:
            scheduler = Scheduler(ledger, engine, open_store(tmp_path))
            with pytest.raises(RuntimeError, match="no such snapshot"):
                await scheduler.open()

            report = ledger.board.report
            await scheduler.close()

        assert not report.is_ready
        assert report.problem == "recovery failed: RuntimeError: no such snapshot"

    asyncio.run(run())


class Hanging(FakeEngine):
    """Makes adapters and trains when it is told to go on."""

    def __init__(self) -> None:
        super().__init__([fake_model(BASE)])
        self.makes = asyncio.Event()
        self.trains = asyncio.Event()

    async def create_adapter(self, spec: AdapterSpec) -> None:
        await self.makes.wait()
        await super().create_adapter(spec)

    async def train(self, batch: Sequence[TrainingWork]) -> list[TrainingOutcome]:
        await self.trains.wait()
        return await super().train(batch)


def test_readiness_reports_why_the_engine_fails_during_recovery(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        ledger = MemoryLedger()
        before = Bench(tmp_path, ledger)
        await before.open()
        await before.create("s:train:0")
        await before.result(await before.step("s:train:0", 1))
        await before.kill()
        after, engine = Bench(tmp_path, ledger), Hanging()
        soon = SchedulerSettings(engine_silence_s=0.01)
        after.engine = engine
        after.scheduler = Scheduler(ledger, engine, after.store, soon)
        opening = asyncio.create_task(after.open())

        await until(lambda: "the creation of s:train:0" in str(ledger.board.report.problem))
        engine.makes.set()
        await until(lambda: "1 commands of s:train:0 again" in str(ledger.board.report.problem))
        engine.trains.set()
        await opening
        await until(lambda: ledger.board.report.is_ready)
        await after.close()

    asyncio.run(run())
