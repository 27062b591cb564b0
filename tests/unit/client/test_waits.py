"""When waits are told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tinsmith.client.waits import ANSWERS, FUTURES, Waits, say, saying, unattended


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
    return Waits(FUTURES, clock=time, later=time.later)


@pytest.fixture
def answers(time: Time) -> Waits:
    return Waits(ANSWERS, clock=time, later=time.later)


def test_a_wait_is_told_within_ten_seconds_and_every_ten_seconds(
    waits: Waits, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    waits.begin_here("optim_step of m")
    say("its turn")

    time.pass_s(8)
    assert caplog.messages == []
    time.pass_s(2)
    assert len(caplog.messages) == 1
    assert "optim_step of m: waiting for 9 s" in caplog.messages[0]
    assert caplog.messages[0].endswith("for its turn")
    time.pass_s(60)
    assert len(caplog.messages) >= 7


def test_a_wait_is_a_warning_once_a_minute_also_from_call_to_call(
    waits: Waits, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    """A program without logging sees warnings alone."""
    for _ in range(6):
        step = waits.begin("optim_step of m")
        time.pass_s(15)
        waits.end(step)
    waits.begin("get_info")
    time.pass_s(11)

    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message[:10] for message in warned] == ["optim_step", "optim_step", "get_info: "]
    assert len(caplog.messages) == 7


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


def test_a_missing_answer_is_a_warning_after_ten_seconds_and_then_every_minute(
    answers: Waits, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    answers.begin("get_session")

    time.pass_s(9.5)
    assert caplog.messages == []
    time.pass_s(2)
    assert len(caplog.messages) == 1
    assert "get_session" in caplog.messages[0] and "since" in caplog.messages[0]
    time.pass_s(120)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3


def test_a_quick_answer_is_not_told(
    answers: Waits, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    key = answers.begin("get_session")
    time.pass_s(9)
    answers.end(key)
    time.pass_s(100)

    assert caplog.messages == []
    assert time.due == []


def test_a_wait_that_begins_later_is_told_later(
    answers: Waits, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    first = answers.begin("a")
    time.pass_s(8)
    answers.begin("b")
    answers.end(first)

    time.pass_s(9)
    assert caplog.messages == []
    time.pass_s(2)
    assert [message[0] for message in caplog.messages] == ["b"]


def test_a_reason_for_a_while_gives_way_to_the_one_before_it(
    waits: Waits, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    waits.begin_here("optim_step of m")
    say("its turn")

    with saying("an answer") as is_told:
        time.pass_s(10)
    time.pass_s(10)

    assert is_told
    assert [message.split(", for ")[1] for message in caplog.messages] == ["an answer", "its turn"]


def test_a_wait_that_is_over_or_is_nobody_s_takes_no_reason(waits: Waits) -> None:
    wait = waits.begin_here("optim_step of m")

    with saying("an answer") as is_told_while_it_lasts:
        pass
    is_told_unattended = unattended().run(_is_told)
    waits.end(wait)

    assert is_told_while_it_lasts
    assert not is_told_unattended
    assert not _is_told()


def _is_told() -> bool:
    with saying("an answer") as is_told:
        return is_told


def test_a_reason_belongs_to_the_user_s_wait_and_not_to_the_request_s(
    waits: Waits, answers: Waits, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    waits.begin_here("get_info")
    answers.begin("get_info")
    say("its second try")

    time.pass_s(11)

    assert [message.endswith("its second try") for message in caplog.messages] == [True, False]
