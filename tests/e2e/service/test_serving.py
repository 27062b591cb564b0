"""`tinsmith serve` as its operator meets it."""

from __future__ import annotations

import json
import resource
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.service.served import Served, serving
from tests.e2e.service.training_run import train


def get(served: Served, path: str) -> tuple[int, str]:
    """The status and the text of a page."""
    try:
        with urllib.request.urlopen(served.base_url + path, timeout=30.0) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


def test_the_service_logs_its_address_and_stops_cleanly(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        assert f"serving on {served.base_url}" in served.log_text()

        assert served.stop() == 0

        assert served.log_text().rstrip().endswith("stopped")


def test_health_readiness_and_metrics_are_served(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        train(served.base_url, 0, 1)

        ready_status, ready = get(served, "/readyz")
        metrics_status, metrics = get(served, "/metrics")

        assert get(served, "/healthz")[0] == ready_status == metrics_status == 200
        assert json.loads(ready)["status"] == "ready"
        assert 'tinsmith_http_requests_total{endpoint="optim_step",status="200"}' in metrics
        assert "tinsmith_ready 1" in metrics


def test_a_full_disk_makes_the_service_unready_until_space_is_freed(tmp_path: Path) -> None:
    """Nobody sends commands any more then, and it still finds out by itself."""
    with serving(tmp_path) as served:
        train(served.base_url, 0, 1)
        unlimited = resource.RLIM_INFINITY
        resource.prlimit(served.pid, resource.RLIMIT_FSIZE, (0, unlimited))

        refused = urllib.request.Request(
            f"{served.base_url}/api/v1/create_session",
            data=b'{"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}',
            headers={"X-API-Key": "tml-any", "Content-Type": "application/json"},
        )
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(refused, timeout=30.0)
        status, told = wait_status(served, "/readyz", 503)
        resource.prlimit(served.pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))

        assert status == 503
        assert "free disk space" in json.loads(told)["problem"]
        assert wait_status(served, "/readyz", 200)[0] == 200


def wait_status(served: Served, path: str, status: int) -> tuple[int, str]:
    """A page as soon as it has a status, or as it is after a while."""
    deadline = time.monotonic() + 60
    while (page := get(served, path))[0] != status and time.monotonic() < deadline:
        time.sleep(0.05)
    return page


def test_metrics_can_be_switched_off(tmp_path: Path) -> None:
    with serving(tmp_path, "--no-metrics") as served:
        assert get(served, "/metrics")[0] == 404


def test_serving_beyond_loopback_requires_a_key(tmp_path: Path) -> None:
    served = Served(tmp_path, "--host", "0.0.0.0")
    served.start(wait=False)

    assert served.wait_end() != 0
    assert "tinsmith key create" in served.log_text()


def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    with serving(tmp_path / "first") as first:
        second = Served(tmp_path)
        second.port = first.port
        second.start(wait=False)

        assert second.wait_end() != 0
        assert f"cannot listen on 127.0.0.1 port {first.port}" in second.log_text()
