"""What a scheduler tells and nobody keeps."""

from __future__ import annotations

import asyncio

from tinsmith.service.ledger import memory_board
from tinsmith.service.ledger.board import ACTIVE, QueueReport, TokenPiece
from tinsmith.service.ledger.memory_board import MemoryBoard

PIECE = TokenPiece(0, (7,), (-0.5,))


def test_the_state_of_a_queue_takes_precedence_over_the_global_state() -> None:
    board = MemoryBoard()
    everywhere = QueueReport("paused_capacity", "no room")
    one = QueueReport("paused_rate_limit", "too fast", 1.0)

    board.set_queue_state(everywhere)
    board.set_queue_state(one, "a")

    assert (board.queue_state("a"), board.queue_state("b")) == (one, everywhere)
    board.set_queue_state(ACTIVE, "a")
    board.set_queue_state(ACTIVE)
    assert board.queue_state("a") == ACTIVE


def test_tokens_reach_only_their_watchers() -> None:
    async def scenario() -> None:
        board = MemoryBoard()
        board.publish_tokens("r", [PIECE])
        assert board.watch("r")
        waiting = asyncio.create_task(board.wait_tokens("r", 0, timeout_s=30.0))
        await asyncio.sleep(0)

        board.publish_tokens("r", [PIECE])

        assert await waiting == [PIECE]
        assert await board.wait_tokens("r", 1, timeout_s=0.01) == []
        board.restart_tokens("r")
        board.publish_tokens("r", [PIECE])
        assert await board.wait_tokens("r", 0, timeout_s=30.0) == [PIECE]
        board.unwatch("r")
        assert not board.is_watched("r")
        assert await board.wait_tokens("r", 0, timeout_s=30.0) == []

    asyncio.run(scenario())


def test_the_number_of_watched_streams_is_limited() -> None:
    board = MemoryBoard()
    for number in range(memory_board.MOST_STREAMS):
        assert board.watch(str(number))

    assert not board.watch("one more")
    assert board.watch("0")


def test_waiters_for_a_queue_learn_that_it_is_paused() -> None:
    async def scenario() -> None:
        board = MemoryBoard()
        full, tired = QueueReport("paused_capacity", "full"), QueueReport("paused_capacity", "x")
        waiting = asyncio.create_task(board.wait_paused("a", ACTIVE))
        await asyncio.sleep(0)
        board.set_queue_state(full, "b")
        await asyncio.sleep(0)
        assert not waiting.done()
        board.set_queue_state(full, "a")
        await waiting

        told = asyncio.create_task(board.wait_paused("a", full))
        await asyncio.sleep(0)
        board.set_queue_state(ACTIVE, "a")
        await asyncio.sleep(0)
        assert not told.done()
        board.set_queue_state(full, "a")
        await told
        await board.wait_paused("a", tired)

    asyncio.run(scenario())
