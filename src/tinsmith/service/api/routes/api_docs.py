"""The description of the routes: an OpenAPI document and an HTML page."""

from __future__ import annotations

import functools

from tinsmith.service.api.api_call import ApiCall, Handler
from tinsmith.service.api.openapi import openapi_document, routes_page
from tinsmith.types.requests import EmptyRequest
from tinsmith.wire import json_format
from tinsmith.wire.endpoint_types import Answer, Endpoint
from tinsmith.wire.exchange import HttpReply


@functools.cache
def _written() -> tuple[bytes, bytes]:
    from tinsmith.service.api.routes import collect  # which loads this module too

    routes = collect()
    document = openapi_document(routes.endpoints, routes.open)
    return json_format.encode(document), routes_page(document).encode()


async def openapi(call: ApiCall) -> HttpReply:  # noqa: ARG001 - the same for all
    """The OpenAPI document."""
    return HttpReply(200, {"Content-Type": "application/json"}, [_written()[0]])


async def docs(call: ApiCall) -> HttpReply:  # noqa: ARG001 - the same for all
    """The page of the routes. It runs no script and loads nothing."""
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
        "X-Content-Type-Options": "nosniff",
    }
    return HttpReply(200, headers, [_written()[1]])


FURTHER_ENDPOINTS = [
    Endpoint(
        name=name,
        method="GET",
        path=path,
        request=EmptyRequest,
        answer=Answer.NOTHING,
        is_extension=True,
    )
    for name, path in (("openapi", "/openapi.json"), ("docs", "/docs"))
]
OPEN = frozenset({"openapi", "docs"})
HANDLERS: dict[str, Handler] = {"openapi": openapi, "docs": docs}
