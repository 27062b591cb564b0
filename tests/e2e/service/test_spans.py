"""Spans of a running service, as a collector gets them. Runs where OpenTelemetry is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.service.served import serving
from tests.e2e.service.training_run import train
from tests.unit.observe.collector import Collector, collecting, spans_of

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed here")


def test_spans_of_requests_and_batches_reach_the_collector(tmp_path: Path) -> None:
    with collecting() as collector:
        with serving(tmp_path, "--otel-endpoint", collector.endpoint) as served:
            train(served.base_url, 0, 1)
            assert served.stop() == 0  # which sends what is left

        found = told(collector)
        requests = [fields for name, fields in found if name == "tinsmith http"]
        endpoints = {fields["tinsmith.endpoint"] for fields in requests}
        assert {"forward_backward", "optim_step", "retrieve_future"} <= endpoints
        batches = [fields for name, fields in found if name == "tinsmith batch"]
        assert {fields["tinsmith.kind"] for fields in batches} == {"training"}


def test_an_unreachable_collector_does_not_delay_the_service(tmp_path: Path) -> None:
    with serving(tmp_path, "--otel-endpoint", "http://127.0.0.1:9/v1/traces") as served:
        train(served.base_url, 0, 1)

        assert served.stop() == 0


def told(collector: Collector) -> list[tuple[str, dict[str, str]]]:
    """Names and text attributes of the spans that arrived."""
    return [
        (span.name, {pair.key: pair.value.string_value for pair in span.attributes})
        for span in spans_of(collector)
    ]
