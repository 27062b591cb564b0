"""Handles that keep things back: from any thread, in order, and past those who leave."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tinsmith.testing.holds import Hold, Reversal


def test_held_requests_are_counted_and_released_in_order() -> None:
    async def story() -> None:
        hold, free = Hold(), list[int]()

        async def visit(number: int) -> None:
            await hold.wait_released()
            free.append(number)

        visits = [asyncio.create_task(visit(number)) for number in range(3)]
        await asyncio.sleep(0)
        assert hold.held == 3
        hold.release(2)
        await asyncio.gather(*visits[:2])
        assert (free, hold.held) == ([0, 1], 1)
        hold.release()
        await visits[2]
        await visit(3)  # nothing is kept back any more
        assert (free, hold.most_held) == ([0, 1, 2, 3], 3)

    asyncio.run(story())


def test_a_request_that_disconnects_is_no_longer_held() -> None:
    async def story() -> None:
        hold = Hold()
        visit = asyncio.create_task(hold.wait_released())
        await asyncio.sleep(0)
        visit.cancel()
        await asyncio.gather(visit, return_exceptions=True)

        assert hold.held == 0
        hold.release()

    asyncio.run(story())


def test_another_thread_waits_and_releases() -> None:
    hold = Hold()

    def other_thread() -> None:
        hold.wait_held(2, timeout_s=5)
        hold.release()

    async def story() -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(hold.wait_released(), hold.wait_released())

    thread = threading.Thread(target=other_thread)
    thread.start()
    asyncio.run(story())
    thread.join()


def test_waiting_for_held_requests_reports_how_many_are_held() -> None:
    with pytest.raises(TimeoutError, match="0 of 1"):
        Hold().wait_held(1, timeout_s=0.01)


def test_a_with_block_releases_at_its_end() -> None:
    with Hold() as hold:
        assert not hold.is_released

    assert hold.is_released


def test_a_pause_ends_after_the_given_number_of_polls() -> None:
    hold = Hold(polls=2)

    hold.note_poll()
    assert not hold.is_released
    hold.note_poll()
    assert hold.is_released


def test_reversal_reverses_the_order() -> None:
    async def story() -> None:
        reversal, ended = Reversal(4), list[int]()

        async def end(number: int) -> None:
            await reversal.wait_turn()
            ended.append(number)

        await asyncio.gather(*(end(number) for number in range(4)))
        assert ended == [3, 2, 1, 0]

    asyncio.run(story())
