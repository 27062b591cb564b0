"""What a scheduler tells and nobody keeps."""

from __future__ import annotations

import asyncio

from tinsmith.ledger import board as boards
from tinsmith.ledger.board import ACTIVE, Board, QueueReport, TokenPiece

PIECE = TokenPiece(0, (7,), (-0.5,))


def test_what_is_said_of_a_line_goes_before_what_is_said_of_all() -> None:
    board = Board()
    everywhere = QueueReport("paused_capacity", "no room")
    one = QueueReport("paused_rate_limit", "too fast", 1.0)

    board.hold(everywhere)
    board.hold(one, "a")

    assert (board.queue("a"), board.queue("b")) == (one, everywhere)
    board.hold(ACTIVE, "a")
    board.hold(ACTIVE)
    assert board.queue("a") == ACTIVE


def test_tokens_reach_whoever_watches_and_nobody_else() -> None:
    async def scenario() -> None:
        board = Board()
        board.tell("r", [PIECE])
        assert board.watch("r")
        waiting = asyncio.create_task(board.wait_pieces("r", 0, timeout_s=30.0))
        await asyncio.sleep(0)

        board.tell("r", [PIECE])

        assert await waiting == [PIECE]
        assert await board.wait_pieces("r", 1, timeout_s=0.01) == []
        board.restart("r")
        board.tell("r", [PIECE])
        assert await board.wait_pieces("r", 0, timeout_s=30.0) == [PIECE]
        board.unwatch("r")
        assert not board.is_watched("r")
        assert await board.wait_pieces("r", 0, timeout_s=30.0) == []

    asyncio.run(scenario())


def test_only_so_many_streams_are_watched() -> None:
    board = Board()
    for number in range(boards.MOST_STREAMS):
        assert board.watch(str(number))

    assert not board.watch("one more")
    assert board.watch("0")


def test_whoever_waits_for_a_line_learns_that_it_is_held_back() -> None:
    async def scenario() -> None:
        board = Board()
        full, tired = QueueReport("paused_capacity", "full"), QueueReport("paused_capacity", "x")
        waiting = asyncio.create_task(board.wait_held("a", ACTIVE))
        await asyncio.sleep(0)
        board.hold(full, "b")
        await asyncio.sleep(0)
        assert not waiting.done()
        board.hold(full, "a")
        await waiting

        told = asyncio.create_task(board.wait_held("a", full))
        await asyncio.sleep(0)
        board.hold(ACTIVE, "a")
        await asyncio.sleep(0)
        assert not told.done()
        board.hold(full, "a")
        await told
        await board.wait_held("a", tired)

    asyncio.run(scenario())
