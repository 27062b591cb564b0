"""Results in protobuf: read by us as by the official SDK, and written so that it reads them.

A server's bytes mean the same to both readers; our bytes mean to the official one what we meant.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from tinker import types as official
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)

from tests.contract.messages import forward_backward_outputs, sample_responses
from tests.contract.strategies import contract
from tests.oracle import tinsmith_pb2 as oracle_pb2
from tinsmith import types as ours
from tinsmith.errors import DecodeError, ValidationError
from tinsmith.wire import proto_format, proto_samples

ORACLE: Any = oracle_pb2  # made at run time, so no checker knows its messages


def our_output_bytes(output: ours.ForwardBackwardOutput) -> bytes:
    return b"".join(proto_format.encode_forward_backward_output(output))


def our_sample_bytes(response: ours.SampleResponse) -> bytes:
    return b"".join(proto_samples.encode_sample_response(response))


# What a result says, read through the attributes that both SDKs have


def output_facts(output: Any) -> tuple[object, ...]:
    return (
        output.loss_fn_output_type,
        {name: struct.pack("<d", value) for name, value in output.metrics.items()},
        [
            {name: tensor_facts(tensor) for name, tensor in datum.items()}
            for datum in output.loss_fn_outputs
        ],
    )


def tensor_facts(tensor: Any) -> tuple[object, ...] | None:
    if tensor is None:
        return None
    numbers = tensor._numpy if isinstance(tensor, official.TensorData) else tensor.numbers.numpy()
    indices = (tensor.sparse_crow_indices, tensor.sparse_col_indices)
    return tensor.dtype, tensor.shape, numbers.tobytes(), indices


def sample_facts(response: Any) -> tuple[object, ...]:
    drawn = response.prompt_alt_tokens
    return (
        [sequence_facts(sequence) for sequence in response.sequences],
        array_facts(response.prompt_logprobs_np),
        repr(response.prompt_logprobs),  # NaN differs from itself; its text does not
        topk_facts(response.topk_prompt_logprobs_np, response.topk_prompt_logprobs),
        tensor_facts(response.target_prompt_logprobs),
        response.prompt_cache_hit_tokens,
        drawn and (tensor_facts(drawn.tokens), tensor_facts(drawn.logprobs)),
    )


def sequence_facts(sequence: Any) -> tuple[object, ...]:
    return (
        sequence.stop_reason,
        array_facts(sequence.tokens_np),
        sequence.tokens,
        array_facts(sequence.logprobs_np),
        repr(sequence.logprobs),
        topk_facts(sequence.topk_logprobs_np, sequence.topk_logprobs),
    )


def topk_facts(matrices: Any, rows: Any) -> tuple[object, ...] | None:
    if matrices is None:
        assert rows is None
        return None
    return array_facts(matrices.token_ids), array_facts(matrices.logprobs), repr(list(rows))


def array_facts(array: Any) -> tuple[object, ...] | None:
    return None if array is None else (str(array.dtype), array.shape, array.tobytes())


# Training results


@settings(contract, max_examples=100)
@given(forward_backward_outputs())
def test_training_results_are_read_as_the_official_sdk_reads_them(message: Any) -> None:
    body = message.SerializeToString()

    theirs = deserialize_forward_backward_output(body)
    mine = proto_format.decode_forward_backward_output(body)

    assert output_facts(mine) == output_facts(theirs)


@settings(contract, max_examples=100)
@given(forward_backward_outputs())
def test_our_training_results_are_read_by_the_official_sdk(message: Any) -> None:
    """Written by us: our bytes for the value, read by the official reader and by both schemas."""
    drawn = proto_format.decode_forward_backward_output(message.SerializeToString())
    # No type and no outputs reads as ArrayRecord, so it cannot be told from it.
    kind = drawn.loss_fn_output_type or "ArrayRecord"
    value = ours.ForwardBackwardOutput(kind, drawn.loss_fn_outputs, drawn.metrics)

    body = our_output_bytes(value)

    expected = output_facts(value)
    assert output_facts(deserialize_forward_backward_output(body)) == expected
    assert output_facts(proto_format.decode_forward_backward_output(body)) == expected
    reference = ORACLE.ForwardBackwardOutput.FromString(body).SerializeToString()
    assert output_facts(proto_format.decode_forward_backward_output(reference)) == expected


def test_ragged_outputs_use_one_record_per_trailing_shape() -> None:
    datums = [
        {"logprobs": ours.TensorData([[1.0, 2.0]], "float32")},
        {"logprobs": ours.TensorData([[3.0, 4.0], [5.0, 6.0]], "float32")},
        {"logprobs": ours.TensorData([[7.0, 8.0, 9.0]], "float32")},
    ]
    output = ours.ForwardBackwardOutput("ArrayRecord", datums, {"loss:sum": 1.0})

    body = our_output_bytes(output)

    records = pb.ForwardBackwardOutput.FromString(body).loss_fn_outputs
    assert [record.num_datums for record in records] == [2, 1]
    theirs = deserialize_forward_backward_output(body).loss_fn_outputs
    assert [datum["logprobs"].shape for datum in theirs] == [[1, 2], [2, 2], [1, 3]]


def test_outputs_without_fields_keep_their_count() -> None:
    """Means are weighted by it, so a server that drops the logprobs must still say it."""
    output = ours.ForwardBackwardOutput("ArrayRecord", [{}, {}, {}], {"loss:mean": 0.5})

    theirs = deserialize_forward_backward_output(our_output_bytes(output))

    assert theirs.loss_fn_outputs == [{}, {}, {}]
    assert theirs.metrics == {"loss:mean": 0.5}


def test_narrow_dtypes_are_widened_bit_for_bit() -> None:
    """bfloat16 to float32 and int32 to int64, the edges, both zeros and NaN included."""
    patterns = np.arange(0, 2**16, 7, dtype="<u2")
    edges = np.array([-(2**31), -1, 0, 2**31 - 1], "<i4")
    message = pb.ForwardBackwardOutput(loss_fn_output_type="x:y:ArrayRecord")
    for name, array, dtype in (
        ("b", patterns, pb.DTYPE_BFLOAT16),
        ("i", edges, pb.DTYPE_INT32),
    ):
        field = message.loss_fn_outputs.add(num_datums=1).fields[name]
        field.data, field.dtype = array.tobytes(), dtype
        field.offsets = np.array([0, array.nbytes], "<i8").tobytes()
    first, second = message.loss_fn_outputs

    for record in (first, second):
        single = pb.ForwardBackwardOutput(loss_fn_outputs=[record])
        body = single.SerializeToString()
        assert output_facts(proto_format.decode_forward_backward_output(body)) == output_facts(
            deserialize_forward_backward_output(body)
        )


def test_records_with_different_names_keep_their_own_datums() -> None:
    """The official reader counts such datums from the wrong record; ours keeps each in its own."""
    message = pb.ForwardBackwardOutput()
    message.loss_fn_outputs.add(num_datums=1)
    field = message.loss_fn_outputs.add(num_datums=1).fields["x"]
    field.data, field.dtype = np.array([5], "<i8").tobytes(), pb.DTYPE_INT64
    field.offsets = np.array([0, 8], "<i8").tobytes()
    body = message.SerializeToString()

    with pytest.raises(IndexError):
        deserialize_forward_backward_output(body)
    outputs = proto_format.decode_forward_backward_output(body).loss_fn_outputs
    assert [{name: t.tolist() for name, t in datum.items()} for datum in outputs] == [
        {},
        {"x": [5]},
    ]


def test_outputs_with_differing_names_are_rejected_before_sending() -> None:
    uneven = [{"a": ours.TensorData([1], "int64")}, {"b": ours.TensorData([1], "int64")}]

    with pytest.raises(ValidationError, match="same names"):
        our_output_bytes(ours.ForwardBackwardOutput("ArrayRecord", uneven))


@pytest.mark.parametrize("code", [0, 5, 99])
def test_unknown_dtypes_are_rejected_like_in_the_official_sdk(code: int) -> None:
    message = pb.ForwardBackwardOutput()
    field = message.loss_fn_outputs.add(num_datums=1).fields["x"]
    field.offsets, field.dtype = np.array([0, 0], "<i8").tobytes(), code  # type: ignore[assignment]  # an unknown one
    body = message.SerializeToString()

    with pytest.raises(ValueError, match="DType"):
        deserialize_forward_backward_output(body)
    with pytest.raises(DecodeError, match="dtype"):
        proto_format.decode_forward_backward_output(body)


# Sampling results


@settings(contract, max_examples=100)
@given(sample_responses())
def test_samples_are_read_as_the_official_sdk_reads_them(message: Any) -> None:
    body = message.SerializeToString()

    theirs = deserialize_sample_response(body)
    mine = proto_samples.decode_sample_response(body)

    assert sample_facts(mine) == sample_facts(theirs)


@settings(contract, max_examples=100)
@given(sample_responses())
def test_our_samples_are_read_by_the_official_sdk(message: Any) -> None:
    value = proto_samples.decode_sample_response(message.SerializeToString())

    body = our_sample_bytes(value)

    expected = sample_facts(value)
    assert sample_facts(deserialize_sample_response(body)) == expected
    assert sample_facts(proto_samples.decode_sample_response(body)) == expected
    reference = ORACLE.SampleResponse.FromString(body).SerializeToString()
    assert sample_facts(proto_samples.decode_sample_response(reference)) == expected


def test_a_hand_made_sample_decodes_to_the_same_values_in_the_official_sdk() -> None:
    topk = ours.TopkLogprobs(
        [[5, 6], [7, 0], [0, 0]], [[-0.5, -1.0], [-0.1, -99999.0], [-99999.0, -99999.0]]
    )
    response = ours.SampleResponse(
        [
            ours.SampledSequence("stop", tokens=[1, 2, 2**31 - 1], logprobs=[-0.5, -1.5, -np.inf]),
            ours.SampledSequence("length", tokens=[], topk_logprobs_np=topk),
        ],
        prompt_logprobs=[None, -2.0, -np.inf],
        topk_prompt_logprobs_np=topk,
        target_prompt_logprobs=ours.TensorData(
            [1.5], "float32", [2, 2], sparse_crow_indices=[0, 0, 1], sparse_col_indices=[1]
        ),
        prompt_cache_hit_tokens=3,
        prompt_alt_tokens=ours.PromptAltTokens(
            ours.TensorData([[1], [2]], "int64"), ours.TensorData([[-0.5], [-1.0]], "float32")
        ),
    )

    theirs = deserialize_sample_response(our_sample_bytes(response))

    assert sample_facts(theirs) == sample_facts(response)
    assert [s.stop_reason for s in theirs.sequences] == ["stop", "length"]
    assert theirs.prompt_logprobs == [None, -2.0, -np.inf]
    assert (
        theirs.topk_prompt_logprobs
        == response.topk_prompt_logprobs
        == [
            [(5, -0.5), (6, -1.0)],
            [(7, np.float32(-0.1))],
            None,
        ]
    )
    target = theirs.target_prompt_logprobs
    assert target is not None
    assert target.to_numpy(-1).tolist() == [[-1.0, -1.0], [-1.0, 1.5]]


def test_a_sentinel_in_the_first_cell_empties_the_row() -> None:
    """Whatever follows it; so the official SDK reads it too."""
    topk = pb.TopkLogprobs(
        token_ids=np.array([0, 5], "<i4").tobytes(),
        logprobs=np.array([-99999.0, -1.0], "<f4").tobytes(),
        k=2,
        length=1,
    )
    body = pb.SampleResponse(topk_prompt_logprobs=topk).SerializeToString()

    theirs = deserialize_sample_response(body).topk_prompt_logprobs
    mine = proto_samples.decode_sample_response(body).topk_prompt_logprobs

    assert theirs == [None]
    assert mine == [None]


def test_an_unknown_stop_reason_is_rejected_like_in_the_official_sdk() -> None:
    message = pb.SampleResponse(sequences=[pb.SampledSequence(stop_reason=2)])  # type: ignore[arg-type]  # an unknown one
    body = message.SerializeToString()

    with pytest.raises(ValueError, match="stop_reason"):
        deserialize_sample_response(body)
    with pytest.raises(DecodeError, match="reason 2"):
        proto_samples.decode_sample_response(body)


def test_bfloat16_targets_are_widened_where_the_official_reader_misreads_them() -> None:
    """0x3F80 is 1.0; the official SDK 0.36.0 takes the bits for the number 16256."""
    tensor = pb.Tensor(dense=b"\x80\x3f", dtype=pb.DTYPE_BFLOAT16, shape=[1, 1])
    body = pb.SampleResponse(target_prompt_logprobs=tensor).SerializeToString()

    theirs = deserialize_sample_response(body).target_prompt_logprobs
    mine = proto_samples.decode_sample_response(body).target_prompt_logprobs

    assert theirs is not None and theirs.tolist() == [[16256.0]]
    assert mine is not None and mine.tolist() == [[1.0]]


def test_large_top_k_matrices_decode_like_in_the_official_sdk() -> None:
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 200_000, (2000, 20)).astype("<i4")
    logprobs = generator.standard_normal((2000, 20)).astype("<f4")
    topk = pb.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=20, length=2000)
    body = pb.SampleResponse(topk_prompt_logprobs=topk).SerializeToString()

    theirs = deserialize_sample_response(body).topk_prompt_logprobs
    mine = proto_samples.decode_sample_response(body).topk_prompt_logprobs

    assert mine == theirs
