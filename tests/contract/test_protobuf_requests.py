"""`ForwardBackwardRequest` in protobuf: the official bytes are read, and ours are the same message.

Messages are compared through deterministic serialisation, so every bit counts, NaN included.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types as official
from tinker.proto import tinker_public_pb2
from tinker.proto.request_conv import forward_backward_request_to_proto

from tests.contract.strategies import INT64_EDGES, as_ours, contract, forward_backward_requests
from tests.oracle import tinsmith_pb2 as oracle_pb2
from tinsmith import types as ours
from tinsmith.errors import ValidationError
from tinsmith.wire import proto_format

ORACLE: Any = oracle_pb2  # made at run time, so no checker knows its messages


def official_message(request: Any, forward_only: bool) -> Any:
    """The message as the SDK's resource layer makes it."""
    message = forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    return message


def our_request(request: Any, forward_only: bool) -> ours.ForwardBackwardRequest:
    given = as_ours(request.forward_backward_input)
    return ours.ForwardBackwardRequest(
        given, request.model_id, request.seq_id, forward_only=forward_only
    )


def our_body(request: ours.ForwardBackwardRequest) -> bytes:
    return b"".join(proto_format.encode_forward_backward_request(request))


def canonical(message: Any) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))


def facts(request: Any) -> tuple[object, ...]:
    """All that a request says, read through the attributes that both SDKs have."""
    given = request.forward_backward_input
    config = given.loss_fn_config or {}
    return (
        request.model_id,
        request.seq_id or 0,
        given.loss_fn,
        {name: _exact(value) for name, value in config.items()},
        [_datum_facts(datum) for datum in given.data],
    )


def _datum_facts(datum: Any) -> tuple[object, ...]:
    tensors = {name: _tensor_facts(tensor) for name, tensor in datum.loss_fn_inputs.items()}
    spans = [_spans(datum.model_input_spans), _spans(datum.loss_fn_input_spans)]
    return [_chunk_facts(chunk) for chunk in datum.model_input.chunks], tensors, spans


def _spans(spans: Any) -> list[tuple[object, ...]]:
    # No spans at all and two empty lists are the same on the wire.
    return [(type(s).__name__, s.sequence_id, s.offset, s.length) for s in spans or ()]


def _chunk_facts(chunk: Any) -> tuple[object, ...]:
    names = ("type", "tokens", "data", "format", "expected_tokens", "dmel")
    return tuple(getattr(chunk, name, None) for name in names)


def _tensor_facts(tensor: Any) -> tuple[object, ...]:
    numbers = tensor._numpy if isinstance(tensor, official.TensorData) else tensor.numbers.numpy()
    indices = (tensor.sparse_crow_indices, tensor.sparse_col_indices)
    return tensor.dtype, tensor.shape, numbers.tobytes(), indices


def _exact(value: float | str) -> object:
    return value if isinstance(value, str) else struct.pack("<d", value)


@settings(contract, max_examples=100)
@given(forward_backward_requests, st.booleans())
def test_official_bytes_decode_to_what_the_official_sdk_encoded(
    request: Any, forward_only: bool
) -> None:
    body = official_message(request, forward_only).SerializeToString()

    decoded = proto_format.decode_forward_backward_request(body)

    assert facts(decoded) == facts(request)
    assert decoded.forward_only is forward_only


@settings(contract, max_examples=100)
@given(forward_backward_requests, st.booleans())
def test_our_bytes_decode_to_the_official_message(request: Any, forward_only: bool) -> None:
    made = our_request(request, forward_only)

    body = our_body(made)

    parsed = tinker_public_pb2.ForwardBackwardRequest.FromString(body)
    assert canonical(parsed) == canonical(official_message(request, forward_only))
    assert facts(proto_format.decode_forward_backward_request(body)) == facts(made)


@contract
@given(forward_backward_requests, st.booleans())
def test_our_own_schema_reads_and_writes_the_same_bytes(request: Any, forward_only: bool) -> None:
    body = our_body(our_request(request, forward_only))

    parsed = ORACLE.ForwardBackwardRequest.FromString(body)

    assert canonical(parsed) == canonical(official_message(request, forward_only))
    decoded = proto_format.decode_forward_backward_request(parsed.SerializeToString())
    assert facts(decoded) == facts(request)


# Fixed examples


def round_trip(datum: Any, **rest: Any) -> ours.ForwardBackwardRequest:
    """Through official bytes to ours, checking on the way that ours are the same message."""
    given = official.ForwardBackwardInput(
        data=[datum], loss_fn=rest.pop("loss_fn", "cross_entropy"), **rest
    )
    request = official.ForwardBackwardRequest(given, "s:train:0", 7)
    message = official_message(request, False)
    body = our_body(our_request(request, False))
    assert canonical(tinker_public_pb2.ForwardBackwardRequest.FromString(body)) == canonical(
        message
    )
    return proto_format.decode_forward_backward_request(message.SerializeToString())


def a_datum(**inputs: Any) -> official.Datum:
    """One whose input is as long as its targets: ours is checked when it is made."""
    length = len(inputs["target_tokens"]) if "target_tokens" in inputs else 2
    tokens = official.ModelInput.from_ints([1] * length)
    return official.Datum(model_input=tokens, loss_fn_inputs=inputs)


def test_the_example_in_the_protocol_document_decodes_as_described() -> None:
    datum = official.Datum(
        model_input=official.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]},  # type: ignore[dict-item]  # lists are converted
    )
    given = official.ForwardBackwardInput(data=[datum, datum], loss_fn="cross_entropy")
    request = official.ForwardBackwardRequest(given, "sess-1:train:0", 1)

    body = our_body(our_request(request, False))

    assert len(body) == 237
    assert proto_format.decode_forward_backward_request(body) == our_request(request, False)


def test_extreme_int64_and_float32_values_round_trip() -> None:
    floats = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.4028235e38], "float32")
    ints = np.array(INT64_EDGES, "int64")

    decoded = round_trip(a_datum(target_tokens=ints, weights=floats))

    tensors = decoded.forward_backward_input.data[0].loss_fn_inputs
    assert tensors["target_tokens"].tolist() == INT64_EDGES
    assert tensors["weights"].to_numpy().tobytes() == floats.tobytes()


def test_sparse_inputs_stay_sparse() -> None:
    """A matrix of targets that is mostly empty travels as CSR, from torch on."""
    dense = torch.zeros(6, 8, dtype=torch.int64)
    dense[1, 2], dense[4, 7] = 9, -1

    decoded = round_trip(a_datum(target_tokens=dense))

    tensor = decoded.forward_backward_input.data[0].loss_fn_inputs["target_tokens"]
    assert tensor.is_sparse
    assert tensor == ours.TensorData.from_torch_sparse(dense)
    assert tensor.tolist() == dense.tolist()


def test_loss_config_holds_numbers_and_text() -> None:
    nan = float("nan")
    config: dict[str, Any] = {"beta": 0.1, "loss_id": "löss", "n": 3, "nan": nan, "empty": ""}

    decoded = round_trip(a_datum(), loss_fn="custom", loss_fn_config=config)

    read = decoded.forward_backward_input.loss_fn_config
    assert read is not None
    assert {name: _exact(value) for name, value in read.items()} == {
        name: _exact(value) for name, value in config.items()
    }


def test_provenance_spans_keep_their_kind_and_order() -> None:
    spans: list[Any] = [
        official.PromptProvenanceSpan(sequence_id="q-0", length=2),
        official.SampledProvenanceSpan(sequence_id="séq", offset=2**40, length=0),
    ]
    datum = official.Datum(
        model_input=official.ModelInput.from_ints([1, 2]),
        model_input_spans=spans,
        loss_fn_input_spans=spans[:1],
    )

    decoded = round_trip(datum).forward_backward_input.data[0]

    assert decoded.model_input_spans == as_ours(spans)
    assert decoded.loss_fn_input_spans == as_ours(spans[:1])


def test_images_and_audio_are_sent_as_bytes() -> None:
    chunks: list[Any] = [
        official.EncodedTextChunk(tokens=[-(2**31), 2**31 - 1]),
        official.ImageChunk(data=b"\x89PNG\0", format="png", expected_tokens=0),
        official.ImageChunk(data=b"", format="jpeg"),
        official.DmelChunk(dmel=b"\x00\x01\x03"),
        official.EncodedTextChunk(tokens=[]),
    ]
    datum = official.Datum(model_input=official.ModelInput(chunks=chunks))

    decoded = round_trip(datum).forward_backward_input.data[0]

    assert decoded.model_input == as_ours(datum.model_input)


def test_asset_pointers_cannot_be_trained_on() -> None:
    pointer = official.ImageAssetPointerChunk(format="png", location="gs://x", expected_tokens=1)
    datum = official.Datum(model_input=official.ModelInput(chunks=[pointer]))
    request = official.ForwardBackwardRequest(
        official.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy"), "m", 1
    )

    with pytest.raises(ValueError, match="ImageAssetPointerChunk"):
        forward_backward_request_to_proto(request)
    with pytest.raises(ValidationError, match="ImageAssetPointerChunk"):
        our_body(our_request(request, False))


@pytest.mark.parametrize("seq_id", [None, 0, 1, 2**31 - 1, -(2**31)])
def test_seq_ids_of_up_to_32_bits_round_trip(seq_id: int | None) -> None:
    given = official.ForwardBackwardInput(data=[], loss_fn="ppo")
    request = official.ForwardBackwardRequest(given, "", seq_id)

    body = our_body(our_request(request, True))

    parsed = tinker_public_pb2.ForwardBackwardRequest.FromString(body)
    assert parsed.seq_id == (seq_id or 0)
    assert parsed.forward_only


def test_seq_ids_beyond_32_bits_are_rejected_like_in_the_official_sdk() -> None:
    request = official.ForwardBackwardRequest(
        official.ForwardBackwardInput(data=[], loss_fn="ppo"), "m", 2**31
    )

    with pytest.raises(ValueError, match="range"):
        forward_backward_request_to_proto(request)
    with pytest.raises(ValidationError, match="32 bits"):
        our_body(our_request(request, False))


def test_a_large_batch_encodes_to_the_same_message() -> None:
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 2**31, 20_000).tolist()
    datum = official.Datum(
        model_input=official.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": generator.integers(-(2**63), 2**63 - 1, 20_000),  # type: ignore[dict-item]  # arrays are converted
            "weights": generator.standard_normal(20_000).astype("float32"),  # type: ignore[dict-item]
        },
    )
    given = official.ForwardBackwardInput(data=[datum] * 4, loss_fn="cross_entropy")
    request = official.ForwardBackwardRequest(given, "m", 1)

    body = our_body(our_request(request, False))

    assert len(body) > 1_000_000
    parsed = tinker_public_pb2.ForwardBackwardRequest.FromString(body)
    assert canonical(parsed) == canonical(official_message(request, False))


def test_servers_fall_back_to_the_older_map_if_the_newer_one_is_empty() -> None:
    """SDKs before 0.27 write numbers into `loss_fn_config` alone."""
    message = tinker_public_pb2.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="dro")
    message.loss_fn_config["beta"] = 0.05

    decoded = proto_format.decode_forward_backward_request(message.SerializeToString())

    assert decoded.forward_backward_input.loss_fn_config == {"beta": 0.05}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_lists_arrays_and_tensors_become_the_official_bytes(dtype: torch.dtype) -> None:
    values = [[1, 0, 3], [4, 5, 6]]
    tensor = torch.tensor(values, dtype=dtype)
    forms: list[Any] = [tensor, tensor.float().numpy() if dtype.is_floating_point else values]

    for form in forms:
        key = "weights" if dtype.is_floating_point else "target_tokens"
        theirs = official.Datum(official.ModelInput.empty(), {key: form})
        mine = ours.Datum(ours.ModelInput.empty(), {key: form})

        assert as_ours(theirs.loss_fn_inputs) == mine.loss_fn_inputs
