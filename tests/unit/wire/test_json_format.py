from __future__ import annotations

import json
import math
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.unit.wire import corpus
from tinsmith import types as t
from tinsmith.errors import BodyTooLargeError, DecodeError, ValidationError
from tinsmith.types.buffers import FLOAT32_MAX, Numbers
from tinsmith.wire import json_format
from tinsmith.wire.decode_limits import DecodeLimits
from tinsmith.wire.json_format import decode, decode_any, encode


def tensor_body(array: Any) -> Any:
    """A tensor as the other side reads it."""
    return json.loads(encode(t.TensorData.from_numpy(np.asarray(array))))


@given(hnp.arrays("int64", hnp.array_shapes(max_dims=1, min_side=0)))
def test_integers_round_trip_exactly(array: Any) -> None:
    assert tensor_body(array)["data"] == array.tolist()


@given(
    hnp.arrays(
        "float32",
        hnp.array_shapes(max_dims=1),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
)
def test_float32_round_trips_bit_for_bit(array: Any) -> None:
    again = np.array(tensor_body(array)["data"], dtype="float32")

    assert again.tobytes() == array.tobytes()


def test_infinities_become_the_largest_numbers() -> None:
    assert tensor_body(np.array([math.inf, -math.inf, 1], dtype="float32"))["data"] == [
        FLOAT32_MAX,
        -FLOAT32_MAX,
        1,
    ]


def test_nan_in_an_array_is_rejected_with_a_remedy() -> None:
    with pytest.raises(ValidationError, match="use protobuf"):
        tensor_body(np.array([1.0, math.nan]))


@pytest.mark.parametrize("values", [[1.5, -2.0, 0.0], [], [math.inf], [3e38, 3e38]])
def test_arrays_are_encoded_the_same_with_and_without_numpy(values: list[float]) -> None:
    numbers = t.TensorData(values, "float32").numbers

    with_numpy = json.loads(encode({"x": json_format.array_writer()(numbers)}))["x"]
    without = json_format._write_list(numbers)

    assert with_numpy == pytest.approx(without)


def test_metrics_that_json_cannot_represent_are_omitted_or_clamped() -> None:
    metrics = {"a": 1.5, "b": math.nan, "c": math.inf, "d": -math.inf}

    body = json.loads(encode(t.ForwardBackwardOutput("ArrayRecord", [], metrics)))

    assert body["metrics"]["a"] == 1.5
    assert "b" not in body["metrics"]
    assert body["metrics"]["c"] == -body["metrics"]["d"] == sys.float_info.max


def test_none_is_omitted_and_defaults_are_written() -> None:
    assert encode(t.SamplingParams()) == b'{"temperature":1.0,"top_k":-1,"top_p":1.0}'


def test_unencodable_text_is_rejected() -> None:
    with pytest.raises(ValidationError, match="cannot be encoded as UTF-8"):
        encode(t.SamplingParams(stop="\ud800"))


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b'{"offset": "x", "limit": 1, "total_count": 1}', r"\$\.offset"),
        (b'{"limit": 1, "total_count": 1}', "offset"),
        (b"[]", "Cursor"),
        (b"{", "Cursor"),
        (b"", "Cursor"),
    ],
)
def test_an_error_names_the_type_and_the_path(body: bytes, place: str) -> None:
    with pytest.raises(DecodeError, match="not a valid Cursor") as caught:
        decode(body, t.Cursor)

    assert caught.match(place)


def test_an_error_about_one_of_several_types_names_them() -> None:
    union: Any = t.SessionActive | t.SessionCancelled

    with pytest.raises(DecodeError, match="SessionActive"):
        decode(b"5", union)


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview, lambda body: body.decode()])
def test_a_body_may_be_bytes_a_view_or_text(form: Any) -> None:
    body = form(b'{"offset": 1, "limit": 2, "total_count": 3}')

    assert decode(body, t.Cursor) == t.Cursor(offset=1, limit=2, total_count=3)
    assert decode_any(body) == {"offset": 1, "limit": 2, "total_count": 3}


def test_any_json_is_read_into_plain_data() -> None:
    assert decode_any(b'{"a": [1, null, "x", 1.5, true]}') == {"a": [1, None, "x", 1.5, True]}


def test_a_body_that_could_use_too_much_memory_is_rejected() -> None:
    body = b"[" + b"0," * 1_000 + b"0]"

    assert len(decode_any(body, DecodeLimits(memory_bytes=200_000))) == 1_001
    for form in (body, memoryview(body), body.decode()):
        with pytest.raises(BodyTooLargeError, match="the limit is 50000"):
            decode_any(form, DecodeLimits(memory_bytes=50_000))


def test_arrays_are_encoded_without_an_intermediate_list() -> None:
    written = json_format.array_writer()(Numbers(bytes(8), "int64"))

    assert not isinstance(written, list)
    assert encode({"x": written}) == b'{"x":[0]}'


@pytest.mark.parametrize("name", corpus.TYPES)
def test_every_type_round_trips_through_its_own_json(name: str) -> None:
    value = decode(corpus.JSON_BODIES[name], corpus.TYPES[name])

    assert decode(encode(value), corpus.TYPES[name]) == value


def test_arrays_are_encoded_without_numpy_and_orjson() -> None:
    program = """
import sys
sys.modules["numpy"] = sys.modules["orjson"] = None
from tinsmith import ModelInput, TensorData
from tinsmith.wire.json_format import encode
print(encode(ModelInput.from_ints([1, 2])).decode())
print(encode(TensorData([1.5, float("inf")], "float32")).decode())
"""

    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines() == [
        '{"chunks":[{"tokens":[1,2],"type":"encoded_text"}]}',
        '{"data":[1.5,3.4028234663852886e38],"dtype":"float32"}',
    ]


@pytest.mark.parametrize("writer", ["orjson", "blocks"])
@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 20_000])
def test_long_arrays_are_separate_parts_with_the_same_text(
    count: int, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = t.TensorData([n - 7 for n in range(count)], "int64")
    if writer == "blocks":
        monkeypatch.setattr(json_format, "array_writer", lambda: json_format._write_list)

    parts = json_format.encode_parts(tensor)

    assert json.loads(b"".join(parts)) == {"data": tensor.tolist(), "dtype": "int64"}
    assert (len(parts) > 1) == (count >= 4096)


@pytest.mark.parametrize("writer", ["orjson", "blocks"])
def test_encoding_a_long_array_uses_little_extra_memory(
    writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if writer == "blocks":
        monkeypatch.setattr(json_format, "array_writer", lambda: json_format._write_list)
    tensor = t.TensorData(list(range(100_000, 400_000)), "int64")
    json_format.encode_parts(tensor)  # imports what it needs

    tracemalloc.start()
    try:
        parts = json_format.encode_parts(tensor)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 1.3 * sum(map(len, parts))
    assert len(parts) < 100


@pytest.mark.parametrize("writer", ["orjson", "blocks"])
def test_text_with_nul_bytes_does_not_break_the_parts(
    writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if writer == "blocks":
        monkeypatch.setattr(json_format, "array_writer", lambda: json_format._write_list)
    request = t.SampleRequest(
        prompt=t.ModelInput.from_ints(list(range(5000))).append(
            t.EncodedTextChunk(list(range(9000)))
        ),
        sampling_params=t.SamplingParams(stop=["\0", "a\0b"]),
        sampling_session_id="\0",
    )

    body = b"".join(json_format.encode_parts(request))

    assert json_format.decode(body, t.SampleRequest) == request


def test_infinities_in_a_long_array_are_written_as_the_largest_number() -> None:
    tensor = t.TensorData([math.inf] + [0.5] * 9000 + [-math.inf], "float32")

    data = json.loads(json_format.encode(tensor))["data"]

    assert data[0] == FLOAT32_MAX
    assert data[-1] == -FLOAT32_MAX
    assert data[1:-1] == [0.5] * 9000


# Token ids from the list that they came in


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_ids_are_encoded_the_same_from_a_list_and_from_memory(ids: list[int]) -> None:
    numbers = t.EncodedTextChunk(ids).numbers

    assert json_format.ids_text(tuple(ids)) == b"".join(json_format.numbers_text(numbers))


@pytest.mark.parametrize("other", [True, False, 3.0, 1e9, -1, np.int32(4), [5], "6", None, {}])
def test_values_that_are_not_plain_ids_are_not_encoded_from_a_list(other: Any) -> None:
    assert json_format.ids_text((1, 2, other)) is None
    assert json_format.ids_text((other, 1, 2)) is None
