"""Values of the official SDK for Hypothesis to draw, and the same values made with our types.

`models` reads a pydantic class's own fields, so that a type or field which the official SDK adds is
drawn without a line changed here. What the annotations cannot say is in `_NARROWED`.

Numbers include the edges of int32 and int64; arrays are drawn as raw bits, so that every NaN and
both zeros occur.
"""

from __future__ import annotations

import datetime
import enum
import functools
import types as python_types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args, get_origin

import annotated_types
import numpy as np
import pydantic
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from tinker import types as official
from tinker.types._pydantic_types.tensor_data import TensorData as JsonTensorData

from tinsmith import types as ours

settings.register_profile(
    "contract",
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
)
contract = settings.get_profile("contract")
"""Put `@contract` under `@given`; `settings(contract, max_examples=…)` where a test needs more."""

INT32_EDGES = [-(2**31), -1, 0, 1, 2**31 - 1]
INT64_EDGES = [-(2**63), -(2**31) - 1, *INT32_EDGES, 2**31, 2**53 + 1, 2**63 - 1]

int32s = st.sampled_from(INT32_EDGES) | st.integers(-(2**31), 2**31 - 1)
int64s = st.sampled_from(INT64_EDGES) | st.integers(-(2**63), 2**63 - 1)
finite_floats = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(max_size=12) | st.sampled_from(
    ["", "naïve ✓", "日本", "\U0001f9f0", "a\0b", 'q"\\/']
)
names = st.text(min_size=1, max_size=12)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | int64s | finite_floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
minute_offsets = st.integers(-14 * 60, 14 * 60).map(
    lambda minutes: datetime.timezone(datetime.timedelta(minutes=minutes))
)
aware_times = st.datetimes(
    min_value=datetime.datetime(1971, 1, 1),  # noqa: DTZ001 - Hypothesis adds the zone
    timezones=st.just(datetime.UTC) | minute_offsets,
)
times = aware_times | st.datetimes(min_value=datetime.datetime(1971, 1, 1))  # noqa: DTZ001


# JSON: any pydantic class of the official SDK


@functools.cache
def models(cls: type[pydantic.BaseModel]) -> st.SearchStrategy[Any]:
    """Instances of a pydantic class; a field with a default is sometimes left out."""
    required: dict[str, st.SearchStrategy[Any]] = {}
    optional: dict[str, st.SearchStrategy[Any]] = {}
    for name, field in cls.model_fields.items():
        drawn = _NARROWED.get((cls.__name__, name))
        if drawn is None:
            drawn = _values(field.annotation, field.metadata)
        (required if field.is_required() else optional)[name] = drawn
    made = st.fixed_dictionaries(required, optional=optional)
    if cls.model_config.get("extra") == "allow":
        # None is left out here as in every other field, so no reader ever sees it.
        given = json_values.filter(lambda value: value is not None)
        further = st.dictionaries(st.from_regex(r"[a-z]\w{0,8}", fullmatch=True), given)
        made = st.tuples(further, made).map(lambda both: {**both[0], **both[1]})
    return made.map(lambda fields: cls(**fields))


def _values(annotation: Any, metadata: Sequence[Any] = ()) -> st.SearchStrategy[Any]:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return _values(args[0], [*args[1:], *metadata])
    if origin in (typing.Union, python_types.UnionType):
        return st.one_of([_values(member, metadata) for member in args])
    if origin is Literal:
        return st.sampled_from(args)
    if origin is dict:
        return st.dictionaries(_values(args[0]), _values(args[1]), max_size=3)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return st.lists(_values(args[0]), **_sizes(metadata, most=3))
    return _scalars(annotation, metadata)


def _scalars(annotation: Any, metadata: Sequence[Any]) -> st.SearchStrategy[Any]:
    if annotation is int:
        return _bounded_ints(metadata)
    if annotation is str:
        return st.text(**_sizes(metadata, most=12)) if metadata else texts
    if annotation is pydantic.AwareDatetime:
        return aware_times
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return st.sampled_from(list(annotation))
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return models(annotation)
    return _PLAIN[annotation]


_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    type(None): st.none(),
    None: st.none(),
    bool: st.booleans(),
    float: finite_floats,
    bytes: st.binary(max_size=20),
    datetime.datetime: times,
    Any: json_values,
    object: json_values,
}


def _sizes(metadata: Sequence[Any], most: int) -> dict[str, Any]:
    sizes = {"min_size": 0, "max_size": most}
    for bound in metadata:
        if isinstance(bound, annotated_types.MinLen):
            sizes["min_size"] = bound.min_length
        elif isinstance(bound, annotated_types.MaxLen):
            sizes["max_size"] = bound.max_length
    return sizes


def _bounded_ints(metadata: Sequence[Any]) -> st.SearchStrategy[int]:
    low, high = -(2**63), 2**63 - 1
    for bound in metadata:
        if isinstance(bound, annotated_types.Ge):
            low = typing.cast(int, bound.ge)
        elif isinstance(bound, annotated_types.Le):
            high = typing.cast(int, bound.le)
    edges = [edge for edge in (*INT64_EDGES, low, high) if low <= edge <= high]
    return st.sampled_from(edges) | st.integers(low, high)


def json_tensors() -> st.SearchStrategy[Any]:
    """Tensors of the official JSON form: finite numbers, dense or well-formed CSR."""
    finite = tensors().filter(lambda tensor: bool(np.isfinite(tensor._numpy).all()))
    return finite.map(
        lambda tensor: JsonTensorData(
            data=[_shortest(number) for number in tensor._numpy.ravel()],
            dtype=tensor.dtype,
            shape=tensor.shape,
            sparse_crow_indices=tensor.sparse_crow_indices,
            sparse_col_indices=tensor.sparse_col_indices,
        )
    )


def _shortest(number: Any) -> Any:
    """The number with no more digits than its dtype holds, as we write it."""
    return int(number) if number.dtype.kind == "i" else float(str(number))


_EVENTS = {
    "SessionStartEvent": "SESSION_START",
    "SessionEndEvent": "SESSION_END",
    "UnhandledExceptionEvent": "UNHANDLED_EXCEPTION",
    "GenericEvent": "GENERIC_EVENT",
}


# Tensors and training data


def bits(kind: Literal["int32", "int64", "float32"], count: int) -> st.SearchStrategy[Any]:
    """Arrays of any bit patterns, and of the numbers at the edges."""
    size = np.dtype(kind).itemsize * count
    raw = st.binary(min_size=size, max_size=size).map(
        lambda memory: np.frombuffer(memory, kind).copy()
    )
    edges: dict[str, list[float]] = {
        "int32": list(INT32_EDGES),
        "int64": list(INT64_EDGES),
        "float32": [0.0, -0.0, 1.5, -np.inf, np.inf, np.nan, 3.4028235e38, 1e-45],
    }
    chosen = st.lists(st.sampled_from(edges[kind]), min_size=count, max_size=count)
    return raw | chosen.map(lambda numbers: np.array(numbers, kind))


@st.composite
def dense_tensors(draw: st.DrawFn, *, shapes: st.SearchStrategy[list[int]] | None = None) -> Any:
    """Dense tensors of the official SDK, of either dtype."""
    shape = draw(shapes if shapes is not None else _shapes)
    dtype: official.TensorDtype = draw(st.sampled_from(["int64", "float32"]))
    data = draw(bits(dtype, int(np.prod(shape))))
    return official.TensorData(data=data, dtype=dtype, shape=shape)


_shapes = st.lists(st.integers(0, 4), min_size=1, max_size=3)


@st.composite
def sparse_tensors(draw: st.DrawFn) -> Any:
    """Matrices in CSR form."""
    rows, columns = draw(st.integers(0, 4)), draw(st.integers(0, 5))
    stored = [draw(st.sets(st.integers(0, columns - 1))) if columns else set() for _ in range(rows)]
    dtype: official.TensorDtype = draw(st.sampled_from(["int64", "float32"]))
    count = sum(map(len, stored))
    return official.TensorData(
        data=draw(bits(dtype, count)),
        dtype=dtype,
        shape=[rows, columns],
        sparse_crow_indices=[0, *np.cumsum([len(row) for row in stored]).astype(int).tolist()],
        sparse_col_indices=[column for row in stored for column in sorted(row)],
    )


def tensors() -> st.SearchStrategy[Any]:
    return dense_tensors() | sparse_tensors()


text_chunks = st.lists(int32s, max_size=6).map(
    lambda tokens: official.EncodedTextChunk(tokens=tokens)
)
image_chunks = st.builds(
    official.ImageChunk,
    data=st.binary(max_size=20),
    format=st.sampled_from(["png", "jpeg"]),
    expected_tokens=st.none() | int32s,
)
dmel_chunks = st.builds(official.DmelChunk, dmel=st.binary(max_size=20))
trainable_chunks: st.SearchStrategy[Any] = text_chunks | image_chunks | dmel_chunks
trainable_inputs = st.lists(trainable_chunks, max_size=3).map(
    lambda chunks: official.ModelInput(chunks=chunks)
)
span_fields = {
    "sequence_id": names,
    "offset": st.integers(0, 2**63 - 1),
    "length": st.integers(0, 2**63 - 1),
}
spans = st.lists(
    st.builds(official.PromptProvenanceSpan, **span_fields)
    | st.builds(official.SampledProvenanceSpan, **span_fields),
    max_size=3,
)


@st.composite
def datums(draw: st.DrawFn) -> Any:
    has_spans = draw(st.booleans())
    return official.Datum(
        model_input=draw(trainable_inputs),
        loss_fn_inputs=draw(st.dictionaries(texts, tensors(), max_size=3)),
        model_input_spans=draw(spans) if has_spans else None,
        loss_fn_input_spans=draw(spans) if has_spans else None,
    )


forward_backward_requests = st.builds(
    official.ForwardBackwardRequest,
    forward_backward_input=st.builds(
        official.ForwardBackwardInput,
        data=st.lists(datums(), max_size=3),
        loss_fn=st.sampled_from(get_args(official.LossFnType)) | texts,
        loss_fn_config=st.none()
        | st.dictionaries(texts, st.floats() | texts | int64s.map(float), max_size=3),
    ),
    model_id=texts,
    seq_id=st.none() | int32s,
)

_NARROWED: dict[tuple[str, str], st.SearchStrategy[Any]] = {
    # Token ids are int32 in every body that holds them as bytes.
    ("EncodedTextChunk", "tokens"): st.lists(int32s, max_size=5),
    ("SampleRequest", "target_prompt_logprobs"): st.none() | json_tensors(),
    # The official types let any event claim to be of any kind; what is sent never does.
    **{(name, "event"): st.just(event) for name, event in _EVENTS.items()},
    # The SDK always sends an object; its own type cannot read back what it writes for None.
    ("CreateSessionRequest", "user_metadata"): st.dictionaries(texts, json_values, max_size=3),
    # Bounds that the class checks beyond its annotations.
    ("DimuonParams", "learning_rate"): st.floats(0, 1e300),
    ("DimuonParams", "beta1"): st.floats(0, 1, exclude_max=True),
    # Families that have a class of their own are drawn as that class.
    ("OptimizerConfigBase", "type"): names.filter(lambda name: name not in ("adamw", "dimuon")),
    ("OptimParamsBase", "type"): names.filter(lambda name: name not in ("adamw", "dimuon")),
}


# The same value with our types


def as_ours(value: Any) -> Any:
    """Our value for an official one, made with our constructors from its fields."""
    if isinstance(value, official.TensorData):
        return ours.TensorData(
            value._numpy,
            value.dtype,
            value.shape,
            value.sparse_crow_indices,
            value.sparse_col_indices,
        )
    if isinstance(value, pydantic.BaseModel):
        fields = {name: getattr(value, name) for name in type(value).model_fields}
        return _make(type(value).__name__, {**fields, **(value.model_extra or {})})
    if hasattr(value, "__dataclass_fields__"):
        return _make(type(value).__name__, _public_fields(value))
    if isinstance(value, enum.Enum):
        return getattr(ours, type(value).__name__)(value.value)
    if isinstance(value, dict):
        return {key: as_ours(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_ours(item) for item in value]
    return value


def _public_fields(value: Any) -> dict[str, Any]:
    names_of = value.__dataclass_fields__
    return {name: getattr(value, name) for name in names_of if not name.startswith("_")}


def _make(name: str, fields: dict[str, Any]) -> Any:
    make: Callable[..., Any] = getattr(ours, name)
    return make(**{name: as_ours(value) for name, value in fields.items()})
