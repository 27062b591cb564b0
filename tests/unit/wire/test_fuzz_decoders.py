"""Whatever arrives, a decoder gives a value or a typed error.

`FUZZ_EXAMPLES=20000 pytest tests/unit/wire/test_fuzz_decoders.py` looks longer.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.unit.wire import corpus
from tinsmith import types
from tinsmith.errors import APIStatusError, DecodeError, ValidationError
from tinsmith.types.checkpoints import ParsedCheckpointTinkerPath
from tinsmith.types.futures import RequestFailedResponse
from tinsmith.types.inputs import DmelChunk, chunk_from_plain
from tinsmith.wire import failures, json_format
from tinsmith.wire.endpoint_types import Endpoint
from tinsmith.wire.endpoints import ENDPOINTS, FUTURE_RESULTS
from tinsmith.wire.exchange import read_reply, read_request
from tinsmith.wire.generated import tags
from tinsmith.wire.protobuf import varint

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "100"))
fuzz = settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
PROTOBUF = {"content-type": "application/x-protobuf"}

Decoder = Callable[[Any], Any]


def json_of(as_type: Any) -> Decoder:
    return lambda body: json_format.decode(body, as_type)


def request_to(endpoint: Endpoint, headers: dict[str, str] | None = None) -> Decoder:
    return lambda body: read_request(endpoint, {}, {}, headers or {}, body)


def reply_of(endpoint: Endpoint) -> Decoder:
    return lambda body: read_reply(endpoint, body)


JSON_DECODERS: dict[str, Decoder] = {
    "any": json_format.decode_any,
    **{name: json_of(as_type) for name, as_type in corpus.TYPES.items()},
    **{f"request {name}": request_to(endpoint) for name, endpoint in ENDPOINTS.items()},
    **{f"reply {name}": reply_of(endpoint) for name, endpoint in ENDPOINTS.items()},
    **{f"result {name}": json_of(kind.type) for name, kind in FUTURE_RESULTS.items()},
}


def is_refused(decode: Decoder, given: Any) -> bool:
    """Decode, and let every error pass that is not one of ours."""
    try:
        decode(given)
    except (DecodeError, ValidationError):
        return True
    return False


# Protobuf

MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "repeat", "swap", "drop", "number"]),
        st.integers(0, 1 << 16),
        st.integers(0, 1 << 16),
        st.binary(max_size=12),
    ),
    min_size=1,
    max_size=6,
)


def mutated(body: bytes, mutations: list[tuple[str, int, int, bytes]]) -> bytes:
    """The body with a few things wrong: bits, lengths, order, repetitions."""
    spoiled = bytearray(body)
    for kind, first, second, content in mutations:
        if not spoiled:
            break
        start, stop = sorted((first % len(spoiled), second % len(spoiled)))
        match kind:
            case "flip":
                spoiled[start] ^= 1 << second % 8
            case "cut":
                del spoiled[start:]
            case "drop":
                del spoiled[start : start + second % 16]
            case "insert":
                spoiled[start:start] = content
            case "repeat":
                spoiled[start:start] = spoiled[start : min(stop, start + 512)]
            case "swap":
                half = (start + stop) // 2
                spoiled[start:stop] = spoiled[half:stop] + spoiled[start:half]
            case "number":
                spoiled[start : start + 1] = varint(1 << second % 64)
    return bytes(spoiled)


TAGS = sorted({value for name, value in vars(tags).items() if "__" in name and name.isupper()})
FIELDS: st.SearchStrategy[bytes] = st.deferred(
    lambda: st.lists(
        st.one_of(
            st.builds(corpus.number, st.sampled_from(TAGS), st.integers(0, (1 << 64) - 1)),
            st.builds(corpus.number, st.sampled_from(TAGS), st.integers(0, 5)),
            st.builds(corpus.field, st.sampled_from(TAGS), st.binary(max_size=16)),
            st.builds(corpus.field, st.sampled_from(TAGS), FIELDS),
        ),
        max_size=5,
    ).map(b"".join)
)


@pytest.mark.parametrize("kind", corpus.PROTO_DECODERS)
@fuzz
@given(body=st.binary(max_size=200))
@example(body=b"\xff" * 100)
@example(body=b"\x0a" * 100)
@example(body=b"\x00\x00")
@example(body=b"\x0b\x0c")
@example(body=b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
def test_any_bytes_as_protobuf_decode_or_raise_a_typed_error(kind: str, body: bytes) -> None:
    is_refused(corpus.PROTO_DECODERS[kind], body)


@pytest.mark.parametrize("kind", corpus.PROTO_DECODERS)
@fuzz
@given(body=FIELDS)
def test_any_well_formed_protobuf_decodes_or_raises_a_typed_error(kind: str, body: bytes) -> None:
    is_refused(corpus.PROTO_DECODERS[kind], body)


@pytest.mark.parametrize("kind", corpus.PROTO_DECODERS)
@fuzz
@given(mutations=MUTATIONS, donor=st.sampled_from(sorted(corpus.PROTO_BODIES)))
def test_a_corrupted_protobuf_decodes_or_raises_a_typed_error(
    kind: str, mutations: list[tuple[str, int, int, bytes]], donor: str
) -> None:
    is_refused(corpus.PROTO_DECODERS[kind], mutated(corpus.PROTO_BODIES[donor], mutations))


@pytest.mark.parametrize("kind", corpus.PROTO_DECODERS)
def test_every_single_bit_of_a_protobuf_may_be_flipped(kind: str) -> None:
    body = corpus.PROTO_BODIES[kind]

    for bit in range(8 * len(body)):
        spoiled = bytearray(body)
        spoiled[bit // 8] ^= 1 << bit % 8
        is_refused(corpus.PROTO_DECODERS[kind], bytes(spoiled))


@pytest.mark.parametrize("kind", corpus.PROTO_DECODERS)
def test_a_protobuf_truncated_anywhere_decodes_or_raises_a_typed_error(kind: str) -> None:
    body = corpus.PROTO_BODIES[kind]

    for length in range(len(body)):
        is_refused(corpus.PROTO_DECODERS[kind], body[:length])


@pytest.mark.parametrize("kind", corpus.PROTO_DECODERS)
@pytest.mark.parametrize("value", [0x7F, 0xFF, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_every_byte_of_a_protobuf_may_be_replaced_by_a_huge_number(kind: str, value: int) -> None:
    body = corpus.PROTO_BODIES[kind]

    for place in range(len(body)):
        spoiled = body[:place] + varint(value) + body[place + 1 :]
        is_refused(corpus.PROTO_DECODERS[kind], spoiled)


@pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)
@pytest.mark.parametrize("kind", corpus.PROTO_BODIES)
def test_every_endpoint_accepts_or_rejects_a_protobuf_body(endpoint: Endpoint, kind: str) -> None:
    body = corpus.PROTO_BODIES[kind]

    refused = is_refused(request_to(endpoint, PROTOBUF), body)

    assert refused is not (endpoint.request is types.ForwardBackwardRequest and kind == "request")


# JSON

DEEP = 100_000
HOSTILE_JSON = {
    "nothing": b"",
    "blank": b" \n",
    "null": b"null",
    "byte order mark": b"\xef\xbb\xbf{}",
    "utf-16": '{"a": "é"}'.encode("utf-16"),
    "utf-32": b"{\x00\x00\x00}\x00\x00\x00",
    "latin-1": '{"a": "é"}'.encode("latin-1"),
    "cut in a character": "{'é".encode()[:-1],
    "surrogate in utf-8": b'{"a": "\xed\xa0\x80"}',
    "lone surrogate": b'{"a": "\\ud800"}',
    "lone low surrogate": b'"\\udc00\\ud800"',
    "reversed surrogates": b'["\\udc00\\ud83d"]',
    "nan": b'{"a": NaN}',
    "infinity": b"[Infinity, -Infinity]",
    "1e999": b'{"a": [1e999]}',
    "-1e999": b"-1e999",
    "5000 digits": b'{"seq_id": ' + b"9" * 5000 + b"}",
    "-5000 digits": b"[-" + b"9" * 5000 + b"]",
    "400 digits": b'{"seq_id": ' + b"9" * 400 + b', "offset": ' + b"9" * 400 + b"}",
    "a million digits": b"1" * 1_000_000,
    "a million decimals": b"0." + b"1" * 1_000_000,
    "a million of exponent": b"1e" + b"1" * 1_000_000,
    "duplicate keys": b'{"a": 1, "a": {}, "type": "x", "type": 5}',
    "deep lists": b"[" * DEEP,
    "deep lists, closed": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP,
    "deep in an unknown field": b'{"zzz":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "nul": b"\x00",
    "trailing": b"{} {}",
    "single quotes": b"{'a': 1}",
    "comments": b"{} // x",
    "escapes": b'"\\u0000\\x41"',
    "bad hex": b'"\\uZZZZ"',
}


@pytest.mark.parametrize("body", HOSTILE_JSON.values(), ids=HOSTILE_JSON)
def test_hostile_json_decodes_or_raises_a_typed_error(body: bytes) -> None:
    for decode in JSON_DECODERS.values():
        is_refused(decode, body)
        is_refused(decode, memoryview(body))


@pytest.mark.parametrize("name", ["any", "Cursor", "SampleResponse"])
@pytest.mark.parametrize("text", ['"\ud800"', "\ud800", "{" + " " * 10_000_000 + "\udfff"])
def test_unencodable_text_is_rejected(name: str, text: str) -> None:
    is_refused(JSON_DECODERS[name], text.encode("utf-8", "surrogatepass"))

    assert is_refused(lambda text: json_format.decode(text, types.Cursor), text)
    assert is_refused(json_format.decode_any, text)


WRONG_VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1 << 31,
    1 << 63,
    -(1 << 63) - 1,
    10**400,
    1.5,
    -1e308,
    "",
    "text",
    "1e999",
    "nan",
    "9" * 5000,
    "tinker://",
    "\x00",
    [],
    [[]],
    [None],
    [[[1], [2]]],
    ["a", 1, None, {}],
    [1e308, 10**400],
    {},
    {"type": []},
    {"type": "x", "self": 1, "": None},
    {"type": "dimuon", "learning_rate": 10**400},
    {"data": [1], "dtype": "int64", "shape": [10**400]},
    {"data": [], "dtype": "float32", "shape": "12"},
    {"data": "abc", "dtype": "float32"},
    {"data": {}, "dtype": ["float32"], "shape": {"1": 1}},
]


def places(plain: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in plain data, with each of its keys."""
    keys = plain if isinstance(plain, dict) else range(len(plain) if isinstance(plain, list) else 0)
    for key in list(keys):
        yield plain, key
        yield from places(plain[key])


@pytest.mark.parametrize("name", corpus.TYPES)
def test_a_wrong_value_at_any_place_decodes_or_raises_a_typed_error(name: str) -> None:
    as_type = corpus.TYPES[name]
    plain = copy.deepcopy(corpus.plain_example(as_type))
    readers = [request_to(e) for e in ENDPOINTS.values() if e.request is as_type]

    for container, key in places(plain):
        kept = container[key]
        for wrong in WRONG_VALUES:
            container[key] = wrong
            body = msgspec.json.encode(plain)
            for decode in [JSON_DECODERS[name], *readers]:
                is_refused(decode, body)
        container[key] = kept


@pytest.mark.parametrize("name", corpus.TYPES)
def test_a_missing_field_decodes_or_raises_a_typed_error(name: str) -> None:
    plain = copy.deepcopy(corpus.plain_example(corpus.TYPES[name]))

    for container, key in [p for p in places(plain) if isinstance(p[0], dict)]:
        kept = container.pop(key)
        is_refused(JSON_DECODERS[name], msgspec.json.encode(plain))
        container[key] = kept


@fuzz
@given(name=st.sampled_from(sorted(JSON_DECODERS)), body=st.binary(max_size=100))
def test_any_bytes_as_json_decode_or_raise_a_typed_error(name: str, body: bytes) -> None:
    is_refused(JSON_DECODERS[name], body)


@fuzz
@given(name=st.sampled_from(sorted(corpus.TYPES)), mutations=MUTATIONS)
def test_a_corrupted_json_decodes_or_raises_a_typed_error(
    name: str, mutations: list[tuple[str, int, int, bytes]]
) -> None:
    is_refused(JSON_DECODERS[name], mutated(corpus.JSON_BODIES[name], mutations))


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@fuzz
@given(name=st.sampled_from(sorted(JSON_DECODERS)), plain=PLAIN)
def test_any_json_decodes_or_raises_a_typed_error(name: str, plain: Any) -> None:
    is_refused(JSON_DECODERS[name], msgspec.json.encode(plain))


@pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)
def test_any_query_path_and_header_decode_or_raise_a_typed_error(endpoint: Endpoint) -> None:
    hostile = ["", "x", "nan", "1e999", "9" * 5000, "\ud800", "\x00", "-1", "2026-13-45", "null"]
    names = getattr(endpoint.request, "__struct_fields__", ("model_id",))

    for text in hostile:
        fields = dict.fromkeys(names, text)
        headers = {header.lower(): text for header in endpoint.header_fields.values()}
        for in_path, query, body in [(fields, fields, b""), (fields, {}, b"{}"), ({}, fields, b"")]:
            read = functools.partial(read_request, endpoint, in_path, query, headers)
            is_refused(read, body)
        is_refused(request_to(endpoint, {"content-type": text}), b"{}")


# What takes plain data or text


@fuzz
@given(plain=PLAIN)
@example(plain={"type": "encoded_text"})
@example(plain={"type": "encoded_text", "tokens": None})
@example(plain={"type": "encoded_text", "tokens": {"a": 1}})
@example(plain={"type": "encoded_text", "tokens": "text"})
@example(plain={"type": "encoded_text", "tokens": [[1]]})
@example(plain={"type": "image", "data": 5, "format": []})
@example(plain={"type": "dmel", "dmel": "é"})
def test_any_plain_chunk_returns_a_chunk_or_raises_a_typed_error(plain: Any) -> None:
    is_refused(chunk_from_plain, plain)


def test_a_chunk_without_a_printable_repr_is_rejected() -> None:
    assert is_refused(chunk_from_plain, {"type": nested(5_000)})
    assert is_refused(chunk_from_plain, {"type": 10**5000})
    assert is_refused(chunk_from_plain, {"type": "encoded_text", "tokens": [10**5000]})
    assert is_refused(chunk_from_plain, {"type": "encoded_text", "tokens": nested(5_000)})


@fuzz
@given(plain=st.dictionaries(st.sampled_from(["error", "category", "x"]), PLAIN))
def test_any_failure_can_be_read(plain: dict[str, Any]) -> None:
    failed = RequestFailedResponse.from_plain(plain)

    assert isinstance(failed.error, str)


def nested(depth: int) -> list[Any]:
    plain: list[Any] = []
    for _ in range(depth):
        plain = [plain]
    return plain


@pytest.mark.parametrize(
    "error",
    [nested(100_000), {"message": nested(100_000)}, 10**5000],
    ids=["deep", "deep message", "long number"],
)
def test_a_failure_without_a_printable_repr_can_be_decoded(error: Any) -> None:
    failed = RequestFailedResponse.from_plain({"error": error, "category": nested(3)})

    assert "cannot be printed" in failed.error


@fuzz
@given(status=st.integers(300, 999), body=st.binary(max_size=60) | PLAIN.map(msgspec.json.encode))
def test_any_error_body_becomes_an_error(status: int, body: bytes) -> None:
    error = failures.error_from_reply(status, {}, body)

    assert isinstance(error, APIStatusError)
    assert error.status_code == status
    assert str(error)


def test_an_error_body_may_be_nested_as_deeply_as_the_parser_allows() -> None:
    for depth in range(1, sys.getrecursionlimit() + 10, 7):
        error = failures.error_from_reply(400, {}, b"[" * depth + b"]" * depth)

        assert error.status_code == 400


@fuzz
@given(path=st.text() | st.text().map("tinker://".__add__) | st.text().map("tinker://a/b/".__add__))
def test_any_path_is_a_checkpoint_or_a_typed_error(path: str) -> None:
    is_refused(ParsedCheckpointTinkerPath.from_tinker_path, path)


@fuzz
@given(header=st.binary(max_size=40))
@example(header=b"")
@example(header=b"\xfe")
@example(header=b"\xfe\x00")
@example(header=b"\x00\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff")
def test_any_dmel_returns_a_length_or_raises_a_typed_error(header: bytes) -> None:
    is_refused(lambda dmel: DmelChunk(dmel=dmel).length, header)
