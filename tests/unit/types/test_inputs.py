from __future__ import annotations

import base64
import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from tinsmith import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    TensorData,
)
from tinsmith.errors import UnknownFieldError, ValidationError
from tinsmith.types import ImageAssetPointerChunk, ImageChunk
from tinsmith.types.inputs import chunk_from_plain

TEXT = EncodedTextChunk(tokens=[1, 2, 3])
IMAGE = ImageChunk(data=b"hello", format="png", expected_tokens=7)
POINTER = ImageAssetPointerChunk(format="jpeg", location="s3://x", expected_tokens=5)
AUDIO = DmelChunk(dmel=bytes([0, 2, 9, 80]))
CHUNKS: list[Any] = [TEXT, IMAGE, POINTER, AUDIO]
SPANS: Any = [
    PromptProvenanceSpan(sequence_id="a", length=1),
    SampledProvenanceSpan(sequence_id="a", offset=4, length=2),
]


# Chunks


def test_the_length_of_a_chunk_is_its_token_count() -> None:
    assert [chunk.length for chunk in CHUNKS] == [3, 7, 5, 9]


@pytest.mark.parametrize("chunk", CHUNKS, ids=lambda chunk: type(chunk).__name__)
def test_chunks_survive_pickling_and_copying_and_can_be_hashed(chunk: Any) -> None:
    for again in (pickle.loads(pickle.dumps(chunk)), copy.copy(chunk), copy.deepcopy(chunk)):
        assert again == chunk
        assert type(again) is type(chunk)
        assert hash(again) == hash(chunk)
    assert chunk != 5


@pytest.mark.parametrize("chunk", CHUNKS, ids=lambda chunk: type(chunk).__name__)
def test_chunks_are_immutable(chunk: Any) -> None:
    for name in ("tokens", "data", "location", "dmel", "type"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(chunk, name, b"x")


@pytest.mark.parametrize("chunk", CHUNKS, ids=lambda chunk: type(chunk).__name__)
def test_chunks_round_trip_through_plain_data(chunk: Any) -> None:
    plain = ModelInput([chunk]).model_dump()["chunks"][0]

    assert plain["type"] == chunk.type
    assert chunk_from_plain(plain) == chunk


@pytest.mark.parametrize(
    ("plain", "kind"),
    [
        ({"tokens": [1]}, EncodedTextChunk),
        ({"location": "x", "format": "png"}, ImageAssetPointerChunk),
        ({"data": "", "format": "png"}, ImageChunk),
        ({"dmel": "AAEC"}, DmelChunk),
    ],
)
def test_the_type_of_an_untagged_chunk_is_inferred_from_its_keys(
    plain: dict[str, Any], kind: type
) -> None:
    assert type(chunk_from_plain(plain)) is kind


@pytest.mark.parametrize(
    "plain",
    [
        None,
        [],
        {},
        {"type": "video"},
        {"type": ["image"]},
        {"type": "image"},
        {"type": "encoded_text"},
        {"type": "encoded_text", "tokens": "abc"},
        {"type": "image", "data": "x", "format": "gif"},
    ],
)
def test_an_invalid_plain_chunk_is_rejected(plain: Any) -> None:
    with pytest.raises(ValidationError):
        chunk_from_plain(plain)


def test_tokens_are_copied_and_never_change() -> None:
    tokens = np.array([1, 2, 3], dtype="int32")
    chunk = EncodedTextChunk(tokens)

    tokens[0] = 9
    chunk.tokens.append(4)

    assert chunk.tokens == [1, 2, 3]


@pytest.mark.parametrize(
    "tokens", [[1, 2], (1, 2), range(1, 3), np.array([1, 2]), torch.tensor([1, 2])]
)
def test_tokens_may_be_any_numbers(tokens: Any) -> None:
    assert EncodedTextChunk(tokens=tokens).tokens == [1, 2]
    assert EncodedTextChunk(tokens, type="encoded_text").length == 2


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ("hello", ValidationError),
        (b"hello", ValidationError),
        ([[1]], ValidationError),
        ([1 << 31], ValidationError),
        (np.array([1 << 40]), ValidationError),
        ([1.5], ValidationError),
        (["1"], ValidationError),
        (None, TypeError),
        (5, TypeError),
    ],
)
def test_invalid_tokens_are_rejected(tokens: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="tokens"):
        EncodedTextChunk(tokens)


def test_a_chunk_of_another_type_is_rejected() -> None:
    with pytest.raises(ValidationError, match="always 'encoded_text'"):
        EncodedTextChunk([1], type="image")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match=r"ImageChunk\.type"):
        ImageChunk(data=b"", format="png", type="dmel")  # type: ignore[arg-type]


def test_images_and_audio_take_bytes_or_base64() -> None:
    text: Any = base64.b64encode(b"hello").decode()
    mutable: Any = bytearray(b"hello")

    assert ImageChunk(data=text, format="png").data == b"hello"
    assert ImageChunk(data=mutable, format="png").data == b"hello"
    assert DmelChunk(dmel=text).dmel == b"hello"


@pytest.mark.parametrize("data", ["a", "é", "a===", 5, None, [1]])
def test_data_that_is_neither_bytes_nor_base64_is_rejected(data: Any) -> None:
    with pytest.raises(ValidationError, match="base64"):
        ImageChunk(data=data, format="png")


def test_an_image_without_expected_tokens_has_no_length() -> None:
    for chunk in (
        ImageChunk(data=b"", format="png"),
        ImageAssetPointerChunk(location="x", format="png"),
    ):
        with pytest.raises(ValueError, match="expected_tokens"):
            _ = chunk.length


@pytest.mark.parametrize("image_format", ["gif", "", None, 5])
def test_an_image_must_be_png_or_jpeg(image_format: Any) -> None:
    with pytest.raises(ValidationError, match="format"):
        ImageChunk(data=b"", format=image_format)


def test_the_error_names_a_misspelt_field_of_a_chunk() -> None:
    with pytest.raises(UnknownFieldError, match="did you mean 'expected_tokens'"):
        ImageChunk(data=b"", format="png", expected_token=5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("header", "length"),
    [
        (bytes([0, 1, 5]), 5),
        (bytes([254, 7, 2, 5, 80]), 5),
        (bytes([3, 1, 0x80, 0x01]), 128),
        (bytes([0, 32, *[3] * 32]), 3),
    ],
)
def test_the_length_of_audio_is_read_from_its_header(header: bytes, length: int) -> None:
    assert DmelChunk(dmel=header + b"payload").length == length


@pytest.mark.parametrize(
    "header",
    [
        b"",
        bytes([8, 1, 5]),
        bytes([254]),
        bytes([0, 0]),
        bytes([0, 33]),
        bytes([0, 1]),
        b"\0\1\xff",
    ],
)
def test_audio_without_a_header_has_no_length(header: bytes) -> None:
    with pytest.raises(ValidationError, match="dmel"):
        _ = DmelChunk(dmel=header).length


def test_a_repr_of_a_long_text_stays_short() -> None:
    text = ModelInput.from_ints(range(1_000_000))

    assert len(repr(text)) < 150
    assert "999992 more" in repr(text)


# Inputs


def test_an_input_round_trips_through_ints() -> None:
    prompt = ModelInput.from_ints([1, 2, 3])

    assert prompt.to_ints() == [1, 2, 3]
    assert prompt.length == 3
    assert prompt.chunks == [TEXT]
    assert ModelInput.from_ints(tokens=(1, 2, 3)) == prompt
    assert ModelInput(chunks=[EncodedTextChunk([1, 2, 3])]) == prompt


def test_appending_returns_a_new_input() -> None:
    empty = ModelInput.empty()
    token: Any = np.int64(5)

    longer = empty.append(TEXT).append_int(4).append_int(token)

    assert empty.chunks == []
    assert empty.length == 0
    assert longer.to_ints() == [1, 2, 3, 4, 5]
    assert [chunk.length for chunk in longer.chunks] == [3, 1, 1]


def test_only_text_inputs_convert_to_ints() -> None:
    mixed = ModelInput(CHUNKS)

    assert mixed.length == 24
    with pytest.raises(ValueError, match="ImageChunk"):
        mixed.to_ints()


def test_equal_inputs_have_equal_hashes() -> None:
    one, other = ModelInput(CHUNKS), ModelInput([copy.copy(chunk) for chunk in CHUNKS])

    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other, ModelInput.empty()}) == 2
    assert one != ModelInput(CHUNKS[::-1])
    assert one != CHUNKS


def test_an_input_survives_pickling_and_copying() -> None:
    mixed = ModelInput(CHUNKS)

    for again in (pickle.loads(pickle.dumps(mixed)), copy.copy(mixed), copy.deepcopy(mixed)):
        assert again == mixed


def test_an_input_is_immutable() -> None:
    prompt = ModelInput.from_ints([1])

    with pytest.raises(AttributeError, match="create a new ModelInput"):
        prompt.chunks = []


@pytest.mark.parametrize("chunks", ["text", [5], [None], [[1, 2]], [{"type": "video"}]])
def test_an_input_must_consist_of_chunks(chunks: Any) -> None:
    with pytest.raises(ValidationError):
        ModelInput(chunks)
    with pytest.raises(TypeError):
        ModelInput(tokens=[1])  # type: ignore[call-arg]


# Datums


@pytest.mark.parametrize(
    "values",
    [
        [1, 2],
        [1.0, 2.0],
        np.array([1, 2]),
        torch.tensor([1, 2]),
        TensorData([1, 2], "int64", [2]),
    ],
)
def test_loss_inputs_may_be_lists_arrays_and_tensors(values: Any) -> None:
    datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": values})

    held = datum.loss_fn_inputs["target_tokens"]

    assert held == TensorData([1, 2], "int64", [2])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("target_tokens", "int64"),
        ("weights", "float32"),
        ("advantages", "float32"),
        ("logprobs", "float32"),
        ("clip_low_threshold", "float32"),
        ("clip_high_threshold", "float32"),
        ("sequence_ratio_mask", "float32"),
    ],
)
def test_lists_get_the_dtype_of_their_input_name(name: str, dtype: str) -> None:
    datum = Datum(model_input=ModelInput.empty(), loss_fn_inputs={name: [[1, 2], [3, 4]]})

    assert datum.loss_fn_inputs[name].dtype == dtype
    assert datum.loss_fn_inputs[name].shape == [2, 2]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("unheard_of", [1], KeyError),
        ("weights", [[1, 2], [3]], ValueError),
        ("weights", [None], ValueError),
        ("target_tokens", [1.5], ValueError),
        ("weights", np.array([1], dtype="uint8"), ValueError),
        ("weights", np.array([True]), ValueError),
        ("weights", torch.tensor([True]), ValueError),
        ("weights", torch.ones(1, requires_grad=True), RuntimeError),
        ("weights", (1, 2), TypeError),
        ("weights", "12", TypeError),
        ("weights", None, TypeError),
        ("weights", {1: 2}, TypeError),
        ("weights", 5, TypeError),
    ],
)
def test_the_error_names_an_invalid_loss_input(
    name: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        Datum(ModelInput.empty(), {name: value})


def test_a_wide_matrix_of_few_cells_becomes_sparse() -> None:
    matrix = torch.zeros(4, 20)
    matrix[2, 3] = 0.5

    datum = Datum(
        ModelInput.empty(),
        {"weights": matrix, "target_tokens": matrix.long(), "advantages": matrix},
    )

    sparse = {name: tensor.is_sparse for name, tensor in datum.loss_fn_inputs.items()}
    assert sparse == {"weights": True, "target_tokens": True, "advantages": False}
    assert datum.loss_fn_inputs["weights"].to_torch().equal(matrix)


def test_a_model_input_is_required() -> None:
    with pytest.raises(TypeError, match="ModelInput"):
        Datum([1, 2])  # type: ignore[arg-type]


def a_datum(**rest: Any) -> Datum:
    return Datum(
        ModelInput.from_ints([1, 2, 3]),
        {"target_tokens": [2, 3, 4], "weights": np.array([0, 1, math.nan])},
        **rest,
    )


def test_datums_are_equal_if_their_fields_are() -> None:
    assert a_datum() == a_datum()
    assert a_datum() != a_datum(model_input_spans=SPANS, loss_fn_input_spans=SPANS)
    assert a_datum() != Datum(ModelInput.from_ints([1, 2, 3]))
    with pytest.raises(TypeError, match="unhashable"):
        hash(a_datum())


def test_a_datum_survives_pickling_and_copying() -> None:
    datum = a_datum(model_input_spans=SPANS, loss_fn_input_spans=SPANS)

    for again in (pickle.loads(pickle.dumps(datum)), copy.copy(datum), copy.deepcopy(datum)):
        assert again == datum


def test_a_datum_is_immutable() -> None:
    with pytest.raises(AttributeError, match="create a new Datum"):
        a_datum().model_input = ModelInput.empty()


def test_a_repr_of_a_large_datum_stays_short() -> None:
    datum = Datum(ModelInput.from_ints(range(100_000)), {"weights": np.zeros(100_000)})

    assert len(repr(datum)) < 400


# Provenance


def test_provenance_tiles_input_and_targets() -> None:
    datum = a_datum().with_provenance(SPANS, SPANS)

    assert datum.model_input_spans == SPANS
    assert datum.loss_fn_input_spans == SPANS
    assert a_datum().with_provenance(model_input=SPANS, loss_fn_inputs=SPANS) == datum


@pytest.mark.parametrize(("model_input", "loss_fn_inputs"), [(SPANS[:1], SPANS), (SPANS, [])])
def test_provenance_that_does_not_tile_is_rejected(model_input: Any, loss_fn_inputs: Any) -> None:
    with pytest.raises(ValueError, match="positions"):
        a_datum().with_provenance(model_input, loss_fn_inputs)


def test_provenance_spans_must_be_given_as_a_pair() -> None:
    with pytest.raises(ValidationError, match="give both"):
        a_datum(model_input_spans=SPANS)
    with pytest.raises(ValidationError, match="give both"):
        a_datum(loss_fn_input_spans=[])
    with pytest.raises(TypeError, match="model_input_spans"):
        a_datum(model_input_spans=[1], loss_fn_input_spans=[2])


@pytest.mark.parametrize("span", [{"length": -1}, {"length": 1, "offset": -1}])
def test_a_negative_span_is_rejected(span: dict[str, int]) -> None:
    for cls in (PromptProvenanceSpan, SampledProvenanceSpan):
        with pytest.raises(ValidationError, match="negative"):
            cls(sequence_id="a", **span)


@pytest.mark.parametrize("targets", [[2, 3], [2, 3, 4, 5], [[1, 2]], []])
def test_a_datum_with_differing_lengths_is_rejected_on_construction(targets: list[Any]) -> None:
    """The service refused it, far from the line that was wrong."""
    with pytest.raises(ValidationError, match=r"model_input has 3 tokens.*tokens\[:-1\]"):
        Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": targets})


@pytest.mark.parametrize(
    ("tokens", "inputs"),
    [
        ([1, 2, 3], {"target_tokens": [2, 3, 4]}),
        ([1, 2, 3], {"target_tokens": [[2], [3], [4]]}),
        # What a loss of one's own takes is its own matter: a number for the whole datum, for one.
        ([1, 2, 3], {"target_tokens": [2, 3, 4], "advantages": [1.0]}),
        ([1, 2, 3], {"weights": [1.0]}),
        ([], {"target_tokens": [1]}),
    ],
)
def test_a_datum_that_the_official_sdk_accepts_is_accepted(
    tokens: list[int], inputs: dict[str, Any]
) -> None:
    given = ModelInput.from_ints(tokens) if tokens else ModelInput.empty()

    assert Datum(given, inputs).loss_fn_inputs.keys() == inputs.keys()
