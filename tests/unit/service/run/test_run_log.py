"""What is kept of training runs while they are at work."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tinsmith.errors import LedgerUnavailableError
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.records import ModelEntry, SessionId, TenantId
from tinsmith.service.run.run_log import RunLog

RUNS = ["run-1", "run-2", "run-3"]


async def _trained(ledger: MemoryLedger) -> None:
    """Have runs, each with a step that nobody was told of."""
    for run_id in RUNS:
        model = ModelEntry(
            id=run_id,
            tenant_id=TenantId("a"),
            created_at=0.0,
            session_id=SessionId("session-1"),
            base_model="test/base",
        )
        await ledger.entries(ModelEntry).add(model)
        ledger.board.runs.note_step(run_id, {"tinsmith/step": 7.0})


async def _steps(ledger: MemoryLedger) -> list[int | None]:
    kept = [await ledger.entries(ModelEntry).get(run_id) for run_id in RUNS]
    return [None if model is None else model.steps for model in kept]


def test_only_the_lease_holder_records_run_steps() -> None:
    async def look(*, is_lost: bool) -> list[int | None]:
        async with MemoryLedger() as ledger:
            await _trained(ledger)
            lease = await ledger.acquire_lease("first")
            if is_lost:
                await ledger.acquire_lease("second")
            await RunLog(ledger, lambda: lease.epoch).look()
            return await _steps(ledger)

    assert asyncio.run(look(is_lost=False)) == [7, 7, 7]
    assert 7 not in asyncio.run(look(is_lost=True))


def test_an_unavailable_ledger_is_waited_for_once_not_for_each_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each wait takes half a minute, and the service closes after the last of them."""
    asked: list[Any] = []

    def away(*given: Any, **_: Any) -> None:
        asked.append(given)
        raise LedgerUnavailableError("the database is away")

    async def look() -> None:
        async with MemoryLedger() as ledger:
            await _trained(ledger)
            monkeypatch.setattr(ledger, "entries", away)
            await RunLog(ledger).look()

    asyncio.run(look())

    assert len(asked) == 1
