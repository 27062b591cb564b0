"""Waits that are not silent."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tinsmith.client.slow_calls import SlowCalls


class Time:
    """A clock that calls what is due as it is moved on."""

    def __init__(self) -> None:
        self.now = 100.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def later(self, delay_s: float, fn: Callable[[], None]) -> None:
        self.due.append((self.now + delay_s, fn))

    def pass_s(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := min(self.due, default=None, key=lambda d: d[0])) and due[0] <= end:
            self.due.remove(due)
            self.now = due[0]
            due[1]()
        self.now = end


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def slow(time: Time) -> SlowCalls:
    return SlowCalls(clock=time, later=time.later)


def test_a_long_wait_is_told_after_ten_seconds_and_then_every_minute(
    slow: SlowCalls, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    slow.begin("get_session")

    time.pass_s(9.5)
    assert caplog.messages == []
    time.pass_s(2)
    assert len(caplog.messages) == 1
    assert "get_session" in caplog.messages[0] and "since" in caplog.messages[0]
    time.pass_s(120)
    assert len(caplog.messages) == 3


def test_a_quick_answer_is_not_told(
    slow: SlowCalls, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    key = slow.begin("get_session")
    time.pass_s(9)
    slow.end(key)
    time.pass_s(100)

    assert caplog.messages == []
    assert time.due == []


def test_many_calls_of_one_kind_are_one_line(
    slow: SlowCalls, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(400):
        slow.begin("asample")
    slow.begin("get_info")

    time.pass_s(11)

    assert len(caplog.messages) == 2
    assert "400 of them" in caplog.messages[0]


def test_a_wait_that_begins_later_is_told_later(
    slow: SlowCalls, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    first = slow.begin("a")
    time.pass_s(8)
    slow.begin("b")
    slow.end(first)

    time.pass_s(9)
    assert caplog.messages == []
    time.pass_s(2)
    assert [message[0] for message in caplog.messages] == ["b"]


def test_looking_begins_anew_after_a_quiet_time(
    slow: SlowCalls, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    slow.end(slow.begin("a"))
    time.pass_s(100)
    slow.begin("a")
    time.pass_s(11)

    assert len(caplog.messages) == 1
