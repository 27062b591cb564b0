"""What a call returns: results and errors, waiting, cancelling and callbacks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import TypeVar

import pytest

from tinsmith.client.futures import APIFuture
from tinsmith.errors import APITimeoutError, NotFoundError

T = TypeVar("T")


def test_a_result_is_the_same_object_however_often_it_is_asked_for() -> None:
    future: APIFuture[list[int]] = APIFuture()
    value = [1, 2]

    future.settle(value)

    assert future.result() is value
    assert future.result() is value
    assert asyncio.run(_awaited(future)) is value


def test_an_error_is_raised_by_every_way_of_asking() -> None:
    future: APIFuture[int] = APIFuture()
    future.fail(NotFoundError("no such run"))

    with pytest.raises(NotFoundError):
        future.result()
    with pytest.raises(NotFoundError):
        asyncio.run(_awaited(future))
    assert isinstance(future.exception(), NotFoundError)


def test_a_timeout_in_a_thread_leaves_the_work_going() -> None:
    future: APIFuture[int] = APIFuture("forward_backward 3")

    with pytest.raises(TimeoutError, match="forward_backward 3"):
        future.result(timeout=0.001)
    future.settle(5)

    assert future.result() == 5


def test_a_timeout_in_a_coroutine_gives_the_work_up() -> None:
    future: APIFuture[int] = APIFuture("sample 7")
    stopped: list[bool] = []
    future.stop_work_with(lambda: stopped.append(True))

    with pytest.raises(APITimeoutError, match="sample 7"):
        asyncio.run(future.result_async(timeout=0.001))

    assert stopped == [True]
    assert future.cancelled()


def test_a_cancelled_waiter_gives_the_work_up() -> None:
    future: APIFuture[int] = APIFuture()

    async def scenario() -> None:
        waiter = asyncio.ensure_future(_awaited(future))
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter

    asyncio.run(scenario())

    assert future.cancelled()


def test_cancelling_stops_work_that_is_found_later() -> None:
    future: APIFuture[int] = APIFuture()
    future.cancel()
    stopped: list[bool] = []

    future.stop_work_with(lambda: stopped.append(True))

    assert stopped == [True]


def test_a_result_that_comes_after_cancelling_is_dropped() -> None:
    future: APIFuture[int] = APIFuture()
    future.cancel()

    future.settle(1)
    future.fail(NotFoundError("late"))

    with pytest.raises(concurrent.futures.CancelledError):
        future.result()


def test_callbacks_do_not_run_on_the_thread_that_settles() -> None:
    future: APIFuture[int] = APIFuture()
    called = threading.Event()
    threads: list[threading.Thread] = []

    def callback(_: concurrent.futures.Future[int]) -> None:
        threads.append(threading.current_thread())
        called.set()

    future.add_done_callback(callback)
    future.settle(1)

    assert called.wait(10)
    assert threads != [threading.current_thread()]


def test_a_callback_that_raises_does_not_stop_the_next(caplog: pytest.LogCaptureFixture) -> None:
    future: APIFuture[int] = APIFuture()
    called = threading.Event()

    def broken(_: concurrent.futures.Future[int]) -> None:
        raise RuntimeError("user code")

    future.add_done_callback(broken)
    future.add_done_callback(lambda _: called.set())
    future.settle(1)

    assert called.wait(10)
    assert "user code" in caplog.text


def test_it_works_with_the_standard_library_s_own_waiting() -> None:
    futures: list[APIFuture[int]] = [APIFuture() for _ in range(3)]
    for number, future in enumerate(futures):
        future.settle(number)

    done = concurrent.futures.wait(futures).done

    assert {future.result() for future in done} == {0, 1, 2}


def test_many_awaiting_coroutines_are_woken_by_one_burst() -> None:
    futures: list[APIFuture[int]] = [APIFuture() for _ in range(500)]

    def settle_all() -> None:
        for number, future in enumerate(futures):
            future.settle(number)

    async def scenario() -> list[int]:
        waiting = asyncio.gather(*map(_awaited, futures))
        await asyncio.sleep(0)
        threading.Thread(target=settle_all).start()
        return await asyncio.wait_for(waiting, timeout=20)

    assert asyncio.run(scenario()) == list(range(500))


async def _awaited(future: APIFuture[T]) -> T:
    return await future
