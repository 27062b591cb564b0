"""OpenTelemetry spans, if an endpoint is configured.

A service creates one `Spans` and passes it to its components. Without a tracer, `span` does
nothing. `SPANS` defines the names; attributes are `tinsmith.` and a field of `log_fields.py`.
docs/reference/metrics.md lists both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from tinsmith.observe.log_fields import FIELDS

SPANS = {
    "http": "one HTTP request; it continues the trace of its `traceparent` header",
    "batch": "one training batch in the engine",
    "snapshot": "the engine saves a model's state",
}
"""All spans and their meaning."""

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class OpenTelemetryMissingError(ImportError):
    """Spans are configured, but OpenTelemetry is not installed."""


class Spans:
    """Creates spans.

    Args:
        tracer: An OpenTelemetry tracer; None to create no spans.
        shutdown: Sends the remaining spans and stops the exporter.
    """

    def __init__(self, tracer: Any = None, shutdown: Callable[[], None] | None = None) -> None:
        self._tracer = tracer
        self._shutdown = shutdown

    @property
    def is_on(self) -> bool:
        """Whether spans are created."""
        return self._tracer is not None

    def span(
        self, name: str, *, carrier: Mapping[str, str] | None = None, **fields: Any
    ) -> AbstractContextManager[None]:
        """A span around a block; an exception marks it as failed.

        Args:
            name: One of `SPANS`.
            carrier: Headers, with lower-case names, that may name the trace to continue.
            fields: Attributes by their name in `log_fields.FIELDS`; None is ignored.
        """
        if self._tracer is None:
            return _NOTHING
        return self._made(name, carrier, fields)

    @contextlib.contextmanager
    def _made(
        self, name: str, carrier: Mapping[str, str] | None, fields: Mapping[str, Any]
    ) -> Iterator[None]:
        assert name in SPANS and fields.keys() <= FIELDS.keys(), "unknown span or field"
        from opentelemetry import propagate, trace

        context = None if carrier is None else propagate.extract(dict(carrier))
        attributes = {
            f"tinsmith.{field}": value for field, value in fields.items() if value is not None
        }
        with self._tracer.start_as_current_span(
            f"tinsmith {name}",
            context=context,
            attributes=attributes,
            record_exception=False,  # its message may contain user data
            set_status_on_exception=False,
        ) as span:
            try:
                yield
            except Exception as exc:
                span.set_attribute("tinsmith.error", type(exc).__name__)
                span.set_status(trace.Status(trace.StatusCode.ERROR))
                raise

    def tell(self, **fields: Any) -> None:
        """Add attributes to the current span, if there is one."""
        if self._tracer is None:
            return
        from opentelemetry import trace

        span = trace.get_current_span()
        for field, value in fields.items():
            if value is not None:
                span.set_attribute(f"tinsmith.{field}", value)

    def close(self) -> None:
        """Send the remaining spans. May be called repeatedly."""
        shutdown, self._shutdown = self._shutdown, None
        if shutdown is not None:
            shutdown()


def open_spans(endpoint: str | None) -> Spans:
    """Create spans and send them to an OTLP endpoint over HTTP; None for no spans.

    Raises:
        OpenTelemetryMissingError: There is an endpoint, but OpenTelemetry is not installed.
    """
    if endpoint is None:
        return Spans()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as exc:
        raise OpenTelemetryMissingError(
            f"otel_endpoint is set, but {exc.name} is not installed; "
            "run `pip install 'tinsmith[otel]'`, or remove the setting"
        ) from exc
    provider = TracerProvider(resource=Resource.create({"service.name": "tinsmith"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Spans(provider.get_tracer("tinsmith"), provider.shutdown)
