"""No body makes a decoder take more memory than twice its limit, or more time than its length."""

from __future__ import annotations

import functools
import gc
import struct
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.unit.wire.corpus import field, number
from tinsmith import types
from tinsmith.errors import BodyTooLargeError, DecodeError
from tinsmith.wire import json_format, proto_format, proto_samples
from tinsmith.wire.decode_limits import DecodeLimits
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import read_request
from tinsmith.wire.protobuf import varint

KIB = 1024
LIMIT_BYTES = 256 * KIB
LIMITS = DecodeLimits(memory_bytes=LIMIT_BYTES)
ROOMY = DecodeLimits(memory_bytes=1 << 40)

EMOJI = "😀".encode()
FLOAT32, INT32, BFLOAT16 = number(0x18, 1), number(0x18, 3), number(0x18, 4)
FLOAT = b"\x11" + struct.pack("<d", 1.5)

AT_ONCE_CPU_S = 10.0
"""A hundred times what it takes, and nothing beside what it would take to go through them."""

Decode = Callable[[bytes, DecodeLimits], Any]


class Bomb(NamedTuple):
    """A small body, for each size, that could be decoded into something large."""

    decode: Decode
    body: Callable[[int], bytes]


def datum(*contents: bytes) -> bytes:
    return field(0x1A, *contents)


def tensor_input(*contents: bytes, name: bytes = b"x") -> bytes:
    return field(0x12, field(0x0A, name), field(0x12, *contents))


def record(*contents: bytes) -> bytes:
    return field(0x12, *contents)


def names(count: int) -> list[bytes]:
    return [b"%d" % index for index in range(count)]


def csr(count: int, dtype: bytes) -> bytes:
    indices = field(0x12, struct.pack("<2q", 0, count)) + field(0x1A, bytes(8 * count))
    return tensor_input(
        field(0x12, field(0x0A, bytes(4 * count)), indices), dtype, field(0x22, b"\1\1")
    )


def columns_of(count: int, columns: int) -> bytes:
    """Many arrays of one number each, with as long a shape as is allowed."""
    offsets = struct.pack(f"<{count + 1}q", *range(0, 4 * count + 1, 4))
    parts = (field(0x0A, bytes(4 * count)), field(0x12, offsets), FLOAT32, field(0x22, b"\1" * 32))
    return record(*[tensor_input(*parts, name=name) for name in names(columns)])


REQUESTS: dict[str, Callable[[int], bytes]] = {
    "empty datums": lambda n: datum() * n,
    "empty text chunks": lambda n: datum(field(0x0A, field(0x0A)) * n),
    "text chunks": lambda n: datum(field(0x0A, field(0x0A, field(0x0A, b"abcd"))) * n),
    "audio chunks": lambda n: datum(field(0x0A, field(0x1A, field(0x0A, b"abcd"))) * n),
    "one audio chunk": lambda n: datum(field(0x0A, field(0x1A, field(0x0A, bytes(n))))),
    "audio said four times": lambda n: datum(field(0x0A, field(0x1A, field(0x0A, bytes(n)) * 4))),
    "images": lambda n: datum(
        field(0x0A, field(0x12, field(0x0A, b"a"), field(0x12, b"png"), number(0x18, 1 << 30))) * n
    ),
    "spans": lambda n: datum(
        field(0x1A, field(0x0A, field(0x0A, b"abc"), number(0x10, 1 << 60), number(0x18, 9))) * n
    ),
    "wide text": lambda n: field(0x0A, EMOJI, b"a" * n),
    "wide texts": lambda n: field(0x0A, EMOJI, b"a" * n) + field(0x22, b"a" * n, EMOJI),
    "settings": lambda n: b"".join(field(0x2A, field(0x0A, name), FLOAT) for name in names(n)),
    "wide settings": lambda n: b"".join(
        field(0x3A, field(0x0A, EMOJI, name), field(0x12, field(0x12, EMOJI, b"a" * 100)))
        for name in names(n)
    ),
    "tensors": lambda n: datum(
        *[tensor_input(field(0x0A, b"abcd"), FLOAT32, name=name) for name in names(n)]
    ),
    "tensors of many dimensions": lambda n: datum(
        *[
            tensor_input(FLOAT32, field(0x22, b"\0", varint(1 << 62) * 31), name=name)
            for name in names(n)
        ]
    ),
    "int32 tensor": lambda n: datum(tensor_input(field(0x0A, b"\xff\xff\1\0" * n), INT32)),
    "bfloat16 tensor": lambda n: datum(tensor_input(field(0x0A, b"ab" * n), BFLOAT16)),
    "sparse tensor": lambda n: datum(csr(n, FLOAT32)),
    "sparse int32 tensor": lambda n: datum(csr(n, INT32)),
    "sparse rows": lambda n: datum(
        tensor_input(
            field(0x12, field(0x12, bytes(8 * n + 8))), FLOAT32, field(0x22, varint(n), b"\1")
        )
    ),
    "unknown fields": lambda n: b"\x78\1" * n,
}
OUTPUTS: dict[str, Callable[[int], bytes]] = {
    "datums said to be there": lambda n: record(number(0x18, n)),
    "records": lambda n: record() * n,
    "records of one": lambda n: record(number(0x18, 1)) * n,
    "offsets": lambda n: record(tensor_input(field(0x12, bytes(8 * n)), FLOAT32)),
    "1 column": lambda n: columns_of(n, 1),
    "6 columns": lambda n: columns_of(n, 6),
    "50 columns": lambda n: columns_of(n, 50),
    "columns of one": lambda n: record(
        *[tensor_input(field(0x12, bytes(16)), FLOAT32, name=name) for name in names(n)]
    ),
    "columns of none": lambda n: record(*[field(0x12, field(0x0A, name)) for name in names(n)]),
    "bfloat16 column": lambda n: record(
        tensor_input(field(0x0A, bytes(2 * n)), field(0x12, struct.pack("<2q", 0, 2 * n)), BFLOAT16)
    ),
    "int32 column": lambda n: record(
        tensor_input(field(0x0A, bytes(4 * n)), field(0x12, struct.pack("<2q", 0, 4 * n)), INT32)
    ),
    "metrics": lambda n: b"".join(
        field(0x1A, field(0x0A, EMOJI, name), FLOAT) for name in names(n)
    ),
    "wide type": lambda n: field(0x0A, EMOJI, b":", b"a" * n),
}
TOPK = field(0x0A, b"abcd") + field(0x12, b"abcd") + number(0x18, 1) + number(0x20, 1)
RESPONSES: dict[str, Callable[[int], bytes]] = {
    "empty sequences": lambda n: field(0x0A) * n,
    "sequences": lambda n: field(0x0A, field(0x12, b"abcd"), field(0x1A, b"abcd")) * n,
    "sequences with top-k": lambda n: (
        field(0x0A, field(0x12, b"abcd"), field(0x1A, b"abcd"), field(0x22, TOPK)) * n
    ),
    "one sequence": lambda n: field(0x0A, field(0x12, bytes(4 * n))),
    "top-k said often": lambda n: field(0x1A, TOPK) * n,
}


def listed(before: bytes, item: bytes, after: bytes) -> Callable[[int], bytes]:
    return lambda n: before + b",".join([item] * n) + after


def keyed(before: bytes, value: bytes, after: bytes) -> Callable[[int], bytes]:
    return lambda n: before + b",".join(b'"%b":%b' % (name, value) for name in names(n)) + after


ANY: dict[str, Callable[[int], bytes]] = {
    "lists": listed(b"[", b"[]", b"]"),
    "nested lists": listed(b"[", b"[[[[[[]]]]]]", b"]"),
    "objects": keyed(b"{", b"{}", b"}"),
    "objects of one": listed(b"[", b'{"a":{}}', b"]"),
    "small numbers": listed(b"[", b"1", b"]"),
    "numbers": listed(b"[", b"999", b"]"),
    "long numbers": listed(b"[", b"9" * 400, b"]"),
    "short texts": listed(b"[", b'"ab"', b"]"),
    "wide short texts": listed(b"[", b'"%b"' % EMOJI, b"]"),
    "wide texts": listed(b"[", b'"%b%b"' % (EMOJI, b"a" * 100), b"]"),
    "wide text": lambda n: b'"' + b"a" * n + EMOJI + b'"',
    "wide text by escape": lambda n: b'"' + b"a" * n + b'\\ud83d\\ude00"',
    "wide keys": keyed(b'{"' + EMOJI + b'":{},', b"0", b"}"),
}
TYPED: dict[str, tuple[Any, Callable[[int], bytes]]] = {
    "models": (
        types.GetServerCapabilitiesResponse,
        listed(b'{"supported_models":[', b"{}", b"]}"),
    ),
    "outputs": (types.ForwardBackwardOutput, listed(b'{"loss_fn_outputs":[', b"{}", b"]}")),
    "metrics": (
        types.ForwardBackwardOutput,
        keyed(b'{"loss_fn_outputs":[],"metrics":{', b"1", b"}}"),
    ),
    "json sequences": (
        types.SampleResponse,
        listed(b'{"sequences":[', b'{"tokens":[1],"logprobs":[1],"stop_reason":"stop"}', b"]}"),
    ),
    "prompt logprobs": (
        types.SampleResponse,
        listed(b'{"sequences":[],"prompt_logprobs":[', b"null", b"]}"),
    ),
    "top-k rows to pad": (
        types.SampleResponse,
        listed(
            b'{"sequences":[],"topk_prompt_logprobs":[[' + b"[0,0]," * 19 + b"[0,0]],",
            b"null",
            b"]}",
        ),
    ),
    "top-k square": (
        types.SampleResponse,
        lambda n: (
            b'{"sequences":[],"topk_prompt_logprobs":[%b[%b[0,0]]]}' % (b"null," * n, b"[0,0]," * n)
        ),
    ),
}
SENT: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "json chunks": (
        "asample",
        listed(b'{"sampling_params":{},"prompt":{"chunks":[', b'{"tokens":[1]}', b"]}}"),
    ),
    "json audio chunks": (
        "asample",
        listed(b'{"sampling_params":{},"prompt":{"chunks":[', b'{"dmel":"AAEC"}', b"]}}"),
    ),
    "json tokens": (
        "asample",
        listed(b'{"sampling_params":{},"prompt":{"chunks":[{"tokens":[', b"1.0", b"]}]}}"),
    ),
    "json datums": (
        "forward",
        listed(
            b'{"model_id":"","forward_input":{"loss_fn":"","data":[',
            b'{"model_input":{"chunks":[]},"loss_fn_inputs":{}}',
            b"]}}",
        ),
    ),
    "json tensors": (
        "forward",
        keyed(
            b'{"model_id":"","forward_input":{"loss_fn":"","data":'
            b'[{"model_input":{"chunks":[]},"loss_fn_inputs":{',
            b'{"data":[],"dtype":"int64"}',
            b"}}]}}",
        ),
    ),
    "operations": (
        "create_custom_loss",
        listed(
            b'{"session_id":"","custom_loss_seq_id":1,"name":"","inputs":[],"graph":{"nodes":[',
            b'{"op":"output","name":"","target":""}',
            b"]}}",
        ),
    ),
    "optimizer settings": (
        "optim_step",
        keyed(b'{"model_id":"","optimizer_params":{"type":"x",', b"1", b"}}"),
    ),
}


def typed(as_type: Any) -> Decode:
    return lambda body, limits: json_format.decode(body, as_type, limits)


def sent_to(name: str) -> Decode:
    return lambda body, limits: read_request(ENDPOINTS[name], {}, {}, {}, body, limits)


BOMBS: dict[str, Bomb] = {
    **{k: Bomb(proto_format.decode_forward_backward_request, f) for k, f in REQUESTS.items()},
    **{k: Bomb(proto_format.decode_forward_backward_output, f) for k, f in OUTPUTS.items()},
    **{k: Bomb(proto_samples.decode_sample_response, f) for k, f in RESPONSES.items()},
    **{f"any: {k}": Bomb(json_format.decode_any, f) for k, f in ANY.items()},
    **{k: Bomb(typed(as_type), f) for k, (as_type, f) in TYPED.items()},
    **{k: Bomb(sent_to(name), f) for k, (name, f) in SENT.items()},
}


def is_taken(bomb: Bomb, body: bytes, limits: DecodeLimits = LIMITS) -> bool:
    try:
        bomb.decode(body, limits)
    except DecodeError:
        return False
    return True


@functools.cache
def largest_taken(bomb: Bomb) -> int:
    """The size of the largest body that is just inside the limit."""
    taken, refused = 1, 2
    while is_taken(bomb, bomb.body(refused)):
        taken, refused = refused, 2 * refused
    while refused - taken > 1 + taken // 64:
        middle = (taken + refused) // 2
        taken, refused = (middle, refused) if is_taken(bomb, bomb.body(middle)) else (taken, middle)
    return taken


def peak_bytes(bomb: Bomb, body: Any) -> int:
    """What decoding takes at most, beyond the body itself."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        is_taken(bomb, body)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_no_body_uses_more_than_twice_the_memory_limit(bomb: Bomb) -> None:
    size = largest_taken(bomb)

    sizes = (size, size + 1 + size // 64, 4 * size, 64 * size)
    peaks = [peak_bytes(bomb, bomb.body(size)) for size in sizes]

    assert max(peaks) <= 2 * LIMIT_BYTES


def test_a_body_above_the_limit_is_not_parsed() -> None:
    body = b"[" + b"[]," * 1_000_000 + b"0]"

    for given in (body, memoryview(body), body.decode()):
        assert peak_bytes(BOMBS["any: lists"], given) < 64 * KIB


@pytest.mark.parametrize(
    ("count", "limits"), [(1 << 31, LIMITS), (1 << 60, ROOMY), ((1 << 63) - 1, ROOMY)]
)
def test_a_declared_datum_count_without_data_is_rejected(count: int, limits: DecodeLimits) -> None:
    body = record(number(0x18, count))

    with pytest.raises(BodyTooLargeError):
        proto_format.decode_forward_backward_output(body, limits)


@pytest.mark.parametrize(
    ("k", "length"), [(1 << 31, 1 << 31), (1 << 32, 1), (0xFFFFFFFF, 0xFFFFFFFF), (1 << 63, 2)]
)
def test_top_k_matrices_of_overflowing_size_are_rejected_or_empty(k: int, length: int) -> None:
    topk = field(0x0A, b"abcd") + field(0x12, b"abcd") + number(0x18, k) + number(0x20, length)

    body = field(0x1A, topk)

    try:
        response = proto_samples.decode_sample_response(body, ROOMY)
    except DecodeError:
        return
    assert response.topk_prompt_logprobs is None


@pytest.mark.parametrize(
    "shape",
    [
        [1 << 40, 1 << 40],
        [(1 << 63) - 1] * 32,
        [1] * 33,
        [1] * 1_000_000,
        [1 << 63, 2],
        [(1 << 64) - 1],
    ],
    ids=["2^80", "2^2016", "33 sizes", "a million sizes", "2^64", "negative"],
)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_absurd_shapes_are_rejected_immediately(shape: list[int], dtype: bytes) -> None:
    packed = field(0x22, b"".join(map(varint, shape)))
    dense = tensor_input(field(0x0A, b"abcd"), dtype, packed)
    sparse = tensor_input(field(0x12, field(0x0A, b"abcd")), dtype, packed)
    started = time.process_time()

    for body in (datum(dense), datum(sparse)):
        with pytest.raises(DecodeError):
            proto_format.decode_forward_backward_request(body, ROOMY)

    assert time.process_time() - started < AT_ONCE_CPU_S


@pytest.mark.parametrize("size", [1, (1 << 63) - 1, 10**400])
def test_a_million_dimensions_in_json_are_rejected_immediately(size: int) -> None:
    sizes = b",".join([b"%d" % size] * (1_000_000 if size == 1 else 50_000))
    body = b'{"loss_fn_outputs":[{"x":{"data":[1],"dtype":"int64","shape":[%b]}}]}' % sizes
    started = time.process_time()

    with pytest.raises(DecodeError):
        json_format.decode(body, types.ForwardBackwardOutput, ROOMY)

    assert time.process_time() - started < AT_ONCE_CPU_S


@pytest.mark.parametrize(
    "offsets", [(0, 1 << 62), (-8, 4), (4, 0), (0, 3), (0, -1), (1 << 62, 1 << 62), (0, 8, 4)]
)
def test_offsets_outside_the_data_are_rejected(offsets: tuple[int, ...]) -> None:
    packed = field(0x12, struct.pack(f"<{len(offsets)}q", *offsets))
    body = record(tensor_input(field(0x0A, bytes(8)), packed, FLOAT32))

    with pytest.raises(DecodeError):
        proto_format.decode_forward_backward_output(body)


def cpu_s(bomb: Bomb, size: int) -> float:
    """The least CPU time of a few runs, without the collector, whose work grows with the heap."""
    body = bomb.body(size)
    times = []
    gc.disable()
    try:
        for _ in range(3):
            started = time.process_time()
            is_taken(bomb, body, ROOMY)
            times.append(time.process_time() - started)
    finally:
        gc.enable()
    return min(times)


GROWTH = 8
QUADRATIC = GROWTH * GROWTH


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_decoding_time_is_linear_in_the_body_size(bomb: Bomb) -> None:
    size = max(64, min(largest_taken(bomb), 1_000))

    # Halfway to quadratic growth on a logarithmic scale, and a millisecond for the clock's noise.
    # A busy neighbour can slow one of the two; it does not do so three times in a row.
    limit = (GROWTH * QUADRATIC) ** 0.5
    is_slow = [cpu_s(bomb, GROWTH * size) - 0.001 > limit * cpu_s(bomb, size)]
    while is_slow[-1] and len(is_slow) < 3:
        is_slow.append(cpu_s(bomb, GROWTH * size) - 0.001 > limit * cpu_s(bomb, size))

    assert not is_slow[-1]
