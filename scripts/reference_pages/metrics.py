"""The page of what a service tells of itself: metrics, fields of logs, spans."""

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

What a service tells of itself; [serving](../serving.md#metrics) says where and to whom.

## Metrics

At `/metrics`, in Prometheus' text format. A label that would take more than a thousand values is
counted under `other` from there on.

{table(("metric", "kind", "labels", "what it is"), metrics)}

## Fields of the log

Beside `time`, `level`, `logger` and `message`, where they are known:

{table(("field", "what it is"), fields)}

## Spans

With `otel_endpoint`. Their attributes are the fields above with `tinsmith.` before them.

{table(("span", "what it is"), spans)}
"""
