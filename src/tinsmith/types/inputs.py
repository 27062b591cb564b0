"""What goes into a model: chunks of text, images and audio, and the data of a training step."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias

from msgspec.structs import force_setattr

from tinsmith.errors import ValidationError, shown
from tinsmith.types.buffers import Numbers, pack, shortened
from tinsmith.types.last_list import LAST_LIST
from tinsmith.types.record import ArrayWriter, Frozen, FrozenModel, Request, set_once, to_plain
from tinsmith.types.tensors import MOST_DIMENSIONS, TensorData, TensorDtype, tensor_from

ImageFormat: TypeAlias = Literal["png", "jpeg"]


class EncodedTextChunk(FrozenModel):
    """Token ids, held as int32 in memory and never changed.

    `tokens` may be given as a list, a tuple, a numpy array, a torch tensor or any buffer of
    integers.
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
            raise ValidationError("tokens must be token ids, not text; encode it first")
        tokens = LAST_LIST.copied(tokens)
        numbers, shape = pack(tokens, "int32", "tokens")
        if len(shape) != 1:
            raise ValidationError(f"tokens must be one flat list, not of shape {shape}")
        is_shared = isinstance(numbers.memory, memoryview) and not numbers.memory.readonly
        own = Numbers(bytes(numbers.memory), "int32") if is_shared else numbers
        set_once(self, "_numbers", own)
        set_once(self, "_list", None)
        LAST_LIST.keep(own, tokens)

    @property
    def tokens(self) -> list[int]:
        """The token ids as a list of the caller's own."""
        made = self._list
        if made is None:
            made = self._numbers.tolist()
            set_once(self, "_list", made)  # to copy it costs a tenth of making it
        return made.copy()

    @property
    def numbers(self) -> Numbers:
        """The token ids in memory."""
        return self._numbers

    @property
    def length(self) -> int:
        """How many tokens this chunk takes."""
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
    """An image's bytes. `data` may be given as base64 text and is kept as bytes."""

    data: bytes
    format: ImageFormat
    expected_tokens: int | None = None
    type: Literal["image"] = "image"

    def __post_init__(self) -> None:
        force_setattr(self, "data", _binary("ImageChunk.data", self.data))
        super().__post_init__()

    @property
    def length(self) -> int:
        """How many tokens this image is expected to take."""
        return _expected(self.expected_tokens, "ImageChunk")

    def __repr__(self) -> str:
        about = f"format={self.format!r}, expected_tokens={self.expected_tokens}"
        return f"ImageChunk(data={len(self.data)} bytes, {about})"


class ImageAssetPointerChunk(Request, weakref=True):
    """An image that the service fetches from `location`. For sampling only."""

    format: ImageFormat
    location: str
    expected_tokens: int | None = None
    type: Literal["image_asset_pointer"] = "image_asset_pointer"

    @property
    def length(self) -> int:
        """How many tokens this image is expected to take."""
        return _expected(self.expected_tokens, "ImageAssetPointerChunk")


class DmelChunk(Request, weakref=True):
    """Audio frames in the API's tensor container. `dmel` may be given as base64 text."""

    dmel: bytes
    type: Literal["dmel"] = "dmel"

    def __post_init__(self) -> None:
        force_setattr(self, "dmel", _binary("DmelChunk.dmel", self.dmel))
        super().__post_init__()

    @property
    def length(self) -> int:
        """How many tokens the audio takes: the first dimension named in its header."""
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
    "tokens": "encoded_text",  # last: images of SDK 0.3 say under this name how many they take
}


def chunk_from_plain(plain: Any) -> ModelInputChunk:
    """A chunk from its JSON form; SDK 0.16 and older leave `type` out, so the keys tell."""
    if not isinstance(plain, dict):
        raise ValidationError(f"a chunk is an object, not {type(plain).__name__}")
    kind = plain.get("type")
    if kind is None:
        kind = next((_TYPE_OF_KEY[key] for key in _TYPE_OF_KEY if key in plain), None)
    cls = _CHUNKS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ValidationError(
            f"unknown chunk type {shown(plain.get('type'))}",
            remedy=f"known are {', '.join(_CHUNKS)}",
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
    """What a model reads: chunks of text, images and audio in order. Treat it as immutable."""

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
        """Text alone, from token ids in a list, array, tensor or buffer."""
        return cls([EncodedTextChunk(tokens)])

    @classmethod
    def empty(cls) -> Self:
        """Nothing yet; `append` to it."""
        return cls([])

    def append(self, chunk: ModelInputChunk) -> ModelInput:
        """A new input with `chunk` at its end."""
        return ModelInput([*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        """A new input with one token more, in a chunk of its own."""
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
                    f"to_ints works for text alone; this input has a {type(chunk).__name__}"
                )
            tokens += chunk.tokens
        return tokens

    @property
    def length(self) -> int:
        """How many tokens the input takes."""
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
    """A run of positions that were the prompt of a sampled sequence."""


class SampledProvenanceSpan(_ProvenanceSpan):
    """A run of positions that were sampled."""


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
    """One training example: what the model reads and what the loss needs beside it.

    The values of `loss_fn_inputs` may be given as lists, numpy arrays, torch tensors or
    `TensorData`, and are kept as `TensorData`. Provenance spans come as a pair that tiles the
    input and the targets.

    `target_tokens` must have a row for each token of the input, which is checked here. Other inputs
    of a named loss must have as many rows, which `forward` and `forward_backward` check: a loss of
    your own may take inputs of any shape.

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
                "provenance comes as a pair", remedy="give both lists of spans or neither"
            )

    def with_provenance(
        self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans
    ) -> Datum:
        """A copy that says where its tokens came from.

        Args:
            model_input: Runs that tile the input's tokens, in order.
            loss_fn_inputs: Runs that tile `target_tokens`, in order.

        Raises:
            ValueError: The runs do not add up to the length of what they tile.
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
        """The JSON form of SDK 0.24 and older, which knows no provenance."""
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
        """A datum as somebody sent it: lengths are for whoever runs it to check."""
        datum = object.__new__(cls)
        set_once(datum, "model_input", model_input)
        set_once(datum, "loss_fn_inputs", _tensors(loss_fn_inputs))
        set_once(datum, "model_input_spans", model_input_spans)
        set_once(datum, "loss_fn_input_spans", loss_fn_input_spans)
        return datum

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).received, self._parts()  # it was checked, or is not to be

    def check_rows(self) -> None:
        """Check that inputs which named losses read have a row for each target.

        Raises:
            ValidationError: One has more or fewer.
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
                    remedy="give one value for each target; 0 excludes a target from the loss",
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
    # The length of an image or of audio is for the service to say; no input at all is yet to come.
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
            raise ValidationError(f"{what} is text and not valid base64: {exc}") from exc
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise ValidationError(f"{what} must be bytes or base64 text, not {type(value).__name__}")


def _expected(tokens: int | None, what: str) -> int:
    if tokens is None:
        raise ValidationError(f"{what} has no length until expected_tokens is given")
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
            f"the {what} spans cover {covered} positions and there are {length}",
            remedy="the runs must tile them exactly",
        )


_CONSTANT_MARKER = 254
_DTYPE_CODES = range(8)


def _container_shape(data: bytes) -> list[int]:
    """The shape in the header of a tensor container.

    The header is an optional marker byte, a dtype byte, then the rank and each size as varints.
    """
    position = 1 if data[:1] == bytes([_CONSTANT_MARKER]) else 0
    if len(data) <= position or data[position] not in _DTYPE_CODES:
        raise ValidationError("dmel does not begin with a tensor container's header")
    rank, position = _read_varint(data, position + 1)
    if not 1 <= rank <= MOST_DIMENSIONS:
        raise ValidationError(
            f"dmel says it has {rank} dimensions; 1 to {MOST_DIMENSIONS} are allowed"
        )
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
    raise ValidationError("dmel ends inside its header")
