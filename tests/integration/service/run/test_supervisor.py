"""A service whose engine is lost: it is restarted, or the service ends meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path

import pytest

from tests.integration.service.scheduler.bench import BASE, QUICK, Bench, until
from tinsmith.engine.base import (
    SampleEvent,
    SampleOutcome,
    SampleWork,
    TrainingOutcome,
    TrainingWork,
)
from tinsmith.engine.fake.engine import FakeEngine, fake_model
from tinsmith.engine.fake.fake_settings import FakeSettings
from tinsmith.engine.fleet.replica import FIRST_PAUSE_S, LONGEST_PAUSE_S, pause_after
from tinsmith.engine.process.process_engine import ProcessEngine
from tinsmith.errors import EngineLostError, TinkerError
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.run.assemble import Service
from tinsmith.service.run.service_settings import ServiceSettings
from tinsmith.service.run.supervisor import SchedulerSupervisor
from tinsmith.service.scheduler.scheduler import Scheduler
from tinsmith.service.scheduler.suspects import SUSPECTED_S, Suspects
from tinsmith.types.futures import RequestFailedResponse

WAIT_S = 60.0


async def _opened(folder: Path) -> tuple[Service, ProcessEngine]:
    settings = ServiceSettings(
        data=folder, engine="fake", engine_process=True, models=("a",), database="memory:"
    )
    service = await Service.open(settings)
    engine = service._engine
    assert isinstance(engine, ProcessEngine)
    await until(lambda: service.ledger.board.report.is_ready)
    return service, engine


def _kill(engine: ProcessEngine) -> None:
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)


def test_readiness_names_the_problem_until_the_engine_works_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with asyncio.timeout(WAIT_S):
            service, engine = await _opened(tmp_path)
            async with service:
                first = engine.pid
                _kill(engine)
                board = service.ledger.board
                await until(lambda: "restarting the engine" in str(board.report.problem))
                told = board.report
                await until(lambda: board.report.is_ready)

                assert not told.is_ready
                assert "SIGKILL" in str(told.problem)
                assert engine.pid not in (None, first)
                assert "tinsmith_engine_losses_total 1.0\n" in service.metrics.exposition()

    asyncio.run(test())


def test_a_service_that_is_closed_while_it_restarts_leaves_nothing_behind(
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


class Mortal(FakeEngine):
    """Is lost whenever it works on one of `poison`."""

    def __init__(self) -> None:
        super().__init__([fake_model(BASE)], FakeSettings())
        self.poison: set[str] = set()
        self.is_sick = False
        """Whether it is lost whatever it works on."""
        self.deaths = 0
        self._sampling: set[str] = set()

    async def open(self) -> None:
        self._gone: asyncio.Future[TinkerError] = asyncio.get_running_loop().create_future()
        self._sampling.clear()
        await super().open()

    async def wait_lost(self) -> TinkerError:
        return await asyncio.shield(self._gone)

    async def train(self, batch: Sequence[TrainingWork]) -> list[TrainingOutcome]:
        self._work_on(work.work_id for work in batch)
        return await super().train(batch)

    def admit(self, work: SampleWork) -> None:
        self._sampling.add(work.work_id)
        super().admit(work)

    async def step_sampler(self) -> list[SampleEvent]:
        self._work_on(self._sampling)
        events = await super().step_sampler()
        self._sampling -= {one.work_id for one in events if isinstance(one, SampleOutcome)}
        return events

    def _work_on(self, work_ids: Iterable[str]) -> None:
        if not self.is_sick and self.poison.isdisjoint(work_ids):
            return
        if not self._gone.done():
            self.deaths += 1
            self._gone.set_result(EngineLostError("it has ended"))
        raise EngineLostError("it has ended")


@contextlib.asynccontextmanager
async def _working(
    folder: Path, pause: Callable[[float], Awaitable[object]] = asyncio.sleep
) -> AsyncIterator[tuple[Bench, Mortal]]:
    """A service without its server, on an engine that can be lost."""
    bench, engine = Bench(folder, MemoryLedger()), Mortal()
    bench.engine = engine
    await engine.open()
    working = SchedulerSupervisor(
        engine,
        bench.ledger.board,
        lambda suspects: Scheduler(bench.ledger, engine, bench.store, QUICK, None, suspects),
        pause,
    )
    running = asyncio.create_task(working.run())
    try:
        async with asyncio.timeout(WAIT_S):
            yield bench, engine
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await working.close(1.0)
        await engine.close()


def test_a_command_that_crashes_the_engine_fails_and_all_others_complete(tmp_path: Path) -> None:
    """Those of its own model too, and another such command after it."""

    async def test() -> None:
        async with _working(tmp_path) as (bench, engine):
            engine.poison = {"s:train:0:2", "s:train:1:3"}
            lines = [f"s:train:{number}" for number in range(4)]
            for line in lines:
                await bench.create(line)
            asked = [
                [await bench.forward_backward(line, 1)]
                + [await bench.step(line, number) for number in (2, 3, 4)]
                for line in lines
            ]
            await bench.add_sampler("s:sample:0")
            samples = [await bench.sample("s:sample:0", number) for number in range(1, 9)]

            failed = set()
            for request_id in [*itertools.chain(*asked), *samples]:
                ended = await bench.result(request_id)
                if isinstance(ended, RequestFailedResponse):
                    assert "is not run again" in ended.error
                    failed.add(request_id)

            assert failed == engine.poison
            assert engine.deaths <= 6  # fewer if both were in it at once

    asyncio.run(test())


def test_a_sample_that_crashes_the_engine_fails_and_all_others_complete(tmp_path: Path) -> None:
    async def test() -> None:
        async with _working(tmp_path) as (bench, engine):
            engine.poison = {"s:sample:0:3"}
            await bench.create("s:train:0")
            await bench.add_sampler("s:sample:0")
            samples = [await bench.sample("s:sample:0", number) for number in range(1, 9)]
            steps = [await bench.step("s:train:0", number) for number in (1, 2)]

            ended = {one: await bench.result(one) for one in [*samples, *steps]}

            failed = {one for one, how in ended.items() if isinstance(how, RequestFailedResponse)}
            assert failed == engine.poison
            assert engine.deaths == 3

    asyncio.run(test())


def test_an_engine_that_crashes_with_each_command_is_restarted_after_growing_pauses(
    tmp_path: Path,
) -> None:
    """Readiness and the lines say why; once it works again, so does the service, at once."""

    async def test() -> None:
        pauses: list[float] = []
        told: list[tuple[str, str]] = []

        async def pause(pause_s: float) -> None:
            pauses.append(pause_s)
            board = bench.ledger.board
            told.append((str(board.report.problem), str(board.queue_state("s:train:0").reason)))
            if len(pauses) == 8:
                engine.is_sick = False

        async with _working(tmp_path, pause) as (bench, engine):
            await bench.create("s:train:0")
            engine.is_sick = True
            steps = [await bench.step("s:train:0", number) for number in range(1, 13)]
            ended = [await bench.result(step) for step in steps]
            engine.poison = {"s:train:0:13"}
            await bench.result(await bench.step("s:train:0", 13))

            are_failed = [isinstance(one, RequestFailedResponse) for one in ended]
            assert are_failed == sorted(are_failed, reverse=True)
            assert 0 < sum(are_failed) <= 6  # one at each loss from the third on, at most
            assert pauses == [0, 0, 0, 1, 2, 4, 8, 16, 0, 0, 0]
            assert all("8 times in a row with nothing trained" in one for one in told[7])
            assert "it has ended" in told[7][0]

    asyncio.run(test())


def test_a_command_that_crashes_the_engine_fails_however_slow_the_restart_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0

    async def pause(_: float) -> None:
        nonlocal now_s
        now_s += SUSPECTED_S

    async def test() -> None:
        async with _working(tmp_path, pause) as (bench, engine):
            await bench.create("s:train:0")
            engine.poison = {"s:train:0:1"}

            ended = await bench.result(await bench.step("s:train:0", 1))

            assert isinstance(ended, RequestFailedResponse)
            assert engine.deaths == 3

    monkeypatch.setattr("tinsmith.service.run.supervisor.Suspects", lambda: Suspects(lambda: now_s))
    asyncio.run(test())


def test_restart_delays_grow_up_to_a_limit() -> None:
    assert [pause_after(losses) for losses in (1, 3, 4, 5)] == [0, 0, FIRST_PAUSE_S, 2]
    assert pause_after(12) < LONGEST_PAUSE_S == pause_after(13) == pause_after(10_000)
