from __future__ import annotations

import math
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.oracle import tinsmith_pb2
from tests.unit.wire import corpus
from tests.unit.wire.corpus import field, joined, number
from tinsmith import types as t
from tinsmith.errors import DecodeError, ValidationError
from tinsmith.types.requests import ForwardBackwardRequest, ForwardRequest
from tinsmith.wire import proto_format, proto_samples
from tinsmith.wire.proto_format import (
    decode_forward_backward_output,
    decode_forward_backward_request,
    encode_forward_backward_output,
    encode_forward_backward_request,
)
from tinsmith.wire.proto_samples import decode_sample_response, encode_sample_response

pb: Any = tinsmith_pb2  # made at run time, so unknown to type checkers
MILLION = 1_000_000


def request_of(*data: t.Datum, config: dict[str, float | str] | None = None) -> Any:
    given = t.ForwardBackwardInput(list(data), "cross_entropy", config)
    return ForwardBackwardRequest(given, "model", 1)


def peak_bytes(act: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# Both ways


@pytest.mark.parametrize("kind", corpus.PROTO_BODIES)
def test_every_message_round_trips(kind: str) -> None:
    value = {
        "request": corpus.a_request(),
        "output": corpus.an_output(),
        "response": corpus.a_response(),
    }

    again = corpus.PROTO_DECODERS[kind](corpus.PROTO_BODIES[kind])

    assert again == value[kind]


def test_the_class_of_outputs_is_named_without_its_module() -> None:
    output = t.ForwardBackwardOutput("some.module:ArrayRecord", [{}])

    again = decode_forward_backward_output(joined(encode_forward_backward_output(output)))

    assert again.loss_fn_output_type == "ArrayRecord"


@pytest.mark.parametrize("kind", corpus.PROTO_BODIES)
def test_the_protobuf_library_reads_the_same_fields(kind: str) -> None:
    cls = {
        "request": pb.ForwardBackwardRequest,
        "output": pb.ForwardBackwardOutput,
        "response": pb.SampleResponse,
    }[kind]
    message = cls()

    message.ParseFromString(corpus.PROTO_BODIES[kind])

    again = message.SerializeToString()
    assert corpus.PROTO_DECODERS[kind](again) == corpus.PROTO_DECODERS[kind](
        corpus.PROTO_BODIES[kind]
    )


def test_forward_and_forward_backward_requests_stay_distinct() -> None:
    given = t.ForwardBackwardInput([], "ppo")

    for request in (ForwardRequest(given, "m"), ForwardBackwardRequest(given, "m")):
        again = decode_forward_backward_request(joined(encode_forward_backward_request(request)))
        assert again == request


def test_an_empty_body_is_an_empty_message() -> None:
    assert decode_forward_backward_request(b"").forward_backward_input.data == []
    assert decode_forward_backward_output(b"") == t.ForwardBackwardOutput("ArrayRecord", [])
    assert decode_sample_response(b"") == t.SampleResponse([])


def two_sequences() -> bytes:
    drawn = [t.SampledSequence("stop", tokens=[1, 2]), t.SampledSequence("length", tokens=[3])]
    return joined(encode_sample_response(t.SampleResponse(drawn)))


def test_sequences_are_read_with_the_ids_of_their_submission() -> None:
    read = decode_sample_response(two_sequences(), sequence_ids=["a", "b"])

    assert [sequence.sequence_id for sequence in read.sequences] == ["a", "b"]
    assert [sequence.tokens for sequence in read.sequences] == [[1, 2], [3]]
    assert read == decode_sample_response(two_sequences()).with_sequence_ids(["a", "b"])


@pytest.mark.parametrize("ids", [["a"], ["a", "b", "c"]])
def test_more_or_fewer_ids_than_sequences_are_rejected(ids: list[str]) -> None:
    with pytest.raises(DecodeError, match=f"received 2 sequences with {len(ids)} sequence ids"):
        decode_sample_response(two_sequences(), sequence_ids=ids)


@given(hnp.arrays(st.sampled_from(["float32", "int64"]), hnp.array_shapes(max_dims=3)))
def test_every_bit_of_a_tensor_round_trips(array: Any) -> None:
    request = request_of(t.Datum(t.ModelInput.empty(), {"x": array}))

    again = decode_forward_backward_request(joined(encode_forward_backward_request(request)))

    held = again.forward_backward_input.data[0].loss_fn_inputs["x"].to_numpy()
    assert held.tobytes() == array.tobytes()
    assert held.shape == array.shape


def test_numbers_of_a_loss_config_are_written_for_old_and_new_servers() -> None:
    body = joined(encode_forward_backward_request(request_of(config={"a": 1, "b": "x", "c": 0.0})))

    message = pb.ForwardBackwardRequest.FromString(body)

    assert dict(message.loss_fn_config) == {"a": 1.0, "c": 0.0}
    assert set(message.loss_fn_config_v2) == {"a", "b", "c"}


def test_the_config_of_an_old_client_is_read() -> None:
    message = pb.ForwardBackwardRequest(loss_fn_config={"a": 1.5})

    request = decode_forward_backward_request(message.SerializeToString())

    assert request.forward_backward_input.loss_fn_config == {"a": 1.5}


def test_outputs_of_different_shapes_are_sent_in_separate_records() -> None:
    message = pb.ForwardBackwardOutput.FromString(corpus.PROTO_BODIES["output"])

    assert [record.num_datums for record in message.loss_fn_outputs] == [2, 1]


# Narrow dtypes


def tensor_body(*contents: bytes) -> bytes:
    return field(0x1A, field(0x12, field(0x0A, b"x"), field(0x12, *contents)))


def tensor_of(body: bytes, name: str = "x") -> t.TensorData:
    datum = decode_forward_backward_request(body).forward_backward_input.data[0]
    return datum.loss_fn_inputs[name]


def test_int32_is_read_as_int64() -> None:
    values = [0, -1, 2**31 - 1, -(2**31)]

    tensor = tensor_of(tensor_body(field(0x0A, struct.pack("<4i", *values)), number(0x18, 3)))

    assert tensor == t.TensorData(values, "int64")


def test_bfloat16_is_read_as_float32() -> None:
    values = torch.tensor([1.5, -2.0, math.inf]).bfloat16()
    memory = values.view(torch.int16).numpy().tobytes()

    tensor = tensor_of(tensor_body(field(0x0A, memory), number(0x18, 4)))

    assert tensor == t.TensorData(values.float().tolist(), "float32")


def test_a_shape_may_be_packed_or_not() -> None:
    dense, dtype = field(0x0A, bytes(48)), number(0x18, 2)

    packed = tensor_of(tensor_body(dense, dtype, field(0x22, b"\2\3")))
    unpacked = tensor_of(tensor_body(dense, dtype, number(0x20, 2), number(0x20, 3)))

    assert packed.shape == unpacked.shape == [2, 3]


# What is refused


@pytest.mark.parametrize(
    "contents",
    [
        [field(0x0A, bytes(4))],
        [field(0x0A, bytes(4)), number(0x18, 9)],
        [field(0x0A, bytes(5)), number(0x18, 1)],
        [field(0x0A, bytes(4)), number(0x18, 2)],
        [field(0x0A, bytes(3)), number(0x18, 4)],
        [field(0x0A, bytes(4)), number(0x18, 1), field(0x22, b"\2")],
        [field(0x0A, bytes(4)), number(0x18, 1), number(0x20, (1 << 64) - 1)],
        [field(0x12), number(0x18, 1)],
        [field(0x12, field(0x12, bytes(7))), number(0x18, 1), field(0x22, b"\1\1")],
    ],
)
def test_an_inconsistent_tensor_is_rejected(contents: list[bytes]) -> None:
    with pytest.raises(DecodeError):
        tensor_of(tensor_body(*contents))


@pytest.mark.parametrize(
    "body",
    [
        field(0x1A, field(0x0A)),
        field(0x1A, field(0x0A, field(0x22))),
        field(0x1A, field(0x0A, field(0x12, field(0x12, b"gif")))),
        field(0x1A, field(0x0A, field(0x0A, field(0x0A, b"abc")))),
        field(0x1A, field(0x12, field(0x0A, b"x"))),
        field(0x1A, field(0x1A)),
        field(0x1A, field(0x1A, field(0x0A, number(0x10, 1 << 63)))),
        field(0x0A, b"\xff"),
    ],
)
def test_an_inconsistent_request_is_rejected(body: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_forward_backward_request(body)


@pytest.mark.parametrize(
    "body",
    [
        field(0x0A, number(0x08, 2)),
        field(0x0A, field(0x12, b"abc")),
        field(0x0A, field(0x1A, b"abc")),
        field(0x12, b"abc"),
        field(0x1A, number(0x18, 1), number(0x20, 1)),
        field(0x32),
        field(0x32, field(0x0A, number(0x18, 1))),
    ],
)
def test_an_inconsistent_response_is_rejected(body: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_sample_response(body)


def test_a_column_shorter_than_its_record_is_rejected() -> None:
    column = field(0x12, field(0x0A, b"x"), field(0x12, field(0x12, bytes(16)), number(0x18, 1)))

    assert len(decode_forward_backward_output(field(0x12, column)).loss_fn_outputs) == 1
    for count in (2, (1 << 64) - 1):
        with pytest.raises(DecodeError, match="datums"):
            decode_forward_backward_output(field(0x12, column, number(0x18, count)))


def test_an_image_asset_pointer_cannot_be_trained_on() -> None:
    pointer = t.ImageAssetPointerChunk(format="png", location="s3://x")

    with pytest.raises(ValidationError, match="use an ImageChunk"):
        encode_forward_backward_request(request_of(t.Datum(t.ModelInput([pointer]))))


def test_outputs_that_protobuf_cannot_represent_are_rejected() -> None:
    sparse = t.TensorData(**corpus.SPARSE)
    dense = t.TensorData([1], "int64")

    with pytest.raises(ValidationError, match="sparse"):
        encode_forward_backward_output(t.ForwardBackwardOutput("A", [{"x": sparse}]))
    with pytest.raises(ValidationError, match="same names"):
        encode_forward_backward_output(t.ForwardBackwardOutput("A", [{"x": dense}, {"y": dense}]))


@pytest.mark.parametrize("seq_id", [1 << 31, -(1 << 31) - 1])
def test_a_number_that_the_schema_cannot_represent_is_rejected(seq_id: int) -> None:
    request = ForwardBackwardRequest(t.ForwardBackwardInput([], "ppo"), "m", seq_id)

    with pytest.raises(ValidationError, match="seq_id"):
        encode_forward_backward_request(request)


# What it takes, as S23 asks


def test_arrays_are_encoded_without_a_copy() -> None:
    weights = np.random.default_rng(0).random(10_000, dtype="float32")
    targets = torch.arange(10_000)
    datum = t.Datum(
        t.ModelInput.from_ints(range(10_000)), {"weights": weights, "target_tokens": targets}
    )

    parts = [p for p in encode_forward_backward_request(request_of(datum)) if len(p) > 8_192]

    arrays = [np.frombuffer(part, dtype="uint8") for part in parts]
    tokens = datum.model_input.chunks[0]
    assert isinstance(tokens, t.EncodedTextChunk)
    assert len(arrays) == 3
    assert any(part is tokens.numbers.memory for part in parts)
    assert any(np.shares_memory(array, weights) for array in arrays)
    assert any(np.shares_memory(array, targets.numpy()) for array in arrays)


def test_a_million_floats_encode_in_less_than_four_times_their_memory() -> None:
    values = np.random.default_rng(0).random(MILLION, dtype="float32")
    body: list[bytes] = []

    def act() -> None:
        datum = t.Datum(t.ModelInput.empty(), {"weights": values})
        body.append(joined(encode_forward_backward_request(request_of(datum))))

    peak = peak_bytes(act)

    assert peak < 1.3 * values.nbytes  # S23 allows four times; only the joined body is made
    assert tensor_of(body[0], "weights").to_numpy().tobytes() == values.tobytes()


def test_a_million_floats_in_a_list_encode_in_less_than_four_times_their_memory() -> None:
    values = np.random.default_rng(0).random(MILLION, dtype="float32")
    listed = values.tolist()
    body: list[bytes] = []

    def act() -> None:
        datum = t.Datum(t.ModelInput.empty(), {"weights": listed})
        body.append(joined(encode_forward_backward_request(request_of(datum))))

    assert peak_bytes(act) < 4 * values.nbytes
    assert tensor_of(body[0], "weights").to_numpy().tobytes() == values.tobytes()


def test_64_long_datums_encode_within_a_third_above_their_payload() -> None:
    count, length = 64, 32_768
    tokens = np.arange(length, dtype="int32")
    arrays = [(np.arange(length), np.ones(length, dtype="float32")) for _ in range(count)]
    payload = count * length * (4 + 8 + 4)

    def act() -> None:
        data = [
            t.Datum(t.ModelInput.from_ints(tokens), {"target_tokens": targets, "weights": weights})
            for targets, weights in arrays
        ]
        assert len(joined(encode_forward_backward_request(request_of(*data)))) > payload

    # The arrays are the caller's; tokens are copied once, and the joined body is the payload.
    assert peak_bytes(act) <= 1.3 * payload


def test_decoded_arrays_are_views_of_the_body() -> None:
    body = joined(encode_forward_backward_output(corpus.an_output()))
    whole = np.frombuffer(body, dtype="uint8")

    outputs = decode_forward_backward_output(body).loss_fn_outputs
    response = decode_sample_response(corpus.PROTO_BODIES["response"])

    for output in outputs:
        for tensor in output.values():
            view = np.frombuffer(tensor.numbers.memory, dtype="uint8")
            assert np.shares_memory(view, whole) or not len(view)
    whole = np.frombuffer(corpus.PROTO_BODIES["response"], dtype="uint8")
    tokens = np.frombuffer(response.sequences[0].token_numbers.memory, dtype="uint8")
    assert np.shares_memory(tokens, whole)


def test_decoding_outputs_uses_almost_no_memory_besides_the_body() -> None:
    logprobs = t.TensorData.from_numpy(np.zeros(MILLION, dtype="float32"))
    output = t.ForwardBackwardOutput("ArrayRecord", [{"logprobs": logprobs}] * 4)
    body = joined(encode_forward_backward_output(output))

    assert peak_bytes(lambda: decode_forward_backward_output(body)) < 16 * 1024


def test_a_body_may_be_writable_memory() -> None:
    body = bytearray(corpus.PROTO_BODIES["response"])

    response = decode_sample_response(memoryview(body))
    request = decode_forward_backward_request(memoryview(bytearray(corpus.PROTO_BODIES["request"])))

    assert response == corpus.a_response()
    assert request == corpus.a_request()
    chunk = request.forward_backward_input.data[0].model_input.chunks[0]
    assert isinstance(chunk, t.EncodedTextChunk)
    assert memoryview(chunk.numbers.memory).readonly


def a_topk_body() -> bytes:
    """A sequence of 100 tokens with 20 candidates each: two matrices make up nearly all of it."""
    count, k = 100, 20
    ids = np.arange(count * k, dtype="int32")
    topk = t.TopkLogprobs(ids, -ids.astype("float32"), shape=(count, k))
    sequence = t.SampledSequence("stop", "", range(count), [-1.0] * count, topk)
    return joined(encode_sample_response(t.SampleResponse([sequence])))


def test_large_arrays_of_a_response_share_a_writable_body_and_are_writable() -> None:
    body = bytearray(a_topk_body())

    (sequence,) = decode_sample_response(memoryview(body)).sequences

    topk = sequence.topk_logprobs_np
    assert topk is not None
    whole = np.frombuffer(body, dtype="uint8")
    for matrix in (topk.token_ids, topk.logprobs):
        assert np.shares_memory(matrix, whole)
        matrix[0, 0] = 7
    assert sequence.topk_logprobs is not None
    assert sequence.topk_logprobs[0] is not None
    assert sequence.topk_logprobs[0][0] == (7, 7.0)


def test_small_arrays_of_a_response_do_not_keep_its_body_alive() -> None:
    body = bytearray(a_topk_body())

    (sequence,) = decode_sample_response(memoryview(body)).sequences

    assert sequence.logprobs_np is not None
    for array in (sequence.tokens_np, sequence.logprobs_np):
        assert array.flags.writeable
        assert not np.shares_memory(array, np.frombuffer(body, dtype="uint8"))


def test_arrays_of_a_read_only_body_are_copied_once() -> None:
    body = a_topk_body()

    (sequence,) = decode_sample_response(body).sequences

    topk = sequence.topk_logprobs_np
    assert topk is not None
    topk.logprobs[0, 0] = 7
    assert topk.logprobs[0, 0] == 7
    assert body == a_topk_body()


def test_every_decoder_is_registered_for_fuzzing() -> None:
    """A new decoder must be added to the corpus, or it is not fuzzed."""
    known = {**vars(proto_format), **vars(proto_samples)}
    decoders = {value for name, value in known.items() if name.startswith("decode_")}

    assert decoders == set(corpus.PROTO_DECODERS.values())
