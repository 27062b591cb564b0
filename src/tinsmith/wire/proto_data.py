"""What is trained on, in protobuf: datums, chunks of their inputs, and provenance spans.

Part of `proto_format.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tinsmith.errors import DecodeError, ValidationError
from tinsmith.types.buffers import (
    Memory,
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
from tinsmith.types.tensors import TensorData
from tinsmith.wire.generated import tags
from tinsmith.wire.proto_tensors import (
    VALUE_MESSAGE,
    numbers_of,
    put_unless_empty,
    read_entry,
    read_tensor,
    write_tensor,
)
from tinsmith.wire.protobuf import (
    Parts,
    Reader,
    put_int,
    put_int32,
    put_map_entry,
    put_message,
    put_text,
    signed,
    signed32,
)


def write_datum(out: Parts, datum: Datum) -> int:
    """A datum's fields; returns their size."""
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
    """The datum between two places of a body."""
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
        f"a {type(chunk).__name__} cannot be trained on", remedy="send the image's bytes"
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
        raise DecodeError("a chunk of the model input is of no kind that is known")
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


def _write_tensor_value(out: Parts, tensor: TensorData) -> int:
    return put_message(out, VALUE_MESSAGE, write_tensor, tensor)
