"""Outcomes on their way into the ledger, and the patience that it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from tests.unit.service.scheduler.made import a_command
from tinsmith.errors import (
    BadRequestError,
    CheckpointUnavailableError,
    LedgerUnavailableError,
    RequestErrorCategory,
)
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.fenced import FencedLedger
from tinsmith.service.ledger.memory_board import MemoryBoard
from tinsmith.service.ledger.records import RequestId, Settlement
from tinsmith.service.scheduler.settling import LARGEST_SETTLEMENT, Settler, failure, success
from tinsmith.service.scheduler.status import LONGEST_WAIT_S, InFlight, OutageRetry, Sleep
from tinsmith.wire.stored import read_failure


class SlowLedger:
    """Settles when it is let, and fails as often as it is told to."""

    def __init__(self) -> None:
        self.board = MemoryBoard()
        self.now = lambda: 0.0
        self.may_settle = asyncio.Event()
        self.may_settle.set()
        self.failures = 0
        self.settled: list[list[str]] = []

    async def settle(self, settlements: Sequence[Settlement], **_: object) -> list[RequestId]:
        await self.may_settle.wait()
        if self.failures:
            self.failures -= 1
            raise LedgerUnavailableError("the disk is full")
        self.settled.append([one.request_id for one in settlements])
        return [one.request_id for one in settlements]

    def settler(self, *, most: int = 100, sleep: Sleep = asyncio.sleep) -> Settler:
        retry = OutageRetry(self.board, sleep=sleep)
        ledger = FencedLedger(cast(Ledger, self), None, retry)
        return Settler(ledger, InFlight(100), most_unsettled=most)


def _settlement(number: int) -> Settlement:
    return Settlement(request_id=RequestId(f"m:{number}"), payload=b"")


def test_settlements_keep_their_order_and_share_a_write() -> None:
    """What gathers while one is made is made together, behind it."""

    async def run() -> None:
        ledger = SlowLedger()
        ledger.may_settle.clear()
        settler = ledger.settler()
        task = asyncio.create_task(settler.run())
        settler.add(_settlement(0))
        await asyncio.sleep(0)
        for number in range(1, 5):
            settler.add(_settlement(number))
        unsettled = settler.unsettled
        ledger.may_settle.set()
        await settler.wait_settled()
        task.cancel()

        assert unsettled == 5
        assert ledger.settled == [["m:0"], ["m:1", "m:2", "m:3", "m:4"]]
        assert settler.unsettled == 0

    asyncio.run(run())


def test_nothing_is_lost_while_the_ledger_is_unavailable() -> None:
    """It is settled in its order when it is back; meanwhile the board says so."""

    async def run() -> None:
        ledger, board, waits = SlowLedger(), MemoryBoard(), list[float]()
        ledger.failures = 20

        async def sleep(wait_s: float) -> None:
            waits.append(wait_s)
            await asyncio.sleep(0)

        retry = OutageRetry(board, sleep=sleep)
        fenced = FencedLedger(cast(Ledger, ledger), None, retry)
        settler = Settler(fenced, InFlight(100), most_unsettled=100)
        task = asyncio.create_task(settler.run())
        settler.add(_settlement(0), _settlement(1))
        while len(waits) < 3:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0)
        during = board.queue_state("m").state, retry.problem
        settler.add(_settlement(2))
        await settler.wait_settled()
        task.cancel()

        assert during == ("paused_capacity", "the ledger is unavailable: the disk is full")
        assert ledger.settled == [["m:0", "m:1"], ["m:2"]]
        assert (board.queue_state("m").state, retry.problem) == ("active", None)
        assert len(waits) == 20 and max(waits) <= LONGEST_WAIT_S

    asyncio.run(run())


def test_new_work_waits_while_too_many_settlements_are_pending() -> None:
    """Room is there again when it has been settled."""

    async def run() -> None:
        ledger = SlowLedger()
        ledger.may_settle.clear()
        settler = ledger.settler(most=2)
        task = asyncio.create_task(settler.run())
        await settler.wait_room()
        settler.add(_settlement(0), _settlement(1))
        waiting = asyncio.create_task(settler.wait_room())
        await asyncio.sleep(0.01)
        had_room = waiting.done()
        ledger.may_settle.set()
        async with asyncio.timeout(60):
            await waiting
        task.cancel()

        assert not had_room

    asyncio.run(run())


def test_wait_passed_returns_when_earlier_settlements_are_written() -> None:
    """It returns when that is in the ledger, and at once if nothing was added."""

    async def run() -> None:
        ledger = SlowLedger()
        settler = ledger.settler()
        await settler.wait_passed()
        settler.add(_settlement(0))
        waiting = asyncio.create_task(settler.wait_passed())
        await asyncio.sleep(0)
        was_done = waiting.done()
        task = asyncio.create_task(settler.run())
        async with asyncio.timeout(60):
            await waiting
        task.cancel()

        assert not was_done
        assert ledger.settled == [["m:0"]]

    asyncio.run(run())


def test_a_failure_has_the_category_of_its_cause() -> None:
    """The user's mistakes are told, faults are not."""
    users = read_failure(failure(a_command(), BadRequestError("look here")).payload)
    ours = read_failure(failure(a_command(), RuntimeError("secret")).payload)

    assert (users.category, users.error) == (RequestErrorCategory.User, "look here")
    assert ours.category is RequestErrorCategory.Server
    assert "secret" not in ours.error


def test_a_command_without_a_result_is_settled_with_nothing() -> None:
    """The end of a model has none."""
    settlement = success(a_command(kind="release_model"), None)

    assert (settlement.payload, settlement.is_failed) == (b"J{}", False)


class StoppingLedger(SlowLedger):
    """Settles once, and then not until it is let again."""

    async def settle(self, settlements: Sequence[Settlement], **_: object) -> list[RequestId]:
        settled = await super().settle(settlements)
        self.may_settle.clear()
        return settled


def test_there_is_no_room_while_the_maximum_number_of_settlements_is_pending() -> None:
    """Of more than one change takes, the first leaves exactly so many."""

    async def run() -> None:
        ledger = StoppingLedger()
        settler = ledger.settler(most=3)
        settler.add(*(_settlement(number) for number in range(LARGEST_SETTLEMENT + 3)))
        waiting = asyncio.create_task(settler.wait_room())
        task = asyncio.create_task(settler.run())
        while not ledger.settled:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        had_room, unsettled = waiting.done(), settler.unsettled
        ledger.may_settle.set()
        async with asyncio.timeout(60):
            await waiting
        task.cancel()

        assert (had_room, unsettled) == (False, 3)

    asyncio.run(run())


def test_store_errors_are_shown_only_to_the_operator(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = CheckpointUnavailableError("/var/checkpoints cannot be read")

    settlement = failure(a_command(number=7), error)

    assert "/var/checkpoints" not in read_failure(settlement.payload).error
    assert "m:7 failed: /var/checkpoints cannot be read" in caplog.text


def test_no_new_work_starts_without_the_lease() -> None:
    async def run() -> None:
        ledger = SlowLedger()
        settler = ledger.settler()
        ledger.board.may_work = lambda: False
        waiting = asyncio.create_task(settler.wait_room())
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done

        ledger.board.may_work = lambda: True

        async with asyncio.timeout(30):
            await waiting

    asyncio.run(run())
