"""What one server publishes, the others see; what is lost or late misleads nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from tinsmith.service.ledger.board import ACTIVE, QueueReport, SchedulerReport, TokenPiece
from tinsmith.service.ledger.postgres_board import (
    FORGET_S,
    LONGEST_NOTICE,
    REPEAT_S,
    SILENT_S,
    PostgresBoard,
    notices,
)

READY = SchedulerReport(is_ready=True, figures={"claims": 3.0})
BUSY = QueueReport("paused_capacity", "the engine is busy")
SAMPLE = "sampler:1"


class Servers:
    """Boards of several servers, and what carries notices between them."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.is_down = False
        self.sent: list[tuple[str, str]] = []
        self._boards: list[PostgresBoard] = []
        self._deaf: list[PostgresBoard] = []

    def add(self, epoch: int = 0) -> PostgresBoard:
        """One more server; with an epoch it has the scheduler."""
        board = PostgresBoard(self._carry, "all", lambda: self.time)
        board.epoch = epoch
        board.follow()
        self._boards.append(board)
        return board

    def deafen(self, board: PostgresBoard) -> None:
        """It hears nothing from now on, as a process that is paused."""
        self._boards.remove(board)
        self._deaf.append(board)

    async def _carry(self, told: Sequence[tuple[str, str]]) -> None:
        if self.is_down:
            raise ConnectionResetError
        for channel, text in told:
            assert len(text.encode()) <= LONGEST_NOTICE
            self.sent.append((channel, text))
            for board in self._boards:
                if channel in board.channels:
                    board.hear(text)

    async def settle(self) -> None:
        """Until everything has been carried."""
        for _ in range(4):
            for board in (*self._boards, *self._deaf):
                await board.flush()
            await asyncio.sleep(0)

    async def close(self) -> None:
        for board in (*self._boards, *self._deaf):
            await board.close()


def played(scene: Callable[[Servers], Awaitable[None]]) -> None:
    async def play() -> None:
        servers = Servers()
        try:
            await scene(servers)
        finally:
            await servers.close()

    asyncio.run(play())


def test_a_report_reaches_all_servers_and_grows_stale() -> None:
    async def scene(servers: Servers) -> None:
        api, scheduler = servers.add(), servers.add(epoch=1)
        assert "no scheduler has reported yet" in str(api.report.problem)

        scheduler.publish_report(READY)
        await servers.settle()
        assert api.report == READY

        servers.time += SILENT_S + 1
        assert not api.report.is_ready
        assert "no scheduler has reported for 6 s" in str(api.report.problem)
        assert scheduler.report == READY

    played(scene)


def test_a_scheduler_that_was_replaced_is_not_heard() -> None:
    async def scene(servers: Servers) -> None:
        api, old, new = servers.add(), servers.add(epoch=1), servers.add(epoch=2)
        old.publish_report(READY)
        old.set_queue_state(BUSY, "q")
        await servers.settle()
        assert api.queue_state("q") == BUSY

        servers.deafen(old)
        new.clear_queue_states()
        new.publish_report(READY)
        await servers.settle()
        old.publish_report(SchedulerReport(problem="paused meanwhile"))
        old.set_queue_state(BUSY, "q")
        await servers.settle()

        assert api.report == READY
        assert api.queue_state("q") == ACTIVE

    played(scene)


def test_a_scheduler_that_knows_of_its_successor_publishes_nothing() -> None:
    async def scene(servers: Servers) -> None:
        old, new = servers.add(epoch=1), servers.add(epoch=2)
        old.publish_report(READY)
        new.publish_report(SchedulerReport(problem="recovering"))
        await servers.settle()
        servers.sent.clear()

        old.publish_report(READY)
        old.set_queue_state(BUSY)
        await servers.settle()

        assert servers.sent == []
        assert old.report.problem == "recovering"

    played(scene)


def test_a_server_that_joins_late_learns_what_is_paused() -> None:
    async def scene(servers: Servers) -> None:
        scheduler = servers.add(epoch=1)
        scheduler.publish_report(READY)
        scheduler.set_queue_state(BUSY, "q")
        queues = [f"model-{number:0400}" for number in range(60)]
        for queue_id in queues:
            scheduler.set_queue_state(BUSY, queue_id)
        await servers.settle()

        late = servers.add()
        await servers.settle()

        assert late.report == READY
        assert {late.queue_state(queue_id) for queue_id in ("q", *queues)} == {BUSY}
        scheduler.set_queue_state(ACTIVE, "q")
        await servers.settle()
        assert late.queue_state("q") == ACTIVE

    played(scene)


def test_tokens_go_to_the_server_that_streams_them_and_to_no_other() -> None:
    async def scene(servers: Servers) -> None:
        api, other, scheduler = servers.add(), servers.add(), servers.add(epoch=1)
        scheduler.clear_queue_states()
        await servers.settle()
        assert not scheduler.is_watched(SAMPLE)

        assert api.watch(SAMPLE)
        await api.flush()
        assert scheduler.is_watched(SAMPLE)
        scheduler.restart_tokens(SAMPLE)
        long = tuple(range(1000))
        scheduler.publish_tokens(SAMPLE, [TokenPiece(0, (1, 2), (-0.5, -1.0)), TokenPiece(1, long)])
        await servers.settle()

        pieces = await api.wait_tokens(SAMPLE, 0, timeout_s=1.0)
        assert pieces[0] == TokenPiece(0, (1, 2), (-0.5, -1.0))
        assert sum((piece.tokens for piece in pieces[1:]), ()) == long
        assert not [text for channel, text in servers.sent if channel == other.channels[1]]

        api.unwatch(SAMPLE)
        await servers.settle()
        assert not scheduler.is_watched(SAMPLE)

    played(scene)


def test_after_lost_tokens_the_rest_of_the_run_is_dropped_and_the_next_run_is_not() -> None:
    async def scene(servers: Servers) -> None:
        api, scheduler = servers.add(), servers.add(epoch=1)
        scheduler.clear_queue_states()
        await servers.settle()
        api.watch(SAMPLE)
        await servers.settle()
        scheduler.restart_tokens(SAMPLE)
        scheduler.publish_tokens(SAMPLE, [TokenPiece(0, (1,))])
        await servers.settle()
        servers.is_down = True
        scheduler.publish_tokens(SAMPLE, [TokenPiece(0, (2,))])
        await scheduler.flush()
        servers.is_down = False
        await asyncio.sleep(0.6)
        scheduler.publish_tokens(SAMPLE, [TokenPiece(0, (3,))])
        await servers.settle()

        assert await api.wait_tokens(SAMPLE, 0, timeout_s=0.1) == [TokenPiece(0, (1,))]
        before = api.restarts(SAMPLE)
        scheduler.restart_tokens(SAMPLE)
        scheduler.publish_tokens(SAMPLE, [TokenPiece(0, (1, 2, 3))])
        await servers.settle()
        assert api.restarts(SAMPLE) == before + 1
        assert await api.wait_tokens(SAMPLE, 0, timeout_s=0.1) == [TokenPiece(0, (1, 2, 3))]

    played(scene)


def test_a_scheduler_that_takes_over_learns_what_is_streamed() -> None:
    async def scene(servers: Servers) -> None:
        api, old = servers.add(), servers.add(epoch=1)
        old.clear_queue_states()
        api.watch(SAMPLE)
        await servers.settle()
        assert old.is_watched(SAMPLE)

        new = servers.add(epoch=2)
        new.clear_queue_states()
        await servers.settle()

        assert new.is_watched(SAMPLE)
        assert not old.is_watched(SAMPLE)

    played(scene)


def test_streams_of_a_server_that_died_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.service.ledger.postgres_board.REPEAT_S", 0.01)

    async def scene(servers: Servers) -> None:
        api, scheduler = servers.add(), servers.add(epoch=1)
        scheduler.clear_queue_states()
        api.watch(SAMPLE)
        await servers.settle()
        assert scheduler.is_watched(SAMPLE)

        await api.close()
        servers.time += FORGET_S + REPEAT_S
        scheduler.publish_report(READY)
        await servers.settle()
        scheduler.publish_report(READY)
        await servers.settle()

        assert not scheduler.is_watched(SAMPLE)

    played(scene)


def test_doubts_reach_the_server_with_the_scheduler() -> None:
    async def scene(servers: Servers) -> None:
        api, scheduler = servers.add(), servers.add(epoch=1)
        api.doubt_ledger()
        api.doubt_store()
        async with asyncio.timeout(10):
            await scheduler.wait_ledger_doubt()
            assert await scheduler.wait_store_doubt(timeout_s=10)

    played(scene)


def test_messages_of_another_version_are_ignored() -> None:
    async def scene(servers: Servers) -> None:
        api, scheduler = servers.add(), servers.add(epoch=1)
        api.hear('["news","a",1]\n["report","a","no number",{}]\nnot even JSON')
        scheduler.publish_report(READY)
        await servers.settle()

        assert api.report == READY

    played(scene)


def test_notices_keep_the_order_of_each_channel() -> None:
    messages = [(f"c{n % 2}", b"%d" % n * 900) for n in range(30)]

    found = notices(messages)

    for channel in ("c0", "c1"):
        lines = [line for name, text in found if name == channel for line in text.split("\n")]
        assert lines == [text.decode() for name, text in messages if name == channel]
