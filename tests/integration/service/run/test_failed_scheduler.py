"""A service whose scheduler has ended lets another server work, and says that it is not ready."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NoReturn

import pytest

from tests.contract.postgres_server import new_database
from tinsmith.service.ledger.postgres import PostgresLedger
from tinsmith.service.run.assemble import Service
from tinsmith.service.run.service_settings import ServiceSettings
from tinsmith.service.scheduler.scheduler import Scheduler


def test_a_failed_scheduler_does_not_keep_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: Scheduler) -> NoReturn:
        raise RuntimeError("the recovery failed")

    monkeypatch.setattr(Scheduler, "open", fail)
    database = new_database()
    settings = ServiceSettings(
        data=tmp_path, database=database, engine="fake", models=("m:fake",), lease_s=600.0
    )

    async def run() -> bool:
        service = await Service.open(settings)
        async with service, await PostgresLedger.open(database) as other:
            await other.acquire_lease("another", wait_s=60.0)
            return service.ledger.board.readiness.is_ready

    assert not asyncio.run(run())
