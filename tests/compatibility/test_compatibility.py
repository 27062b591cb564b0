"""Every public method of every SDK works against a running service, and the page says so."""

from __future__ import annotations

import pytest

from tests.compatibility import page
from tests.compatibility.measure import CLIENTS, failures, measure
from tests.compatibility.outcomes import Run
from tests.compatibility.sdks import NEWEST
from tests.compatibility.targets import for_tests


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return measure(CLIENTS)


def test_every_call_of_every_sdk_succeeds_or_is_explained(runs: list[Run]) -> None:
    assert failures(runs) == []


def test_every_method_of_every_sdk_was_called(runs: list[Run]) -> None:
    """A driver that stops early must not look like one that found no fault."""
    assert [run.title for run in runs] == [client.title for client in CLIENTS]
    assert min(len(run.outcomes) for run in runs) >= 70
    newest = next(run for run in runs if run.title == "0.36.0")
    assert len(newest.outcomes) >= 130


def test_the_compatibility_page_matches_the_measurements(runs: list[Run]) -> None:
    assert page.is_current(page.rendered(runs)), "run scripts/compatibility --write"


def test_the_testing_service_works_with_the_oldest_and_the_newest_sdk() -> None:
    clients = [client for client in CLIENTS if client.title in ("0.3.0", NEWEST, "tinsmith")]

    runs = measure(clients, for_tests)

    assert len(runs) == 3
    # Its engine is the fake one, which runs no uploaded losses.
    assert [one for one in failures(runs) if "built-in losses only" not in one] == []
