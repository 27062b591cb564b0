"""When a call of the engine is told of as a problem."""

from __future__ import annotations

import logging

import pytest

from tinsmith.scheduler.silence import Silence


class Ticks:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_call_that_does_not_come_back_is_told_of_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ticks = Ticks()
    silence = Silence(10.0, ticks)
    with caplog.at_level(logging.ERROR), silence.call("training"):
        ticks.now += 5
        with silence.call("sampling"):
            ticks.now += 4
            assert silence.problem() is None
            ticks.now += 1
            told = [silence.problem(), silence.problem()]
            assert silence.longest_s() == 10.0

    assert told == ["the engine has not come back for 10 s from training"] * 2
    assert len(caplog.records) == 1
    assert silence.problem() is None
    assert silence.longest_s() == 0.0


def test_any_time_may_be_allowed() -> None:
    ticks = Ticks()
    silence = Silence(0.0, ticks)

    with silence.call("training"):
        ticks.now += 1e6

        assert silence.problem() is None
