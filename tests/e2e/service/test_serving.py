"""`tinsmith serve` as its operator meets it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

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


def test_it_says_where_it_serves_and_ends_well_when_asked(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        assert f"serving on {served.base_url}" in served.log_text()

        assert served.stop() == 0

        assert served.log_text().rstrip().endswith("closed")


def test_operators_see_health_readiness_and_metrics(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        train(served.base_url, 0, 1)

        ready_status, ready = get(served, "/readyz")
        metrics_status, metrics = get(served, "/metrics")

        assert get(served, "/healthz")[0] == ready_status == metrics_status == 200
        assert json.loads(ready)["status"] == "ready"
        assert 'tinsmith_http_requests_total{endpoint="optim_step",status="200"}' in metrics
        assert "tinsmith_ready 1" in metrics


def test_metrics_can_be_switched_off(tmp_path: Path) -> None:
    with serving(tmp_path, "--no-metrics") as served:
        assert get(served, "/metrics")[0] == 404


def test_beyond_loopback_it_wants_a_key(tmp_path: Path) -> None:
    served = Served(tmp_path, "--host", "0.0.0.0")
    served.start(wait=False)

    assert served.wait_end() != 0
    assert "tinsmith key create" in served.log_text()


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with serving(tmp_path / "first") as first:
        second = Served(tmp_path)
        second.port = first.port
        second.start(wait=False)

        assert second.wait_end() != 0
        assert f"cannot listen on 127.0.0.1 port {first.port}" in second.log_text()
