"""Callers on loops of their own: woken together, and let run before the thread that woke them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from tinsmith.client import inbox
from tinsmith.client.futures import APIFuture


def _on_another_loop(work: Callable[[], None]) -> None:
    """Do something on an event loop in another thread, and wait for its end without blocking."""

    async def run() -> None:
        work()

    asyncio.run(run())


def test_callers_have_run_when_they_were_let_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they ask for next is known before the next part of a burst is delivered."""
    monkeypatch.setattr(inbox, "TURN_S", 60.0)
    futures: list[APIFuture[int]] = [APIFuture() for _ in range(8)]
    order: list[str] = []

    def deliver() -> None:
        for part in (futures[:4], futures[4:]):
            for future in part:
                future.settle(1)
            order.append("delivered")
            inbox.let_callers_run()

    async def caller(future: APIFuture[int]) -> None:
        await future
        order.append("asked")

    async def whole() -> None:
        callers = asyncio.gather(*map(caller, futures))
        await asyncio.sleep(0)
        await asyncio.to_thread(_on_another_loop, deliver)
        await callers

    asyncio.run(whole())

    assert order == (["delivered"] + ["asked"] * 4) * 2


def test_a_loop_that_did_not_come_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that computes in its event loop's thread holds up results once, not each time."""
    monkeypatch.setattr(inbox, "TURN_S", 0.2)
    monkeypatch.setattr(inbox, "FIRST_REST_S", 60.0)
    waits_s: list[float] = []

    def deliver(loop: asyncio.AbstractEventLoop) -> None:
        mine = inbox.Inbox(loop)
        for _ in range(2):
            mine.put(loop.create_future())
            mine._is_woken = False  # as if it had come after all
            began = time.monotonic()
            inbox.let_callers_run()
            waits_s.append(time.monotonic() - began)

    loop = asyncio.new_event_loop()  # never run
    thread = threading.Thread(target=_on_another_loop, args=(lambda: deliver(loop),))
    thread.start()
    thread.join()
    loop.close()

    assert waits_s[1] < waits_s[0] / 2


def test_a_thread_does_not_wait_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "TURN_S", 60.0)
    future: APIFuture[int] = APIFuture()

    async def whole() -> int:
        waiting = asyncio.ensure_future(future.result_async())
        await asyncio.sleep(0)
        future.settle(5)
        inbox.let_callers_run()
        return await asyncio.wait_for(waiting, 30.0)

    assert asyncio.run(whole()) == 5
