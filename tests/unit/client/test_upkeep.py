"""Flags that change while a client runs."""

from __future__ import annotations

import asyncio

import pytest

from tinsmith.client.upkeep import keep_fresh
from tinsmith.errors import APIResponseValidationError, InternalServerError
from tinsmith.types import ClientDynamicConfigResponse as Flags

FAILURES = [InternalServerError("down"), APIResponseValidationError(message="not flags")]


class ScriptEndError(Exception):
    """The script is over."""


def run(first: Flags, answers: list[Flags | Exception]) -> tuple[list[float], list[Flags]]:
    """The periods that were waited, and the flags that were taken."""
    periods: list[float] = []
    taken: list[Flags] = []
    script = iter(answers)

    async def sleep(delay_s: float) -> None:
        periods.append(delay_s)

    async def fetch() -> Flags:
        answer = next(script, None)
        if answer is None:
            raise ScriptEndError
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(ScriptEndError):
        asyncio.run(keep_fresh(first, fetch, taken.append, sleep=sleep))
    return periods, taken


def test_the_flags_set_their_refresh_interval() -> None:
    faster = Flags(refresh_interval_sec=30)

    periods, taken = run(Flags(), [faster])

    assert periods == [300, 30]
    assert taken == [faster]


@pytest.mark.parametrize(
    ("asked", "waited"), [(0, 10.0), (-5, 10.0), (10, 10.0), (11, 11), (10**30, 86400.0)]
)
def test_the_refresh_interval_stays_within_its_limits(asked: int, waited: float) -> None:
    periods, _ = run(Flags(refresh_interval_sec=asked), [])

    assert periods == [waited]


@pytest.mark.parametrize("failure", FAILURES)
def test_after_a_failure_the_last_flags_are_kept(failure: Exception) -> None:
    first = Flags(refresh_interval_sec=20)
    later = Flags(refresh_interval_sec=40, sample_cancel_enabled=True)

    periods, taken = run(first, [failure, failure, later])

    assert periods == [20, 20, 20, 40]
    assert taken == [later]
