from __future__ import annotations

import copy
import datetime
import pickle
from typing import Any

import pytest

from tests.unit.wire import corpus
from tinsmith import AdamParams, DimuonParams, OptimStepRequest, SampleRequest, SamplingParams
from tinsmith import types as t
from tinsmith.errors import DecodeError, ValidationError
from tinsmith.types import requests as r
from tinsmith.types.record import to_plain
from tinsmith.types.requests import ForwardBackwardRequest, ForwardRequest
from tinsmith.wire import json_format

GIVEN = t.ForwardBackwardInput([t.Datum(t.ModelInput.from_ints([1]))], "cross_entropy")
ADAM = AdamParams(learning_rate=0.5)
DIMUON = DimuonParams(learning_rate=0.5)


@pytest.mark.parametrize("seq_id", [None, 0, 7])
@pytest.mark.parametrize("cls", [ForwardBackwardRequest, ForwardRequest])
def test_a_forward_backward_request_survives_pickling_and_copying(
    cls: type[ForwardBackwardRequest], seq_id: int | None
) -> None:
    request = cls(GIVEN, "model", seq_id)

    for again in (pickle.loads(pickle.dumps(request)), copy.copy(request), copy.deepcopy(request)):
        assert type(again) is cls
        assert again == request
        assert again.seq_id == seq_id
        assert again.forward_only == request.forward_only
        assert to_plain(again) == to_plain(request)


def test_a_forward_request_is_a_pass_without_gradients() -> None:
    request = ForwardRequest(forward_input=GIVEN, model_id="m", seq_id=1)

    assert request.forward_only
    assert request.forward_input is request.forward_backward_input is GIVEN
    assert request == ForwardBackwardRequest(GIVEN, "m", 1, forward_only=True)
    assert request != ForwardBackwardRequest(GIVEN, "m", 1)
    assert request != 5
    assert repr(request).startswith("ForwardRequest(model_id='m'")
    assert len(repr(request)) < 200


def test_forward_and_forward_backward_inputs_have_separate_names_in_json() -> None:
    forward, both = ForwardRequest(GIVEN, "m", 1), ForwardBackwardRequest(GIVEN, "m")

    assert set(to_plain(forward)) == {"forward_input", "model_id", "seq_id"}
    assert set(to_plain(both)) == {"forward_backward_input", "model_id"}
    for request in (forward, both):
        body = json_format.encode(request)
        assert json_format.decode(body, ForwardBackwardRequest) == request


@pytest.mark.parametrize("name", ["optim_params", "adam_params", "optimizer_params"])
@pytest.mark.parametrize("params", [ADAM, DIMUON])
def test_an_optim_step_accepts_its_settings_under_three_names(name: str, params: Any) -> None:
    given: dict[str, Any] = {name: params}

    request = OptimStepRequest(model_id="m", **given)

    assert request.optim_params == params


def test_an_optim_step_writes_its_settings_under_the_name_of_their_family() -> None:
    adam = OptimStepRequest(model_id="m", seq_id=1, optim_params=ADAM)
    dimuon = OptimStepRequest(model_id="m", optim_params=DIMUON)

    assert set(to_plain(adam)) == {"model_id", "seq_id", "type", "adam_params"}
    assert set(to_plain(dimuon)) == {"model_id", "type", "optimizer_params"}
    assert to_plain(adam)["adam_params"]["learning_rate"] == 0.5


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optim_params": None},
        {"optim_params": ADAM, "adam_params": ADAM},
        {"adam_params": {"learning_rate": 0.5}},
        {"optimizer_params": t.AdamOptimizerConfig()},
        {"optim_params": ADAM, "type": "step"},
    ],
)
def test_an_optim_step_needs_exactly_one_set_of_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="OptimStepRequest"):
        OptimStepRequest(model_id="m", **settings)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model_id": "m"}',
        b'{"model_id": "m", "adam_params": {}, "optim_params": {}}',
        b'{"model_id": "m", "adam_params": []}',
        b'{"model_id": "m", "optimizer_params": {"type": "dimuon"}}',
        b'{"model_id": "m", "optimizer_params": {"type": 5}}',
        b'{"adam_params": {}}',
        b"[]",
    ],
)
def test_a_decoded_optim_step_without_exactly_one_set_of_settings_is_rejected(body: bytes) -> None:
    with pytest.raises(DecodeError):
        json_format.decode(body, OptimStepRequest)


def test_steps_are_compared_hashed_pickled_and_copied() -> None:
    for params in (ADAM, DIMUON):
        step = OptimStepRequest(model_id="m", optim_params=params)

        for again in (pickle.loads(pickle.dumps(step)), copy.copy(step), copy.deepcopy(step)):
            assert again == step
            assert hash(again) == hash(step)
            assert again.seq_id is None
        assert step != OptimStepRequest(model_id="m", optim_params=params, seq_id=0)
        assert step != 5


@pytest.mark.parametrize("limit", [0, 201, -1])
def test_a_search_limit_is_1_to_200_sessions(limit: int) -> None:
    with pytest.raises(ValidationError, match="limit"):
        r.SessionSearchRequest(limit=limit)
    assert r.SessionSearchRequest(limit=200).owner == t.OwnSearchOwner()


def test_search_filters_must_not_be_empty() -> None:
    empty: list[dict[str, Any]] = [{"display_name": ""}, {"statuses": []}]

    for given in empty:
        with pytest.raises(ValidationError):
            r.SessionSearchRequest(**given)


def test_a_sample_request_writes_defaults_and_omits_none() -> None:
    request = SampleRequest(
        prompt=t.ModelInput.from_ints([1, 2]), sampling_params=SamplingParams(max_tokens=3)
    )

    assert to_plain(request) == {
        "num_samples": 1,
        "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 3, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "type": "sample",
    }


def test_the_prompt_of_a_sample_request_is_an_input() -> None:
    wrong: Any = [1, 2]

    with pytest.raises(ValidationError, match=r"SampleRequest\.prompt"):
        SampleRequest(prompt=wrong, sampling_params=SamplingParams())
    with pytest.raises(TypeError, match="sampling_params"):
        SampleRequest(prompt=t.ModelInput.empty())  # type: ignore[call-arg]


def test_absent_and_null_differ_where_the_api_says_so() -> None:
    names: dict[str, Any] = {"training_run_id": "r", "checkpoint_id": "c"}

    assert "ttl_seconds" not in to_plain(r.SetCheckpointTtlRequest(**names))
    assert to_plain(r.SetCheckpointTtlRequest(**names, ttl_seconds=None))["ttl_seconds"] is None
    finished = r.FinishSessionRequest(session_id="s", reason=t.ClientSessionFinishSuccess())
    assert to_plain(finished)["detail"] is None


def test_a_day_is_a_date() -> None:
    request = r.GetAuditLogRequest(day=datetime.date(2026, 1, 2))

    assert to_plain(request)["day"] == datetime.date(2026, 1, 2)


@pytest.mark.parametrize("name", [n for n in corpus.TYPES if n.endswith("Request")])
def test_the_example_of_every_request_is_valid(name: str) -> None:
    """The fuzzers spoil these; one that is refused as it is would prove nothing."""
    json_format.decode(corpus.JSON_BODIES[name], corpus.TYPES[name])
