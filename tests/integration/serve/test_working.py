"""A service whose engine is lost: it begins anew, or ends in order meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from tests.integration.scheduler.bench import until
from tinsmith.engines.child import ChildEngine
from tinsmith.serve.assemble import Service
from tinsmith.serve.settings import ServiceSettings

WAIT_S = 60.0


async def _opened(folder: Path) -> tuple[Service, ChildEngine]:
    settings = ServiceSettings(
        data=folder, engine="fake", engine_process=True, models=("a",), database="memory:"
    )
    service = await Service.open(settings)
    engine = service._engine
    assert isinstance(engine, ChildEngine)
    await until(lambda: service.ledger.board.scheduler.is_ready)
    return service, engine


def _kill(engine: ChildEngine) -> None:
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)


def test_readiness_says_why_until_the_engine_works_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with asyncio.timeout(WAIT_S):
            service, engine = await _opened(tmp_path)
            async with service:
                first = engine.pid
                _kill(engine)
                board = service.ledger.board
                await until(lambda: "anew" in str(board.scheduler.problem))
                told = board.scheduler
                await until(lambda: board.scheduler.is_ready)

                assert not told.is_ready
                assert "SIGKILL" in str(told.problem)
                assert engine.pid not in (None, first)

    asyncio.run(test())


def test_a_service_that_is_closed_while_it_begins_anew_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    """At whatever step it is."""

    async def test(turns: int) -> None:
        async with asyncio.timeout(WAIT_S):
            service, engine = await _opened(tmp_path / str(turns))
            _kill(engine)
            await engine.wait_lost()
            for _ in range(turns):
                await asyncio.sleep(0)
            await service.close()

            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert [task for task in left if not task.done()] == []
            assert engine.pid is None

    for turns in (0, 1, 4, 64):
        asyncio.run(test(turns))
