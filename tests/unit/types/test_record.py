from __future__ import annotations

import copy
import datetime
import enum
import json
import pickle
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pytest
import torch

from tests.unit.wire import corpus
from tinsmith import types as t
from tinsmith.errors import UnknownFieldError, ValidationError
from tinsmith.types.record import (
    UNSET,
    FrozenModel,
    Record,
    Request,
    Tagged,
    UnsetType,
    to_plain,
)
from tinsmith.wire import json_format


class Colour(enum.Enum):
    RED = "red"


class Answer(Record):
    name: str
    count: int | None = None
    at: datetime.datetime | None = None


class Ask(Request):
    name: str
    count: int | None = None
    rate: float = 0.5
    kind: Literal["a", "b"] = "a"
    limit: Annotated[int, msgspec.Meta(ge=1, le=9)] = 5
    names: list[str] = []
    extra: dict[str, Any] | None = None
    ttl: int | UnsetType | None = UNSET


class Circle(Tagged, tag="circle"):
    type = "circle"
    radius: float = 1.0


def a(as_type: type[Any]) -> Any:
    """A value of the type with every field given."""
    return json_format.decode(corpus.JSON_BODIES[as_type.__name__], as_type)


EVERY_TYPE = pytest.mark.parametrize("as_type", corpus.TYPES.values(), ids=corpus.TYPES)
EVERY_RECORD = pytest.mark.parametrize(
    "as_type", [t for t in corpus.TYPES.values() if issubclass(t, Record)], ids=lambda t: t.__name__
)


@EVERY_TYPE
def test_every_type_survives_pickling_and_copying(as_type: type[Any]) -> None:
    value = a(as_type)

    for again in (pickle.loads(pickle.dumps(value)), copy.copy(value), copy.deepcopy(value)):
        assert type(again) is type(value)
        assert again == value
        assert to_plain(again) == to_plain(value)


@EVERY_TYPE
def test_every_type_is_frozen(as_type: type[Any]) -> None:
    value = a(as_type)
    names = [*getattr(as_type, "__struct_fields__", ()), *getattr(as_type, "__slots__", ()), "new"]

    for name in names:
        with pytest.raises((AttributeError, TypeError)):
            setattr(value, name, None)


@EVERY_TYPE
def test_every_type_round_trips_through_json(as_type: type[Any]) -> None:
    value = a(as_type)

    again = json_format.decode(json_format.encode(value), as_type)

    assert again == value


@EVERY_RECORD
def test_every_record_round_trips_through_its_dumps(as_type: type[Record]) -> None:
    value = a(as_type)

    assert as_type.model_validate_json(value.model_dump_json()) == value
    assert as_type.model_validate(value.model_dump(mode="json")) == value
    assert as_type.model_validate(value.model_dump(mode="json", exclude_none=True)) == value
    assert str(value) == repr(value)


@EVERY_RECORD
def test_every_record_rejects_an_unknown_field_on_construction(as_type: type[Record]) -> None:
    with pytest.raises(UnknownFieldError, match="has no field 'no_such_field'"):
        as_type(no_such_field=1)


@EVERY_RECORD
def test_every_record_ignores_an_unknown_field_when_decoding(as_type: type[Record]) -> None:
    plain = {**corpus.plain_example(as_type), "field_of_a_newer_release": {"a": [1]}}

    again = json_format.decode(msgspec.json.encode(plain), as_type)

    assert again == a(as_type)


def test_a_misspelt_field_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(UnknownFieldError, match="no field 'cuont'; did you mean 'count'"):
        Ask(name="x", cuont=1)  # type: ignore[call-arg]


def test_an_unknown_field_is_rejected_with_the_list_of_fields() -> None:
    with pytest.raises(TypeError, match="its fields are name, count, at"):
        Answer(name="x", zzz=1)  # type: ignore[call-arg]


def test_a_missing_field_and_a_positional_one_are_type_errors() -> None:
    with pytest.raises(TypeError, match="Ask: Missing required argument 'name'"):
        Ask()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="Ask"):
        Ask("x")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("field", "given", "held"),
    [
        ("count", np.int64(5), 5),
        ("count", np.uint8(5), 5),
        ("count", np.array(5), 5),
        ("count", torch.tensor(5), 5),
        ("count", "5", 5),
        ("count", 5.0, 5),
        ("rate", np.float32(0.25), 0.25),
        ("rate", torch.tensor(0.25), 0.25),
        ("rate", "1e-4", 1e-4),
        ("rate", "2", 2.0),
        ("rate", 2, 2.0),
        ("limit", "9", 9),
        ("limit", np.int32(9), 9),
        ("names", ("a", "b"), ["a", "b"]),
        ("extra", {"a": {"b": [1]}}, {"a": {"b": [1]}}),
        ("ttl", None, None),
        ("ttl", UNSET, UNSET),
    ],
)
def test_numbers_of_other_libraries_and_numeric_strings_are_accepted(
    field: str, given: Any, held: Any
) -> None:
    request = Ask(name="x", **{field: given})

    value = getattr(request, field)

    assert value == held
    assert type(value) is type(held)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("name", 5),
        ("name", None),
        ("name", b"x"),
        ("count", "five"),
        ("count", "\ud800"),
        ("count", 5.5),
        ("count", True),
        ("count", [5]),
        ("count", "9" * 5000),
        ("count", np.array([5])),
        ("rate", None),
        ("rate", "fast"),
        ("rate", "nan"),
        ("rate", float("inf")),
        ("kind", "c"),
        ("kind", None),
        ("limit", 0),
        ("limit", 10),
        ("limit", "10"),
        ("names", "ab"),
        ("names", [1]),
        ("names", None),
        ("extra", [1]),
        ("extra", {1: 2}),
        ("ttl", "soon"),
    ],
)
def test_the_error_names_the_field_of_an_invalid_value(field: str, given: Any) -> None:
    with pytest.raises(ValidationError, match=rf"Ask\.{field}"):
        Ask(**{"name": "x", field: given})


def test_a_given_list_is_copied() -> None:
    names = ["a"]
    request = Ask(name="x", names=names)

    names.append("b")

    assert request.names == ["a"]
    assert Ask(name="x").names is not Ask(name="x").names


def test_none_is_omitted_and_defaults_are_written() -> None:
    plain = to_plain(Ask(name="x"))

    assert plain == {"name": "x", "rate": 0.5, "kind": "a", "limit": 5, "names": []}


def test_absent_and_null_differ_where_the_api_distinguishes_them() -> None:
    assert "ttl" not in to_plain(Ask(name="x"))
    assert to_plain(Ask(name="x", ttl=None))["ttl"] is None
    assert to_plain(Ask(name="x", ttl=5))["ttl"] == 5


def test_null_inside_free_form_data_is_kept() -> None:
    request = Ask(name="x", extra={"a": None, "b": [None]})

    assert to_plain(request)["extra"] == {"a": None, "b": [None]}


def test_a_dump_shows_every_field() -> None:
    at = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    answer = Answer(name="x", at=at)

    assert answer.model_dump() == {"name": "x", "count": None, "at": at}
    assert answer.model_dump(mode="json")["at"] == "2026-01-02T00:00:00Z"
    assert answer.model_dump(exclude_none=True) == {"name": "x", "at": at}
    assert answer.model_dump_json(exclude_none=True) == '{"name":"x","at":"2026-01-02T00:00:00Z"}'


def test_a_copy_may_replace_fields() -> None:
    request = Ask(name="x", count=1)

    assert request.model_copy(update={"count": 2}) == Ask(name="x", count=2)
    assert request.model_copy() == request


def test_validation_accepts_instances_and_dicts_only() -> None:
    answer = Answer(name="x")

    assert Answer.model_validate(answer) == answer
    assert Answer.model_validate({"name": "x", "new": 1}) == answer
    wrong_values: list[Any] = [{}, {"name": 5}, {"name": "x", "count": "\ud800"}, [], "x", None]
    for wrong in wrong_values:
        with pytest.raises(ValidationError, match="Answer"):
            Answer.model_validate(wrong)
    wrong_texts: list[str | bytes] = ["", "{", "[]", '"\ud800"', b"\xff", b"[" * 100_000]
    for text in wrong_texts:
        with pytest.raises(ValidationError, match="Answer"):
            Answer.model_validate_json(text)


def test_records_are_equal_and_hash_by_their_fields() -> None:
    assert Answer(name="x") == Answer(name="x") != Answer(name="y")
    assert len({Answer(name="x"), Answer(name="x"), Answer(name="y")}) == 2


def test_a_type_tag_is_written_and_may_be_passed() -> None:
    assert to_plain(Circle()) == {"type": "circle", "radius": 1.0}
    assert Circle(type="circle") == Circle()  # type: ignore[call-arg]
    assert Circle().type == "circle"
    with pytest.raises(UnknownFieldError):
        Circle(type="square")  # type: ignore[call-arg]


def test_values_of_other_libraries_become_plain_python_values() -> None:
    day = datetime.date(2026, 1, 2)
    given = {
        "number": np.float32(0.5),
        "array": np.arange(3),
        "tensor": torch.tensor([1, 2]),
        "mixed": [1, np.int64(2)],
        "colour": Colour.RED,
        "bytes": b"hello",
        "day": day,
        "tuple": (1, 2),
        "record": Answer(name="x"),
    }

    body = json_format.encode(Ask(name="x", extra=given))

    assert json_format.decode_any(body)["extra"] == {
        "number": 0.5,
        "array": [0, 1, 2],
        "tensor": [1, 2],
        "mixed": [1, 2],
        "colour": "red",
        "bytes": "aGVsbG8=",
        "day": "2026-01-02",
        "tuple": [1, 2],
        "record": {"name": "x"},
    }


@pytest.mark.parametrize("value", [object(), {1, 2}, [1, object()], lambda: 1])
def test_values_that_json_cannot_represent_are_rejected_with_a_remedy(value: Any) -> None:
    with pytest.raises(ValidationError, match="use numbers, text, lists and dicts"):
        json_format.encode(Ask(name="x", extra={"a": value}))


def test_a_type_without_a_plain_form_says_so() -> None:
    class Bare(FrozenModel):
        __slots__ = ()

    with pytest.raises(NotImplementedError):
        Bare().model_dump()


@pytest.mark.parametrize("cls", [t.LoraConfig, t.AdamParams, t.SampleRequest])
def test_a_request_built_from_a_dict_rejects_unknown_fields(cls: type[Request]) -> None:
    with pytest.raises(UnknownFieldError, match="rnk"):
        cls.model_validate({"rnk": 3})
    with pytest.raises(UnknownFieldError, match="rnk"):
        cls.model_validate_json('{"rnk": 3}')


def test_a_response_built_from_a_dict_ignores_unknown_fields() -> None:
    assert t.AuthTokenResponse.model_validate({"jwt": "x", "new": 1}).jwt == "x"
    assert t.AuthTokenResponse.model_validate_json('{"jwt": "x", "new": 1}').jwt == "x"


def test_a_dump_shares_no_list_with_its_record() -> None:
    params = t.SamplingParams(stop=["a"])

    params.model_dump()["stop"].append("b")

    assert params.stop == ["a"]


@pytest.mark.parametrize(
    "value", [t.ModelInput.from_ints([1, 2]), t.EncodedTextChunk([3]), t.AdamOptimizerConfig()]
)
def test_types_that_are_not_structs_have_the_model_methods_too(value: Any) -> None:
    assert type(value).model_validate(value.model_dump()) == value
    assert type(value).model_validate(value) is value
    assert json.loads(value.model_dump_json()) == value.model_dump()


@pytest.mark.parametrize(
    ("made", "update"),
    [
        (t.ModelInput.from_ints([1, 2]), {"chunks": [t.EncodedTextChunk(tokens=[3])]}),
        (t.EncodedTextChunk(tokens=[1, 2]), {"tokens": [3]}),
        (t.OptimStepRequest(model_id="m", adam_params=t.AdamParams(), seq_id=1), {"seq_id": 2}),
    ],
    ids=lambda one: type(one).__name__,
)
def test_types_with_arrays_are_copied_and_validated_like_other_models(
    made: Any, update: dict[str, Any]
) -> None:
    assert made.model_copy() == made
    changed = made.model_copy(update=update)
    assert changed != made
    ((name, value),) = update.items()
    assert getattr(changed, name) == value
    assert type(made).model_validate_json(made.model_dump_json()) == made
    with pytest.raises(ValidationError):
        type(made).model_validate_json("{")
