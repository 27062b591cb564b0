"""The reference of routes, from the table of endpoints that the server uses."""

from __future__ import annotations

from scripts.reference_pages.markdown import code, paragraphs, table
from tinsmith.service.api.routes import Routes, collect
from tinsmith.wire.endpoint_types import Answer, Endpoint, Format, Pool
from tinsmith.wire.endpoints import FUTURE_RESULTS

GROUPS = {
    "Sessions and samplers": "session",
    "Training": "train",
    "Sampling": "sample",
    "Results": "retrieve",
    "Management": "management",
    "The service itself": "rest",
    "Extensions": "extension",
}
HEAD = ("route", "takes", "gives", "what it does")
INTRODUCTION = """\
# Routes

For programmers of clients and proxies: every route of a service.

```sh
curl -H "X-API-Key: $TINKER_API_KEY" "$TINKER_BASE_URL/api/v1/get_server_capabilities"
```

A running service has the fields of each route at `/docs`, and for programs at `/openapi.json`.
Health checks are described in [operating a service](../operations.md#health).

- Routes need a key in the header `X-API-Key`, except those marked *open*.
- Bodies are JSON. *Protobuf* marks bodies that can also be sent in that format.
- *A future of X* is a request id, for which `retrieve_future` returns an X.
- A refusal is a status with `{"detail": "why"}`; see [errors](errors.md#statuses).
- *Until 0.25* marks routes that later releases of the official SDK do not call; see
  [compatibility](../compatibility.md).
- *Operators* marks routes that need the key of an [operator](../serving.md#replicas). To all other
  keys they do not exist.
- [Extensions](../extensions.md) are tinsmith's own.
"""


def page() -> str:
    """The whole page."""
    routes = collect()
    parts = [INTRODUCTION.rstrip()]
    shown = 0
    for title, group in GROUPS.items():
        found = [endpoint for endpoint in routes.endpoints if _group(endpoint) == group]
        parts += [f"## {title}", table(HEAD, (_row(endpoint, routes) for endpoint in found))]
        shown += len(found)
    assert shown == len(routes.endpoints), "a route has no group"
    return "\n\n".join(parts) + "\n"


def _group(endpoint: Endpoint) -> str:
    if endpoint.is_extension:
        return "extension"
    if endpoint.is_management:
        return "management"
    return "rest" if endpoint.pool in (Pool.REST, Pool.TELEMETRY) else endpoint.pool.value


def _row(endpoint: Endpoint, routes: Routes) -> tuple[str, ...]:
    notes = [] if endpoint.until is None else [f"*Until {endpoint.until}.*"]
    notes += ["*Open.*"] if endpoint.name in routes.open else []
    notes += ["*Operators.*"] if endpoint.is_for_operators else []
    path = endpoint.path.replace(":path}", "}")
    # One handler queues all commands; the request type says what a command does.
    about = endpoint.request if endpoint.answer is Answer.FUTURE else routes.handlers[endpoint.name]
    return (
        code(f"{endpoint.method} {path}"),
        _taken(endpoint),
        _given(endpoint),
        " ".join([*paragraphs(about)[:1], *notes]),
    )


def _taken(endpoint: Endpoint) -> str:
    if endpoint.takes_stream:
        return "bytes"
    name = endpoint.request.__name__
    if name == "EmptyRequest":
        return ""
    return code(name) + (", *protobuf*" if endpoint.request_format is Format.PROTOBUF else "")


def _given(endpoint: Endpoint) -> str:
    if endpoint.answer is Answer.FUTURE:
        result = FUTURE_RESULTS[endpoint.result or ""]
        also = ", *protobuf*" if result.format is Format.PROTOBUF else ""
        return f"a future of {code(result.type.__name__)}{also}"
    if endpoint.answer is Answer.RESULT:
        return "the result of the future"
    if endpoint.answer is Answer.EVENTS:
        return "server-sent events"
    return code(endpoint.response.__name__) if endpoint.response is not None else ""
