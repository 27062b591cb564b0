"""What the log has of exchanges that fail."""

from __future__ import annotations

import pytest

from tinsmith.errors import LedgerUnavailableError
from tinsmith.service.api.app import TOLD_AGAIN_S, FailureLog

AWAY = LedgerUnavailableError("the database is away")


def test_repeated_identical_failures_are_logged_a_few_times_with_a_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    failures = FailureLog(lambda: now)

    for _ in range(1000):
        failures.tell("optim_step", 503, AWAY)
    failures.tell("asample", 503, AWAY)
    now += TOLD_AGAIN_S
    failures.tell("optim_step", 503, AWAY)
    now += TOLD_AGAIN_S
    failures.tell("optim_step", 503, AWAY)

    assert caplog.messages == [
        "optim_step failed with 503: the database is away",
        "asample failed with 503: the database is away",
        "optim_step failed with 503 (and 999 times before): the database is away",
        "optim_step failed with 503: the database is away",
    ]
