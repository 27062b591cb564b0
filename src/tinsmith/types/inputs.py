"""The inputs of a model: chunks of text, images and audio, and training examples."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias

from msgspec.structs import force_setattr

from tinsmith.errors import ValidationError, shown
from tinsmith.types.buffers import LAST_LIST, Numbers, pack, shortened
from tinsmith.types.record import ArrayWriter, Frozen, FrozenModel, Request, set_once, to_plain
from tinsmith.types.tensors import MAX_DIMENSIONS, TensorData, TensorDtype, tensor_from

ImageFormat: TypeAlias = Literal["png", "jpeg"]


class EncodedTextChunk(FrozenModel):
    """An immutable sequence of token ids.

    `tokens` may be a list, a tuple, a numpy array, a torch tensor or any buffer of integers.
    """

    __slots__ = ("__weakref__", "_list", "_numbers")

    type: Literal["encoded_text"] = "encoded_text"
    _list: list[int] | None
    _numbers: Numbers

    def __init__(
        self,
        tokens: Any,
        type: Literal["encoded_text"] = "encoded_text",  # noqa: A002 - API name
    ) -> None:
        _check_type(self, type)
        if isinstance(tokens, str | bytes):
            raise ValidationError("tokens must be token ids, not text; encode the text first")
        tokens = LAST_LIST.copied(tokens)
        numbers, shape = pack(tokens, "int32", "tokens")
        if len(shape) != 1:
            raise ValidationError(f"tokens must be one-dimensional, not of shape {shape}")
        is_shared = isinstance(numbers.memory, memoryview) and not numbers.memory.readonly
        own = Numbers(bytes(numbers.memory), "int32") if is_shared else numbers
        set_once(self, "_numbers", own)
        set_once(self, "_list", None)
        LAST_LIST.keep(own, tokens)

    @property
    def tokens(self) -> list[int]:
        """The token ids as a new list."""
        made = self._list
        if made is None:
            made = self._numbers.tolist()
            set_once(self, "_list", made)  # copying it takes a tenth of the time
        return made.copy()

    @property
    def numbers(self) -> Numbers:
        """The token ids as a buffer."""
        return self._numbers

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self._numbers)

    def _arguments(self) -> dict[str, Any]:
        return {"tokens": self._numbers}

    def _parts(self) -> tuple[Any, ...]:
        return (self._numbers,)

    def __hash__(self) -> int:
        return hash(self._numbers)

    def __repr__(self) -> str:
        return f"EncodedTextChunk(tokens={shortened(self._numbers)}, type='encoded_text')"

    def _to_plain(self, write_array: ArrayWriter) -> dict[str, Any]:
        return {"tokens": write_array(self._numbers), "type": self.type}

    @classmethod
    def _from_plain(cls, plain: Any) -> ModelInputChunk:
        chunk = chunk_from_plain(plain)
        if not isinstance(chunk, cls):
            raise ValidationError(f"Expected an encoded_text chunk, not {chunk.type}")
        return chunk


class ImageChunk(Request, weakref=True):
    """An image. `data` may be bytes or base64 text, and is stored as bytes."""

    data: bytes
    format: ImageFormat
    expected_tokens: int | None = None
    type: Literal["image"] = "image"

    def __post_init__(self) -> None:
        force_setattr(self, "data", _binary("ImageChunk.data", self.data))
        super().__post_init__()

    @property
    def length(self) -> int:
        """The expected number of tokens."""
        return _expected(self.expected_tokens, "ImageChunk")

    def __repr__(self) -> str:
        about = f"format={self.format!r}, expected_tokens={self.expected_tokens}"
        return f"ImageChunk(data={len(self.data)} bytes, {about})"


class ImageAssetPointerChunk(Request, weakref=True):
    """An image that the service fetches from `location`; for sampling only."""

    format: ImageFormat
    location: str
    expected_tokens: int | None = None
    type: Literal["image_asset_pointer"] = "image_asset_pointer"

    @property
    def length(self) -> int:
        """The expected number of tokens."""
        return _expected(self.expected_tokens, "ImageAssetPointerChunk")


class DmelChunk(Request, weakref=True):
    """Audio frames in the API's tensor container. `dmel` may be bytes or base64 text."""

    dmel: bytes
    type: Literal["dmel"] = "dmel"

    def __post_init__(self) -> None:
        force_setattr(self, "dmel", _binary("DmelChunk.dmel", self.dmel))
        super().__post_init__()

    @property
    def length(self) -> int:
        """The number of tokens: the first dimension in the header."""
        return _container_shape(self.dmel)[0]


ModelInputChunk: TypeAlias = EncodedTextChunk | ImageAssetPointerChunk | ImageChunk | DmelChunk

_CHUNKS: dict[str, type[Any]] = {
    "encoded_text": EncodedTextChunk,
    "image": ImageChunk,
    "image_asset_pointer": ImageAssetPointerChunk,
    "dmel": DmelChunk,
}
_TYPE_OF_KEY = {
    "location": "image_asset_pointer",
    "data": "image",
    "dmel": "dmel",
    "tokens": "encoded_text",  # last: images of SDK 0.3 use this key for their number of tokens
}


def chunk_from_plain(plain: Any) -> ModelInputChunk:
    """Convert a chunk from JSON; SDK 0.16 and older omit `type`, so the keys decide."""
    if not isinstance(plain, dict):
        raise ValidationError(f"a chunk must be an object, not {type(plain).__name__}")
    kind = plain.get("type")
    if kind is None:
        kind = next((_TYPE_OF_KEY[key] for key in _TYPE_OF_KEY if key in plain), None)
    cls = _CHUNKS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ValidationError(
            f"unknown chunk type {shown(plain.get('type'))}",
            remedy=f"expected one of {', '.join(_CHUNKS)}",
        )
    names = ("tokens",) if cls is EncodedTextChunk else cls.__struct_fields__
    fields = {name: plain[name] for name in names if plain.get(name) is not None}
    if "expected_tokens" in names and isinstance(plain.get("tokens"), int):
        fields.setdefault("expected_tokens", plain["tokens"])  # its name in SDK 0.3
    try:
        return cls(**fields)  # type: ignore[no-any-return]
    except TypeError as exc:
        raise ValidationError(str(exc)) from exc


class ModelInput(FrozenModel):
    """The input of a model: chunks of text, images and audio. Treat it as immutable."""

    __slots__ = ("chunks",)

    chunks: list[ModelInputChunk]

    def __init__(self, chunks: Iterable[ModelInputChunk | dict[str, Any]]) -> None:
        made = [
            chunk if isinstance(chunk, ModelInputChunk) else chunk_from_plain(chunk)
            for chunk in chunks
        ]
        set_once(self, "chunks", made)

    @classmethod
    def from_ints(cls, tokens: Any) -> Self:
        """An input of text only, from token ids in a list, array, tensor or buffer."""
        return cls([EncodedTextChunk(tokens)])

    @classmethod
    def empty(cls) -> Self:
        """An input without chunks; add some with `append`."""
        return cls([])

    def append(self, chunk: ModelInputChunk) -> ModelInput:
        """A new input with `chunk` appended."""
        return ModelInput([*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        """A new input with one token appended, as a separate chunk."""
        return self.append(EncodedTextChunk([token]))

    def to_ints(self) -> list[int]:
        """All token ids in order.

        Raises:
            ValueError: A chunk is not text.
        """
        tokens: list[int] = []
        for chunk in self.chunks:
            if not isinstance(chunk, EncodedTextChunk):
                raise ValidationError(
                    f"to_ints supports only text, but this input has a {type(chunk).__name__}"
                )
            tokens += chunk.tokens
        return tokens

    @property
    def length(self) -> int:
        """The number of tokens."""
        return sum(chunk.length for chunk in self.chunks)

    def _parts(self) -> tuple[Any, ...]:
        return (self.chunks,)

    def _arguments(self) -> dict[str, Any]:
        return {"chunks": self.chunks}

    def __hash__(self) -> int:
        return hash(tuple(self.chunks))

    def __repr__(self) -> str:
        return f"ModelInput(chunks={self.chunks!r})"

    def _to_plain(self, write_array: ArrayWriter) -> dict[str, Any]:
        return {"chunks": [to_plain(chunk, write_array=write_array) for chunk in self.chunks]}

    @classmethod
    def _from_plain(cls, plain: Any) -> Self:
        chunks = plain.get("chunks") if isinstance(plain, dict) else None
        if not isinstance(chunks, list):
            raise ValueError("Expected a list of chunks, as ModelInput.from_ints makes them")
        return cls(chunks)


class _ProvenanceSpan(Request):
    sequence_id: str
    offset: int = 0
    length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 0 or self.offset < 0:
            raise ValidationError(
                f"a span's offset and length must not be negative: {self.offset}, {self.length}"
            )
        if not self.sequence_id:
            raise ValidationError("a span's sequence_id must not be empty")


class PromptProvenanceSpan(_ProvenanceSpan):
    """A range of positions that were part of the prompt of a sampled sequence."""


class SampledProvenanceSpan(_ProvenanceSpan):
    """A range of positions that were sampled."""


ProvenanceSpans: TypeAlias = list[PromptProvenanceSpan | SampledProvenanceSpan]
LossFnInputs: TypeAlias = dict[str, TensorData]
LossFnOutput: TypeAlias = dict[str, TensorData]

_LIST_DTYPES: dict[str, TensorDtype] = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}


class Datum(Frozen):
    """One training example: the model's input, and the inputs of the loss function.

    The values of `loss_fn_inputs` may be lists, numpy arrays, torch tensors or `TensorData`, and
    are stored as `TensorData`. The provenance spans, given both or not at all, cover the input and
    the targets.

    `target_tokens` must have one row per token of the input, which is checked here. The other
    inputs of a named loss must have as many rows, which `forward` and `forward_backward` check.
    Custom losses may have inputs of any shape.

    Raises:
        ValidationError: `target_tokens` and the input differ in length.
    """

    __slots__ = ("loss_fn_input_spans", "loss_fn_inputs", "model_input", "model_input_spans")

    model_input: ModelInput
    loss_fn_inputs: LossFnInputs
    model_input_spans: ProvenanceSpans | None
    loss_fn_input_spans: ProvenanceSpans | None

    def __init__(
        self,
        model_input: ModelInput,
        loss_fn_inputs: Mapping[str, Any] | None = None,
        model_input_spans: ProvenanceSpans | None = None,
        loss_fn_input_spans: ProvenanceSpans | None = None,
    ) -> None:
        if not isinstance(model_input, ModelInput):
            raise TypeError(f"model_input must be a ModelInput, not {type(model_input).__name__}")
        tensors = _tensors(loss_fn_inputs)
        _check_target_rows(model_input, tensors)
        set_once(self, "model_input", model_input)
        set_once(self, "loss_fn_inputs", tensors)
        set_once(self, "model_input_spans", _checked_spans("model_input_spans", model_input_spans))
        set_once(
            self, "loss_fn_input_spans", _checked_spans("loss_fn_input_spans", loss_fn_input_spans)
        )
        if (model_input_spans is None) != (loss_fn_input_spans is None):
            raise ValidationError(
                "only one list of provenance spans was given", remedy="give both or neither"
            )

    def with_provenance(
        self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans
    ) -> Datum:
        """A copy with the provenance of its tokens.

        Args:
            model_input: Spans that cover the input's tokens, in order.
            loss_fn_inputs: Spans that cover `target_tokens`, in order.

        Raises:
            ValueError: The lengths of the spans do not add up to the number of tokens.
        """
        _check_tiling("model_input", model_input, self.model_input.length)
        targets = self.loss_fn_inputs.get("target_tokens")
        if targets is not None and targets.shape is not None and len(targets.shape) == 1:
            _check_tiling("loss_fn_inputs", loss_fn_inputs, targets.shape[0])
        return Datum(self.model_input, self.loss_fn_inputs, model_input, loss_fn_inputs)

    def _parts(self) -> tuple[Any, ...]:
        return (
            self.model_input,
            self.loss_fn_inputs,
            self.model_input_spans,
            self.loss_fn_input_spans,
        )

    def __repr__(self) -> str:
        spans = "" if self.model_input_spans is None else ", with provenance"
        return f"Datum({self.model_input!r}, loss_fn_inputs={self.loss_fn_inputs!r}{spans})"

    def _to_plain(self, write_array: ArrayWriter) -> dict[str, Any]:
        """The JSON format of SDK 0.24 and older, which has no provenance."""
        return {
            "model_input": self.model_input._to_plain(write_array),
            "loss_fn_inputs": {
                name: tensor._to_plain(write_array) for name, tensor in self.loss_fn_inputs.items()
            },
        }

    @classmethod
    def _from_plain(cls, plain: Any) -> Self:
        inputs = plain.get("loss_fn_inputs") if isinstance(plain, dict) else None
        if not isinstance(inputs, dict):
            raise ValueError("Expected a datum: an object with model_input and loss_fn_inputs")
        return cls.received(
            ModelInput._from_plain(plain.get("model_input")),
            {name: TensorData._from_plain(tensor) for name, tensor in inputs.items()},
        )

    @classmethod
    def received(
        cls,
        model_input: ModelInput,
        loss_fn_inputs: Mapping[str, Any],
        model_input_spans: ProvenanceSpans | None = None,
        loss_fn_input_spans: ProvenanceSpans | None = None,
    ) -> Self:
        """A datum from the wire, without checking its lengths; the service checks them later."""
        datum = object.__new__(cls)
        set_once(datum, "model_input", model_input)
        set_once(datum, "loss_fn_inputs", _tensors(loss_fn_inputs))
        set_once(datum, "model_input_spans", model_input_spans)
        set_once(datum, "loss_fn_input_spans", loss_fn_input_spans)
        return datum

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).received, self._parts()  # already checked, or deliberately not

    def check_rows(self) -> None:
        """Check that the inputs of named losses have one row per target.

        Raises:
            ValidationError: One of them has another number of rows.
        """
        targets = self.loss_fn_inputs.get("target_tokens")
        if targets is None:
            return
        for name in _LIST_DTYPES:
            tensor = self.loss_fn_inputs.get(name)
            if tensor is not None and _rows(tensor) != _rows(targets):
                raise ValidationError(
                    f"loss_fn_inputs[{name!r}] has length {_rows(tensor)}, but target_tokens has "
                    f"length {_rows(targets)}",
                    remedy="give one value per target; 0 excludes a target from the loss",
                )


def _tensors(given: Mapping[str, Any] | None) -> LossFnInputs:
    return {
        name: tensor_from(name, value, _LIST_DTYPES.get(name))
        for name, value in (given or {}).items()
    }


def _rows(tensor: TensorData) -> int:
    return tensor.shape[0] if tensor.shape else len(tensor.numbers)


def _check_target_rows(model_input: ModelInput, tensors: LossFnInputs) -> None:
    targets = tensors.get("target_tokens")
    chunks = model_input.chunks
    # Only the service knows the length of images and audio; an empty input is filled in later.
    if (
        targets is None
        or not chunks
        or not all(isinstance(one, EncodedTextChunk) for one in chunks)
    ):
        return
    if _rows(targets) != model_input.length:
        raise ValidationError(
            f"target_tokens has length {_rows(targets)}, but model_input has {model_input.length} "
            "tokens",
            remedy="for a list of tokens, use tokens[:-1] as input and tokens[1:] as targets",
        )


def _check_type(chunk: object, given: str) -> None:
    expected = type(chunk).type  # type: ignore[attr-defined]
    if given != expected:
        raise ValidationError(f"{type(chunk).__name__}.type is always {expected!r}, not {given!r}")


def _binary(what: str, value: Any) -> bytes:
    if isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as exc:
            raise ValidationError(f"{what} is not valid base64: {exc}") from exc
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise ValidationError(f"{what} must be bytes or base64 text, not {type(value).__name__}")


def _expected(tokens: int | None, what: str) -> int:
    if tokens is None:
        raise ValidationError(f"the length of {what} is unknown unless expected_tokens is given")
    return tokens


def _checked_spans(what: str, spans: Sequence[Any] | None) -> ProvenanceSpans | None:
    for span in spans or ():
        if not isinstance(span, PromptProvenanceSpan | SampledProvenanceSpan):
            raise TypeError(
                f"{what} takes PromptProvenanceSpan and SampledProvenanceSpan, "
                f"not {type(span).__name__}"
            )
    return None if spans is None else list(spans)


def _check_tiling(what: str, spans: ProvenanceSpans, length: int) -> None:
    covered = sum(span.length for span in spans)
    if covered != length:
        raise ValidationError(
            f"the {what} spans cover {covered} positions, but there are {length}",
            remedy="the spans must cover all positions exactly once",
        )


_CONSTANT_MARKER = 254
_DTYPE_CODES = range(8)


def _container_shape(data: bytes) -> list[int]:
    """The shape in the header of a tensor container.

    The header is an optional marker byte, a dtype byte, then the rank and each size as varints.
    """
    position = 1 if data[:1] == bytes([_CONSTANT_MARKER]) else 0
    if len(data) <= position or data[position] not in _DTYPE_CODES:
        raise ValidationError("dmel does not start with the header of a tensor container")
    rank, position = _read_varint(data, position + 1)
    if not 1 <= rank <= MAX_DIMENSIONS:
        raise ValidationError(f"dmel has {rank} dimensions: expected 1 to {MAX_DIMENSIONS}")
    shape = []
    for _ in range(rank):
        size, position = _read_varint(data, position)
        shape.append(size)
    return shape


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValidationError("dmel is truncated in its header")
