"""Who is tried alone after the engine was lost, and who is given up."""

from __future__ import annotations

import asyncio

import pytest

from tinsmith.errors import InternalServerError
from tinsmith.ledger.records import RequestId
from tinsmith.scheduler.suspects import SUSPECTED_S, Suspects

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


def test_who_is_alone_in_the_engine_at_the_third_loss_is_given_up() -> None:
    suspects = Suspects()

    blamed = [lose(suspects, BAD, GOOD), lose(suspects, BAD, OTHER), lose(suspects, BAD)]

    assert blamed == [None, None, BAD]
    assert not suspects.are_apart
    suspects.check(GOOD)
    with pytest.raises(InternalServerError, match=r"lost 3 times while it ran m:1.*SIGSEGV"):
        suspects.check(BAD)


def test_who_ended_well_after_all_is_not_given_up() -> None:
    """Its outcome was under way when the engine was lost; a replay must not refuse it then."""
    suspects = Suspects()
    for _ in range(3):
        lose(suspects, BAD)

    suspects.leave([BAD])

    suspects.check(BAD)


def test_nobody_is_given_up_who_was_not_alone() -> None:
    suspects = Suspects()

    blamed = [lose(suspects, BAD, GOOD) for _ in range(5)]

    assert blamed == [None] * 5
    suspects.check(BAD)


def test_one_loss_makes_nobody_wait() -> None:
    suspects = Suspects()

    lose(suspects, BAD, GOOD)

    assert not suspects.are_apart


def test_suspects_enter_one_after_another_until_all_have_ended() -> None:
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


def test_nobody_waits_for_one_that_takes_longer_than_suspects_are_tried_alone(
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

    monkeypatch.setattr("tinsmith.scheduler.suspects.SUSPECTED_S", 0.2)
    asyncio.run(test())


def test_a_loss_long_ago_says_nothing() -> None:
    ticks = Ticks()
    suspects = Suspects(ticks)
    lose(suspects, BAD)
    ticks.now += SUSPECTED_S

    blamed = [lose(suspects, BAD), lose(suspects, BAD)]

    assert blamed == [None, None]
    assert suspects.are_apart
    ticks.now += SUSPECTED_S
    assert not suspects.are_apart


def test_the_time_for_which_the_engine_was_away_does_not_count() -> None:
    """After a long pause, and with a model that takes long to load."""
    ticks = Ticks()
    suspects = Suspects(ticks)
    blamed = []
    for _ in range(3):
        blamed.append(lose(suspects, BAD))
        ticks.now += SUSPECTED_S
        suspects.note_opened()

    assert blamed == [None, None, BAD]
