"""Rules: which requests they strike, and which rules make sense."""

from __future__ import annotations

from typing import Any

import pytest

from tinsmith.errors import ValidationError
from tinsmith.testing.faults import Faults
from tinsmith.testing.received import ReceivedRequest


def a_request(endpoint: str = "asample", number: int = 0) -> ReceivedRequest:
    return ReceivedRequest(
        number=number,
        endpoint=endpoint,
        method="POST",
        path="/",
        query={},
        headers={},
        body_bytes=0,
        connection=0,
        arrived_at=0.0,
    )


def statuses(faults: Faults, count: int, endpoint: str = "asample") -> list[int | None]:
    struck = [faults.of_exchange(a_request(endpoint, number)) for number in range(count)]
    return [None if fault is None else fault.status for fault in struck]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({}, [500, None, None]),
        ({"times": 2}, [500, 500, None]),
        ({"times": None}, [500, 500, 500]),
        ({"nth": 2}, [None, 500, None]),
        ({"when": lambda received: received.number == 2}, [None, None, 500]),
        ({"on": "asample"}, [500, None, None]),
        ({"on": ("optim_step", "asample")}, [500, None, None]),
        ({"on": "optim_step"}, [None, None, None]),
    ],
)
def test_a_rule_applies_to_the_requests_it_selects(
    rule: dict[str, Any], expected: list[int | None]
) -> None:
    faults = Faults()
    faults.add(**rule, status=500)

    assert statuses(faults, 3) == expected


def test_each_rule_counts_its_matches_even_behind_another_rule() -> None:
    faults = Faults()
    first = faults.add(nth=1, status=500)
    second = faults.add(nth=2, status=501)
    third = faults.add(times=2, status=502)

    assert statuses(faults, 5) == [500, 501, 502, 502, None]
    assert [rule.struck for rule in (first, second, third)] == [1, 1, 2]


def test_all_matching_command_rules_are_applied() -> None:
    faults = Faults()
    failing = faults.fail_command(on="optim_step")
    slow = faults.delay_commands(delay_s=1.0)

    assert faults.of_command(a_request("optim_step")) == [failing, slow]
    assert faults.of_command(a_request("optim_step")) == [slow]


def test_clear_removes_rules_and_releases_holds() -> None:
    faults = Faults()
    hold, pause = faults.hold(), faults.pause()

    faults.clear()

    assert hold.is_released
    assert pause.is_released
    assert statuses(faults, 1) == [None]
    assert faults.of_command(a_request()) == []


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"on": "asampel", "status": 500}, "unknown endpoint 'asampel'"),
        ({"nth": 0, "status": 500}, "nth counts from 1"),
        ({}, "must have an effect"),
        ({"status": 500, "reset": True}, "only one outcome"),
        ({"lose_reply": True, "half_reply": True}, "only one outcome"),
    ],
)
def test_a_contradictory_rule_is_rejected(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        Faults().add(**fields)


def test_an_unknown_rule_field_is_rejected() -> None:
    with pytest.raises(TypeError, match="stauts"):
        Faults().add(stauts=500)


@pytest.mark.parametrize(
    ("fields", "does_work"),
    [
        ({"status": 500}, False),
        ({"status": 500, "after_work": True}, True),
        ({"reset": True}, False),
        ({"empty_400": True}, False),
        ({"lose_reply": True}, True),
        ({"half_reply": True}, True),
        ({"delay_s": 1.0}, True),
    ],
)
def test_a_rule_that_affects_only_the_reply_still_does_the_work(
    fields: dict[str, Any], does_work: bool
) -> None:
    assert Faults().add(**fields).does_work is does_work
