"""Spans for OpenTelemetry, where it is installed and an endpoint is set; nothing otherwise.

`Spans` is made once for a service and handed to its parts. Without a tracer its `span` costs one
look and does nothing. Names are those of `SPANS`, attributes are `tinsmith.` and a field of
`log_fields.py`; docs/reference/metrics.md lists them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from tinsmith.observe.log_fields import FIELDS

SPANS = {
    "http": "one HTTP exchange; it continues the trace of its `traceparent` header",
    "batch": "one training batch in the engine",
    "snapshot": "the engine writes a model's state",
}
"""Every span and what it is."""

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class OpenTelemetryMissingError(ImportError):
    """Spans were asked for, and the library that sends them is not installed."""


class Spans:
    """Where spans go.

    Args:
        tracer: An OpenTelemetry tracer; None for nowhere.
        shutdown: Sends what is left, and ends.
    """

    def __init__(self, tracer: Any = None, shutdown: Callable[[], None] | None = None) -> None:
        self._tracer = tracer
        self._shutdown = shutdown

    @property
    def is_on(self) -> bool:
        """Whether spans go anywhere."""
        return self._tracer is not None

    def span(
        self, name: str, *, carrier: Mapping[str, str] | None = None, **fields: Any
    ) -> AbstractContextManager[None]:
        """A span around what happens inside; what is raised there marks it as failed.

        Args:
            name: One of `SPANS`.
            carrier: Headers that may name the trace to go on with, in lower case.
            fields: Attributes, by names of `log_fields.FIELDS`; a None is left out.
        """
        if self._tracer is None:
            return _NOTHING
        return self._made(name, carrier, fields)

    @contextlib.contextmanager
    def _made(
        self, name: str, carrier: Mapping[str, str] | None, fields: Mapping[str, Any]
    ) -> Iterator[None]:
        assert name in SPANS and fields.keys() <= FIELDS.keys(), "names are in one place"
        from opentelemetry import propagate, trace

        context = None if carrier is None else propagate.extract(dict(carrier))
        attributes = {
            f"tinsmith.{field}": value for field, value in fields.items() if value is not None
        }
        with self._tracer.start_as_current_span(
            f"tinsmith {name}",
            context=context,
            attributes=attributes,
            record_exception=False,  # its message may hold what a user sent
            set_status_on_exception=False,
        ) as span:
            try:
                yield
            except Exception as exc:
                span.set_attribute("tinsmith.error", type(exc).__name__)
                span.set_status(trace.Status(trace.StatusCode.ERROR))
                raise

    def tell(self, **fields: Any) -> None:
        """Add attributes to the span that is open here, if one is."""
        if self._tracer is None:
            return
        from opentelemetry import trace

        span = trace.get_current_span()
        for field, value in fields.items():
            if value is not None:
                span.set_attribute(f"tinsmith.{field}", value)

    def close(self) -> None:
        """Send what is left. May be called again."""
        shutdown, self._shutdown = self._shutdown, None
        if shutdown is not None:
            shutdown()


def open_spans(endpoint: str | None) -> Spans:
    """Spans that go to an OTLP endpoint over HTTP; nowhere if there is none.

    Raises:
        OpenTelemetryMissingError: There is an endpoint, and the library is not installed.
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
            f"otel_endpoint is set, and {exc.name} is not installed; "
            "pip install 'tinsmith[otel]', or leave the setting out"
        ) from exc
    provider = TracerProvider(resource=Resource.create({"service.name": "tinsmith"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Spans(provider.get_tracer("tinsmith"), provider.shutdown)
