"""Training data in protobuf: datums, their chunks, provenance spans and tensors.

Part of `proto_format.py` and `proto_samples.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
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
    ModelInput,
    ModelInputChunk,
    PromptProvenanceSpan,
    ProvenanceSpans,
    SampledProvenanceSpan,
)
from tinsmith.types.tensors import MAX_DIMENSIONS, TensorData, TensorDtype
from tinsmith.wire.generated import tags
from tinsmith.wire.protobuf import (
    Parts,
    Reader,
    put_bytes,
    put_int,
    put_int32,
    put_map_entry,
    put_message,
    put_packed_ints,
    put_text,
    signed,
    signed32,
)

KEY, VALUE_MESSAGE, VALUE_DOUBLE = 0x0A, 0x12, 0x11
"""Tags of the entries of a map: the key, and the value as field 2."""

DTYPE_CODES: dict[TensorDtype, int] = {
    "float32": tags.DTYPE_FLOAT32,
    "int64": tags.DTYPE_INT64,
}


def write_tensor(out: Parts, tensor: TensorData) -> int:
    """Encode a tensor and return its size."""
    if tensor.row_starts is not None:
        size = put_message(out, tags.TENSOR__SPARSE_CSR, _write_csr, tensor)
    else:
        size = put_bytes(out, tags.TENSOR__DENSE, tensor.numbers.memory)
    tail = _dtype_and_shape(tensor.dtype, tuple(tensor.shape or ()))
    out.append(tail)
    return size + len(tail)


@functools.lru_cache(maxsize=1024)
def _dtype_and_shape(dtype: TensorDtype, shape: tuple[int, ...]) -> bytes:
    """The fields after a tensor's values; cached, since many tensors share them."""
    out: Parts = []
    put_int(out, tags.TENSOR__DTYPE, DTYPE_CODES[dtype])
    put_packed_ints(out, tags.TENSOR__SHAPE, list(shape))
    return b"".join(out)


def _write_csr(out: Parts, tensor: TensorData) -> int:
    assert tensor.row_starts is not None and tensor.columns is not None
    return (
        put_unless_empty(out, tags.SPARSE_CSR__VALUES, tensor.numbers.memory)
        + put_unless_empty(out, tags.SPARSE_CSR__CROW_INDICES, tensor.row_starts.memory)
        + put_unless_empty(out, tags.SPARSE_CSR__COL_INDICES, tensor.columns.memory)
    )


def read_tensor(reader: Reader, start: int, stop: int) -> TensorData:
    """Decode the tensor in a range of the body."""
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
            shape = checked_shape(shape + reader.packed_ints(at, min(end, at + 10 * 33)))
        elif tag == tags.TENSOR__SHAPE_UNPACKED:
            shape = checked_shape([*shape, signed(at)])
    if csr is not None:
        return _read_csr(reader, *csr, code, shape)
    numbers, dtype = widened(reader, b"" if dense is None else dense, code)
    if shape and math.prod(shape) != len(numbers):
        raise DecodeError(f"a tensor of shape {shape} has {len(numbers)} values")
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
    values, dtype = widened(reader, stored, code)
    try:
        return TensorData(
            values,
            dtype,
            shape,
            sparse_crow_indices=numbers_of(row_starts, "int64", "crow_indices"),
            sparse_col_indices=numbers_of(columns, "int64", "col_indices"),
        )
    except ValidationError as exc:
        raise DecodeError(str(exc)) from exc


def widened(reader: Reader, memory: Memory, code: int) -> tuple[Numbers, TensorDtype]:
    """Convert one of the four dtypes on the wire to one of the two of tensors."""
    if code == tags.DTYPE_FLOAT32:
        return numbers_of(memory, "float32", "a tensor"), "float32"
    if code == tags.DTYPE_INT64:
        return numbers_of(memory, "int64", "a tensor"), "int64"
    if code in (tags.DTYPE_INT32, tags.DTYPE_BFLOAT16):
        reader.take_bytes(2 * len(memory))  # not views of the body, since they are widened
    if code == tags.DTYPE_INT32:
        return Numbers(
            widen_int32(numbers_of(memory, "int32", "a tensor").memory), "int64"
        ), "int64"
    if code == tags.DTYPE_BFLOAT16:
        if len(memory) % 2:
            raise DecodeError("a bfloat16 tensor has an odd number of bytes")
        return Numbers(widen_bfloat16(memory), "float32"), "float32"
    raise DecodeError(f"unknown dtype {code} of a tensor")


def numbers_of(memory: Memory, kind: Kind, what: str) -> Numbers:
    """Convert bytes to numbers; raises `DecodeError` if the size is not a multiple."""
    if len(memory) % NUMBER_BYTES[kind]:
        raise DecodeError(f"{what} has {len(memory)} bytes, not a multiple of the size of {kind}")
    return Numbers(memory, kind)


def checked_shape(shape: list[int]) -> list[int]:
    """Check a shape; raises `DecodeError` if it is invalid."""
    if len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape):
        raise DecodeError(f"invalid shape: expected up to {MAX_DIMENSIONS} sizes of at least 0")
    return shape


def read_entry(
    reader: Reader, start: int, stop: int, read: Callable[[Reader, int, int], Any], absent: Any
) -> tuple[str, Any]:
    """Decode an entry of a map: its key, and its value with `read`."""
    key, value = "", absent
    for tag, at, end in reader.message(start, stop):
        if tag == KEY:
            key = reader.text(at, end)
        elif tag == VALUE_MESSAGE:
            value = read(reader, at, end)
    return key, value


def put_unless_empty(out: Parts, tag: int, memory: Memory) -> int:
    """Append a field of bytes, omitted if there are none."""
    return put_bytes(out, tag, memory) if len(memory) else 0


def write_datum(out: Parts, datum: Datum) -> int:
    """Encode a datum and return its size."""
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


def read_datum(reader: Reader, start: int, stop: int) -> Datum:
    """Decode the datum in a range of the body."""
    chunks: list[ModelInputChunk | dict[str, Any]] = []
    tensors: dict[str, TensorData] = {}
    input_spans: ProvenanceSpans = []
    target_spans: ProvenanceSpans = []
    for tag, at, end in reader.message(start, stop):
        if tag == tags.DATUM__MODEL_INPUT:
            chunks.append(_read_chunk(reader, at, end))
        elif tag == tags.DATUM__LOSS_FN_INPUTS:
            name, tensor = read_entry(reader, at, end, read_tensor, None)
            if tensor is None:
                raise DecodeError(f"loss_fn_inputs[{name!r:.80}] has no tensor")
            tensors[name] = tensor
        elif tag == tags.DATUM__MODEL_INPUT_SPANS:
            input_spans.append(_read_span(reader, at, end))
        elif tag == tags.DATUM__LOSS_FN_INPUT_SPANS:
            target_spans.append(_read_span(reader, at, end))
    has_spans = bool(input_spans or target_spans)
    return Datum.received(
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
        f"{type(chunk).__name__} is not supported for training", remedy="use an ImageChunk"
    )


def _write_text(out: Parts, chunk: EncodedTextChunk) -> int:
    return put_unless_empty(out, tags.ENCODED_TEXT_CHUNK__TOKENS, chunk.numbers.memory)


def _write_image(out: Parts, chunk: ImageChunk) -> int:
    size = put_unless_empty(out, tags.IMAGE_CHUNK__DATA, chunk.data)
    size += put_text(out, tags.IMAGE_CHUNK__FORMAT, chunk.format)
    if chunk.expected_tokens is not None:
        tag = tags.IMAGE_CHUNK__EXPECTED_TOKENS
        size += put_int32(out, tag, chunk.expected_tokens, "expected_tokens", even_if_0=True)
    return size


def _write_dmel(out: Parts, chunk: DmelChunk) -> int:
    return put_unless_empty(out, tags.DMEL_CHUNK__DMEL, chunk.dmel)


def _read_chunk(reader: Reader, start: int, stop: int) -> ModelInputChunk:
    read: Callable[[Reader, int, int], ModelInputChunk] | None = None
    where = (0, 0)
    for tag, at, end in reader.message(start, stop):
        if tag in _CHUNK_READERS:
            read, where = _CHUNK_READERS[tag], (at, end)
    if read is None:
        raise DecodeError("unknown kind of chunk in the model input")
    return read(reader, *where)


def _read_text(reader: Reader, start: int, stop: int) -> EncodedTextChunk:
    memory: Memory = b""
    for tag, at, end in reader.message(start, stop):
        if tag == tags.ENCODED_TEXT_CHUNK__TOKENS:
            memory = reader.memory(at, end)
    return EncodedTextChunk(numbers_of(memory, "int32", "tokens"))


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
    # Both kinds of span have the same fields and numbers.
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
        raise DecodeError("unknown kind of provenance span")
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


def _write_tensor_value(out: Parts, tensor: TensorData) -> int:
    return put_message(out, VALUE_MESSAGE, write_tensor, tensor)
