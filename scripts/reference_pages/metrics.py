"""The reference of metrics, log fields and spans."""

from __future__ import annotations

from scripts.reference_pages.markdown import code, table
from tinsmith.observe.log_fields import FIELDS
from tinsmith.observe.metrics import ServiceMetrics
from tinsmith.observe.spans import SPANS


def page() -> str:
    """The whole page."""
    metrics = (
        (code(one.name), one.kind, ", ".join(map(code, one.label_names)), one.text)
        for one in ServiceMetrics().registry
    )
    fields = ((code(name), what) for name, what in FIELDS.items())
    spans = ((code(f"tinsmith {name}"), what) for name, what in SPANS.items())
    return f"""\
# Metrics, logs and spans

For operators who build dashboards and alerts: every metric, log field and span of a service.
[Operating a service](../operations.md#metrics) says how to get them.

## Metrics

At `/metrics`, in Prometheus' text format. A label has at most a thousand values; further ones are
counted as `other`.

{table(("metric", "kind", "labels", "meaning"), metrics)}

## Fields of the log

Beside `time`, `level`, `logger` and `message`, if they are known:

{table(("field", "meaning"), fields)}

## Spans

Sent if `otel_endpoint` is set. Attributes are the fields above, prefixed with `tinsmith.`.

{table(("span", "meaning"), spans)}
"""
