"""The thread for all I/O: order, cancelling, and what happens after a fork."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import multiprocessing
import sys
import threading

import pytest

from tinsmith.client.background import Background, background
from tinsmith.errors import APITimeoutError


async def _double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def test_a_process_has_one_background_loop() -> None:
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        seen = set(pool.map(lambda _: id(background()), range(200)))

    assert len(seen) == 1


def test_a_coroutine_runs_on_the_loop_s_thread_and_returns_its_result() -> None:
    async def where() -> str:
        return threading.current_thread().name

    assert background().run(where()) == "tinsmith-loop"


def test_an_error_of_the_coroutine_reaches_the_caller() -> None:
    async def broken() -> None:
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        background().run(broken())


def test_work_that_exceeds_its_timeout_is_cancelled_and_the_error_names_it() -> None:
    ended: list[str] = []

    async def stuck() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    future = background().start(stuck(), "optim_step of m-1", timeout=0.01)

    with pytest.raises(APITimeoutError, match=r"optim_step of m-1: not done within 0\.01 s"):
        future.result(60)
    assert ended == ["cancelled"]


def test_a_timeout_error_raised_by_the_work_itself_is_unchanged() -> None:
    async def own() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        background().run(own(), timeout=60)


def test_work_cancelled_before_it_starts_causes_no_warning() -> None:
    loop = Background()
    blocked = threading.Event()
    loop.call_soon(blocked.wait)

    future = loop.start(_double(1), timeout=5)
    future.cancel()
    blocked.set()
    loop.stop()

    assert future.cancelled()


def test_a_blocking_call_on_the_loop_s_own_thread_is_rejected() -> None:
    async def nested() -> int:
        return background().run(_double(1), "sample")

    with pytest.raises(RuntimeError, match="sample"):
        background().run(nested())


def test_coroutines_of_one_thread_start_in_submission_order() -> None:
    begun: list[int] = []

    async def begin(number: int) -> None:
        begun.append(number)

    futures = [background().start(begin(number)) for number in range(1000)]
    for future in futures:
        future.result(20)

    assert begun == list(range(1000))


@pytest.mark.usefixtures("eager_switching")
def test_s44_no_submission_is_lost_among_many_threads() -> None:
    def hand_over(base: int) -> list[int]:
        futures = [background().start(_double(base + i)) for i in range(100)]
        return [future.result(60) for future in futures]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        results = list(pool.map(hand_over, range(0, 1600, 100)))

    assert sorted(itertools.chain(*results)) == [2 * number for number in range(1600)]


def test_cancelling_the_future_cancels_the_coroutine() -> None:
    cancelled = threading.Event()

    async def endless() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    future = background().start(endless())
    background().run(_double(0))  # by now the other has begun
    future.cancel()

    assert cancelled.wait(60)


def test_work_cancelled_before_it_starts_never_starts() -> None:
    loop = Background()
    block, blocked = threading.Event(), threading.Event()
    begun: list[bool] = []

    async def hold_the_loop() -> None:
        blocked.set()
        block.wait(20)

    async def begin() -> None:
        begun.append(True)

    holding = loop.start(hold_the_loop())
    blocked.wait(20)
    future = loop.start(begin())
    future.cancel()
    block.set()
    holding.result(20)
    loop.run(_double(0))
    loop.stop()

    assert begun == []


def test_an_async_caller_s_loop_is_not_blocked() -> None:
    async def scenario() -> int:
        future = background().start(_double(21))
        ticks = 0
        while not future.done():
            ticks += 1
            await asyncio.sleep(0)
        return await future

    assert asyncio.run(scenario()) == 42


def _child(results: multiprocessing.SimpleQueue[int]) -> None:
    results.put(background().run(_double(4), timeout=20))


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")
def test_a_forked_child_has_its_own_loop() -> None:
    background().run(_double(1))
    context = multiprocessing.get_context("fork")
    results: multiprocessing.SimpleQueue[int] = context.SimpleQueue()
    child = context.Process(target=_child, args=(results,))

    child.start()
    child.join(30)

    assert child.exitcode == 0
    assert results.get() == 8


def test_s18_stopping_the_loop_settles_all_pending_work() -> None:
    loop = Background()
    begun = threading.Event()

    async def endless() -> None:
        begun.set()
        await asyncio.sleep(3600)

    future = loop.start(endless())
    begun.wait(20)
    loop.stop()

    with pytest.raises(concurrent.futures.CancelledError):
        future.result(timeout=1)


def test_finished_work_is_freed() -> None:
    for _ in range(100):
        background().run(_double(1))
    background().run(_double(1))

    assert len(background()._tasks) <= 1


def test_tasks_started_by_a_task_being_cancelled_are_cancelled_too() -> None:
    loop = Background()
    second: list[asyncio.Task[None]] = []

    async def stubborn(rounds: int) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            if rounds:
                second.append(asyncio.create_task(stubborn(rounds - 1)))

    future = loop.start(stubborn(3))
    loop.run(asyncio.sleep(0))
    loop.stop()

    assert future.cancelled()
    assert [task.cancelled() for task in second] == [True] * 3
