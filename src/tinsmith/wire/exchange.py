"""The HTTP request and response of one call, encoded and decoded by the table of endpoints.

`to_http` and `read_reply` are for the client, `read_request` and `to_reply` for the server. They do
no I/O: they return and take methods, paths, headers and bodies.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec.structs import fields as fields_of

from tinsmith.errors import DecodeError, ValidationError, shown
from tinsmith.types.buffers import Memory
from tinsmith.types.extensions import SampleManyRequest
from tinsmith.types.record import Frozen, Record, convert_custom, nullable_fields, to_plain
from tinsmith.types.requests import ForwardBackwardRequest, SampleRequest
from tinsmith.types.sampling import SampleResponse
from tinsmith.types.training import ForwardBackwardOutput
from tinsmith.wire import content, json_format, packed_format, proto_samples
from tinsmith.wire.decode_limits import DEFAULT_LIMITS, DecodeLimits
from tinsmith.wire.endpoint_types import Answer, Endpoint, Format
from tinsmith.wire.protobuf import Parts

Encode = Callable[[Any], Parts]
Decode = Callable[[Memory, DecodeLimits], Any]

_PLAIN_ID = re.compile(r"[A-Za-z0-9_.~:-]+")
"""Ids that need no escaping in a path."""


class HttpRequest(msgspec.Struct, frozen=True):
    """The request of one call; the transport adds credentials and tracing headers."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    """Headers that are the same for every request of an endpoint, so their bytes may be cached."""
    parts: Parts
    """The body, as a list of buffers."""
    once: dict[str, str] = {}
    """Headers of this request only."""


class HttpReply(msgspec.Struct, frozen=True):
    """The response to one call."""

    status: int
    headers: dict[str, str]
    parts: Parts


def to_http(
    endpoint: Endpoint, request: Record | Frozen, *, accept: Format = Format.JSON
) -> HttpRequest:
    """Encode a request.

    Args:
        endpoint: The endpoint.
        request: A value of the endpoint's request type.
        accept: The format to request; for the result of a future, that in `FUTURE_RESULTS`.

    Raises:
        ValidationError: The request is of another type, or an id is not valid in a path.
    """
    if not isinstance(request, endpoint.request):
        raise ValidationError(
            f"{endpoint.name} takes a {endpoint.request.__name__}, not {type(request).__name__}"
        )
    headers = {"Accept": accept.value, **endpoint.headers}
    if endpoint.request_format is Format.PROTOBUF:
        headers["Content-Type"] = content.PROTOBUF_TYPE
        parts = encode_body(request, Format.PROTOBUF)
        return HttpRequest(endpoint.method, endpoint.path, {}, headers, parts)
    if isinstance(request, Frozen):
        headers["Content-Type"] = content.JSON_TYPE
        return HttpRequest(
            endpoint.method, endpoint.path, {}, headers, json_format.encode_parts(request)
        )
    return _json_request(endpoint, request, headers)


@functools.cache
def _is_flat(endpoint_path: str, cls: type[Record]) -> bool:
    """Whether all fields are required scalars that go into the body."""
    flat = {str, int, float, bool}
    return "{" not in endpoint_path and all(field.type in flat for field in fields_of(cls))


def json_request(
    endpoint: Endpoint, parts: Parts, content_type: str = content.JSON_TYPE
) -> HttpRequest:
    """The request for a JSON body that is already encoded; the path has no fields."""
    headers = {"Accept": content.JSON_TYPE, **endpoint.headers, "Content-Type": content_type}
    return HttpRequest(endpoint.method, endpoint.path, {}, headers, parts)


def packed_request(endpoint: Endpoint, packed: packed_format.PackedText) -> HttpRequest:
    """The request for packed samples; plain JSON if there are no arrays."""
    if not packed.arrays:
        return json_request(endpoint, packed.text)
    return json_request(endpoint, packed.body(), content.PACKED_TYPE)


def _json_request(endpoint: Endpoint, request: Record, headers: dict[str, str]) -> HttpRequest:
    if endpoint.method == "POST" and _is_flat(endpoint.path, type(request)):
        headers["Content-Type"] = content.JSON_TYPE
        body = msgspec.json.encode(request)
        return HttpRequest(endpoint.method, endpoint.path, {}, headers, [body])
    writer = json_format.BodyWriter()
    fields = to_plain(request, write_array=writer.write_array)
    for name, header in endpoint.header_fields.items():
        if name in fields:
            headers[header] = _header_value(name, fields.pop(name))
    path, path_fields = endpoint.path, endpoint.path_fields
    if path_fields:
        path = _filled(path, {name: fields.pop(name, None) for name in path_fields})
    if endpoint.method in ("GET", "DELETE"):
        query = {name: _checked_text(name, _query_value(value)) for name, value in fields.items()}
        return HttpRequest(endpoint.method, path, query, headers, [])
    headers["Content-Type"] = content.JSON_TYPE
    # A request whose fields are all in the path has no body.
    in_path_alone = bool(path_fields) and set(request.__struct_fields__) == set(path_fields)
    parts: Parts = [] if in_path_alone else writer.parts(fields)
    return HttpRequest(endpoint.method, path, {}, headers, parts)


def read_request(
    endpoint: Endpoint,
    path_fields: Mapping[str, str],
    query: Mapping[str, str],
    headers: Mapping[str, str],
    body: Memory,
    limits: DecodeLimits = DEFAULT_LIMITS,
    *,
    on_unknown: Callable[[set[str]], None] | None = None,
) -> Any:
    """Decode a request, as sent by any SDK from 0.3 on.

    Args:
        endpoint: The endpoint.
        path_fields: The fields that the router found in the path.
        query: The parameters of the query.
        headers: The headers, with lower-case names.
        body: The decompressed body.
        limits: Limits of the decoder.
        on_unknown: Called with the names of unknown fields, which are ignored.

    Raises:
        DecodeError: The request is malformed.
    """
    content_type = headers.get("content-type", "")
    if content.is_protobuf(content_type):
        return decode_body(body, endpoint.request, Format.PROTOBUF, limits)
    if issubclass(endpoint.request, Frozen):
        return json_format.decode(body, endpoint.request, limits)
    fields: dict[str, Any] = dict(query)
    if len(body) and not endpoint.takes_stream:
        given = _decode_fields(endpoint, content_type, body, limits)
        if not isinstance(given, dict):
            raise DecodeError(f"{endpoint.name}: the body must be a JSON object")
        fields = given
    for name, header in endpoint.header_fields.items():
        if header.lower() in headers:
            fields[name] = headers[header.lower()]
    fields.update(path_fields)
    if on_unknown is not None and not fields.keys() <= _known_fields(endpoint.request):
        on_unknown(fields.keys() - _known_fields(endpoint.request))
    return request_from_fields(endpoint, fields)


def _decode_fields(
    endpoint: Endpoint, content_type: str, body: Memory, limits: DecodeLimits
) -> Any:
    if not content.is_packed(content_type):
        return json_format.decode_any(body, limits)
    if endpoint.request not in (SampleRequest, SampleManyRequest):
        raise DecodeError(f"{endpoint.name} does not accept packed bodies: expected JSON")
    return packed_format.decode(body, limits)


@functools.cache
def _known_fields(cls: type[Record]) -> frozenset[str]:
    return frozenset(cls.__struct_fields__)


def request_from_fields(endpoint: Endpoint, fields: dict[str, Any]) -> Any:
    """Convert the fields of a JSON object or a query; raises `DecodeError` if they are invalid."""
    # SDKs up to 0.16 send null for unset fields.
    nullable = nullable_fields(endpoint.request)
    fields = {
        name: value for name, value in fields.items() if value is not None or name in nullable
    }
    # The values of a query are text.
    is_text = endpoint.method in ("GET", "DELETE", "HEAD") or endpoint.takes_stream
    try:
        return msgspec.convert(
            fields, endpoint.request, strict=not is_text, dec_hook=convert_custom
        )
    except (msgspec.ValidationError, RecursionError, UnicodeError) as exc:
        raise DecodeError(f"{endpoint.name}: {exc}") from exc


def to_reply(value: Record | Frozen | None, format: Format = Format.JSON) -> HttpReply:  # noqa: A002
    """Encode a response; None has no body."""
    if value is None:
        return HttpReply(204, {}, [])
    parts = encode_body(value, format)
    size = sum(map(len, parts))
    headers = {"Content-Type": format.value, "Content-Length": str(size)}
    return HttpReply(200, headers, parts)


def read_reply(endpoint: Endpoint, body: Memory, limits: DecodeLimits = DEFAULT_LIMITS) -> Any:
    """Decode a successful response; None if the endpoint returns nothing.

    The response of `retrieve_future` is decoded to plain JSON here, which tells whether to poll
    again. Its result is decoded by `decode_body`, with the type and format in `FUTURE_RESULTS`.

    Raises:
        DecodeError: The response is malformed.
    """
    if endpoint.answer is Answer.NOTHING:
        return None
    if endpoint.answer in (Answer.RESULT, Answer.EVENTS):
        return json_format.decode_any(body, limits)
    return decode_body(body, endpoint.response, Format.JSON, limits)


def encode_body(value: Record | Frozen, format: Format) -> Parts:  # noqa: A002
    """Encode a body in a format."""
    if format is Format.JSON:
        return json_format.encode_parts(value)
    codec = _protobuf_codec(type(value))  # type: ignore[arg-type]  # types are hashable
    if codec is None:
        raise ValidationError(f"{type(value).__name__} has no protobuf format")
    return codec[0](value)


def decode_body(
    body: Memory,
    as_type: Any,
    format: Format,  # noqa: A002
    limits: DecodeLimits = DEFAULT_LIMITS,
) -> Any:
    """Decode a body; raises `DecodeError` if it is malformed."""
    if format is Format.JSON:
        return json_format.decode(body, as_type, limits)
    codec = _protobuf_codec(as_type)
    if codec is None:
        raise DecodeError(f"{as_type.__name__} has no protobuf format")
    return codec[1](body, limits)


@functools.cache
def _protobuf_codec(as_type: type[Any]) -> tuple[Encode, Decode] | None:
    if issubclass(as_type, SampleResponse):
        return proto_samples.encode_sample_response, proto_samples.decode_sample_response
    from tinsmith.wire import proto_format  # not needed by clients that only sample

    if issubclass(as_type, ForwardBackwardRequest):
        encode_request = proto_format.encode_forward_backward_request
        return encode_request, proto_format.decode_forward_backward_request
    if issubclass(as_type, ForwardBackwardOutput):
        encode_output = proto_format.encode_forward_backward_output
        return encode_output, proto_format.decode_forward_backward_output
    return None


def _filled(template: str, values: dict[str, Any]) -> str:
    """Insert ids into a path; `:` is not escaped, nor is `/` in a `:path` field."""
    path = template
    for name, value in values.items():
        is_multipart = f"{{{name}:path}}" in template
        segments = str(value).split("/") if is_multipart else [str(value)]
        if value is None or any(segment in ("", ".", "..") for segment in segments):
            raise ValidationError(f"invalid {name} {value!r:.200}: it cannot be part of a path")
        text = _checked_text(name, str(value))
        if not all(map(_PLAIN_ID.fullmatch, segments)):
            # 0.4 MB that few programs need. And if Ctrl-C ends a program, Python loses the
            # KeyboardInterrupt when this is first imported while the session is being ended.
            from urllib.parse import quote

            text = quote(text, safe=":/~" if is_multipart else ":~")
        path = path.replace(f"{{{name}:path}}" if is_multipart else f"{{{name}}}", text)
    return path


def _checked_text(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise ValidationError(
            f"invalid {name} {shown(text)}: it cannot be encoded as UTF-8"
        ) from exc
    return text


def _header_value(name: str, value: Any) -> str:
    text = str(value)
    if not text.isascii() or not text.isprintable():
        raise ValidationError(f"invalid {name}: its characters are not allowed in a header")
    return text


def _query_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime.date):
        return str(msgspec.to_builtins(value))
    return str(value)
