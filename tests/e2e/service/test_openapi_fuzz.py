"""Whatever a route's description allows, and what it does not, is answered: never with a 5xx.

Schemathesis makes requests from the service's own OpenAPI document, valid and broken ones, for
every operation that is in it.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core.result import Ok

from tests.e2e.service.served import serving

KEY = {"X-API-Key": "tml-any"}
EXAMPLES = 5
LONG_POLL_S = 0.05
_PATIENT = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service whose polls end soon: nothing that is asked for here is on its way."""
    folder = tmp_path_factory.mktemp("fuzzed")
    with serving(folder, f"--long-poll-s={LONG_POLL_S}") as served:
        yield served.base_url
        assert served.is_ready(), served.log_text()
        assert "Traceback" not in served.log_text()


def document(base_url: str) -> Any:
    """The service's description of itself."""
    with urllib.request.urlopen(f"{base_url}/openapi.json", timeout=30.0) as reply:
        return json.load(reply)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_generated_from_the_openapi_description_causes_a_500(
    base_url: str, mode: GenerationMode
) -> None:
    described = schemathesis.openapi.from_dict(document(base_url))
    asked: set[str] = set()

    for found in described.get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()
        try:
            _ask(operation, mode, base_url)
        except Unsatisfiable:  # it takes nothing that could be wrong
            assert mode is GenerationMode.NEGATIVE
        else:
            asked.add(f"{operation.method.upper()} {operation.path}")

    assert len(asked) > 40, asked


def _ask(operation: Any, mode: GenerationMode, base_url: str) -> None:
    """Make requests to one operation, and look at their answers."""

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=_PATIENT,
    )
    def check(case: Any) -> None:
        reply = case.call(base_url=base_url, headers=KEY, timeout=60)
        assert reply.status_code < 500, (reply.status_code, reply.text, case.as_curl_command())
        if reply.status_code >= 400 and operation.method != "head":
            assert reply.json()["detail"], case.as_curl_command()

    check()


def test_the_openapi_description_is_valid(base_url: str) -> None:
    described = document(base_url)

    assert described["openapi"].startswith("3.")
    assert "/api/v1/forward_backward" in described["paths"]
