"""What a web page can read of a service on the machine of whoever looks at it: nothing."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.service.served import Served, serving
from tinsmith.cli.main import main

PATHS = ["/metrics", "/readyz", "/api/v1/training_runs"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served")) as running:
        yield running


def status(served: Served, path: str, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request("GET", path, headers=headers)
    reply = connection.getresponse()
    reply.read()
    connection.close()
    return reply.status


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example:8000"}, {"Origin": "https://evil.example"}], ids=str
)
def test_a_web_page_cannot_read_a_service_without_keys(
    served: Served, path: str, headers: dict[str, str]
) -> None:
    assert status(served, path, headers) == 403


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1"])
def test_local_programs_can_read_everything(served: Served, path: str, host: str) -> None:
    assert status(served, path, {"Host": host}) == 200


def test_a_service_with_keys_can_be_monitored_under_any_host_name(tmp_path: Path) -> None:
    assert main(["key", "create", "--data", str(tmp_path / "data")]) == 0
    with serving(tmp_path) as served:
        assert status(served, "/metrics", {"Host": "tinsmith.example"}) == 200
        assert status(served, "/readyz", {"Host": "tinsmith.example"}) == 200
