"""The routes as an OpenAPI document and as an HTML page, both made from the table of endpoints.

Nothing is written here about a single route: its endpoint says what it takes and returns, and the
types describe their fields. Only types that are not plain records have a schema below.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from tinsmith._version import __version__
from tinsmith.types.futures import RequestFailedResponse, TryAgainResponse
from tinsmith.types.inputs import ModelInput
from tinsmith.types.record import Record
from tinsmith.types.requests import ForwardBackwardRequest, OptimStepRequest
from tinsmith.types.sampling import SampleResponse
from tinsmith.types.tensors import TensorData
from tinsmith.types.training import AdamParams, ForwardBackwardOutput, OptimizerConfigBase
from tinsmith.wire.content import JSON_TYPE, PROTOBUF_TYPE
from tinsmith.wire.endpoint_types import Answer, Endpoint, Format
from tinsmith.wire.endpoints import FUTURE_RESULTS

Schema = dict[str, Any]

_REFERENCE = "#/components/schemas/"
_BINARY: Schema = {"type": "string", "format": "binary"}
_NUMBERS: Schema = {"type": "array", "items": {"type": "number"}}
_INTEGERS: Schema = {"type": "array", "items": {"type": "integer"}}


class ErrorResponse(Record):
    """A refusal, and why."""

    detail: str


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": required}


def _ref(name: str) -> Schema:
    return {"$ref": _REFERENCE + name}


def _maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _chunk(kind: str, required: list[str], **properties: Schema) -> Schema:
    return _object([*required, "type"], type={"const": kind}, **properties)


_IMAGE = {"format": {"enum": ["png", "jpeg"]}, "expected_tokens": _maybe({"type": "integer"})}
_INPUT = _object(
    ["data", "loss_fn"],
    data={"type": "array", "items": _ref("Datum")},
    loss_fn={"type": "string"},
    loss_fn_config=_maybe(
        {"type": "object", "additionalProperties": {"type": ["number", "string"]}}
    ),
)
_LOGPROBS = _maybe({"type": "array", "items": {"type": ["number", "null"]}})

_SHAPES: dict[type, Schema] = {
    TensorData: _object(
        ["data", "dtype"],
        data=_NUMBERS,
        dtype={"enum": ["int64", "float32"]},
        shape=_maybe(_INTEGERS),
        sparse_crow_indices=_maybe(_INTEGERS),
        sparse_col_indices=_maybe(_INTEGERS),
    ),
    ModelInput: _object(
        ["chunks"],
        chunks={
            "type": "array",
            "items": {
                "oneOf": [
                    _chunk("encoded_text", ["tokens"], tokens=_INTEGERS),
                    _chunk("image", ["data", "format"], data={"type": "string"}, **_IMAGE),
                    _chunk(
                        "image_asset_pointer",
                        ["location", "format"],
                        location={"type": "string"},
                        **_IMAGE,
                    ),
                    _chunk("dmel", ["dmel"], dmel={"type": "string"}),
                ]
            },
        },
    ),
    OptimizerConfigBase: {
        **_object(["type"], type={"type": "string"}),
        "default": {"type": "adamw"},
    },
    ForwardBackwardRequest: _object(
        ["model_id"],
        model_id={"type": "string"},
        seq_id=_maybe({"type": "integer"}),
        forward_backward_input=_INPUT,
        forward_input=_INPUT,
        forward_only={"type": "boolean", "default": False},
    ),
    OptimStepRequest: _object(
        ["model_id"],
        model_id={"type": "string"},
        seq_id=_maybe({"type": "integer"}),
        type={"const": "optim_step"},
        adam_params=_ref("AdamParams"),
        optimizer_params=_object(["type"], type={"type": "string"}),
    ),
    ForwardBackwardOutput: _object(
        ["loss_fn_output_type", "loss_fn_outputs", "metrics"],
        loss_fn_output_type={"type": "string"},
        loss_fn_outputs={
            "type": "array",
            "items": {"type": "object", "additionalProperties": _ref("TensorData")},
        },
        metrics={"type": "object", "additionalProperties": {"type": "number"}},
    ),
    SampleResponse: _object(
        ["sequences"],
        sequences={
            "type": "array",
            "items": _object(
                ["stop_reason", "tokens"],
                stop_reason={"enum": ["stop", "length"]},
                tokens=_INTEGERS,
                logprobs=_LOGPROBS,
            ),
        },
        prompt_logprobs=_LOGPROBS,
        topk_prompt_logprobs=_maybe({"type": "array"}),
        type={"const": "sample"},
    ),
}
_DATUM = _object(
    ["model_input", "loss_fn_inputs"],
    model_input=_ref("ModelInput"),
    loss_fn_inputs={"type": "object", "additionalProperties": _ref("TensorData")},
)


def openapi_document(endpoints: Iterable[Endpoint], open_names: Iterable[str] = ()) -> Schema:
    """The OpenAPI 3.1 document of these routes.

    Args:
        endpoints: In the order to show them.
        open_names: Those that need no credential.
    """
    endpoints, unlocked = list(endpoints), frozenset(open_names)
    schemas = _schemas(endpoints)
    paths: dict[str, Schema] = {}
    for endpoint in endpoints:
        operation = _operation(endpoint, schemas)
        if endpoint.name in unlocked:
            operation["security"] = []
        path = endpoint.path.replace(":path}", "}")
        paths.setdefault(path, {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tinsmith",
            "version": __version__,
            "description": "The Tinker fine-tuning API. Ids are used in paths as they are: they "
            "may contain colons, and a checkpoint's id contains a slash.",
        },
        "paths": paths,
        "security": [{"key": []}],
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}},
        },
    }


def _schemas(endpoints: list[Endpoint]) -> dict[str, Schema]:
    """All types that routes take and return, by name."""
    types: list[Any] = [ErrorResponse, TryAgainResponse, RequestFailedResponse, AdamParams]
    types += [result.type for result in FUTURE_RESULTS.values()]
    for endpoint in endpoints:
        types += [one for one in (endpoint.request, endpoint.response) if one is not None]
    plain = [one for one in dict.fromkeys(types) if one not in _SHAPES]
    _, schemas = msgspec.json.schema_components(
        plain, schema_hook=_custom, ref_template=_REFERENCE + "{name}"
    )
    for shape, schema in _SHAPES.items():
        about = (shape.__doc__ or "").partition("\n")[0]
        schemas[shape.__name__] = {"title": shape.__name__, "description": about, **schema}
    return {**schemas, "Datum": _DATUM}


def _custom(given: type) -> Schema:
    for shape in _SHAPES:
        if issubclass(given, shape):
            return _ref(shape.__name__)
    raise NotImplementedError(f"{given} has no schema in openapi.py")


def _operation(endpoint: Endpoint, schemas: dict[str, Schema]) -> Schema:
    request = endpoint.request.__name__
    fields: dict[str, Schema] = schemas[request].get("properties", {})
    required = set(schemas[request].get("required", []))
    operation: Schema = {
        "operationId": endpoint.name,
        "summary": schemas[request].get("description", ""),
        "tags": [_group(endpoint)],
        "responses": _responses(endpoint),
    }
    if endpoint.until is not None:
        operation["deprecated"] = True
        operation["description"] = f"Used by SDKs up to {endpoint.until}."
    if endpoint.is_for_operators:
        operation["description"] = "Needs the key of an operator; others are told 404."
    parameters = [_parameter(name, "path", fields[name]) for name in endpoint.path_fields]
    for name, header in endpoint.header_fields.items():
        parameters.append({**_parameter(header, "header", fields[name]), "required": False})
    rest = [n for n in fields if n not in endpoint.path_fields and n not in endpoint.header_fields]
    if endpoint.takes_stream:
        content = {"application/octet-stream": {"schema": _BINARY}}
        operation["requestBody"] = {"required": True, "content": content}
    if endpoint.takes_stream or endpoint.method in ("GET", "DELETE", "HEAD"):
        parameters += [
            {**_parameter(name, "query", fields[name]), "required": name in required}
            for name in rest
        ]
    elif rest:
        operation["requestBody"] = _body(endpoint, rest, fields, required)
    if parameters:
        operation["parameters"] = parameters
    return operation


def _parameter(name: str, place: str, schema: Schema) -> Schema:
    return {"name": name, "in": place, "required": True, "schema": schema}


def _body(
    endpoint: Endpoint, rest: list[str], fields: dict[str, Schema], required: set[str]
) -> Schema:
    schema = _ref(endpoint.request.__name__)
    if len(rest) < len(fields):
        in_body = {name: fields[name] for name in rest}
        schema = _object([name for name in rest if name in required], **in_body)
    content: Schema = {JSON_TYPE: {"schema": schema}}
    if endpoint.request_format is Format.PROTOBUF:
        content[PROTOBUF_TYPE] = {"schema": _BINARY}
    return {"required": bool(required), "content": content}


def _responses(endpoint: Endpoint) -> Schema:
    refusal = {
        "description": "Refused, with the reason.",
        "content": {JSON_TYPE: {"schema": _ref("ErrorResponse")}},
    }
    responses: Schema = {"default": refusal}
    if endpoint.answer is Answer.NOTHING:
        responses["2XX" if endpoint.method in ("GET", "HEAD") else "204"] = {"description": "Done."}
        return responses
    responses["200"] = {"description": _given(endpoint), "content": _given_content(endpoint)}
    if endpoint.answer is Answer.RESULT:
        waiting = {JSON_TYPE: {"schema": _ref("TryAgainResponse")}}
        responses["408"] = {"description": "Still pending; ask again.", "content": waiting}
    if endpoint.follows_redirects or endpoint.name == "get_checkpoint_archive_url":
        responses["302"] = {"description": "Redirects to the URL in Location."}
    return responses


def _given(endpoint: Endpoint) -> str:
    if endpoint.answer is Answer.FUTURE:
        result = FUTURE_RESULTS[endpoint.result or ""].type.__name__
        return f"Accepted. `retrieve_future` returns the result, a {result}."
    if endpoint.answer is Answer.EVENTS:
        return "Server-sent events."
    return "The answer."


def _given_content(endpoint: Endpoint) -> Schema:
    if endpoint.answer is Answer.EVENTS:
        return {"text/event-stream": {"schema": {"type": "string"}}}
    if endpoint.answer is Answer.RESULT:
        names = sorted({result.type.__name__ for result in FUTURE_RESULTS.values()})
        names += ["TryAgainResponse", "RequestFailedResponse"]
        results = {"anyOf": [_ref(name) for name in names]}
        return {JSON_TYPE: {"schema": results}, PROTOBUF_TYPE: {"schema": _BINARY}}
    return {JSON_TYPE: {"schema": _ref(endpoint.response.__name__)}}


def _group(endpoint: Endpoint) -> str:
    if endpoint.is_extension:
        return "extensions"
    return "management" if endpoint.is_management else endpoint.pool.value


# The HTML page

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem;
  color: #222; background: #fff }
h2 { margin-top: 2.5rem } code { font-size: 13px }
details { border-top: 1px solid #ddd; padding: .4rem 0 } summary { cursor: pointer }
b { display: inline-block; min-width: 4.5rem; font-size: 12px } .old { color: #888 }
table { border-collapse: collapse; margin: .5rem 0 .5rem 1rem } td { padding: .1rem 1rem .1rem 0;
  vertical-align: top }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818 }
  details { border-color: #444 } a { color: #8bf } }
"""


def routes_page(document: Schema) -> str:
    """The document as one self-contained HTML page."""
    groups: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            shown = _shown(method, path, operation, document["components"]["schemas"])
            groups.setdefault(operation["tags"][0], []).append(shown)
    sections = [
        f"<h2>{html.escape(name)}</h2>\n" + "\n".join(shown) for name, shown in groups.items()
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>tinsmith: routes</title><style>{_STYLE}</style></head><body>"
        f"<h1>tinsmith {html.escape(document['info']['version'])}</h1>"
        f"<p>{html.escape(document['info']['description'])}</p>"
        '<p>The same as an OpenAPI document: <a href="openapi.json">openapi.json</a></p>'
        + "\n".join(sections)
        + "</body></html>\n"
    )


def _shown(method: str, path: str, operation: Schema, schemas: dict[str, Schema]) -> str:
    rows = [
        (one["name"], one["in"], _type(one["schema"])) for one in operation.get("parameters", [])
    ]
    body = operation.get("requestBody", {}).get("content", {}).get(JSON_TYPE, {}).get("schema", {})
    body = schemas.get(body.get("$ref", "").removeprefix(_REFERENCE), body)
    rows += [(name, "body", _type(schema)) for name, schema in body.get("properties", {}).items()]
    cells = "".join(
        f"<tr><td><code>{html.escape(name)}</code></td><td>{place}</td>"
        f"<td>{html.escape(kind)}</td></tr>"
        for name, place, kind in rows
    )
    about = " ".join([operation["summary"], operation.get("description", "")]).strip()
    given = operation["responses"].get("200", operation["responses"].get("204", {}))
    old = ' class="old"' if operation.get("deprecated") else ""
    return (
        f'<details id="{html.escape(operation["operationId"])}"><summary{old}>'
        f"<b>{method.upper()}</b> <code>{html.escape(path)}</code></summary>"
        f"<p>{html.escape(about)}</p><table>{cells}</table>"
        f"<p>{html.escape(given.get('description', ''))}</p></details>"
    )


def _type(schema: Schema) -> str:
    """A field's type in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(_REFERENCE)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            kinds = [_type(one) for one in schema[key] if one != {"type": "null"}]
            return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        return " or ".join(map(repr, schema.get("enum", [schema.get("const")])))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return re.sub(r"[\[\]']", "", str(kind))
