"""Valid messages of every kind, for the tests that spoil them and those that count their cost."""

from __future__ import annotations

import enum
from typing import Any

import msgspec
from msgspec import inspect

from tinsmith import types
from tinsmith.types import extensions, requests
from tinsmith.types.record import Frozen, Record
from tinsmith.types.requests import ForwardBackwardRequest
from tinsmith.wire import proto_format, proto_samples
from tinsmith.wire.protobuf import Parts, varint

TENSOR: dict[str, Any] = {"data": [1, 2], "dtype": "int64", "shape": [2]}
SPARSE: dict[str, Any] = {
    "data": [1.5],
    "dtype": "float32",
    "shape": [1, 3],
    "sparse_crow_indices": [0, 1],
    "sparse_col_indices": [2],
}
CHUNKS: list[dict[str, Any]] = [
    {"type": "encoded_text", "tokens": [1, 2, 3]},
    {"tokens": [4]},
    {"type": "image", "data": "aGVsbG8=", "format": "png", "expected_tokens": 3},
    {"type": "image_asset_pointer", "location": "s3://x", "format": "jpeg"},
    {"type": "dmel", "dmel": "AAEC"},
]
DATUM = {"model_input": {"chunks": CHUNKS}, "loss_fn_inputs": {"x": TENSOR, "y": SPARSE}}
FORWARD = {"data": [DATUM], "loss_fn": "ppo", "loss_fn_config": {"clip": 0.2, "mode": "a"}}
PLAIN_OF_CUSTOM: dict[str, Any] = {
    "TensorData": SPARSE,
    "ModelInput": {"chunks": CHUNKS},
    "OptimizerConfigBase": {"type": "dimuon", "version": 1},
    "OptimParamsBase": {"type": "dimuon", "learning_rate": 0.1, "beta1": 0.5},
    "OptimStepRequest": {
        "model_id": "m",
        "seq_id": 1,
        "optimizer_params": {"type": "dimuon", "learning_rate": 0.1},
    },
    "Datum": DATUM,
    "ForwardBackwardInput": FORWARD,
    "ForwardBackwardRequest": {"forward_input": FORWARD, "model_id": "m", "seq_id": 1},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [{"x": TENSOR, "y": SPARSE}, {}],
        "metrics": {"loss:sum": 1.5},
    },
    "SampleResponse": {
        "sequences": [{"tokens": [1, 2], "logprobs": [-1.5, -2], "stop_reason": "stop"}],
        "prompt_logprobs": [None, -1.5],
        "topk_prompt_logprobs": [None, [[1, -0.5], [2, -1.5]], [[3, -0.1]]],
        "type": "sample",
    },
}


def _all_types() -> dict[str, type[Any]]:
    """Every type that has a JSON form to be read: all records, and what holds arrays."""
    found = {**vars(types), **vars(requests), **vars(extensions)}
    return {
        name: value
        for name, value in sorted(found.items())
        if isinstance(value, type)
        and not name.startswith("_")
        and (
            (issubclass(value, Record) and value.__module__ != "tinsmith.types.record")
            or (issubclass(value, Frozen) and name in PLAIN_OF_CUSTOM)
        )
    }


TYPES = _all_types()


def plain_example(as_type: Any) -> Any:
    """A valid plain form of a type, with every field given."""
    return _example(inspect.type_info(as_type))


def _example(info: inspect.Type) -> Any:
    match info:
        case inspect.StructType():
            tag = {} if info.tag_field is None else {info.tag_field: info.tag}
            return {**tag, **{field.encode_name: _example(field.type) for field in info.fields}}
        case inspect.UnionType():
            return _example(next(t for t in info.types if not isinstance(t, inspect.NoneType)))
        case inspect.LiteralType():
            return info.values[0]
        case inspect.EnumType():
            member: enum.Enum = next(iter(info.cls))
            return member.value
        case inspect.ListType():
            return [_example(info.item_type)]
        case inspect.DictType():
            return {"key": _example(info.value_type)}
        case inspect.CustomType():
            return PLAIN_OF_CUSTOM[info.cls.__name__]
        case inspect.Metadata():
            return _example(info.type)
        case _:
            return _SCALARS[type(info)]


_SCALARS: dict[type[inspect.Type], Any] = {
    inspect.IntType: 7,
    inspect.FloatType: 0.5,
    inspect.StrType: "text",
    inspect.BoolType: True,
    inspect.BytesType: "aGVsbG8=",
    inspect.DateTimeType: "2026-01-02T03:04:05Z",
    inspect.DateType: "2026-01-02",
    inspect.AnyType: {"a": [1, None]},
}

JSON_BODIES: dict[str, bytes] = {
    name: msgspec.json.encode(plain_example(as_type)) for name, as_type in TYPES.items()
}


# Protobuf


def field(tag: int, *contents: bytes) -> bytes:
    """A field of bytes, or a nested message."""
    content = b"".join(contents)
    return varint(tag) + varint(len(content)) + content


def number(tag: int, value: int) -> bytes:
    """A field that holds a number."""
    return varint(tag) + varint(value)


def joined(parts: Parts) -> bytes:
    return b"".join(parts)


def a_request() -> ForwardBackwardRequest:
    """A training request with every kind of chunk, tensor, span and setting."""
    spans: types.ProvenanceSpans = [
        types.PromptProvenanceSpan(sequence_id="a", length=1),
        types.SampledProvenanceSpan(sequence_id="b", offset=1, length=2),
    ]
    chunks = [chunk for chunk in CHUNKS if chunk.get("type") != "image_asset_pointer"]
    datum = types.Datum(
        types.ModelInput(chunks),
        {"x": types.TensorData(**TENSOR), "y": types.TensorData(**SPARSE)},
        spans,
        spans,
    )
    given = types.ForwardBackwardInput([datum, datum], "ppo", {"clip": 0.2, "mode": "é😀"})
    return ForwardBackwardRequest(given, "model", 3, forward_only=True)


def an_output() -> types.ForwardBackwardOutput:
    """A training result of two records."""
    outputs = [
        {
            "logprobs": types.TensorData([[1.0, 2.0]], "float32"),
            "n": types.TensorData([1], "int64", [1]),
        },
        {
            "logprobs": types.TensorData([[3.0, 4.0]], "float32"),
            "n": types.TensorData([], "int64", [0]),
        },
        {
            "logprobs": types.TensorData([5.0], "float32", [1]),
            "n": types.TensorData([2, 3], "int64", [2]),
        },
    ]
    return types.ForwardBackwardOutput("ArrayRecord", outputs, {"loss:sum": 1.5, "é:max": 2})


def a_response() -> types.SampleResponse:
    """A sampling result with all that can be asked for."""
    topk = types.TopkLogprobs([[1, 2], [3, 0]], [[-0.5, -1.5], [-0.1, -99999.0]])
    return types.SampleResponse(
        [
            types.SampledSequence(
                "length", tokens=[1, 2], logprobs=[-1, -2], topk_logprobs_np=topk
            ),
            types.SampledSequence("stop", tokens=[]),
        ],
        prompt_logprobs=[None, -1.5],
        topk_prompt_logprobs_np=topk,
        target_prompt_logprobs=types.TensorData(**SPARSE),
        prompt_cache_hit_tokens=3,
        prompt_alt_tokens=types.PromptAltTokens(
            types.TensorData([[1, 2]], "int64"), types.TensorData([[-1, -2]], "float32")
        ),
    )


PROTO_BODIES: dict[str, bytes] = {
    "request": joined(proto_format.encode_forward_backward_request(a_request())),
    "output": joined(proto_format.encode_forward_backward_output(an_output())),
    "response": joined(proto_samples.encode_sample_response(a_response())),
}
PROTO_DECODERS = {
    "request": proto_format.decode_forward_backward_request,
    "output": proto_format.decode_forward_backward_output,
    "response": proto_samples.decode_sample_response,
}
