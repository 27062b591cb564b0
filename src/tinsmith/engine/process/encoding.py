"""Values of the engine contract as bytes, and back.

A body is the length of its header, the header, and the arrays:

    the length of the header    four bytes, little-endian, unsigned
    the header                  MessagePack: structs, texts, numbers, and a mark for each array
    the arrays                  their memory, one after the other, in the order of the marks

A mark has the kind of numbers and the number of bytes. The arrays fill the rest of the body, so
they can neither overlap nor leave gaps, and received arrays are views of the body, not copies. No
length that is received is used before it is checked against the bytes that are there.

Structs are decoded by their declared types. Types with arrays have a pair of functions here. No
bytes ever name code to run.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from tinsmith.engine.process.sent_errors import SentError, received, sent
from tinsmith.errors import DecodeError, ValidationError
from tinsmith.types.buffers import Kind, Memory, Numbers
from tinsmith.types.inputs import (
    Datum,
    EncodedTextChunk,
    ModelInput,
    PromptProvenanceSpan,
    ProvenanceSpans,
    SampledProvenanceSpan,
    chunk_from_plain,
)
from tinsmith.types.sampling import PromptAltTokens, SampledSequence, SampleResponse
from tinsmith.types.tensors import TensorData
from tinsmith.types.topk import TopkLogprobs
from tinsmith.types.training import (
    ForwardBackwardOutput,
    OptimizerConfigBase,
    OptimParamsBase,
)

LARGEST_BODY_BYTES = 4 * 1024**3
"""Of one message. A training batch of the default limits takes a few megabytes."""

_HEADER_LENGTH = struct.Struct("<I")
_ARRAY_LENGTH = struct.Struct("<Q")
_CODES: dict[Kind, int] = {"int32": 1, "int64": 2, "float32": 3}
_KINDS = {code: kind for kind, code in _CODES.items()}

_MALFORMED = (
    msgspec.MsgspecError,
    struct.error,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What decoders and constructors raise for values that do not fit."""

T = TypeVar("T")


class BodyEncoder:
    """Encodes values. For one thread."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._plain)
        self._arrays: list[Memory] = []

    def encode(self, value: object) -> bytes:
        """A value as a body.

        Raises:
            ValidationError: It cannot be encoded, or has more than `LARGEST_BODY_BYTES`.
        """
        self._arrays = []
        try:
            header = self._encoder.encode(value)
        except (TypeError, OverflowError, UnicodeError, RecursionError) as exc:
            raise ValidationError(
                f"a message to or from an engine cannot be encoded: {exc}"
            ) from exc
        size = _HEADER_LENGTH.size + len(header) + sum(map(len, self._arrays))
        if size > LARGEST_BODY_BYTES:
            raise ValidationError(
                f"a message of {size} bytes is too large for an engine in a process of its own",
                remedy=f"send less at once: at most {LARGEST_BODY_BYTES} bytes",
            )
        arrays, self._arrays = self._arrays, []
        return b"".join((_HEADER_LENGTH.pack(len(header)), header, *arrays))

    def _plain(self, value: Any) -> Any:
        if type(value) is Numbers:
            self._arrays.append(value.memory)
            return msgspec.msgpack.Ext(_CODES[value.kind], _ARRAY_LENGTH.pack(len(value.memory)))
        write = _WRITERS.get(type(value))
        if write is not None:
            return write(value)
        if isinstance(value, OptimizerConfigBase | OptimParamsBase):
            return value._fields()
        if isinstance(value, BaseException):
            return sent(value)
        if isinstance(value, float):  # such as numpy's
            return float(value)
        raise TypeError(f"a value of type {type(value).__name__}")


class BodyDecoder(Generic[T]):
    """Decodes values of one type. For one thread."""

    def __init__(self, as_type: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(
            as_type, dec_hook=_custom, ext_hook=self._array
        )
        self._body = memoryview(b"")
        self._place = 0

    def decode(self, body: bytes) -> T:
        """The value in a body. Its arrays are views of the body.

        Raises:
            DecodeError: It is malformed.
        """
        self._body = memoryview(body)
        try:
            return self._decode()
        except DecodeError:
            raise
        except _MALFORMED as exc:
            raise DecodeError(f"malformed message of an engine: {exc}") from exc
        finally:
            self._body = memoryview(b"")

    def _decode(self) -> T:
        size = len(self._body)
        if size < _HEADER_LENGTH.size:
            raise DecodeError(f"a message of an engine has only {size} bytes")
        self._place = _HEADER_LENGTH.size + _HEADER_LENGTH.unpack_from(self._body)[0]
        if self._place > size:
            raise DecodeError("the header of an engine's message exceeds the message")
        value = self._decoder.decode(self._body[_HEADER_LENGTH.size : self._place])
        if self._place != size:
            raise DecodeError(f"the arrays of an engine's message end at {self._place}, not {size}")
        return value

    def _array(self, code: int, data: memoryview) -> Numbers:
        kind = _KINDS.get(code)
        if kind is None or len(data) != _ARRAY_LENGTH.size:
            raise ValueError(f"there is no kind {code} of arrays")
        start, self._place = self._place, self._place + _ARRAY_LENGTH.unpack(data)[0]
        return Numbers(self._body[start : self._place], kind)


def _custom(declared: type, plain: Any) -> Any:
    read = _READERS.get(declared)
    if read is None:
        raise NotImplementedError(f"{declared.__name__} is not sent to or by engines")
    return read(plain)


# Each pair below writes the parts of a value, which are encoded in turn, and reads them again.


def _write_input(value: ModelInput) -> list[Any]:
    return [
        chunk.numbers if isinstance(chunk, EncodedTextChunk) else chunk for chunk in value.chunks
    ]


def _read_input(plain: Any) -> ModelInput:
    return ModelInput(
        EncodedTextChunk(one) if isinstance(one, Numbers) else chunk_from_plain(one)
        for one in plain
    )


def _write_tensor(value: TensorData) -> tuple[Any, ...]:
    if value.row_starts is None:
        return value.numbers, value.shape
    return value.numbers, value.shape, value.row_starts, value.columns


def _read_tensor(plain: Any) -> TensorData:
    numbers, shape, *sparse = plain
    return TensorData(_numbers(numbers), numbers.kind, shape, *map(_numbers, sparse))


def _numbers(plain: Any) -> Numbers:
    if not isinstance(plain, Numbers):
        raise TypeError(f"expected an array, not {type(plain).__name__}")
    return plain


def _write_datum(value: Datum) -> tuple[Any, ...]:
    inputs = value.model_input, value.loss_fn_inputs
    if value.model_input_spans is None and value.loss_fn_input_spans is None:
        return inputs
    return (*inputs, _spans(value.model_input_spans), _spans(value.loss_fn_input_spans))


def _read_datum(plain: Any) -> Datum:
    tokens, tensors, *spans = plain
    inputs = {name: _read_tensor(one) for name, one in tensors.items()}
    return Datum.received(_read_input(tokens), inputs, *map(_read_spans, spans))


def _spans(spans: ProvenanceSpans | None) -> list[Any] | None:
    return (
        None
        if spans is None
        else [
            (isinstance(one, SampledProvenanceSpan), one.sequence_id, one.offset, one.length)
            for one in spans
        ]
    )


def _read_spans(plain: Any) -> ProvenanceSpans | None:
    return (
        None
        if plain is None
        else [
            (SampledProvenanceSpan if is_sampled else PromptProvenanceSpan)(
                sequence_id=sequence_id, offset=offset, length=length
            )
            for is_sampled, sequence_id, offset, length in plain
        ]
    )


def _read_output(plain: Any) -> ForwardBackwardOutput:
    kind, outputs, metrics = plain
    read = [{name: _read_tensor(one) for name, one in output.items()} for output in outputs]
    return ForwardBackwardOutput(kind, read, metrics)


def _write_topk(value: TopkLogprobs) -> tuple[Any, ...]:
    return value.id_numbers, value.logprob_numbers, value.length, value.k


def _read_topk(plain: Any) -> TopkLogprobs | None:
    if plain is None:
        return None
    ids, logprobs, length, k = plain
    return TopkLogprobs(_numbers(ids), _numbers(logprobs), (int(length), int(k)))


def _read_sequence(plain: Any) -> SampledSequence:
    stop_reason, sequence_id, tokens, logprobs, topk = plain
    optional = None if logprobs is None else _numbers(logprobs)
    return SampledSequence(stop_reason, sequence_id, _numbers(tokens), optional, _read_topk(topk))


def _read_response(plain: Any) -> SampleResponse:
    sequences, logprobs, topk, targets, cached, alternatives = plain
    return SampleResponse(
        [_read_sequence(one) for one in sequences],
        None if logprobs is None else _numbers(logprobs),
        _read_topk(topk),
        None if targets is None else _read_tensor(targets),
        int(cached),
        None if alternatives is None else PromptAltTokens(*map(_read_tensor, alternatives)),
    )


def _parts(value: Any) -> Sequence[Any]:
    parts: Sequence[Any] = value._parts()
    return parts


_WRITERS: dict[type, Callable[[Any], Any]] = {
    ModelInput: _write_input,
    TensorData: _write_tensor,
    Datum: _write_datum,
    TopkLogprobs: _write_topk,
    ForwardBackwardOutput: _parts,
    SampledSequence: _parts,
    SampleResponse: _parts,
    PromptAltTokens: _parts,
}
_READERS: dict[type, Callable[[Any], Any]] = {
    ModelInput: _read_input,
    TensorData: _read_tensor,
    Datum: _read_datum,
    ForwardBackwardOutput: _read_output,
    SampleResponse: _read_response,
    OptimizerConfigBase: OptimizerConfigBase._from_plain,
    OptimParamsBase: OptimParamsBase._from_plain,
    BaseException: lambda plain: received(msgspec.convert(plain, SentError)),
}
