"""Bodies that no client makes, to every route of a real `tinsmith serve`: never a 5xx."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator

import pytest

from tests.e2e.service.served import Served, serving
from tinsmith.service.api.routes import collect
from tinsmith.wire.content import JSON_TYPE, PACKED_TYPE, PROTOBUF_TYPE, compress
from tinsmith.wire.endpoint_types import Endpoint

DEEP = 100_000
NUMBERED = b'{"model_id":"m","seq_id":1,"x":%b}'
JSON_BODIES: dict[str, bytes] = {
    "deep lists": b"[" * DEEP,
    "deep lists that end": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP,
    "deep in a field": NUMBERED % (b"[" * DEEP + b"]" * DEEP),
    "deep in the number": b'{"model_id":"m","seq_id":%b}' % (b"[" * DEEP + b"]" * DEEP),
    "no UTF-8": b"\xff\xfe",
    "no UTF-8 in a text": NUMBERED % b'"\xff"',
    "no UTF-8 in the model": b'{"model_id":"\xc3\x28","seq_id":1}',
    "no UTF-8 in a name": b'{"model_id":"m","seq_id":1,"\xff":1}',
    "half a character": b'{"model_id":"\\ud800","seq_id":1}',
    "NUL": b'{"model_id":"\\u0000","seq_id":1,"session_id":"\\u0000"}',
    "large numbers": b'{"model_id":"m","seq_id":%b}' % (b"9" * 5000),
    "an infinite number": b'{"model_id":"m","seq_id":1e999}',
    "a negative number": b'{"model_id":"m","seq_id":-1}',
    "a number beyond 64 bits": b'{"model_id":"m","seq_id":18446744073709551616}',
    "null": b"null",
    "a list": b"[]",
    "a text": b'"text"',
    "nothing": b"",
    "a mark in front": b"\xef\xbb\xbf{}",
    "cut off": b'{"model_id":"m","seq_id":1',
}
OTHER_BODIES: dict[str, tuple[str, bytes]] = {
    "protobuf: no field": (PROTOBUF_TYPE, b"\x07"),
    "protobuf: no UTF-8": (PROTOBUF_TYPE, b"\x10\x01\x0a\x02\xc3\x28"),
    "protobuf: a long number": (PROTOBUF_TYPE, b"\x10" + b"\xff" * 12),
    "protobuf: nested": (PROTOBUF_TYPE, b"\x1a\x06\x0a\x04\x0a\x02\x0a\x00"),
    "packed: deep": (PACKED_TYPE, (DEEP).to_bytes(4, "little") + b"[" * DEEP),
    "packed: no UTF-8": (PACKED_TYPE, b"\x02\0\0\0\xff\xfe"),
    "packed: short": (PACKED_TYPE, b"\x02"),
}
BODIES = {name: (JSON_TYPE, body) for name, body in JSON_BODIES.items()} | OTHER_BODIES
ENDPOINTS = [one for one in collect().endpoints if one.method != "GET"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served"), "--long-poll-s=0.05") as running:
        yield running
        assert "Traceback" not in running.log_text()


def status(served: Served, endpoint: Endpoint, body: bytes, headers: dict[str, str]) -> int:
    path = re.sub(r"{\w+(:path)?}", "x", endpoint.path)
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    try:
        headers = {"X-API-Key": "tml-any", **headers}
        connection.request(endpoint.method, path, body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(("kind", "body"), BODIES.values(), ids=BODIES)
def test_no_request_body_causes_a_500(served: Served, kind: str, body: bytes) -> None:
    plain = {"Content-Type": kind}
    packed = plain | {"Content-Encoding": "zstd"}

    found = {one.name: status(served, one, body, plain) for one in ENDPOINTS}
    unpacked = {one.name: status(served, one, compress([body]), packed) for one in ENDPOINTS}

    wrong = {name: code for name, code in (found | unpacked).items() if code >= 500}
    assert not wrong
    assert "Traceback" not in served.log_text()


@pytest.mark.parametrize(
    "name", ["deep lists", "deep in a field", "no UTF-8", "no UTF-8 in a text"]
)
@pytest.mark.parametrize("endpoint", ["optim_step", "forward", "save_weights", "load_weights"])
def test_odd_json_in_a_command_with_a_seq_id_is_rejected(
    served: Served, endpoint: str, name: str
) -> None:
    [found] = [one for one in ENDPOINTS if one.name == endpoint]

    assert status(served, found, JSON_BODIES[name], {"Content-Type": JSON_TYPE}) == 400


MANY = 16 * 1024 * 1024


@pytest.mark.parametrize(
    ("endpoint", "kind", "body"),
    [
        ("forward_backward", PROTOBUF_TYPE, b"\x1a\0" * MANY),
        ("forward_backward", PROTOBUF_TYPE, b"\x78\1" * MANY),
        ("asample", JSON_TYPE, b'{"prompt":{"chunks":[%b{}]}}' % (b"{}," * 400_000)),
    ],
    ids=["empty messages", "unknown fields", "empty objects"],
)
def test_a_body_with_too_many_messages_is_rejected(
    served: Served, endpoint: str, kind: str, body: bytes
) -> None:
    [found] = [one for one in ENDPOINTS if one.name == endpoint]
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=300)
    headers = {"X-API-Key": "tml-any", "Content-Type": kind}
    connection.request("POST", found.path, body, headers)
    reply = connection.getresponse()
    told = reply.read().decode()
    connection.close()

    assert reply.status == 413
    assert re.search(r"(messages|fields|objects)\b.*send it in parts", told), told
