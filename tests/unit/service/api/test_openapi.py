"""The OpenAPI document has every route with every field, and the page shows them all."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from tinsmith.service.api.openapi import openapi_document, routes_page
from tinsmith.service.api.routes import collect
from tinsmith.types.record import Frozen
from tinsmith.wire.endpoint_types import Endpoint

ROUTES = collect()
DOCUMENT = openapi_document(ROUTES.endpoints, ROUTES.open)
SCHEMAS = DOCUMENT["components"]["schemas"]


def operation(endpoint: Endpoint) -> dict[str, Any]:
    path = endpoint.path.replace(":path}", "}")
    found: dict[str, Any] = DOCUMENT["paths"][path][endpoint.method.lower()]
    return found


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        found: dict[str, Any] = SCHEMAS[schema["$ref"].rpartition("/")[2]]
        return found
    return schema


@pytest.mark.parametrize("endpoint", ROUTES.endpoints, ids=lambda endpoint: endpoint.name)
def test_every_route_is_described_with_every_field(endpoint: Endpoint) -> None:
    found = operation(endpoint)
    told = {one["name"] for one in found.get("parameters", [])}
    for content in found.get("requestBody", {}).get("content", {}).values():
        told |= set(resolved(content["schema"]).get("properties", {}))

    fields = (
        {field.encode_name for field in msgspec.structs.fields(endpoint.request)}
        if (issubclass(endpoint.request, msgspec.Struct))
        else {"model_id", "seq_id"}
    )
    wanted = {endpoint.header_fields.get(name, name) for name in fields}

    assert found["operationId"] == endpoint.name
    assert wanted <= told
    assert found["summary"]
    assert issubclass(endpoint.request, msgspec.Struct | Frozen)


def test_every_reference_resolves() -> None:
    text = msgspec.json.encode(DOCUMENT).decode()

    names = set(re.findall(r'"#/components/schemas/(\w+)"', text))

    assert names <= set(SCHEMAS)
    assert "$defs" not in text


def test_every_parameter_of_a_path_is_declared() -> None:
    for path, methods in DOCUMENT["paths"].items():
        for found in methods.values():
            declared = {one["name"] for one in found.get("parameters", []) if one["in"] == "path"}
            assert declared == set(re.findall(r"{(\w+)}", path))


def test_operation_names_are_unique() -> None:
    names = [one["operationId"] for path in DOCUMENT["paths"].values() for one in path.values()]

    assert len(names) == len(set(names)) == len(ROUTES.endpoints)


def test_every_route_except_open_ones_requires_a_key() -> None:
    unlocked = {
        one["operationId"]
        for path in DOCUMENT["paths"].values()
        for one in path.values()
        if one.get("security") == []
    }

    assert unlocked == ROUTES.open


def test_the_page_shows_every_route_and_loads_no_external_resources() -> None:
    page = routes_page(DOCUMENT)

    for endpoint in ROUTES.endpoints:
        assert f'id="{endpoint.name}"' in page
    assert "<script" not in page
    assert not re.findall(r'(?:src|href)="(?!openapi\.json)', page)
    assert "http://" not in page
    assert "https://" not in page
