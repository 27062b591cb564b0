"""Every type of the official SDK that travels as JSON, in both directions.

official → JSON → ours → JSON → official, and ours → JSON → official. What we write is compared
with what the official SDK writes, key by key; what we read with what our constructors make.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import numpy as np
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types as official
from tinker.types._pydantic_types.datum import Datum as JsonDatum
from tinker.types._pydantic_types.forward_backward_input import (
    ForwardBackwardInput as JsonForwardBackwardInput,
)
from tinker.types._pydantic_types.tensor_data import TensorData as JsonTensorData
from tinker.types.generic_event import GenericEvent
from tinker.types.optimizer import OptimizerConfigBase, OptimParamsBase
from tinker.types.try_again_response import TryAgainResponse

from tests.contract.strategies import as_ours, bits, contract, json_tensors, models, texts
from tinsmith import types as ours
from tinsmith.errors import DecodeError, UnknownFieldError, ValidationError
from tinsmith.types.record import Frozen, Record, Request
from tinsmith.wire import json_format

NAMED = {name: value for name, value in vars(official).items() if name[0].isupper()}
MODELS: dict[str, type[pydantic.BaseModel]] = {
    name: value
    for name, value in NAMED.items()
    if inspect.isclass(value) and issubclass(value, pydantic.BaseModel)
}
MODELS |= {
    cls.__name__: cls
    for cls in (GenericEvent, OptimizerConfigBase, OptimParamsBase, TryAgainResponse)
}
"""Every pydantic class of `tinker.types`, and those that are only used inside others."""

STRICT = [name for name, cls in MODELS.items() if cls.model_config.get("extra") == "forbid"]
LENIENT = [name for name, cls in MODELS.items() if cls.model_config.get("extra") == "ignore"]


def official_json(value: pydantic.BaseModel) -> Any:
    """What the official SDK's resource layer sends, as data."""
    return value.model_dump(exclude_unset=False, exclude_none=True, mode="json")


def to_body(plain: Any) -> bytes:
    return json.dumps(plain, allow_nan=False).encode()


def read(plain: Any, name: str) -> Any:
    return json_format.decode(to_body(plain), getattr(ours, name))


def written(value: Record | Frozen) -> Any:
    return json.loads(json_format.encode(value))


@pytest.mark.parametrize("name", MODELS)
@settings(contract, max_examples=12)
@given(data=st.data())
def test_a_type_round_trips_through_json_like_the_official_one(
    name: str, data: st.DataObject
) -> None:
    value = data.draw(models(MODELS[name]))
    sent = official_json(value)

    decoded = read(sent, name)
    made = as_ours(value)

    assert decoded == made
    assert written(decoded) == sent
    assert written(made) == sent
    assert MODELS[name].model_validate(written(made)) == value


@pytest.mark.parametrize("name", MODELS)
@settings(contract, max_examples=3)
@given(data=st.data())
def test_every_official_field_exists_on_our_type(name: str, data: st.DataObject) -> None:
    value = data.draw(models(MODELS[name]))

    made = as_ours(value)

    for field in MODELS[name].model_fields:
        assert getattr(made, field) == as_ours(getattr(value, field)), field


@pytest.mark.parametrize("name", MODELS)
def test_defaults_are_the_official_ones(name: str) -> None:
    """What is left out means the same on both sides."""
    defaults = {
        field: info.get_default(call_default_factory=True)
        for field, info in MODELS[name].model_fields.items()
        if not info.is_required()
    }
    required = {
        field: _any_value(name, field)
        for field, info in MODELS[name].model_fields.items()
        if info.is_required()
    }

    made = getattr(ours, name)(**required)

    for field, default in defaults.items():
        assert getattr(made, field) == as_ours(default), field


def _any_value(name: str, field: str) -> Any:
    """Some value for a required field: the first that Hypothesis would try."""
    return as_ours(getattr(_EXAMPLES[name], field))


class _Examples(dict[str, pydantic.BaseModel]):
    """One official instance of each type, made when asked for."""

    def __missing__(self, name: str) -> pydantic.BaseModel:
        found: list[pydantic.BaseModel] = []

        @settings(contract, max_examples=1, database=None, derandomize=True)
        @given(models(MODELS[name]))
        def take(value: pydantic.BaseModel) -> None:
            found.append(value)

        take()
        self[name] = found[0]
        return found[0]


_EXAMPLES = _Examples()


@pytest.mark.parametrize("name", STRICT)
def test_unknown_fields_are_rejected_where_the_official_type_rejects_them(name: str) -> None:
    fields = {field: getattr(_EXAMPLES[name], field) for field in MODELS[name].model_fields}

    with pytest.raises(pydantic.ValidationError):
        MODELS[name](**fields, surprise=1)
    with pytest.raises((UnknownFieldError, TypeError), match="surprise"):
        getattr(ours, name)(**as_ours(fields), surprise=1)


@pytest.mark.parametrize("name", LENIENT)
def test_unknown_keys_of_a_response_are_ignored_like_in_the_official_type(name: str) -> None:
    sent = official_json(_EXAMPLES[name])

    decoded = read({**sent, "surprise": {"new": [1, None]}}, name)

    assert decoded == read(sent, name)
    assert MODELS[name].model_validate({**sent, "surprise": 1}) == _EXAMPLES[name]


def test_types_that_callers_construct_reject_unknown_fields() -> None:
    """A misspelt `max_token` is told, not dropped; these two are the only such types."""
    made_by_callers = {name for name in LENIENT if issubclass(getattr(ours, name), Request)}

    assert made_by_callers == {"SamplingParams", "SessionSearchCursor"}
    assert official.SamplingParams(max_token=5) == official.SamplingParams()  # type: ignore[call-arg]  # the point
    with pytest.raises(UnknownFieldError, match="max_tokens"):
        ours.SamplingParams(max_token=5)  # type: ignore[call-arg]  # the point


@pytest.mark.parametrize("name", MODELS)
def test_a_missing_field_is_rejected_where_the_official_type_rejects_it(name: str) -> None:
    sent = official_json(_EXAMPLES[name])
    for field, info in MODELS[name].model_fields.items():
        if not info.is_required() or field in FORGIVEN.get(name, ()) or field not in sent:
            continue
        short = {key: value for key, value in sent.items() if key != field}

        with pytest.raises(pydantic.ValidationError):
            MODELS[name].model_validate(short)
        with pytest.raises((DecodeError, ValidationError)):
            read(short, name)


FORGIVEN = {
    "CreateSessionRequest": ("user_metadata",),  # SDK 0.16 and older send null for it
    "LoadWeightsRequest": ("optimizer",),  # SDK 0.3 does not know it
    "TelemetrySendRequest": ("process_uuid",),  # SDK 0.22 and older do not know it
    "TelemetryBatch": ("process_uuid",),
    "TryAgainResponse": ("queue_state",),  # nothing is lost if it is not known
    # Of an event by itself the class says the kind; in a batch the key is required.
    "SessionStartEvent": ("event",),
    "SessionEndEvent": ("event",),
    "UnhandledExceptionEvent": ("event",),
    "GenericEvent": ("event",),
}
"""Required by the official type and optional in ours, with the reason."""


# Hand-written: what the fields alone do not show


OPTIM_PARAMS = [
    (official.AdamParams(learning_rate=0.5), "adam_params"),
    (official.DimuonParams(learning_rate=0.5), "optimizer_params"),
    (OptimParamsBase.model_validate({"type": "mine", "depth": {"a": None}}), "optimizer_params"),
]
SPELLINGS = ("optim_params", "adam_params", "optimizer_params")


@pytest.mark.parametrize(("params", "official_key"), OPTIM_PARAMS)
def test_optim_step_reads_all_three_spellings_and_writes_the_official_one(
    params: pydantic.BaseModel, official_key: str
) -> None:
    theirs = official.OptimStepRequest(optim_params=params, model_id="m", seq_id=1)  # type: ignore[arg-type]  # any family

    for spelling in SPELLINGS:
        made = ours.OptimStepRequest(model_id="m", seq_id=1, **{spelling: as_ours(params)})
        body = {"model_id": "m", "seq_id": 1, spelling: official_json(params)}

        assert read(body, "OptimStepRequest") == made == as_ours(theirs)
        assert written(made) == official_json(theirs)
        assert set(written(made)) & set(SPELLINGS) == {official_key}


def test_optim_step_with_two_settings_is_rejected() -> None:
    """Which of them is meant could only be guessed."""
    body = {"model_id": "m", "adam_params": {}, "optimizer_params": {"type": "mine"}}

    with pytest.raises(pydantic.ValidationError):
        official.OptimStepRequest.model_validate(body)
    with pytest.raises(DecodeError, match="one of optim_params"):
        read(body, "OptimStepRequest")
    with pytest.raises(DecodeError, match="one of optim_params"):
        read({"model_id": "m"}, "OptimStepRequest")


def test_nulls_inside_free_form_values_survive() -> None:
    node = official.CustomLossNode(
        op="call_function",
        name="sum_1",
        target="torch.sum",
        args=[{"ref": "x"}, None, [None, {"slice": [None, 1, None]}], {"float": "inf"}, True],
        kwargs={"dim": None, "dtype": {"dtype": "float32"}, "out": {"dict": {"k": None}}},
    )
    loss = official.CreateCustomLossRequest(
        session_id="s",
        custom_loss_seq_id=0,
        name="loss",
        inputs=[official.CustomLossInput(name="logprobs", rank=1)],
        graph=official.CustomLossGraph(nodes=[node]),
    )

    sent = official_json(loss)

    assert sent["graph"]["nodes"][0]["kwargs"]["dim"] is None
    assert written(read(sent, "CreateCustomLossRequest")) == sent
    assert written(as_ours(loss)) == sent


def test_stop_absent_and_stop_empty_differ() -> None:
    for stop in (None, [], "", "x", ["x", "y"], [1, 2]):
        params = official.SamplingParams(stop=stop)

        decoded = read(official_json(params), "SamplingParams")

        assert decoded.stop == stop
        assert ("stop" in written(decoded)) == (stop is not None)


def test_events_in_a_batch_are_distinguished_by_their_kind_alone() -> None:
    common = {"event_id": "1", "event_session_index": 0, "severity": "INFO"}
    event = {**common, "event": "SESSION_START", "timestamp": "2026-01-02T03:04:05Z"}
    batch = {"platform": "p", "sdk_version": "v", "session_id": "s", "process_uuid": "u"}

    decoded = read({**batch, "events": [event]}, "TelemetrySendRequest")

    assert isinstance(decoded.events[0], ours.SessionStartEvent)
    del event["event"]
    with pytest.raises(DecodeError, match="event"):
        read({**batch, "events": [event]}, "TelemetrySendRequest")


def test_seq_ids_of_clones_keep_all_their_digits() -> None:
    """Clone ids push seq_id to about 10^18, beyond what a double can count."""
    request = official.SampleRequest(
        prompt=official.ModelInput.from_ints([1]),
        sampling_params=official.SamplingParams(),
        sampling_session_id="s",
        seq_id=999_999_999_000_000_001,
    )

    decoded = read(official_json(request), "SampleRequest")

    assert decoded.seq_id == 999_999_999_000_000_001
    assert written(decoded)["seq_id"] == 999_999_999_000_000_001


CONFIGS: list[dict[str, float | str] | None] = [None, {}, {"beta": 0.5, "loss_id": "x"}]


@contract
@given(st.data())
def test_the_json_datum_of_older_sdks_round_trips(data: st.DataObject) -> None:
    """The SDK still has the JSON form of training data that releases up to 0.24 send."""
    theirs = JsonForwardBackwardInput(
        data=[
            JsonDatum(
                model_input=data.draw(models(official.ModelInput)),
                loss_fn_inputs=data.draw(st.dictionaries(texts, json_tensors(), max_size=2)),
            )
        ],
        loss_fn="ppo",
        loss_fn_config=data.draw(st.sampled_from(CONFIGS)),
    )
    sent = official_json(theirs)

    decoded = read(sent, "ForwardBackwardInput")

    assert decoded == as_ours(theirs)
    assert written(decoded) == sent
    assert JsonForwardBackwardInput.model_validate(written(decoded)) == theirs


@settings(contract, max_examples=200)
@given(bits("float32", 4))
def test_float32_round_trips_through_json_bit_for_bit(values: np.ndarray[Any, Any]) -> None:
    """We write the fewest digits that tell a float32 from its neighbours; the SDK writes more."""
    values[~np.isfinite(values)] = 0.0
    tensor = ours.TensorData(values, "float32", [4])

    sent = written(tensor)

    assert read(sent, "TensorData") == tensor
    theirs = JsonTensorData.model_validate(sent).to_numpy()
    assert theirs.tobytes() == values.tobytes()
