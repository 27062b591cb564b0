"""When waits are told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tinsmith.client.waits import Waits, say


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
def waits(time: Time, caplog: pytest.LogCaptureFixture) -> Waits:
    caplog.set_level("INFO")
    return Waits(time, time.later)


def test_a_wait_is_told_within_ten_seconds_and_every_ten_seconds(
    waits: Waits, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    waits.begin("optim_step of m")
    say("its turn")

    time.pass_s(8)
    assert caplog.messages == []
    time.pass_s(2)
    assert len(caplog.messages) == 1
    assert "optim_step of m: waiting for 9 s" in caplog.messages[0]
    assert caplog.messages[0].endswith("for its turn")
    time.pass_s(60)
    assert len(caplog.messages) >= 7


def test_waits_of_one_name_are_one_line(
    waits: Waits, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(400):
        waits.begin("sample of s")
    waits.begin("get_info")

    time.pass_s(10)

    assert len(caplog.messages) == 2
    assert "400 of them" in caplog.messages[0]


def test_nobody_looks_when_nobody_waits(
    waits: Waits, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    waits.end(waits.begin("get_info"))
    time.pass_s(100)

    assert caplog.messages == []
    assert time.due == []
    waits.begin("get_info")
    time.pass_s(10)
    assert len(caplog.messages) == 1
