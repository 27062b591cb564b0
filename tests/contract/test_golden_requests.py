"""S24–S26: what each request looks like on the wire, to the byte, and that nothing else is sent.

`tests/golden/requests.txt` and `prompts.txt` hold it; `tests/golden/record_requests.py` writes
them anew.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import msgspec
import pytest
from tinker import types as official

from tests.contract.test_json_types import MODELS, official_json
from tests.golden.examples import FULL, MINIMAL, PROMPTS
from tests.golden.record_requests import FOLDER, prompt_lines, request_lines
from tinsmith import types as t
from tinsmith.errors import DecodeError, UnknownFieldError, ValidationError
from tinsmith.types.record import UNSET, Frozen, Record, Request, nullable_fields, to_plain
from tinsmith.wire import json_format
from tinsmith.wire.endpoint_types import Format
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import read_request, to_http

EXAMPLES = [
    pytest.param(name, request, id=f"{name}-{kind}")
    for kind, requests in (("minimal", MINIMAL), ("full", FULL))
    for name, request in requests.items()
]
OF_JSON = [
    parameter
    for parameter in EXAMPLES
    if ENDPOINTS[str(parameter.values[0])].request_format is Format.JSON
]
NEWER = {("save_weights_external", "user_metadata")}
"""Fields that SDK 0.36 does not have."""
NULLABLE = {("finish_session", "detail"), ("set_checkpoint_ttl", "ttl_seconds")}
"""Fields where the API tells null from absent."""


def golden(file: str) -> list[str]:
    return (FOLDER / file).read_text(encoding="utf-8").splitlines()


def body_of(name: str, request: Any) -> Any:
    body = b"".join(to_http(ENDPOINTS[name], request).parts)
    return json.loads(body) if body else {}


def fields_of(request: Any) -> set[str]:
    if isinstance(request, Record):
        return set(request.__struct_fields__)
    return set().union(*(getattr(cls, "__slots__", ()) for cls in type(request).__mro__))


# S24


def test_s24_each_request_is_sent_exactly_as_recorded() -> None:
    assert request_lines() == golden("requests.txt")


def test_s24_every_route_has_a_recorded_request() -> None:
    assert set(MINIMAL) == set(ENDPOINTS)
    assert FULL.keys() <= MINIMAL.keys()


@pytest.mark.parametrize("name", MINIMAL)
def test_s24_full_examples_set_every_field(name: str) -> None:
    """So the recorded bodies show each type's whole key set."""
    request = FULL.get(name, MINIMAL[name])

    unset = {field for field in fields_of(request) if getattr(request, field) in (None, UNSET)}
    assert unset == set()


@pytest.mark.parametrize(("name", "request_"), OF_JSON)
def test_s24_the_official_type_serializes_to_the_same_body(name: str, request_: Any) -> None:
    """For the routes whose request is a type of the official SDK."""
    cls = MODELS.get(ENDPOINTS[name].request.__name__)
    if cls is None:
        assert ENDPOINTS[name].request.__name__ not in vars(official) or _is_dataclass(name)
        return
    body = body_of(name, request_)
    if ENDPOINTS[name].method == "GET":
        body = to_http(ENDPOINTS[name], request_).query

    body = {field: value for field, value in body.items() if (name, field) not in NEWER}

    theirs = cls.model_validate(body)

    assert official_json(theirs) == body


def _is_dataclass(name: str) -> bool:
    return dataclasses.is_dataclass(getattr(official, ENDPOINTS[name].request.__name__))


@pytest.mark.parametrize(("name", "request_"), EXAMPLES)
def test_s24_a_decoded_request_equals_the_one_that_was_sent(name: str, request_: Any) -> None:
    endpoint = ENDPOINTS[name]
    sent = to_http(endpoint, request_)
    headers = {header.lower(): value for header, value in sent.headers.items()}
    path_fields = {field: getattr(request_, field) for field in endpoint.path_fields}

    read = read_request(endpoint, path_fields, sent.query, headers, b"".join(sent.parts))

    assert read == request_


REQUESTS = sorted(
    {type(request) for request in MINIMAL.values() if isinstance(request, Request)},
    key=lambda cls: cls.__name__,
)


@pytest.mark.parametrize("cls", REQUESTS, ids=lambda cls: cls.__name__)
def test_s24_unknown_fields_are_rejected_when_a_request_is_constructed(cls: type[Request]) -> None:
    made = next(request for request in MINIMAL.values() if type(request) is cls)
    fields = {name: getattr(made, name) for name in cls.__struct_fields__}

    with pytest.raises(UnknownFieldError, match="internal_id"):
        cls(**fields, internal_id=1)


@pytest.mark.parametrize(
    "make",
    [t.OptimStepRequest, t.ForwardBackwardRequest, t.ForwardBackwardInput, t.Datum, t.TensorData],
)
def test_s24_unknown_fields_are_rejected_by_types_that_hold_arrays(make: Any) -> None:
    with pytest.raises(TypeError, match="internal_id"):
        make(internal_id=1)


@pytest.mark.parametrize(("name", "request_"), OF_JSON)
def test_s24_private_attributes_are_never_sent(name: str, request_: Any) -> None:
    body = body_of(name, request_)

    def keys(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*map(keys, value.values()))
        return set().union(*map(keys, value)) if isinstance(value, list) else set()

    assert not [key for key in keys(body) if key.startswith("_")]


def test_s24_responses_ignore_unknown_fields() -> None:
    body = b'{"request_id":"r","surprise":{"deep":[1]},"model_id":null}'

    assert json_format.decode(body, t.UntypedAPIFuture) == t.UntypedAPIFuture(request_id="r")


# S25


def test_s25_each_kind_of_prompt_is_written_exactly_as_recorded() -> None:
    assert prompt_lines() == golden("prompts.txt")


@pytest.mark.parametrize("name", PROMPTS)
def test_s25_the_official_sdk_reads_and_writes_the_same_prompt(name: str) -> None:
    plain = json.loads(json_format.encode(PROMPTS[name]))

    theirs = official.ModelInput.model_validate(plain)

    assert official_json(theirs) == plain


@pytest.mark.parametrize("name", PROMPTS)
def test_s25_a_round_trip_changes_nothing(name: str) -> None:
    body = json_format.encode(PROMPTS[name])

    read = json_format.decode(body, t.ModelInput)

    assert read == PROMPTS[name]
    assert json_format.encode(read) == body


def test_s25_text_alone_is_still_a_list_of_tagged_chunks() -> None:
    body = body_of("asample", MINIMAL["asample"])

    assert body["prompt"] == {"chunks": [{"tokens": [1], "type": "encoded_text"}]}


@pytest.mark.parametrize("tag", ["video", "", "ENCODED_TEXT", 1, ["image"], {}])
def test_s25_an_unknown_tag_is_a_typed_error(tag: Any) -> None:
    body = json.dumps({"chunks": [{"type": tag, "tokens": [1]}]}).encode()

    with pytest.raises(DecodeError, match="unknown chunk type"):
        json_format.decode(body, t.ModelInput)
    with pytest.raises(ValidationError, match="unknown chunk type"):
        t.ModelInput([{"type": tag, "tokens": [1]}])


# S26


@pytest.mark.parametrize(("name", "request_"), OF_JSON)
def test_s26_unset_fields_are_omitted(name: str, request_: Any) -> None:
    body = body_of(name, request_)

    nulls = {(name, key) for key, value in body.items() if value is None}
    assert nulls <= NULLABLE


@pytest.mark.parametrize("name", MINIMAL)
def test_s26_fields_set_to_none_explicitly_are_omitted(name: str) -> None:
    """Where the API does not tell it from absent."""
    request = FULL.get(name, MINIMAL[name])
    if not isinstance(request, Request):
        return
    fields = {field: getattr(request, field) for field in request.__struct_fields__}
    for field in msgspec.structs.fields(type(request)):
        if field.default is not None or field.name in nullable_fields(type(request)):
            continue

        explicit = type(request)(**{**fields, field.name: None})

        assert set(to_plain(explicit)) == set(to_plain(request)) - {field.name}


def test_s26_null_and_absent_differ_where_the_api_distinguishes_them() -> None:
    name = "set_checkpoint_ttl"
    named: dict[str, Any] = {"training_run_id": "r", "checkpoint_id": "weights/c"}
    absent = t.SetCheckpointTtlRequest(**named)
    never = t.SetCheckpointTtlRequest(**named, ttl_seconds=None)

    assert absent != never
    assert absent.ttl_seconds is UNSET
    assert body_of(name, absent) == {}
    assert body_of(name, never) == {"ttl_seconds": None}
    for request in (absent, never):
        body = json.dumps(body_of(name, request)).encode()
        assert read_request(ENDPOINTS[name], named, {}, {}, body) == request


def test_s26_nulls_inside_free_form_values_are_kept() -> None:
    body = body_of("create_session", FULL["create_session"])

    assert body["user_metadata"]["k"] is None
    nodes = body_of("create_custom_loss", FULL["create_custom_loss"])["graph"]["nodes"]
    assert nodes[1]["args"][1] is None
    assert nodes[1]["kwargs"] == {"dim": None}


def test_s26_defaults_are_sent() -> None:
    """A server's own defaults may change; what the caller saw is what is meant."""
    for value, names in (
        (t.AdamParams(), ["learning_rate", "beta1", "beta2", "eps", "weight_decay"]),
        (t.SamplingParams(), ["temperature", "top_k", "top_p"]),
        (t.LoraConfig(rank=1), ["train_unembed", "train_mlp", "train_attn"]),
    ):
        assert set(names) <= to_plain(value).keys()


def test_every_example_has_the_type_of_its_endpoint() -> None:
    for requests in (MINIMAL, FULL):
        for name, request in requests.items():
            assert isinstance(request, ENDPOINTS[name].request)
            assert isinstance(request, Record | Frozen)
