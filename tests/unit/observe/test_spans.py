from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.unit.observe.collector import Collector, collecting, spans_of
from tinsmith.observe.spans import SPANS, OpenTelemetryMissingError, Spans, open_spans

TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_without_an_endpoint_nothing_happens() -> None:
    spans = open_spans(None)

    with spans.span("http", tenant="a"):
        pass
    spans.close()

    assert not spans.is_on


def test_an_endpoint_without_the_opentelemetry_library_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)

    with pytest.raises(OpenTelemetryMissingError, match=r"pip install 'tinsmith\[otel\]'"):
        open_spans("http://127.0.0.1:9/v1/traces")


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed here")
    with collecting() as server:
        yield server


def test_spans_reach_a_collector_with_their_fields_and_their_trace(collector: Collector) -> None:
    spans = open_spans(collector.endpoint)
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "x-api-key": "tml-secret-key"}

    around = spans.span("http", carrier=headers, endpoint="asample", tenant="a", model=None)
    with around, spans.span("batch", kind="sample", tokens=12):
        pass
    spans.close()

    outer, inner = spans_of(collector)
    assert [outer.name, inner.name] == ["tinsmith http", "tinsmith batch"]
    assert {outer.trace_id.hex(), inner.trace_id.hex()} == {TRACE}
    assert inner.parent_span_id == outer.span_id
    attributes = {pair.key: pair.value.string_value for pair in outer.attributes}
    assert attributes == {"tinsmith.endpoint": "asample", "tinsmith.tenant": "a"}
    assert b"secret" not in b"".join(collector.bodies)


def test_a_failure_marks_its_span_without_recording_the_message(collector: Collector) -> None:
    spans = open_spans(collector.endpoint)

    with pytest.raises(ValueError, match="private"), spans.span("snapshot", model="m"):
        raise ValueError("private words")
    spans.close()

    [span] = spans_of(collector)
    assert span.status.code == 2
    assert {pair.key: pair.value.string_value for pair in span.attributes} == {
        "tinsmith.model": "m",
        "tinsmith.error": "ValueError",
    }
    assert b"private" not in b"".join(collector.bodies)


def test_an_unlisted_span_name_raises() -> None:
    spans = Spans(tracer=object())

    with pytest.raises(AssertionError), spans.span("holiday"):
        pass
    assert "holiday" not in SPANS
