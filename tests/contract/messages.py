"""Results as the official protobuf classes hold them, for Hypothesis to draw.

There is no official encoder for results, so the messages themselves are drawn: every dtype, ragged
records, missing parts, and arrays of any bits.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb

from tests.contract.strategies import bits, int32s, texts

Kind = Literal["int32", "int64", "float32", "bfloat16"]

DTYPES: dict[Kind, Any] = {
    "float32": pb.DTYPE_FLOAT32,
    "int64": pb.DTYPE_INT64,
    "int32": pb.DTYPE_INT32,
    "bfloat16": pb.DTYPE_BFLOAT16,
}
ITEM_BYTES: dict[Kind, int] = {"float32": 4, "int64": 8, "int32": 4, "bfloat16": 2}


def memories(kind: Kind, count: int) -> st.SearchStrategy[bytes]:
    """The bytes of so many numbers of a kind."""
    if kind == "bfloat16":
        return st.binary(min_size=2 * count, max_size=2 * count)
    return bits(kind, count).map(lambda array: bytes(array.tobytes()))


# Training results


@st.composite
def batched_tensors(draw: st.DrawFn, count: int) -> Any:
    """The arrays of `count` datums under one name, each of its own first dimension."""
    kind: Kind = draw(st.sampled_from(list(DTYPES)))
    trailing = draw(st.lists(st.integers(0, 3), max_size=2))
    row = int(np.prod(trailing))
    sizes = [draw(st.integers(0, 3)) * row for _ in range(count)]
    offsets = np.cumsum([0, *sizes]) * ITEM_BYTES[kind]
    return pb.BatchedTensor(
        data=draw(memories(kind, sum(sizes))),
        offsets=offsets.astype("<i8").tobytes(),
        dtype=DTYPES[kind],
        trailing_shape=trailing,
    )


@st.composite
def forward_backward_outputs(draw: st.DrawFn) -> Any:
    """Up to three records; all have the same names, and all or none say how many datums they hold.

    The official reader mixes up datums where the records differ in that.
    """
    message = pb.ForwardBackwardOutput(loss_fn_output_type=draw(texts))
    message.metrics.update(draw(st.dictionaries(texts, st.floats(), max_size=4)))
    names = draw(st.lists(texts, unique=True, max_size=3))
    says_count = draw(st.booleans())
    for _ in range(draw(st.integers(0, 3))):
        count = draw(st.integers(1, 3))
        record = message.loss_fn_outputs.add(type_tag=draw(texts))
        record.num_datums = count if says_count else 0
        for name in names:
            record.fields[name].CopyFrom(draw(batched_tensors(count)))
    return message


# Sampling results


@st.composite
def topk_matrices(draw: st.DrawFn) -> Any:
    """Top-k cells, some of them unused."""
    k, length = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    ids = draw(bits("int32", k * length)).reshape(length, k)
    logprobs = draw(bits("float32", k * length)).reshape(length, k)
    for row in range(length):
        unused = draw(st.integers(0, k))
        ids[row, k - unused :], logprobs[row, k - unused :] = 0, -99999.0
    return pb.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=length)


@st.composite
def sampled_sequences(draw: st.DrawFn) -> Any:
    count = draw(st.integers(0, 5))
    sequence = pb.SampledSequence(
        stop_reason=draw(st.sampled_from([pb.STOP_REASON_STOP, pb.STOP_REASON_LENGTH])),
        tokens=draw(memories("int32", count)),
    )
    if draw(st.booleans()):
        sequence.logprobs = draw(memories("float32", count))
    if draw(st.booleans()):
        sequence.topk_sampled_logprobs.CopyFrom(draw(topk_matrices()))
    return sequence


@st.composite
def result_tensors(draw: st.DrawFn, *, may_be_sparse: bool = True) -> Any:
    """Tensors with a shape, of the dtypes that the official reader reads rightly."""
    kind: Kind = draw(st.sampled_from(["float32", "int64", "int32"]))
    rows, columns = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    tensor = pb.Tensor(dtype=DTYPES[kind], shape=[rows, columns])
    if not (may_be_sparse and draw(st.booleans())):
        tensor.dense = draw(memories(kind, rows * columns))
        return tensor
    stored = [sorted(draw(st.sets(st.integers(0, columns - 1)))) for _ in range(rows)]
    starts = np.cumsum([0, *map(len, stored)])
    columns_of = [column for row in stored for column in row]
    tensor.sparse_csr.values = draw(memories(kind, int(starts[-1])))
    tensor.sparse_csr.crow_indices = starts.astype("<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array(columns_of, "<i8").tobytes()
    return tensor


@st.composite
def sample_responses(draw: st.DrawFn) -> Any:
    message = pb.SampleResponse(
        sequences=draw(st.lists(sampled_sequences(), max_size=3)),
        prompt_cache_hit_tokens=draw(int32s),
    )
    if draw(st.booleans()):
        message.prompt_logprobs = draw(memories("float32", draw(st.integers(0, 5))))
    if draw(st.booleans()):
        message.topk_prompt_logprobs.CopyFrom(draw(topk_matrices()))
    if draw(st.booleans()):
        message.target_prompt_logprobs.CopyFrom(draw(result_tensors()))
    if draw(st.booleans()):
        message.prompt_alt_tokens.tokens.CopyFrom(draw(result_tensors(may_be_sparse=False)))
        message.prompt_alt_tokens.logprobs.CopyFrom(draw(result_tensors(may_be_sparse=False)))
    return message
