"""What a call returns: results and errors, waiting, cancelling and callbacks."""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import gc
import sys
import threading
import weakref
from typing import Any, TypeVar

import pytest

from tinsmith.client.background import background
from tinsmith.client.futures import APIFuture
from tinsmith.errors import APITimeoutError, NotFoundError, ValidationError

T = TypeVar("T")


def test_a_result_is_the_same_object_every_time_it_is_read() -> None:
    future: APIFuture[list[int]] = APIFuture()
    value = [1, 2]

    future.settle(value)

    assert future.result() is value
    assert future.result() is value
    assert asyncio.run(_awaited(future)) is value


def test_an_error_is_raised_by_every_way_of_reading_the_result() -> None:
    future: APIFuture[int] = APIFuture()
    future.fail(NotFoundError("no such run"))

    with pytest.raises(NotFoundError):
        future.result()
    with pytest.raises(NotFoundError):
        asyncio.run(_awaited(future))
    assert isinstance(future.exception(), NotFoundError)


def test_a_timeout_in_a_thread_does_not_cancel_the_work() -> None:
    future: APIFuture[int] = APIFuture("forward_backward 3")

    with pytest.raises(TimeoutError, match="forward_backward 3"):
        future.result(timeout=0.001)
    future.settle(5)

    assert future.result() == 5


@pytest.mark.parametrize("timeout", [float("nan"), "soon", object()])
def test_an_invalid_timeout_is_rejected_and_does_not_cancel_the_work(timeout: Any) -> None:
    future: APIFuture[int] = APIFuture("sample 7")

    with pytest.raises(ValidationError, match=r"sample 7: timeout is .*; pass seconds, or None"):
        future.result(timeout)
    with pytest.raises(ValidationError, match="sample 7: timeout is"):
        asyncio.run(future.result_async(timeout))
    future.settle(5)

    assert future.result() == 5


@pytest.mark.parametrize("timeout", [float("inf"), 1e300])
def test_an_endless_timeout_waits_as_long_as_it_takes(timeout: float) -> None:
    future: APIFuture[int] = APIFuture()
    threading.Timer(0.02, future.settle, [5]).start()

    assert future.result(timeout) == 5
    assert asyncio.run(future.result_async(timeout)) == 5


@pytest.mark.parametrize("timeout", [0, -1, float("-inf")])
def test_a_zero_or_negative_timeout_times_out_immediately(timeout: float) -> None:
    future: APIFuture[int] = APIFuture()

    with pytest.raises(TimeoutError, match="no result within"):
        future.result(timeout)
    with pytest.raises(APITimeoutError, match="not done within"):
        asyncio.run(future.result_async(timeout))


def test_a_timeout_in_a_coroutine_cancels_the_work() -> None:
    future: APIFuture[int] = APIFuture("sample 7")
    stopped: list[bool] = []
    future.stop_work_with(lambda: stopped.append(True))

    with pytest.raises(APITimeoutError, match="sample 7"):
        asyncio.run(future.result_async(timeout=0.001))

    assert stopped == [True]
    assert future.cancelled()


def test_cancelling_a_waiter_cancels_the_work() -> None:
    future: APIFuture[int] = APIFuture()

    async def scenario() -> None:
        waiter = asyncio.ensure_future(_awaited(future))
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter

    asyncio.run(scenario())

    assert future.cancelled()


def test_cancelling_stops_work_that_is_attached_later() -> None:
    future: APIFuture[int] = APIFuture()
    future.cancel()
    stopped: list[bool] = []

    future.stop_work_with(lambda: stopped.append(True))

    assert stopped == [True]


def test_a_result_that_arrives_after_cancellation_is_dropped() -> None:
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

    assert called.wait(60)
    assert threads != [threading.current_thread()]


def test_a_callback_that_raises_does_not_stop_the_next(caplog: pytest.LogCaptureFixture) -> None:
    future: APIFuture[int] = APIFuture()
    called = threading.Event()

    def broken(_: concurrent.futures.Future[int]) -> None:
        raise RuntimeError("user code")

    future.add_done_callback(broken)
    future.add_done_callback(lambda _: called.set())
    future.settle(1)

    assert called.wait(60)
    assert "user code" in caplog.text


def test_futures_work_with_concurrent_futures_wait() -> None:
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


def test_a_callback_that_raises_a_base_exception_does_not_stop_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    future: APIFuture[int] = APIFuture()
    called = threading.Event()
    future.add_done_callback(lambda _: sys.exit(3))
    future.add_done_callback(lambda _: called.set())

    future.settle(1)

    assert called.wait(20)
    assert "SystemExit" in caplog.text


def test_work_is_stopped_once_however_often_it_is_cancelled() -> None:
    future: APIFuture[int] = APIFuture()
    stops: list[int] = []
    future.stop_work_with(lambda: stops.append(1))

    assert [future.cancel() for _ in range(3)] == [True] * 3

    assert stops == [1]


def test_a_timeout_error_is_raised_by_blocking_and_async_waits() -> None:
    """As in the official SDK, `except TimeoutError` catches it in threads and coroutines."""
    future: APIFuture[int] = APIFuture("sample 7")

    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(timeout=0.001)
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(future.result_async(timeout=0.001))


def test_an_api_timeout_of_the_work_is_raised_unchanged_to_every_waiter() -> None:
    future: APIFuture[int] = APIFuture("sample 7")
    error = APITimeoutError("the work's own")
    future.fail(error)

    with pytest.raises(APITimeoutError) as blocking:
        future.result(timeout=20)
    with pytest.raises(APITimeoutError) as awaited:
        asyncio.run(future.result_async(timeout=20))

    assert blocking.value is error
    assert awaited.value is error


def test_a_timeout_raised_by_the_work_is_not_mistaken_for_the_caller_s() -> None:
    future: APIFuture[int] = APIFuture()
    future.fail(TimeoutError("the work's own"))

    with pytest.raises(TimeoutError, match="the work's own"):
        asyncio.run(future.result_async(timeout=20))
    assert not future.cancelled()


def test_two_event_loops_can_wait_for_one_result() -> None:
    future: APIFuture[int] = APIFuture()
    waiting = threading.Barrier(3)

    async def ask() -> int:
        asyncio.get_running_loop().call_soon(waiting.wait, 20)
        return await future

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(asyncio.run, ask()) for _ in range(2)]
        waiting.wait(20)
        future.settle(7)

        assert [one.result(20) for one in asked] == [7, 7]


def test_s2_results_for_a_closed_loop_do_not_keep_it_alive() -> None:
    futures: list[APIFuture[int]] = [APIFuture(), APIFuture()]
    loop = asyncio.new_event_loop()
    waiters = [loop.create_task(future.result_async()) for future in futures]
    loop.run_until_complete(asyncio.sleep(0))
    gone = weakref.ref(loop)
    loop.close()

    while futures:
        futures.pop().settle(1)
    while waiters:
        waiter = waiters.pop()
        waiter._log_destroy_pending = False  # type: ignore[attr-defined]  # left as a notebook does
    del loop, waiter
    gc.collect()

    assert gone() is None


@pytest.mark.usefixtures("eager_switching")
def test_s44_a_future_settled_and_cancelled_concurrently_has_one_outcome() -> None:
    for number in range(300):
        future: APIFuture[int] = APIFuture()
        told: list[str] = []
        future.when_settled(lambda _, told=told: told.append("settled"))  # type: ignore[misc]
        together = threading.Barrier(2)

        def cancel(future: APIFuture[int] = future, together: Any = together) -> None:
            together.wait(20)
            future.cancel()

        canceller = threading.Thread(target=cancel)
        canceller.start()
        together.wait(20)
        future.settle(number)
        canceller.join(20)

        assert told == ["settled"]
        assert future.cancelled() or future.result(0) == number


def test_s2_dropped_futures_are_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        results = [weakref.ref(_settled_future()) for _ in range(1000)]
        assert not any(result() is not None for result in results)
    finally:
        gc.enable()


def _settled_future() -> APIFuture[bytes]:
    future: APIFuture[bytes] = APIFuture()
    future.stop_work_with(lambda: None)
    future.settle(bytes(10))
    return future


class _Work:
    """Something that holds the future that can stop it."""

    def __init__(self, future: APIFuture[Any]) -> None:
        self.future = future

    def stop(self) -> None:
        pass


@pytest.mark.parametrize("is_early", [True, False], ids=["settled-first", "settled-later"])
@pytest.mark.parametrize("is_good", [True, False], ids=["result", "error"])
def test_a_settled_future_and_its_work_are_freed_without_the_garbage_collector(
    is_good: bool, is_early: bool
) -> None:
    """Thousands that wait for a full collection would hold their results, and make it slow."""
    future: APIFuture[int] = APIFuture()
    work = _Work(future)
    seen = weakref.ref(work)
    gc.disable()
    try:
        if not is_early:
            future.stop_work_with(work.stop)
        if is_good:
            future.settle(1)
        else:
            future.fail(NotFoundError("gone"))
        if is_early:
            future.stop_work_with(work.stop)
        del work, future

        assert seen() is None
    finally:
        gc.enable()


def test_all_threads_that_wait_for_a_future_are_woken_however_they_wait() -> None:
    future: APIFuture[int] = APIFuture()
    other: APIFuture[int] = APIFuture()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = [pool.submit(future.result, 20) for _ in range(4)]
        errors = [pool.submit(future.exception, 20) for _ in range(2)]
        first = pool.submit(
            concurrent.futures.wait,
            [future, other],
            20,
            concurrent.futures.FIRST_COMPLETED,
        )
        gone_through = pool.submit(lambda: next(concurrent.futures.as_completed([future], 20)))
        future.settle(5)

        assert [result.result(30) for result in results] == [5] * 4
        assert [error.result(30) for error in errors] == [None] * 2
        assert first.result(30).done == {future}
        assert gone_through.result(30) is future


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_a_ctrl_c_just_before_the_wait_begins_still_interrupts_it(
    timeout: float | None,
) -> None:
    """As when it comes just before the wait begins: noted, and the wait not ended by it."""
    future: APIFuture[int] = APIFuture()
    never = threading.Timer(30.0, future.settle, (1,))  # so that a failure does not hang
    never.start()
    threading.Timer(0.1, _thread.interrupt_main).start()

    with pytest.raises(KeyboardInterrupt):
        future.result(timeout)

    never.cancel()
    assert not future.done()  # else it was seen only because the wait was over


def test_a_timeout_error_of_the_work_is_not_mistaken_for_one_of_the_wait() -> None:
    future: APIFuture[int] = APIFuture()
    error = TimeoutError("the work's own")
    threading.Timer(0.05, future.fail, (error,)).start()

    with pytest.raises(TimeoutError) as caught:
        future.result(30.0)

    assert caught.value is error


def test_a_lock_held_on_one_future_does_not_block_another() -> None:
    """`concurrent.futures.wait` takes the locks of all it is given, others' futures among them."""
    held, other = APIFuture[int](), APIFuture[int]()

    with held._condition:
        settling = threading.Thread(target=other.settle, args=(1,))
        settling.start()
        settling.join(30.0)

        assert other.done()


def test_awaiting_a_settled_future_yields_to_tasks_started_earlier() -> None:
    """So does any await of the official SDK, and programs order their calls by it."""
    order: list[str] = []

    async def begun() -> None:
        order.append("begun before")

    async def scenario() -> None:
        future: APIFuture[int] = APIFuture()
        future.settle(1)
        task = asyncio.create_task(begun())
        assert await future == 1
        order.append("awaited")
        await task

    asyncio.run(scenario())

    assert order == ["begun before", "awaited"]


def test_a_waiting_loop_is_woken_even_by_a_loop_that_is_stopping() -> None:
    waiting = asyncio.new_event_loop()
    thread = threading.Thread(target=waiting.run_forever)
    thread.start()
    first: APIFuture[int] = APIFuture()
    second: APIFuture[int] = APIFuture()
    told = [asyncio.run_coroutine_threadsafe(_awaited(one), waiting) for one in (first, second)]
    stopping = asyncio.new_event_loop()

    def last_words() -> None:
        stopping.stop()
        first.settle(1)

    try:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), waiting).result(60)  # both wait now
        stopping.call_soon(last_words)
        stopping.run_forever()
        second.settle(2)

        assert [one.result(60) for one in told] == [1, 2]
    finally:
        stopping.close()
        waiting.call_soon_threadsafe(waiting.stop)
        thread.join()
        waiting.close()


def test_a_coroutine_of_a_future_runs_as_a_task() -> None:
    future: APIFuture[int] = APIFuture()
    threading.Timer(0.02, future.settle, [5]).start()

    async def scenario() -> int:
        return await asyncio.create_task(future.coroutine())

    assert asyncio.run(scenario()) == 5


def test_a_future_is_a_standard_future() -> None:
    future: APIFuture[int] = APIFuture()
    future.settle(5)

    done, pending = concurrent.futures.wait([future.future()], timeout=0)

    assert [one.result() for one in done] == [5]
    assert not pending


@pytest.mark.parametrize("method", ["result", "exception"])
def test_waiting_on_the_clients_own_loop_is_refused(method: str) -> None:
    """Nothing would ever be settled: the loop that does it waits."""
    future: APIFuture[int] = APIFuture("sample 7")

    async def on_own_loop() -> int:
        with pytest.raises(
            RuntimeError, match=rf"sample 7: {method}\(\) on tinsmith's own .*await"
        ):
            getattr(future, method)(timeout=1.0)
        background().loop.call_soon(future.settle, 5)
        assert await future == 5
        return future.result()  # it is settled: nothing to wait for

    assert background().start(on_own_loop()).result(20) == 5
