"""The measurement itself: it finds calls that are missing, wrong, hanging or outdated."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import tinsmith
from tests.compatibility import driver, known, page
from tests.compatibility.caller import Caller
from tests.compatibility.measure import failures
from tests.compatibility.outcomes import Outcome, Run
from tests.compatibility.sdks import refuse_unless_pinned
from tests.compatibility.stage import Stage
from tests.compatibility.surface import faces, public_methods
from tests.compatibility.targets import faults


@pytest.fixture
def stage() -> Stage:
    return Stage(tinsmith, "http://127.0.0.1:9", "tml-test", "a test")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A table of calls for a test to fill."""
    table: dict[str, Any] = {}
    monkeypatch.setattr(driver, "CALLS", table)
    return table


def test_public_methods_are_found_with_their_async_variants() -> None:
    methods = public_methods(tinsmith)

    assert {"TrainingClient.forward", "TrainingClient.forward_async"} <= methods
    assert "auth.get_tinker_token" in methods
    assert "ModelInput.from_ints" in methods
    assert "APIFuture.set_result" not in methods  # the standard library's
    assert faces(methods)["TrainingClient.forward"] == [
        "TrainingClient.forward",
        "TrainingClient.forward_async",
    ]


@pytest.mark.usefixtures("calls")
def test_a_method_without_a_call_is_a_failure(stage: Stage) -> None:
    assert driver.attempt(stage, "RestClient.brand_new", "brand_new") == driver.NOT_COVERED


def test_a_call_that_never_calls_its_method_is_a_failure(
    stage: Stage, calls: dict[str, Any]
) -> None:
    calls["RestClient.whoami"] = lambda _stage, _call: None

    assert "never calls it" in str(driver.attempt(stage, "RestClient.whoami", "whoami"))


def test_an_error_is_reported_with_its_source_line(stage: Stage, calls: dict[str, Any]) -> None:
    def fails(stage: Stage, _call: Caller) -> None:
        assert stage.title == "another", "why"

    calls["RestClient.whoami"] = fails

    error = driver.attempt(stage, "RestClient.whoami", "whoami")

    assert error is not None
    assert error.startswith("AssertionError: why")
    assert 'at assert stage.title == "another"' in error


def test_a_hanging_call_is_abandoned(
    stage: Stage, calls: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "CALL_TIMEOUT_S", 0.01)
    released = threading.Event()
    calls["RestClient.whoami"] = lambda _stage, _call: released.wait()

    error = driver.attempt(stage, "RestClient.whoami", "whoami")
    released.set()

    assert error == "not done within 0.01 s"


def a_run(*outcomes: Outcome, end: str | None = None) -> Run:
    return Run("0.36.0", list(outcomes), end)


def test_only_unexplained_errors_are_failures() -> None:
    explained = known.KNOWN[0].name
    method = f"RestClient.{explained.removesuffix('_async')}"
    done = a_run(
        Outcome("RestClient.whoami", "whoami", None),
        Outcome("RestClient.whoami", "whoami_async", "ValueError: why"),
        Outcome(method, explained, "AssertionError"),
        end="ended with code 3",
    )

    assert failures([done]) == [
        "0.36.0: ended with code 3",
        "0.36.0: RestClient.whoami_async: ValueError: why",
    ]


def test_a_reason_that_no_longer_holds_is_a_failure() -> None:
    explained = known.KNOWN[0].name
    done = a_run(Outcome(f"RestClient.{explained.removesuffix('_async')}", explained, None))

    (found,) = failures([done])

    assert "still listed" in found


def test_the_page_shows_blocking_and_async_methods() -> None:
    both = [Outcome("RestClient.whoami", name, None) for name in ("whoami", "whoami_async")]
    shown = page.rendered(
        [
            Run("a", both, None),
            Run("b", both[:1], None),
            Run("c", [Outcome("RestClient.whoami", "whoami", "ValueError")], None),
            Run("d", [], None),
        ]
    )

    assert "| `whoami` | ✓✓ | ✓– | ✗– | – |\n" in shown


def test_errors_of_the_service_are_seen_even_if_clients_retry() -> None:
    start = "WARNING tinsmith.access: GET /api/v1/healthz  endpoint=healthz status=503 tenant="
    refused = "WARNING tinsmith.access: POST /api/v1/asample  endpoint=asample status=429 tenant="
    failed = "WARNING tinsmith.access: POST /api/v1/asample  endpoint=asample status=500 tenant="
    error = "2026-01-02 ERROR   tinsmith.service.scheduler.scheduler: why"

    assert faults("\n".join([start, refused, failed, error])) == [failed, error]


def test_a_wheel_other_than_the_pinned_one_is_rejected(tmp_path: Path) -> None:
    wheel = tmp_path / "tinker.whl"
    wheel.write_bytes(b"something else")

    with pytest.raises(RuntimeError, match="was pinned"):
        refuse_unless_pinned(wheel, "0" * 64)
