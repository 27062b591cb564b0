"""When waits are told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tinsmith.client.waits import ANSWERS, FUTURES, Wait, WaitReporter, say, saying, unattended


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
def waits(time: Time, caplog: pytest.LogCaptureFixture) -> WaitReporter:
    caplog.set_level("INFO")
    return WaitReporter(FUTURES, clock=time, later=time.later)


@pytest.fixture
def answers(time: Time, caplog: pytest.LogCaptureFixture) -> WaitReporter:
    caplog.set_level("INFO")
    return WaitReporter(ANSWERS, clock=time, later=time.later)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_loop_of_long_steps_causes_no_warning(
    waits: WaitReporter, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps of 40 s are normal work, the first as much as the others."""
    for _ in range(20):
        for call in ("forward_backward of m", "optim_step of m"):
            step = waits.begin(call)
            time.pass_s(40)
            waits.end(step)

    assert warnings(caplog) == []


def test_a_call_far_slower_than_others_of_its_kind_is_logged_as_one_warning(
    waits: WaitReporter, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        step = waits.begin("optim_step of m")
        time.pass_s(4)
        waits.end(step)
    waits.begin_here("optim_step of m")
    say("queued behind 3 calls")

    time.pass_s(19)
    assert warnings(caplog) == []
    time.pass_s(1000)
    expected = "optim_step of m: still running after 20 s, usually 4 s (queued behind 3 calls)"
    assert warnings(caplog) == [expected]


def test_a_quick_call_behind_a_long_one_causes_no_warning(
    waits: WaitReporter, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    """As a save behind a training step, which is sent with it and waits for it."""

    def step(length_s: float) -> None:
        passing = waits.begin("forward_backward of m")
        saving = waits.begin("save_weights_for_sampler of m")
        time.pass_s(length_s)
        waits.end(passing)
        waits.end(saving)

    for _ in range(3):
        waits.end(waits.begin("save_weights_for_sampler of m"))
    step(20)  # of the long one nothing is known yet
    step(20)
    step(20)
    step(60)

    assert warnings(caplog) == []


def test_many_slow_calls_cause_one_warning_until_one_is_normal_again(
    waits: WaitReporter, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    def calls(*lengths_s: float) -> None:
        for length_s in lengths_s:
            call = waits.begin("sample of s")
            time.pass_s(length_s)
            waits.end(call)

    calls(3, 3, 3)
    calls(30, 30, 30, 30)
    assert len(warnings(caplog)) == 1
    calls(3)
    calls(30)
    assert len(warnings(caplog)) == 2


def test_normal_calls_beside_one_slow_call_cause_no_further_warning(
    waits: WaitReporter, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    """Of thousands of samples under way some always end in time."""
    stuck = waits.begin("sample of s")
    stuck.is_stalled = True
    for _ in range(60):
        sample = waits.begin("sample of s")
        time.pass_s(2)
        waits.end(sample)

    assert len(warnings(caplog)) == 1


def test_the_first_call_of_its_kind_causes_a_warning_after_a_minute(
    waits: WaitReporter, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    waits.begin("create_lora_training_client")

    time.pass_s(59)
    assert warnings(caplog) == []
    time.pass_s(2)
    assert len(warnings(caplog)) == 1


def test_a_pause_causes_a_warning_after_ten_seconds(
    waits: WaitReporter, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    waits.begin_here("sample of s")
    say("paused by the service: 429", is_stalled=True)

    time.pass_s(30)

    assert warnings(caplog) == ["sample of s: still running after 9 s (paused by the service: 429)"]


def test_waits_reported_by_sources_have_a_normal_duration_too(
    waits: WaitReporter, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    current: list[Wait] = []
    waits.sources.add(lambda: current)
    waits.look_on()
    for _ in range(10):
        current[:] = [Wait("sample of s", time.now)]
        waits.look_on()
        time.pass_s(20)
        current.clear()
        time.pass_s(2)

    assert warnings(caplog) == []
    assert any("usually" in message for message in caplog.messages)


def test_a_long_wait_is_logged_at_info_level_every_ten_seconds(
    waits: WaitReporter, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    waits.begin_here("optim_step of m")
    say("its turn")

    time.pass_s(8)
    assert caplog.messages == []
    time.pass_s(2)
    assert len(caplog.messages) == 1
    assert caplog.messages[0] == "optim_step of m: still running after 9 s (its turn)"
    time.pass_s(60)
    assert len(caplog.messages) >= 7


def test_waits_of_one_name_share_one_log_line(
    waits: WaitReporter, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(400):
        waits.begin("sample of s")
    waits.begin("get_info")

    time.pass_s(10)

    assert len(caplog.messages) == 2
    assert "400 of them" in caplog.messages[0]


def test_nothing_is_checked_while_nothing_waits(
    waits: WaitReporter, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    waits.end(waits.begin("get_info"))
    time.pass_s(100)

    assert caplog.messages == []
    assert time.due == []
    waits.begin("get_info")
    time.pass_s(10)
    assert len(caplog.messages) == 1


def test_a_missing_reply_is_a_warning_after_ten_seconds_then_every_minute(
    answers: WaitReporter, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    answers.begin("get_session")

    time.pass_s(9.5)
    assert caplog.messages == []
    time.pass_s(2)
    assert len(caplog.messages) == 1
    assert caplog.messages[0] == "get_session: no answer from the service after 10 s"
    time.pass_s(120)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO"]


def test_a_quick_reply_is_not_logged(
    answers: WaitReporter, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    key = answers.begin("get_session")
    time.pass_s(9)
    answers.end(key)
    time.pass_s(100)

    assert caplog.messages == []
    assert time.due == []


def test_a_wait_that_begins_later_is_logged_later(
    answers: WaitReporter, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    first = answers.begin("a")
    time.pass_s(8)
    answers.begin("b")
    answers.end(first)

    time.pass_s(9)
    assert caplog.messages == []
    time.pass_s(2)
    assert [message[0] for message in caplog.messages] == ["b"]


def test_a_temporary_reason_is_replaced_by_the_previous_one(
    waits: WaitReporter, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    waits.begin_here("optim_step of m")
    say("its turn")

    with saying("an answer") as is_told:
        time.pass_s(10)
    time.pass_s(10)

    assert is_told
    assert [message.split(" (")[1] for message in caplog.messages] == ["an answer)", "its turn)"]


def test_a_finished_or_unattended_wait_accepts_no_reason(waits: WaitReporter) -> None:
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
    waits: WaitReporter, answers: WaitReporter, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    waits.begin_here("get_info")
    answers.begin("get_info")
    say("its second try")

    time.pass_s(11)

    assert [message.endswith("(its second try)") for message in caplog.messages] == [True, False]
