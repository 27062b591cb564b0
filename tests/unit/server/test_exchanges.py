"""What the log has of exchanges that fail."""

from __future__ import annotations

import pytest

from tinsmith.errors import LedgerUnavailableError
from tinsmith.server.exchanges import TOLD_AGAIN_S, Failures

AWAY = LedgerUnavailableError("the database is away")


def test_of_many_failures_that_are_alike_a_few_are_told_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    failures = Failures(lambda: now)

    for _ in range(1000):
        failures.tell("optim_step", 503, AWAY)
    failures.tell("asample", 503, AWAY)
    now += TOLD_AGAIN_S
    failures.tell("optim_step", 503, AWAY)
    now += TOLD_AGAIN_S
    failures.tell("optim_step", 503, AWAY)

    assert caplog.messages == [
        "optim_step is answered 503: the database is away",
        "asample is answered 503: the database is away",
        "optim_step is answered 503 (and 999 times before): the database is away",
        "optim_step is answered 503: the database is away",
    ]
