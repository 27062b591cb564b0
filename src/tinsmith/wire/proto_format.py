"""The three protobuf bodies of the API: training requests, training results, sampling results.

Each `encode_…` gives the body in parts whose arrays are the caller's own memory; each `decode_…`
gives a value whose arrays are views of the body. Absent and unknown fields are as the schema says;
a field that should come once and comes again replaces the first.

`proto/tinsmith.proto` is the schema, `generated/tags.py` its numbers.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from tinsmith.errors import DecodeError, ValidationError
from tinsmith.types.buffers import (
    ITEM_BYTES as NUMBER_BYTES,
)
from tinsmith.types.buffers import (
    Kind,
    Memory,
    Numbers,
    widen_bfloat16,
    widen_int32,
)
from tinsmith.types.inputs import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageChunk,
    LossFnOutput,
    ModelInput,
    ModelInputChunk,
    PromptProvenanceSpan,
    ProvenanceSpans,
    SampledProvenanceSpan,
)
from tinsmith.types.requests import ForwardBackwardRequest
from tinsmith.types.sampling import PromptAltTokens, SampledSequence, SampleResponse, StopReason
from tinsmith.types.tensors import MOST_DIMENSIONS, TensorData, TensorDtype
from tinsmith.types.topk import TopkLogprobs
from tinsmith.types.training import ForwardBackwardInput, ForwardBackwardOutput
from tinsmith.wire.generated import tags
from tinsmith.wire.limits import DEFAULT_LIMITS, DecodeLimits
from tinsmith.wire.protobuf import (
    Parts,
    Reader,
    merged,
    put_bytes,
    put_double,
    put_int,
    put_int32,
    put_map_entry,
    put_message,
    put_packed_ints,
    put_pieces,
    put_text,
    signed,
    signed32,
)

_KEY, _VALUE_MESSAGE, _VALUE_DOUBLE = 0x0A, 0x12, 0x11

_DTYPE_CODES: dict[TensorDtype, int] = {
    "float32": tags.DTYPE_FLOAT32,
    "int64": tags.DTYPE_INT64,
}
_STOP_REASONS: dict[int, StopReason] = {
    tags.STOP_REASON_STOP: "stop",
    tags.STOP_REASON_LENGTH: "length",
}
_STOP_CODES = {name: code for code, name in _STOP_REASONS.items()}


def encode_forward_backward_request(request: ForwardBackwardRequest) -> Parts:
    """The body of `forward_backward`, for both directions."""
    out: Parts = []
    given = request.forward_backward_input
    put_text(out, tags.FORWARD_BACKWARD_REQUEST__MODEL_ID, request.model_id)
    put_int32(out, tags.FORWARD_BACKWARD_REQUEST__SEQ_ID, request.seq_id or 0, "seq_id")
    for datum in given.data:
        put_message(out, tags.FORWARD_BACKWARD_REQUEST__DATA, _write_datum, datum)
    put_text(out, tags.FORWARD_BACKWARD_REQUEST__LOSS_FN, given.loss_fn)
    config = given.loss_fn_config or {}
    for name, value in config.items():
        if not isinstance(value, str):  # servers before SDK 0.27 read numbers from here
            place = tags.FORWARD_BACKWARD_REQUEST__LOSS_FN_CONFIG
            put_map_entry(out, place, name, _write_double_value, float(value))
    put_int(out, tags.FORWARD_BACKWARD_REQUEST__FORWARD_ONLY, int(request.forward_only))
    for name, value in config.items():
        place = tags.FORWARD_BACKWARD_REQUEST__LOSS_FN_CONFIG_V2
        put_map_entry(out, place, name, _write_config_value, value)
    return merged(out)


def decode_forward_backward_request(
    body: Memory, limits: DecodeLimits = DEFAULT_LIMITS
) -> ForwardBackwardRequest:
    """Read the body of `forward_backward`.

    Raises:
        DecodeError: It is not such a message.
    """
    reader = Reader(body, limits)
    model_id, seq_id, loss_fn, forward_only = "", 0, "", False
    data: list[Datum] = []
    numbers: dict[str, float | str] = {}
    values: dict[str, float | str] = {}
    for tag, start, stop in reader.fields(0, len(body)):
        if tag == tags.FORWARD_BACKWARD_REQUEST__DATA:
            data.append(_read_datum(reader, start, stop))
        elif tag == tags.FORWARD_BACKWARD_REQUEST__MODEL_ID:
            model_id = reader.text(start, stop)
        elif tag == tags.FORWARD_BACKWARD_REQUEST__SEQ_ID:
            seq_id = signed32(start)
        elif tag == tags.FORWARD_BACKWARD_REQUEST__LOSS_FN:
            loss_fn = reader.text(start, stop)
        elif tag == tags.FORWARD_BACKWARD_REQUEST__FORWARD_ONLY:
            forward_only = bool(start)
        elif tag == tags.FORWARD_BACKWARD_REQUEST__LOSS_FN_CONFIG:
            name, number = _read_double_entry(reader, start, stop)
            numbers[name] = number
        elif tag == tags.FORWARD_BACKWARD_REQUEST__LOSS_FN_CONFIG_V2:
            name, value = _read_entry(reader, start, stop, _read_config_value, 0.0)
            values[name] = value
    config = values or numbers or None  # the newer map knows all that the older one does
    given = ForwardBackwardInput(data, loss_fn, config)  # type: ignore[arg-type]  # any name
    return ForwardBackwardRequest(given, model_id, seq_id, forward_only=forward_only)


def encode_forward_backward_output(output: ForwardBackwardOutput) -> Parts:
    """The result of `forward_backward`.

    Raises:
        ValidationError: The outputs do not all have the same names, or one is sparse.
    """
    out: Parts = []
    put_text(out, tags.FORWARD_BACKWARD_OUTPUT__LOSS_FN_OUTPUT_TYPE, output.loss_fn_output_type)
    # A record holds neighbours whose arrays differ in their first dimension alone.
    for _, run in groupby(output.loss_fn_outputs, key=_layout):
        place = tags.FORWARD_BACKWARD_OUTPUT__LOSS_FN_OUTPUTS
        put_message(out, place, _write_record, list(run))
    if len({frozenset(datum) for datum in output.loss_fn_outputs}) > 1:
        raise ValidationError("each of a pass's loss_fn_outputs must have the same names")
    for name, value in output.metrics.items():
        place = tags.FORWARD_BACKWARD_OUTPUT__METRICS
        put_map_entry(out, place, name, _write_double_value, float(value))
    return merged(out)


def decode_forward_backward_output(
    body: Memory, limits: DecodeLimits = DEFAULT_LIMITS
) -> ForwardBackwardOutput:
    """Read the result of `forward_backward`.

    Raises:
        DecodeError: It is not such a message.
    """
    reader = Reader(body, limits)
    output_type = ""
    outputs: list[LossFnOutput] = []
    has_records = False
    metrics: dict[str, float] = {}
    for tag, start, stop in reader.fields(0, len(body)):
        if tag == tags.FORWARD_BACKWARD_OUTPUT__LOSS_FN_OUTPUTS:
            outputs += _read_record(reader, start, stop)
            has_records = True
        elif tag == tags.FORWARD_BACKWARD_OUTPUT__LOSS_FN_OUTPUT_TYPE:
            output_type = reader.text(start, stop)
        elif tag == tags.FORWARD_BACKWARD_OUTPUT__METRICS:
            name, value = _read_double_entry(reader, start, stop)
            metrics[name] = value
    # The server may name the class with its module before a colon.
    name = output_type.rsplit(":", 1)[-1] if has_records else output_type or "ArrayRecord"
    return ForwardBackwardOutput(name, outputs, metrics)


def encode_sample_response(response: SampleResponse) -> Parts:
    """The result of `asample`; sequence ids are not part of it."""
    out: Parts = []
    for sequence in response.sequences:
        put_message(out, tags.SAMPLE_RESPONSE__SEQUENCES, _write_sequence, sequence)
    if response.prompt_logprob_numbers is not None:
        memory = response.prompt_logprob_numbers.memory
        put_bytes(out, tags.SAMPLE_RESPONSE__PROMPT_LOGPROBS, memory)
    if (topk := response.topk_prompt_logprobs_np) is not None:
        put_message(out, tags.SAMPLE_RESPONSE__TOPK_PROMPT_LOGPROBS, _write_topk, topk)
    hits = response.prompt_cache_hit_tokens
    put_int32(out, tags.SAMPLE_RESPONSE__PROMPT_CACHE_HIT_TOKENS, hits, "prompt_cache_hit_tokens")
    if (target := response.target_prompt_logprobs) is not None:
        put_message(out, tags.SAMPLE_RESPONSE__TARGET_PROMPT_LOGPROBS, _write_tensor, target)
    if (drawn := response.prompt_alt_tokens) is not None:
        put_message(out, tags.SAMPLE_RESPONSE__PROMPT_ALT_TOKENS, _write_alt_tokens, drawn)
    return merged(out)


def decode_sample_response(body: Memory, limits: DecodeLimits = DEFAULT_LIMITS) -> SampleResponse:
    """Read the result of `asample`; the caller adds the sequence ids of the submission.

    A body in writable memory is given away: the large arrays made of it share it and may be
    written to. Those of any other body are copied when they are asked for as numpy arrays.

    Raises:
        DecodeError: It is not such a message.
    """
    reader = Reader(body, limits)
    sequences: list[SampledSequence] = []
    found: dict[str, Any] = {}
    for tag, start, stop in reader.fields(0, len(body)):
        if tag == tags.SAMPLE_RESPONSE__SEQUENCES:
            sequences.append(_read_sequence(reader, start, stop))
        elif tag == tags.SAMPLE_RESPONSE__PROMPT_LOGPROBS:
            found["prompt_logprobs_np"] = _floats(reader, start, stop)
        elif tag == tags.SAMPLE_RESPONSE__TOPK_PROMPT_LOGPROBS:
            found["topk_prompt_logprobs_np"] = _read_topk(reader, start, stop)
        elif tag == tags.SAMPLE_RESPONSE__PROMPT_CACHE_HIT_TOKENS:
            found["prompt_cache_hit_tokens"] = signed32(start)
        elif tag == tags.SAMPLE_RESPONSE__TARGET_PROMPT_LOGPROBS:
            found["target_prompt_logprobs"] = _read_tensor(reader, start, stop)
        elif tag == tags.SAMPLE_RESPONSE__PROMPT_ALT_TOKENS:
            found["prompt_alt_tokens"] = _read_alt_tokens(reader, start, stop)
    return SampleResponse(sequences, **found)


# Data


def _write_datum(out: Parts, datum: Datum) -> int:
    size = 0
    for chunk in datum.model_input.chunks:
        size += put_message(out, tags.DATUM__MODEL_INPUT, _write_chunk, chunk)
    for name, tensor in datum.loss_fn_inputs.items():
        size += put_map_entry(out, tags.DATUM__LOSS_FN_INPUTS, name, _write_tensor_value, tensor)
    for span in datum.model_input_spans or ():
        size += put_message(out, tags.DATUM__MODEL_INPUT_SPANS, _write_span, span)
    for span in datum.loss_fn_input_spans or ():
        size += put_message(out, tags.DATUM__LOSS_FN_INPUT_SPANS, _write_span, span)
    return size


def _read_datum(reader: Reader, start: int, stop: int) -> Datum:
    chunks: list[ModelInputChunk | dict[str, Any]] = []
    tensors: dict[str, TensorData] = {}
    input_spans: ProvenanceSpans = []
    target_spans: ProvenanceSpans = []
    for tag, at, end in reader.message(start, stop):
        if tag == tags.DATUM__MODEL_INPUT:
            chunks.append(_read_chunk(reader, at, end))
        elif tag == tags.DATUM__LOSS_FN_INPUTS:
            name, tensor = _read_entry(reader, at, end, _read_tensor, None)
            if tensor is None:
                raise DecodeError(f"loss_fn_inputs[{name!r:.80}] has no tensor")
            tensors[name] = tensor
        elif tag == tags.DATUM__MODEL_INPUT_SPANS:
            input_spans.append(_read_span(reader, at, end))
        elif tag == tags.DATUM__LOSS_FN_INPUT_SPANS:
            target_spans.append(_read_span(reader, at, end))
    has_spans = bool(input_spans or target_spans)
    return Datum(
        ModelInput(chunks),
        tensors,
        input_spans if has_spans else None,
        target_spans if has_spans else None,
    )


def _write_chunk(out: Parts, chunk: ModelInputChunk) -> int:
    if isinstance(chunk, EncodedTextChunk):
        return put_message(out, tags.CHUNK__ENCODED_TEXT, _write_text, chunk)
    if isinstance(chunk, ImageChunk):
        return put_message(out, tags.CHUNK__IMAGE, _write_image, chunk)
    if isinstance(chunk, DmelChunk):
        return put_message(out, tags.CHUNK__DMEL, _write_dmel, chunk)
    raise ValidationError(
        f"a {type(chunk).__name__} cannot be trained on", remedy="send the image's bytes"
    )


def _write_text(out: Parts, chunk: EncodedTextChunk) -> int:
    return _put_unless_empty(out, tags.ENCODED_TEXT_CHUNK__TOKENS, chunk.numbers.memory)


def _write_image(out: Parts, chunk: ImageChunk) -> int:
    size = _put_unless_empty(out, tags.IMAGE_CHUNK__DATA, chunk.data)
    size += put_text(out, tags.IMAGE_CHUNK__FORMAT, chunk.format)
    if chunk.expected_tokens is not None:
        tag = tags.IMAGE_CHUNK__EXPECTED_TOKENS
        size += put_int32(out, tag, chunk.expected_tokens, "expected_tokens", even_if_0=True)
    return size


def _write_dmel(out: Parts, chunk: DmelChunk) -> int:
    return _put_unless_empty(out, tags.DMEL_CHUNK__DMEL, chunk.dmel)


def _read_chunk(reader: Reader, start: int, stop: int) -> ModelInputChunk:
    read: Callable[[Reader, int, int], ModelInputChunk] | None = None
    where = (0, 0)
    for tag, at, end in reader.message(start, stop):
        if tag in _CHUNK_READERS:
            read, where = _CHUNK_READERS[tag], (at, end)
    if read is None:
        raise DecodeError("a chunk of the model input is of no kind that is known")
    return read(reader, *where)


def _read_text(reader: Reader, start: int, stop: int) -> EncodedTextChunk:
    memory: Memory = b""
    for tag, at, end in reader.message(start, stop):
        if tag == tags.ENCODED_TEXT_CHUNK__TOKENS:
            memory = reader.memory(at, end)
    return EncodedTextChunk(_numbers(memory, "int32", "tokens"))


def _read_image(reader: Reader, start: int, stop: int) -> ImageChunk:
    found: dict[str, Any] = {"data": b"", "format": ""}
    for tag, at, end in reader.message(start, stop):
        if tag == tags.IMAGE_CHUNK__DATA:
            found["data"] = reader.copied(at, end)
        elif tag == tags.IMAGE_CHUNK__FORMAT:
            found["format"] = reader.text(at, end)
        elif tag == tags.IMAGE_CHUNK__EXPECTED_TOKENS:
            found["expected_tokens"] = signed32(at)
    try:
        return ImageChunk(**found)
    except ValidationError as exc:
        raise DecodeError(str(exc)) from exc


def _read_dmel(reader: Reader, start: int, stop: int) -> DmelChunk:
    dmel = b""
    for tag, at, end in reader.message(start, stop):
        if tag == tags.DMEL_CHUNK__DMEL:
            dmel = reader.copied(at, end)
    return DmelChunk(dmel=dmel)


_CHUNK_READERS: dict[int, Callable[[Reader, int, int], ModelInputChunk]] = {
    tags.CHUNK__ENCODED_TEXT: _read_text,
    tags.CHUNK__IMAGE: _read_image,
    tags.CHUNK__DMEL: _read_dmel,
}


def _write_span(out: Parts, span: PromptProvenanceSpan | SampledProvenanceSpan) -> int:
    is_prompt = isinstance(span, PromptProvenanceSpan)
    tag = tags.PROVENANCE_SPAN__PROMPT_TOKENS if is_prompt else tags.PROVENANCE_SPAN__SAMPLED_TOKENS
    return put_message(out, tag, _write_run, span)


def _write_run(out: Parts, span: PromptProvenanceSpan | SampledProvenanceSpan) -> int:
    # Both kinds of span have the same fields under the same numbers.
    return (
        put_text(out, tags.PROMPT_PROVENANCE_SPAN__SEQUENCE_ID, span.sequence_id)
        + put_int(out, tags.PROMPT_PROVENANCE_SPAN__OFFSET, span.offset)
        + put_int(out, tags.PROMPT_PROVENANCE_SPAN__LENGTH, span.length)
    )


def _read_span(
    reader: Reader, start: int, stop: int
) -> PromptProvenanceSpan | SampledProvenanceSpan:
    cls: type[PromptProvenanceSpan] | type[SampledProvenanceSpan] | None = None
    where = (0, 0)
    for tag, at, end in reader.message(start, stop):
        if tag == tags.PROVENANCE_SPAN__PROMPT_TOKENS:
            cls, where = PromptProvenanceSpan, (at, end)
        elif tag == tags.PROVENANCE_SPAN__SAMPLED_TOKENS:
            cls, where = SampledProvenanceSpan, (at, end)
    if cls is None:
        raise DecodeError("a provenance span is of no kind that is known")
    sequence_id, offset, length = "", 0, 0
    for tag, at, end in reader.fields(*where):
        if tag == tags.PROMPT_PROVENANCE_SPAN__SEQUENCE_ID:
            sequence_id = reader.text(at, end)
        elif tag == tags.PROMPT_PROVENANCE_SPAN__OFFSET:
            offset = signed(at)
        elif tag == tags.PROMPT_PROVENANCE_SPAN__LENGTH:
            length = signed(at)
    try:
        return cls(sequence_id=sequence_id, offset=offset, length=length)
    except ValidationError as exc:
        raise DecodeError(str(exc)) from exc


# Tensors


def _write_tensor(out: Parts, tensor: TensorData) -> int:
    if tensor.row_starts is not None:
        size = put_message(out, tags.TENSOR__SPARSE_CSR, _write_csr, tensor)
    else:
        size = put_bytes(out, tags.TENSOR__DENSE, tensor.numbers.memory)
    tail = _dtype_and_shape(tensor.dtype, tuple(tensor.shape or ()))
    out.append(tail)
    return size + len(tail)


@functools.lru_cache(maxsize=1024)
def _dtype_and_shape(dtype: TensorDtype, shape: tuple[int, ...]) -> bytes:
    """What follows a tensor's numbers; the same for many tensors of a batch."""
    out: Parts = []
    put_int(out, tags.TENSOR__DTYPE, _DTYPE_CODES[dtype])
    put_packed_ints(out, tags.TENSOR__SHAPE, list(shape))
    return b"".join(out)


def _write_csr(out: Parts, tensor: TensorData) -> int:
    assert tensor.row_starts is not None and tensor.columns is not None
    return (
        _put_unless_empty(out, tags.SPARSE_CSR__VALUES, tensor.numbers.memory)
        + _put_unless_empty(out, tags.SPARSE_CSR__CROW_INDICES, tensor.row_starts.memory)
        + _put_unless_empty(out, tags.SPARSE_CSR__COL_INDICES, tensor.columns.memory)
    )


def _read_tensor(reader: Reader, start: int, stop: int) -> TensorData:
    dense: Memory | None = None
    csr: tuple[int, int] | None = None
    code = tags.DTYPE_UNSPECIFIED
    shape: list[int] = []
    for tag, at, end in reader.message(start, stop):
        if tag == tags.TENSOR__DENSE:
            dense, csr = reader.memory(at, end), None
        elif tag == tags.TENSOR__SPARSE_CSR:
            dense, csr = None, (at, end)
        elif tag == tags.TENSOR__DTYPE:
            code = at
        elif tag == tags.TENSOR__SHAPE:
            shape = _checked_shape(shape + reader.packed_ints(at, min(end, at + 10 * 33)))
        elif tag == tags.TENSOR__SHAPE_UNPACKED:
            shape = _checked_shape([*shape, signed(at)])
    if csr is not None:
        return _read_csr(reader, *csr, code, shape)
    numbers, dtype = _widened(reader, b"" if dense is None else dense, code)
    if shape and math.prod(shape) != len(numbers):
        raise DecodeError(f"a tensor of shape {shape} came with {len(numbers)} numbers")
    return TensorData.of_numbers(numbers, dtype, shape or None)


def _read_csr(reader: Reader, start: int, stop: int, code: int, shape: list[int]) -> TensorData:
    stored = row_starts = columns = memoryview(b"")
    for tag, at, end in reader.message(start, stop):
        if tag == tags.SPARSE_CSR__VALUES:
            stored = reader.memory(at, end)
        elif tag == tags.SPARSE_CSR__CROW_INDICES:
            row_starts = reader.memory(at, end)
        elif tag == tags.SPARSE_CSR__COL_INDICES:
            columns = reader.memory(at, end)
    values, dtype = _widened(reader, stored, code)
    try:
        return TensorData(
            values,
            dtype,
            shape,
            sparse_crow_indices=_numbers(row_starts, "int64", "crow_indices"),
            sparse_col_indices=_numbers(columns, "int64", "col_indices"),
        )
    except ValidationError as exc:
        raise DecodeError(str(exc)) from exc


def _widened(reader: Reader, memory: Memory, code: int) -> tuple[Numbers, TensorDtype]:
    """The numbers in one of the two dtypes that tensors have, from the four on the wire."""
    if code == tags.DTYPE_FLOAT32:
        return _numbers(memory, "float32", "a tensor"), "float32"
    if code == tags.DTYPE_INT64:
        return _numbers(memory, "int64", "a tensor"), "int64"
    if code in (tags.DTYPE_INT32, tags.DTYPE_BFLOAT16):
        reader.take_bytes(2 * len(memory))  # these are no views of the body: they are widened
    if code == tags.DTYPE_INT32:
        return Numbers(widen_int32(_numbers(memory, "int32", "a tensor").memory), "int64"), "int64"
    if code == tags.DTYPE_BFLOAT16:
        if len(memory) % 2:
            raise DecodeError("a bfloat16 tensor has an odd number of bytes")
        return Numbers(widen_bfloat16(memory), "float32"), "float32"
    raise DecodeError(f"a tensor is of dtype {code}, which is not known")


def _numbers(memory: Memory, kind: Kind, what: str) -> Numbers:
    if len(memory) % NUMBER_BYTES[kind]:
        raise DecodeError(f"{what} has {len(memory)} bytes, which are no whole {kind} numbers")
    return Numbers(memory, kind)


def _checked_shape(shape: list[int]) -> list[int]:
    if len(shape) > MOST_DIMENSIONS or any(size < 0 for size in shape):
        raise DecodeError(f"a shape must have up to {MOST_DIMENSIONS} sizes, none negative")
    return shape


# Training results


def _layout(output: LossFnOutput) -> tuple[Any, ...]:
    return tuple(
        (name, tensor.dtype, tuple((tensor.shape or [0])[1:])) for name, tensor in output.items()
    )


def _write_record(out: Parts, outputs: list[LossFnOutput]) -> int:
    size = 0
    for name in outputs[0]:
        column = [output[name] for output in outputs]
        if any(tensor.is_sparse for tensor in column):
            raise ValidationError(f"the output {name!r} is sparse; results are dense")
        size += put_map_entry(out, tags.ARRAY_RECORD__FIELDS, name, _write_column_value, column)
    return size + put_int(out, tags.ARRAY_RECORD__NUM_DATUMS, len(outputs))


def _write_column_value(out: Parts, column: list[TensorData]) -> int:
    return put_message(out, _VALUE_MESSAGE, _write_column, column)


def _write_column(out: Parts, column: list[TensorData]) -> int:
    memories = [tensor.numbers.memory for tensor in column]
    offsets = [0]
    for memory in memories:
        offsets.append(offsets[-1] + len(memory))
    size = put_pieces(out, tags.BATCHED_TENSOR__DATA, memories)
    packed = struct.pack(f"<{len(offsets)}q", *offsets)
    size += put_bytes(out, tags.BATCHED_TENSOR__OFFSETS, packed)
    size += put_int(out, tags.BATCHED_TENSOR__DTYPE, _DTYPE_CODES[column[0].dtype])
    trailing = (column[0].shape or [0])[1:]
    return size + put_packed_ints(out, tags.BATCHED_TENSOR__TRAILING_SHAPE, trailing)


def _read_record(reader: Reader, start: int, stop: int) -> list[LossFnOutput]:
    columns: dict[str, list[TensorData]] = {}
    count = 0
    for tag, at, end in reader.message(start, stop):
        if tag == tags.ARRAY_RECORD__FIELDS:
            name, column = _read_entry(reader, at, end, _read_column, [])
            columns[name] = column
        elif tag == tags.ARRAY_RECORD__NUM_DATUMS:
            count = signed(at)
    count = count or len(next(iter(columns.values()), ()))
    if count < 0:
        raise DecodeError(f"a record says that it holds {count} datums")
    for name, column in columns.items():
        if len(column) != count:
            raise DecodeError(
                f"the output {name!r:.80} has {len(column)} arrays for {count} datums"
            )
    reader.take_items(count)
    outputs: list[LossFnOutput] = [{} for _ in range(count)]
    for name, column in columns.items():
        for output, tensor in zip(outputs, column, strict=True):
            output[name] = tensor
    return outputs


def _read_column(reader: Reader, start: int, stop: int) -> list[TensorData]:
    data: Memory = b""
    offset_memory: Memory = b""
    code = tags.DTYPE_UNSPECIFIED
    trailing: list[int] = []
    for tag, at, end in reader.message(start, stop):
        if tag == tags.BATCHED_TENSOR__DATA:
            data = reader.memory(at, end)
        elif tag == tags.BATCHED_TENSOR__OFFSETS:
            offset_memory = reader.memory(at, end)
        elif tag == tags.BATCHED_TENSOR__DTYPE:
            code = at
        elif tag == tags.BATCHED_TENSOR__TRAILING_SHAPE:
            trailing = _checked_shape(trailing + reader.packed_ints(at, min(end, at + 10 * 33)))
        elif tag == tags.BATCHED_TENSOR__TRAILING_SHAPE_UNPACKED:
            trailing = _checked_shape([*trailing, signed(at)])
    numbers, dtype = _widened(reader, data, code)
    offsets = _numbers(offset_memory, "int64", "offsets").view()
    reader.take_items(max(0, len(offsets) - 1))
    # Offsets count the bytes that came; int32 and bfloat16 are wider by now.
    width = len(data) // len(numbers) if len(numbers) else 1
    return list(_slices(numbers, offsets, width, dtype, trailing, len(data)))


def _slices(
    numbers: Numbers,
    offsets: memoryview[int],
    width: int,
    dtype: TensorDtype,
    trailing: list[int],
    data_bytes: int,
) -> Iterator[TensorData]:
    row = math.prod(trailing)
    for index in range(len(offsets) - 1):
        start, stop = offsets[index], offsets[index + 1]
        if not 0 <= start <= stop <= data_bytes or start % width or stop % width:
            raise DecodeError(
                f"array {index} is said to lie in bytes {start}…{stop} of {data_bytes}"
            )
        count = (stop - start) // width
        if row and count % row:
            raise DecodeError(f"{count} numbers do not fill rows of shape {trailing}")
        part = numbers.slice(start // width, stop // width)
        shape = [count // row if row else 0, *trailing]
        if not row and count:
            raise DecodeError(f"{count} numbers do not fill rows of shape {trailing}")
        yield TensorData.of_numbers(part, dtype, shape)


# Sampling results


def _write_sequence(out: Parts, sequence: SampledSequence) -> int:
    size = put_int(out, tags.SAMPLED_SEQUENCE__STOP_REASON, _STOP_CODES[sequence.stop_reason])
    size += _put_unless_empty(out, tags.SAMPLED_SEQUENCE__TOKENS, sequence.token_numbers.memory)
    if sequence.logprob_numbers is not None:
        memory = sequence.logprob_numbers.memory
        size += put_bytes(out, tags.SAMPLED_SEQUENCE__LOGPROBS, memory)
    if (topk := sequence.topk_logprobs_np) is not None:
        place = tags.SAMPLED_SEQUENCE__TOPK_SAMPLED_LOGPROBS
        size += put_message(out, place, _write_topk, topk)
    return size


def _read_sequence(reader: Reader, start: int, stop: int) -> SampledSequence:
    code = tags.STOP_REASON_STOP
    tokens = Numbers(b"", "int32")
    logprobs: Numbers | None = None
    topk: TopkLogprobs | None = None
    for tag, at, end in reader.message(start, stop):
        if tag == tags.SAMPLED_SEQUENCE__STOP_REASON:
            code = at
        elif tag == tags.SAMPLED_SEQUENCE__TOKENS:
            tokens = _numbers(reader.array(at, end), "int32", "tokens")
        elif tag == tags.SAMPLED_SEQUENCE__LOGPROBS:
            logprobs = _floats(reader, at, end)
        elif tag == tags.SAMPLED_SEQUENCE__TOPK_SAMPLED_LOGPROBS:
            topk = _read_topk(reader, at, end)
    if code not in _STOP_REASONS:
        raise DecodeError(f"a sequence stopped for reason {code}, which is not known")
    return SampledSequence(_STOP_REASONS[code], "", tokens, logprobs, topk)


def _floats(reader: Reader, start: int, stop: int) -> Numbers | None:
    """Logprobs; none at all means that they were not asked for."""
    return _numbers(reader.array(start, stop), "float32", "logprobs") if stop > start else None


def _write_topk(out: Parts, topk: TopkLogprobs) -> int:
    return (
        _put_unless_empty(out, tags.TOPK_LOGPROBS__TOKEN_IDS, topk.id_numbers.memory)
        + _put_unless_empty(out, tags.TOPK_LOGPROBS__LOGPROBS, topk.logprob_numbers.memory)
        + put_int(out, tags.TOPK_LOGPROBS__K, topk.k)
        + put_int(out, tags.TOPK_LOGPROBS__LENGTH, topk.length)
    )


def _read_topk(reader: Reader, start: int, stop: int) -> TopkLogprobs | None:
    ids = logprobs = memoryview(b"")
    k = length = 0
    for tag, at, end in reader.message(start, stop):
        if tag == tags.TOPK_LOGPROBS__TOKEN_IDS:
            ids = reader.array(at, end)
        elif tag == tags.TOPK_LOGPROBS__LOGPROBS:
            logprobs = reader.array(at, end)
        elif tag == tags.TOPK_LOGPROBS__K:
            k = at & 0xFFFFFFFF
        elif tag == tags.TOPK_LOGPROBS__LENGTH:
            length = at & 0xFFFFFFFF
    if not k or not length:
        return None
    if not len(ids) == len(logprobs) == 4 * k * length:
        raise DecodeError(
            f"{length} positions of {k} came with {len(ids)} bytes of ids and {len(logprobs)} "
            "of logprobs"
        )
    return TopkLogprobs.of_numbers(Numbers(ids, "int32"), Numbers(logprobs, "float32"), (length, k))


def _write_alt_tokens(out: Parts, drawn: PromptAltTokens) -> int:
    return put_message(
        out, tags.PROMPT_ALT_TOKENS__TOKENS, _write_tensor, drawn.tokens
    ) + put_message(out, tags.PROMPT_ALT_TOKENS__LOGPROBS, _write_tensor, drawn.logprobs)


def _read_alt_tokens(reader: Reader, start: int, stop: int) -> PromptAltTokens:
    tokens: TensorData | None = None
    logprobs: TensorData | None = None
    for tag, at, end in reader.message(start, stop):
        if tag == tags.PROMPT_ALT_TOKENS__TOKENS:
            tokens = _read_tensor(reader, at, end)
        elif tag == tags.PROMPT_ALT_TOKENS__LOGPROBS:
            logprobs = _read_tensor(reader, at, end)
    if tokens is None or logprobs is None:
        raise DecodeError("prompt_alt_tokens came without its tokens or its logprobs")
    return PromptAltTokens(tokens, logprobs)


# Entries of maps: a key, and a value as field 2


def _write_tensor_value(out: Parts, tensor: TensorData) -> int:
    return put_message(out, _VALUE_MESSAGE, _write_tensor, tensor)


def _write_double_value(out: Parts, number: float) -> int:
    return put_double(out, _VALUE_DOUBLE, number)


def _write_config_value(out: Parts, value: float | str) -> int:
    return put_message(out, _VALUE_MESSAGE, _write_config, value)


def _write_config(out: Parts, value: float | str) -> int:
    if isinstance(value, str):
        try:
            return put_bytes(out, tags.LOSS_CONFIG_VALUE__TEXT, value.encode())
        except UnicodeEncodeError as exc:
            raise ValidationError(f"{value!r:.80} is no text that can be sent") from exc
    return put_double(out, tags.LOSS_CONFIG_VALUE__NUMBER, float(value))


def _read_config_value(reader: Reader, start: int, stop: int) -> float | str:
    value: float | str = 0.0
    for tag, at, end in reader.message(start, stop):
        if tag == tags.LOSS_CONFIG_VALUE__NUMBER:
            value = reader.double(at)
        elif tag == tags.LOSS_CONFIG_VALUE__TEXT:
            value = reader.text(at, end)
    return value


def _read_entry(
    reader: Reader, start: int, stop: int, read: Callable[[Reader, int, int], Any], absent: Any
) -> tuple[str, Any]:
    key, value = "", absent
    for tag, at, end in reader.message(start, stop):
        if tag == _KEY:
            key = reader.text(at, end)
        elif tag == _VALUE_MESSAGE:
            value = read(reader, at, end)
    return key, value


def _read_double_entry(reader: Reader, start: int, stop: int) -> tuple[str, float]:
    key, value = "", 0.0
    for tag, at, end in reader.message(start, stop):
        if tag == _KEY:
            key = reader.text(at, end)
        elif tag == _VALUE_DOUBLE:
            value = reader.double(at)
    return key, value


# Small things


def _put_unless_empty(out: Parts, tag: int, memory: Memory) -> int:
    return put_bytes(out, tag, memory) if len(memory) else 0
