"""What is told of a store of checkpoints, and when."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from tinsmith.errors import CheckpointUnavailableError
from tinsmith.service.ledger.board import Board, SchedulerReport
from tinsmith.service.ledger.memory_board import MemoryBoard
from tinsmith.service.run import store_health
from tinsmith.service.run.store_health import StoreHealth

WAIT_S = 60.0


class Store:
    """A store of which only its health is asked."""

    def __init__(self) -> None:
        self.error: CheckpointUnavailableError | None = None
        self.asked: list[bool] = []
        self.goes_on = threading.Event()
        self.goes_on.set()

    def check(self, *, writes: bool = False) -> None:
        self.asked.append(writes)
        assert self.goes_on.wait(WAIT_S)
        if self.error is not None:
            raise self.error


def away(**more: Any) -> CheckpointUnavailableError:
    return CheckpointUnavailableError(
        "s3 says no", reason="its endpoint cannot be reached", remedy="look at it", **more
    )


def health(store: Store, board: Board) -> StoreHealth:
    stands_in: Any = store
    board.publish_report(SchedulerReport(is_ready=True))
    return StoreHealth(stands_in, board)


async def until(is_so: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.005)


def test_a_store_with_wrong_settings_is_rejected_at_startup() -> None:
    async def run() -> None:
        store = Store()
        store.error = away(is_lasting=True)
        await health(store, MemoryBoard()).start()

    with pytest.raises(CheckpointUnavailableError, match="s3 says no"):
        asyncio.run(run())


def test_the_service_is_not_ready_while_its_store_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_health, "AGAIN_S", 0.01)

    async def run() -> None:
        store, board = Store(), MemoryBoard()
        watched = health(store, board)
        store.error = away()
        await watched.start()
        assert not board.readiness.is_ready
        assert board.readiness.problem == (
            "the checkpoint store is unavailable: its endpoint cannot be reached; look at it"
        )
        running = asyncio.create_task(watched.run())
        store.error = None
        await until(lambda: board.readiness.is_ready)
        assert all(store.asked), "to read is not enough after trouble"
        running.cancel()

    asyncio.run(run())


def test_a_store_failure_triggers_an_immediate_check() -> None:
    async def run() -> None:
        store, board = Store(), MemoryBoard()
        watched = health(store, board)
        await watched.start()
        running = asyncio.create_task(watched.run())
        store.error = away()
        board.doubt_store()
        await until(lambda: not board.readiness.is_ready)
        running.cancel()

    asyncio.run(run())


def test_a_store_that_does_not_answer_is_reported_and_checked_once_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_health, "LONGEST_CHECK_S", 0.01)
    monkeypatch.setattr(store_health, "AGAIN_S", 0.01)

    async def run() -> None:
        store, board = Store(), MemoryBoard()
        watched = health(store, board)
        store.goes_on.clear()
        await watched.start()
        running = asyncio.create_task(watched.run())
        await asyncio.sleep(0.1)
        assert "it does not answer" in (board.readiness.problem or "")
        assert len(store.asked) == 1
        store.goes_on.set()
        await until(lambda: board.readiness.is_ready)
        running.cancel()

    asyncio.run(run())


def test_a_check_that_fails_after_its_timeout_is_not_reported_separately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_health, "LONGEST_CHECK_S", 0.01)
    complaints: list[Any] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
        store, board = Store(), MemoryBoard()
        store.error = away()
        store.goes_on.clear()
        watched = health(store, board)
        await watched.start()
        store.goes_on.set()
        checks = [one for one in asyncio.all_tasks() if one is not asyncio.current_task()]
        await asyncio.wait(checks)
        del checks, watched
        gc.collect()

    asyncio.run(run())
    assert complaints == []


def test_an_unready_scheduler_is_reported_before_the_store() -> None:
    async def run() -> None:
        board = MemoryBoard()
        board.store_problem = "away"
        board.publish_report(SchedulerReport(problem="recovering"))
        assert board.readiness.problem == "recovering"

    asyncio.run(run())
