"""The line of a model's calls: order, numbers, and calls that give up."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tinsmith.client.dispatch import Line, Place


async def leave_with_numbers(place: Place, count: int, sent: list[int], wait: int = 0) -> None:
    async with place.turn() as line:
        numbers = line.take_numbers(count)
        for _ in range(wait):
            await asyncio.sleep(0)
        sent.extend(numbers)


def test_s14_calls_leave_in_the_order_of_their_places_whatever_begins_first() -> None:
    sent: list[int] = []

    async def scenario() -> list[int]:
        line = Line()
        places = [line.take_place() for _ in range(5)]
        order: list[int] = []

        async def call(place: Place) -> None:
            async with place.turn():
                order.append(place.ticket)

        await asyncio.gather(*(call(place) for place in reversed(places)))
        return order

    sent = asyncio.run(scenario())

    assert sent == [0, 1, 2, 3, 4]


def test_s14_numbers_begin_at_1_and_rise_by_1_over_calls_of_several_chunks() -> None:
    sent: list[int] = []

    async def scenario() -> None:
        line = Line()
        sizes = [1, 4, 1, 3, 2]
        places = [line.take_place() for _ in sizes]
        await asyncio.gather(
            *(
                leave_with_numbers(place, size, sent, wait=size)
                for place, size in zip(places, sizes, strict=True)
            )
        )

    asyncio.run(scenario())

    assert sent == list(range(1, 12))


def test_s17_a_call_cancelled_in_the_line_leaves_no_hole_and_holds_up_nobody() -> None:
    sent: list[int] = []

    async def scenario() -> None:
        line = Line()
        first, cancelled, last = line.take_places(3)
        blocked = asyncio.Event()

        async def slow_first() -> None:
            async with first.turn() as turn:
                sent.extend(turn.take_numbers(1))
                await blocked.wait()

        tasks = [
            asyncio.create_task(slow_first()),
            asyncio.create_task(leave_with_numbers(cancelled, 2, sent)),
            asyncio.create_task(leave_with_numbers(last, 1, sent)),
        ]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        blocked.set()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=60)

    asyncio.run(scenario())

    assert sent == [1, 2]


def test_s17_a_call_that_never_began_can_give_its_place_up() -> None:
    sent: list[int] = []

    async def scenario() -> None:
        line = Line()
        never, last = line.take_places(2)
        task = asyncio.create_task(leave_with_numbers(last, 1, sent))
        await asyncio.sleep(0)
        never.leave()
        never.leave()
        await asyncio.wait_for(task, timeout=60)

    asyncio.run(scenario())

    assert sent == [1]


def test_s17_a_call_cancelled_at_the_moment_of_its_turn_holds_up_nobody() -> None:
    sent: list[int] = []

    async def scenario() -> int:
        line = Line()
        first, cancelled, last = line.take_places(3)
        tasks = [
            asyncio.create_task(leave_with_numbers(cancelled, 1, sent)),
            asyncio.create_task(leave_with_numbers(last, 1, sent)),
        ]
        await asyncio.sleep(0)
        tasks[0].cancel()
        first.leave()  # the one whose turn it is now has not noticed yet that it is cancelled
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=60)
        return len(line._waiting)

    assert asyncio.run(scenario()) == 0
    assert sent == [1]


def test_the_length_of_a_line_counts_those_who_have_not_left_however_often_others_say_so() -> None:
    line = Line()
    places = line.take_places(4)

    places[2].leave()
    assert line.length == 3
    places[0].leave()
    places[0].leave()
    assert line.length == 2
    for place in places:
        place.leave()
        place.leave()
    assert line.length == 0


def test_s17_a_call_that_fails_passes_its_turn_on() -> None:
    sent: list[int] = []

    async def scenario() -> None:
        line = Line()
        failing, last = line.take_places(2)

        async def fail() -> None:
            async with failing.turn():
                raise ConnectionError

        results = await asyncio.gather(
            fail(), leave_with_numbers(last, 1, sent), return_exceptions=True
        )
        assert isinstance(results[0], ConnectionError)

    asyncio.run(scenario())

    assert sent == [1]


def test_s14_a_held_place_makes_those_behind_it_wait() -> None:
    async def scenario() -> list[str]:
        line = Line()
        trace: list[str] = []
        forward, backward, step = line.take_places(3)
        loss_is_ready = asyncio.Event()

        async def custom_loss() -> None:
            async with forward.turn():
                trace.append("forward")
            await loss_is_ready.wait()
            async with backward.turn():
                trace.append("backward")

        async def optim_step() -> None:
            async with step.turn():
                trace.append("step")

        tasks = [asyncio.create_task(optim_step()), asyncio.create_task(custom_loss())]
        for _ in range(5):
            await asyncio.sleep(0)
        loss_is_ready.set()
        await asyncio.wait_for(asyncio.gather(*tasks), timeout=60)
        return trace

    assert asyncio.run(scenario()) == ["forward", "backward", "step"]


@pytest.mark.usefixtures("eager_switching")
def test_s14_places_taken_by_many_threads_are_all_different_and_keep_each_thread_s_order() -> None:
    line = Line()
    taken: list[list[int]] = [[] for _ in range(8)]

    def take(mine: list[int]) -> None:
        for _ in range(200):
            mine.extend(place.ticket for place in line.take_places(3))

    threads = [threading.Thread(target=take, args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(ticket for mine in taken for ticket in mine) == list(range(8 * 200 * 3))
    assert all(mine == sorted(mine) for mine in taken)


def test_a_line_knows_how_many_have_not_left() -> None:
    async def scenario() -> list[int]:
        line = Line()
        places = line.take_places(3)
        lengths = [line.length]
        for place in places:
            async with place.turn():
                pass
            lengths.append(line.length)
        return lengths

    assert asyncio.run(scenario()) == [3, 2, 1, 0]
