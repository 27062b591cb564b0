"""Requests of any kind to every route, made from the OpenAPI document: none ends in a 5xx.

Half of what is sent fits the document, the rest is of another type, out of range or not there at
all. Ids are partly those of things that exist, so that what is sent gets past the first check.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.service.api.managed import ManagedServer
from tests.integration.service.api.running import MODEL
from tinsmith.service.api.openapi import openapi_document
from tinsmith.service.api.routes import collect
from tinsmith.wire.endpoint_types import Endpoint

ROUTES = collect()
DOCUMENT = openapi_document(ROUTES.endpoints, ROUTES.open)
SCHEMAS = DOCUMENT["components"]["schemas"]
DESTRUCTIVE = {"delete_api_key"}
"""What would end the test for the others."""

Schema = dict[str, Any]

_IDS = ["s1", "s1:train:0", "s1:sample:0", "s1:train:0:1", "s1:sample:0:0", "weights/c", "c", "r"]
_PATHS = ["tinker://s1:train:0/weights/c", "tinker://s1:train:0/external_weights/e", "tinker://"]
_texts = st.sampled_from([*_IDS, *_PATHS, MODEL, "", "..", "a/b", "\0", "\ud800", "x" * 3000]) | (
    st.text(max_size=12)
)
_numbers = st.sampled_from([0, 1, -1, 2**31, 2**63, -(2**63), 10**40, 1e308, -0.0]) | st.integers(
    -5, 300
)
_junk = st.recursive(
    st.none() | st.booleans() | _numbers | st.floats(allow_nan=False) | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=5,
)


def values(schema: Schema, depth: int = 0) -> st.SearchStrategy[Any]:
    """What fits a schema, and now and then what does not."""
    return st.one_of(*[_fitting(schema, depth)] * 4, _junk)


def _fitting(schema: Schema, depth: int) -> st.SearchStrategy[Any]:
    if depth > 5:
        return _junk
    if "$ref" in schema:
        named = SCHEMAS[schema["$ref"].rpartition("/")[2]]
        return st.deferred(lambda: _fitting(named, depth + 1))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return st.one_of(*(_fitting(one, depth + 1) for one in schema[key]))
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return st.one_of(*(_fitting({"type": one}, depth) for one in kind))
    if kind == "object":
        return _objects(schema, depth)
    if kind == "array":
        return st.lists(values(schema.get("items", {}), depth + 1), max_size=4)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        "string": _texts,
        "integer": st.integers(0, 20) | st.integers(),
        "number": st.floats(allow_nan=False, allow_infinity=False),
        "boolean": st.booleans(),
        "null": st.none(),
    }
    return simple.get(kind, _junk)


def _objects(schema: Schema, depth: int) -> st.SearchStrategy[dict[str, Any]]:
    fields = {
        name: values(one, depth + 1)
        for name, one in schema.get("properties", {}).items()
        if depth < 4
    }
    required = [name for name in schema.get("required", []) if name in fields]
    optional = {name: one for name, one in fields.items() if name not in required}
    whole = st.fixed_dictionaries({name: fields[name] for name in required}, optional=optional)
    further = schema.get("additionalProperties")
    if isinstance(further, dict):
        more = st.dictionaries(_texts, values(further, depth + 1), max_size=3)
        return st.builds(lambda one, other: {**one, **other}, more, whole)
    return whole


def requests(endpoint: Endpoint) -> st.SearchStrategy[tuple[str, dict[str, str], bytes]]:
    """Path, query and body for an endpoint."""
    operation = DOCUMENT["paths"][endpoint.path.replace(":path}", "}")][endpoint.method.lower()]
    named = {one["name"]: one for one in operation.get("parameters", [])}
    places = {name: _texts for name, one in named.items() if one["in"] == "path"}
    query = {name: values(one["schema"]) for name, one in named.items() if one["in"] == "query"}
    contents = operation.get("requestBody", {}).get("content", {})
    if "application/json" in contents:
        body = values(contents["application/json"]["schema"]).map(_as_json) | st.binary(max_size=30)
    else:
        body = st.binary(max_size=30) if contents else st.just(b"")

    def made(
        given_places: dict[str, str], given_query: dict[str, Any], given_body: bytes
    ) -> tuple[str, dict[str, str], bytes]:
        path = endpoint.path
        for name, text in given_places.items():
            safe = quote(text.encode("utf-8", "surrogatepass"), safe="/:")
            path = path.replace(f"{{{name}:path}}", safe).replace(f"{{{name}}}", safe)
        texts = {name: _query_text(value) for name, value in given_query.items()}
        return path, texts, given_body

    return st.builds(
        made,
        st.fixed_dictionaries(places),
        st.fixed_dictionaries({}, optional=query),
        body,
    )


def _as_json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def _query_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", "replace").decode()[:1000]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagedServer]:
    folder: Path = tmp_path_factory.mktemp("service")
    with ManagedServer(folder, "sqlite", long_poll_s=0.01) as running:
        running.add_session("s1")
        run = running.add_run("s1")
        running.add_sampler("s1")
        running.save(run, "c")
        running.save(run, "e", "external_weights")
        yield running


@pytest.fixture(scope="module")
def client(server: ManagedServer) -> Iterator[httpx.Client]:
    """One for all: to make a client takes longer than a request."""
    with server.http() as made:
        yield made


@pytest.mark.parametrize(
    "endpoint",
    [one for one in ROUTES.endpoints if one.name not in DESTRUCTIVE],
    ids=lambda endpoint: endpoint.name,
)
@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_hostile_request_causes_a_500(
    client: httpx.Client, endpoint: Endpoint, data: st.DataObject, caplog: pytest.LogCaptureFixture
) -> None:
    path, query, body = data.draw(requests(endpoint))
    caplog.set_level(logging.ERROR)

    try:
        request = client.build_request(endpoint.method, path, params=query, content=body)
    except httpx.InvalidURL:
        return
    request.headers["Content-Type"] = "application/json"
    reply = client.send(request)

    assert reply.status_code < 500, (path, query, body, reply.text[:300])
    if reply.status_code >= 400 and endpoint.method != "HEAD" and reply.content:
        assert reply.json()["detail"]
    assert not [record for record in caplog.records if record.name.startswith("tinsmith")]
