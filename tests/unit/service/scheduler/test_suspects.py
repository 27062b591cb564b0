"""Which commands run alone after the engine was lost, and which one fails."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tinsmith.errors import InternalServerError
from tinsmith.service.ledger.records import RequestId
from tinsmith.service.scheduler.suspects import SUSPECTED_S, EngineWatchdog, Suspects

BAD, GOOD, OTHER = RequestId("m:1"), RequestId("n:1"), RequestId("o:1")


class Ticks:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def lose(suspects: Suspects, *inside: RequestId) -> RequestId | None:
    suspects.clear()
    suspects.enter(inside)
    return suspects.note_loss("it died of SIGSEGV")


def test_the_command_alone_in_the_engine_at_the_third_crash_is_failed() -> None:
    suspects = Suspects()

    blamed = [lose(suspects, BAD, GOOD), lose(suspects, BAD, OTHER), lose(suspects, BAD)]

    assert blamed == [None, None, BAD]
    assert not suspects.are_apart
    suspects.check(GOOD)
    with pytest.raises(InternalServerError, match=r"crashed 3 times while it ran m:1.*SIGSEGV"):
        suspects.check(BAD)


def test_a_suspect_that_completed_is_not_failed() -> None:
    """Its outcome was under way when the engine was lost; a replay must not refuse it then."""
    suspects = Suspects()
    for _ in range(3):
        lose(suspects, BAD)

    suspects.leave([BAD])

    suspects.check(BAD)


def test_a_command_that_did_not_run_alone_is_not_failed() -> None:
    suspects = Suspects()

    blamed = [lose(suspects, BAD, GOOD) for _ in range(5)]

    assert blamed == [None] * 5
    suspects.check(BAD)


def test_a_single_crash_isolates_no_command() -> None:
    suspects = Suspects()

    lose(suspects, BAD, GOOD)

    assert not suspects.are_apart


def test_suspects_run_one_at_a_time_until_all_have_ended() -> None:
    async def test() -> None:
        suspects, entered = Suspects(), list[RequestId]()
        lose(suspects, BAD, GOOD)
        lose(suspects, BAD, GOOD)

        async def enter(request_id: RequestId) -> None:
            await suspects.wait_alone()
            suspects.enter([request_id])
            entered.append(request_id)

        tasks = [asyncio.create_task(enter(one)) for one in (GOOD, BAD, OTHER)]
        await asyncio.sleep(0)
        assert entered == [GOOD]
        suspects.leave([GOOD])
        for _ in range(3):
            await asyncio.sleep(0)
        assert entered == [GOOD, BAD]
        suspects.leave([BAD])  # the last of the suspects: nobody needs to be alone any more
        await asyncio.gather(*tasks)

        assert entered == [GOOD, BAD, OTHER]
        assert not suspects.are_apart

    asyncio.run(test())


def test_isolation_of_a_suspect_ends_after_a_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        suspects = Suspects()
        lose(suspects, BAD, GOOD)
        lose(suspects, BAD, GOOD)
        suspects.enter([GOOD])
        assert suspects.must_wait

        async with asyncio.timeout(60):
            await suspects.wait_alone()

        assert not suspects.are_apart

    monkeypatch.setattr("tinsmith.service.scheduler.suspects.SUSPECTED_S", 0.2)
    asyncio.run(test())


def test_an_old_crash_does_not_count() -> None:
    ticks = Ticks()
    suspects = Suspects(ticks)
    lose(suspects, BAD)
    ticks.now += SUSPECTED_S

    blamed = [lose(suspects, BAD), lose(suspects, BAD)]

    assert blamed == [None, None]
    assert suspects.are_apart
    ticks.now += SUSPECTED_S
    assert not suspects.are_apart


def test_the_time_without_an_engine_does_not_count() -> None:
    """After a long pause, and with a model that takes long to load."""
    ticks = Ticks()
    suspects = Suspects(ticks)
    blamed = []
    for _ in range(3):
        blamed.append(lose(suspects, BAD))
        ticks.now += SUSPECTED_S
        suspects.note_opened()

    assert blamed == [None, None, BAD]


def test_a_call_that_hangs_is_reported_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ticks = Ticks()
    silence = EngineWatchdog(10.0, ticks)
    with caplog.at_level(logging.ERROR), silence.call("training"):
        ticks.now += 5
        with silence.call("sampling"):
            ticks.now += 4
            assert silence.problem() is None
            ticks.now += 1
            told = [silence.problem(), silence.problem()]
            assert silence.longest_s() == 10.0

    assert told == ["the engine has not returned for 10 s from training"] * 2
    assert len(caplog.records) == 1
    assert silence.problem() is None
    assert silence.longest_s() == 0.0


def test_a_limit_of_zero_disables_the_watchdog() -> None:
    ticks = Ticks()
    silence = EngineWatchdog(0.0, ticks)

    with silence.call("training"):
        ticks.now += 1e6

        assert silence.problem() is None
