"""The page of the routes, from the table of endpoints by which the server routes."""

from __future__ import annotations

from scripts.reference_pages.markdown import code, paragraphs, table
from tinsmith.server.routes import Routes, collect
from tinsmith.wire.endpoint_types import Answer, Endpoint, Format, Pool
from tinsmith.wire.endpoints import FUTURE_RESULTS

GROUPS = {
    "Sessions and samplers": "session",
    "Training": "train",
    "Sampling": "sample",
    "Results": "retrieve",
    "Looking up and taking care": "management",
    "The service itself": "rest",
    "Extensions": "extension",
}
HEAD = ("route", "takes", "gives", "what it does")
INTRODUCTION = """\
# Routes

What a service of ours answers. Bodies are JSON; *protobuf* marks what is also sent in that form,
which is smaller. A service that runs has the fields of each at `/docs`, and for programs at
`/openapi.json`.

*Until 0.25* says that no release of the official SDK after that one calls the route; the others are
called by the newest that we know ([which were tried](../compatibility.md)). *A future of X* is a
request id, under which `retrieve_future` gives an X. *Open* routes need no key; all others take one
in the header `X-API-Key`. A refusal is a status and `{"detail": "why"}`; [errors](errors.md) says
which is which. What is under *extensions* is ours, and only used
[where a service offers it](../extensions.md). Pages for whoever runs it, such as `/healthz`, are
told of in [serving](../serving.md#health).
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
    path = endpoint.path.replace(":path}", "}")
    # What runs later is put into a line by one handler for all; its request says what it is.
    about = endpoint.request if endpoint.answer is Answer.FUTURE else routes.handlers[endpoint.name]
    return (
        code(f"{endpoint.method} {path}"),
        _taken(endpoint),
        _given(endpoint),
        " ".join([*paragraphs(about)[:1], *notes]),
    )


def _taken(endpoint: Endpoint) -> str:
    if endpoint.takes_bytes:
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
        return "what the future is of"
    if endpoint.answer is Answer.EVENTS:
        return "server-sent events"
    return code(endpoint.response.__name__) if endpoint.response is not None else ""
