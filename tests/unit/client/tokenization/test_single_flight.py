from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tinsmith.client.tokenization.single_flight import SingleFlightCache

THREADS = 32
TIMEOUT_S = 60


class Crowd:
    """32 threads that ask for one key, and a maker that waits until all of them have come."""

    def __init__(self, error: Exception | None = None) -> None:
        self.made = 0
        self._error = error
        self._arrived = threading.Semaphore(0)

    def ask(self, cache: SingleFlightCache[str, str]) -> list[Future[str]]:
        with ThreadPoolExecutor(THREADS) as pool:
            return [pool.submit(self._ask, cache) for _ in range(THREADS)]

    def _ask(self, cache: SingleFlightCache[str, str]) -> str:
        self._arrived.release()
        return cache.get("key", self._make)

    def _make(self) -> str:
        self.made += 1
        for _ in range(THREADS):
            self._arrived.acquire(timeout=TIMEOUT_S)
        threading.Event().wait(0.1)  # for the step from having arrived to waiting
        if self._error is not None:
            raise self._error
        return "made"


def test_s35_32_threads_on_first_use_make_one_value() -> None:
    cache: SingleFlightCache[str, str] = SingleFlightCache(4)
    crowd = Crowd()

    results = crowd.ask(cache)

    assert [result.result() for result in results] == ["made"] * THREADS
    assert crowd.made == 1


def test_s35_a_failure_reaches_all_who_wait_and_is_not_kept() -> None:
    cache: SingleFlightCache[str, str] = SingleFlightCache(4)
    error = OSError("no such tokenizer")
    crowd = Crowd(error)

    results = crowd.ask(cache)

    assert [result.exception() for result in results] == [error] * THREADS
    assert crowd.made == 1
    assert cache.get("key", lambda: "better") == "better"


def test_s35_different_keys_are_made_in_parallel() -> None:
    """Each of two makers waits for the other to have begun."""
    cache: SingleFlightCache[str, str] = SingleFlightCache(4)
    both = threading.Barrier(2)

    def make() -> str:
        both.wait(TIMEOUT_S)
        return "made"

    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(cache.get, key, make) for key in ("a", "b")]

    assert [result.result() for result in results] == ["made", "made"]


def test_an_interrupted_maker_leaves_the_work_to_one_who_waits() -> None:
    cache: SingleFlightCache[str, str] = SingleFlightCache(4)
    begun = threading.Event()
    interrupt = threading.Event()

    def interrupted() -> str:
        begun.set()
        interrupt.wait(TIMEOUT_S)
        raise KeyboardInterrupt

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, "key", interrupted)
        begun.wait(TIMEOUT_S)
        second = pool.submit(cache.get, "key", lambda: "made")
        interrupt.set()

        assert second.result(TIMEOUT_S) == "made"
        assert isinstance(first.exception(), KeyboardInterrupt)


def test_a_flight_of_another_process_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a child forked in the middle of its parent's load finds it."""
    cache: SingleFlightCache[str, str] = SingleFlightCache(4)
    parent = os.getpid()
    in_child: list[str] = []

    def make_in_parent() -> str:
        with monkeypatch.context() as forked:
            forked.setattr(os, "getpid", lambda: parent + 1)
            in_child.append(cache.get("key", lambda: "the child's"))
        return "the parent's"

    assert cache.get("key", make_in_parent) == "the parent's"
    assert in_child == ["the child's"]


def test_the_oldest_values_are_let_go() -> None:
    cache: SingleFlightCache[int, int] = SingleFlightCache(2)
    for number in range(5):
        cache.get(number, lambda number=number: number)  # type: ignore[misc]

    assert len(cache) == 2
    assert cache.get(4, lambda: -1) == 4
    assert cache.get(0, lambda: -1) == -1
