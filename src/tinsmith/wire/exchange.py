"""One call as HTTP sees it, made and read from the table of endpoints.

`to_http` and `read_reply` are the client's half, `read_request` and `to_reply` the server's. None
of them does any I/O: what goes out and comes in are methods, paths, headers and bodies.
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
from tinsmith.wire.endpoint_types import Answer, Endpoint, Format
from tinsmith.wire.limits import DEFAULT_LIMITS, DecodeLimits
from tinsmith.wire.protobuf import Parts

Encode = Callable[[Any], Parts]
Decode = Callable[[Memory, DecodeLimits], Any]

_PLAIN_ID = re.compile(r"[A-Za-z0-9_.~:-]+")
"""What stands in a path as it is."""


class HttpRequest(msgspec.Struct, frozen=True):
    """What is sent for one call; credentials and tracing headers are the transport's to add."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    """Those that are the same for every request of a kind; how they are written may be kept."""
    parts: Parts
    """The body, in pieces."""
    once: dict[str, str] = {}
    """Headers of this request alone."""


class HttpReply(msgspec.Struct, frozen=True):
    """What is answered to one call."""

    status: int
    headers: dict[str, str]
    parts: Parts


def to_http(
    endpoint: Endpoint, request: Record | Frozen, *, accept: Format = Format.JSON
) -> HttpRequest:
    """What to send for this request.

    Args:
        endpoint: Where it goes.
        request: What is asked.
        accept: The format of the answer; of a future's result, that in `FUTURE_RESULTS`.

    Raises:
        ValidationError: It is not of the endpoint's type, or an id cannot stand in a path.
    """
    if not isinstance(request, endpoint.request):
        raise ValidationError(
            f"{endpoint.name} takes a {endpoint.request.__name__}, not {type(request).__name__}"
        )
    headers = {"Accept": _type_of(accept), **endpoint.headers}
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


def _type_of(format: Format) -> str:  # noqa: A002
    """As `format.value`, which is looked up by Python code."""
    return content.JSON_TYPE if format is Format.JSON else content.PROTOBUF_TYPE


@functools.cache
def _is_flat(endpoint_path: str, cls: type[Record]) -> bool:
    """Whether all of it goes into the body, and is numbers and text that are always there."""
    flat = {str, int, float, bool}
    return "{" not in endpoint_path and all(field.type in flat for field in fields_of(cls))


def json_request(
    endpoint: Endpoint, parts: Parts, content_type: str = content.JSON_TYPE
) -> HttpRequest:
    """What to send to a route without fields in its path, for a JSON body that is made already."""
    headers = {"Accept": content.JSON_TYPE, **endpoint.headers, "Content-Type": content_type}
    return HttpRequest(endpoint.method, endpoint.path, {}, headers, parts)


def packed_request(endpoint: Endpoint, packed: packed_format.PackedText) -> HttpRequest:
    """What to send to a route that takes samples; JSON if there is nothing to pack."""
    if not packed.arrays:
        return json_request(endpoint, packed.text)
    return json_request(endpoint, packed.body(), content.PACKED_TYPE)


def bytes_request(endpoint: Endpoint, request: Record, body: Memory) -> HttpRequest:
    """What to send to a route whose body is bytes: the fields go into the path and the query."""
    fields = to_plain(request)
    path = _filled(endpoint.path, {name: fields.pop(name, None) for name in endpoint.path_fields})
    query = {name: _checked_text(name, _query_value(value)) for name, value in fields.items()}
    headers = {"Accept": Format.JSON.value, "Content-Type": "application/octet-stream"}
    return HttpRequest(endpoint.method, path, query, headers, [body])


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
    # A request that only names a thing in its path has no body to send.
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
    """The request that was sent to an endpoint, by any SDK from 0.3 on.

    Args:
        endpoint: The route it came to.
        path_fields: What the router found in the path.
        query: The query's parameters.
        headers: Header names in lower case.
        body: The body, decompressed.
        limits: How much memory decoding may take.
        on_unknown: Told which fields, if any, are ignored because nobody knows them.

    Raises:
        DecodeError: It is not such a request.
    """
    content_type = headers.get("content-type", "")
    if content.is_protobuf(content_type):
        return decode_body(body, endpoint.request, Format.PROTOBUF, limits)
    if issubclass(endpoint.request, Frozen):
        return json_format.decode(body, endpoint.request, limits)
    fields: dict[str, Any] = dict(query)
    if len(body) and not endpoint.takes_bytes:
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
        raise DecodeError(f"{endpoint.name} takes no packed body; samples may be packed")
    return packed_format.decode(body, limits)


@functools.cache
def _known_fields(cls: type[Record]) -> frozenset[str]:
    return frozenset(cls.__struct_fields__)


def request_from_fields(endpoint: Endpoint, fields: dict[str, Any]) -> Any:
    """The request that a JSON object or a query stands for; raises as `read_request`."""
    # SDKs up to 0.16 write null for what they leave unset.
    nullable = nullable_fields(endpoint.request)
    fields = {
        name: value for name, value in fields.items() if value is not None or name in nullable
    }
    # A query holds text alone.
    is_text = endpoint.method in ("GET", "DELETE", "HEAD") or endpoint.takes_bytes
    try:
        return msgspec.convert(
            fields, endpoint.request, strict=not is_text, dec_hook=convert_custom
        )
    except (msgspec.ValidationError, RecursionError, UnicodeError) as exc:
        raise DecodeError(f"{endpoint.name}: {exc}") from exc


def to_reply(value: Record | Frozen | None, format: Format = Format.JSON) -> HttpReply:  # noqa: A002
    """What to answer with a value; None is an answer without a body."""
    if value is None:
        return HttpReply(204, {}, [])
    parts = encode_body(value, format)
    size = sum(map(len, parts))
    headers = {"Content-Type": format.value, "Content-Length": str(size)}
    return HttpReply(200, headers, parts)


def read_reply(endpoint: Endpoint, body: Memory, limits: DecodeLimits = DEFAULT_LIMITS) -> Any:
    """What a successful reply holds; None where the endpoint answers nothing.

    Results of futures are read by `decode_body` with the type and format of `FUTURE_RESULTS`; here
    such a reply is read as JSON of any shape, which says whether to ask again.

    Raises:
        DecodeError: It is not what the endpoint promises.
    """
    if endpoint.answer is Answer.NOTHING:
        return None
    if endpoint.answer in (Answer.RESULT, Answer.EVENTS):
        return json_format.decode_any(body, limits)
    return decode_body(body, endpoint.response, Format.JSON, limits)


def encode_body(value: Record | Frozen, format: Format) -> Parts:  # noqa: A002
    """A body in the given format."""
    if format is Format.JSON:
        return json_format.encode_parts(value)
    codec = _protobuf_codec(type(value))  # type: ignore[arg-type]  # types are hashable
    if codec is None:
        raise ValidationError(f"{type(value).__name__} has no protobuf form")
    return codec[0](value)


def decode_body(
    body: Memory,
    as_type: Any,
    format: Format,  # noqa: A002
    limits: DecodeLimits = DEFAULT_LIMITS,
) -> Any:
    """Read a body of the given format; raises as `read_request`."""
    if format is Format.JSON:
        return json_format.decode(body, as_type, limits)
    codec = _protobuf_codec(as_type)
    if codec is None:
        raise DecodeError(f"{as_type.__name__} has no protobuf form")
    return codec[1](body, limits)


@functools.cache
def _protobuf_codec(as_type: type[Any]) -> tuple[Encode, Decode] | None:
    if issubclass(as_type, SampleResponse):
        return proto_samples.encode_sample_response, proto_samples.decode_sample_response
    from tinsmith.wire import proto_format  # which a client that only samples never needs

    if issubclass(as_type, ForwardBackwardRequest):
        encode_request = proto_format.encode_forward_backward_request
        return encode_request, proto_format.decode_forward_backward_request
    if issubclass(as_type, ForwardBackwardOutput):
        encode_output = proto_format.encode_forward_backward_output
        return encode_output, proto_format.decode_forward_backward_output
    return None


def _filled(template: str, values: dict[str, Any]) -> str:
    """The path with ids put in. `:` stands as it is, and `/` in ids of two parts."""
    path = template
    for name, value in values.items():
        is_multipart = f"{{{name}:path}}" in template
        segments = str(value).split("/") if is_multipart else [str(value)]
        if value is None or any(segment in ("", ".", "..") for segment in segments):
            raise ValidationError(f"{name} {value!r:.200} cannot be part of a path")
        text = _checked_text(name, str(value))
        if not all(map(_PLAIN_ID.fullmatch, segments)):
            # 0.4 MB, which few programs need; and where Ctrl-C has ended one, Python forgets it if
            # this is loaded only when its session is finished.
            from urllib.parse import quote

            text = quote(text, safe=":/~" if is_multipart else ":~")
        path = path.replace(f"{{{name}:path}}" if is_multipart else f"{{{name}}}", text)
    return path


def _checked_text(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise ValidationError(f"{name} is {shown(text)}, which is no text to be sent") from exc
    return text


def _header_value(name: str, value: Any) -> str:
    text = str(value)
    if not text.isascii() or not text.isprintable():
        raise ValidationError(f"{name} holds characters that a header cannot carry")
    return text


def _query_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime.date):
        return str(msgspec.to_builtins(value))
    return str(value)
