"""A recovery that fails is told to whoever asks how the service is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tinsmith.checkpoints.registry import open_store
from tinsmith.engines.registry import make_engine
from tinsmith.ledger.memory import MemoryLedger
from tinsmith.scheduler.loop import Scheduler
from tinsmith.scheduler.recovering import Recovering


def test_the_board_says_why_commands_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: Recovering) -> None:
        raise RuntimeError("no such snapshot")

    monkeypatch.setattr(Recovering, "run", fail)

    async def run() -> None:
        async with MemoryLedger() as ledger, make_engine("fake", ["tiny"]) as engine:
            scheduler = Scheduler(ledger, engine, open_store(tmp_path))
            with pytest.raises(RuntimeError, match="no such snapshot"):
                await scheduler.open()

            report = ledger.board.scheduler
            await scheduler.close()

        assert not report.is_ready
        assert report.problem == "recovery has failed: RuntimeError: no such snapshot"

    asyncio.run(run())
