from __future__ import annotations

import datetime
import json
from typing import Any

import numpy as np
import pytest

from tests.unit.wire import corpus
from tinsmith import types as t
from tinsmith.errors import DecodeError, ValidationError
from tinsmith.types import requests as r
from tinsmith.types.record import Frozen
from tinsmith.wire import json_format
from tinsmith.wire.endpoint_types import Answer, Endpoint, Format
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import (
    HttpRequest,
    decode_body,
    encode_body,
    read_reply,
    read_request,
    to_http,
    to_reply,
)

EVERY = pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)


def received(endpoint: Endpoint, sent: HttpRequest, path_fields: dict[str, str]) -> Any:
    """The request as the server reads what the client sent."""
    headers = {name.lower(): value for name, value in sent.headers.items()}
    return read_request(endpoint, path_fields, sent.query, headers, b"".join(sent.parts))


def a_request_to(endpoint: Endpoint) -> Any:
    if endpoint.request_format is Format.PROTOBUF:
        return corpus.a_request()
    body = corpus.JSON_BODIES[endpoint.request.__name__]
    return json_format.decode(body, endpoint.request)


@EVERY
def test_every_request_round_trips(endpoint: Endpoint) -> None:
    request = a_request_to(endpoint)
    path_fields = {name: getattr(request, name) for name in endpoint.path_fields}

    sent = to_http(endpoint, request)

    assert sent.method == endpoint.method
    assert "{" not in sent.path
    assert received(endpoint, sent, path_fields) == request


@EVERY
def test_a_request_for_another_endpoint_is_rejected(endpoint: Endpoint) -> None:
    with pytest.raises(ValidationError, match=endpoint.name):
        to_http(endpoint, t.SamplingParams())


@EVERY
def test_every_reply_round_trips(endpoint: Endpoint) -> None:
    if endpoint.answer is Answer.NOTHING:
        reply = to_reply(None)
        assert (reply.status, reply.parts) == (204, [])
        assert read_reply(endpoint, b"ignored") is None
        return
    if endpoint.answer in (Answer.RESULT, Answer.EVENTS):
        assert read_reply(endpoint, b'{"type": "try_again"}') == {"type": "try_again"}
        return
    response = json_format.decode(corpus.JSON_BODIES[endpoint.response.__name__], endpoint.response)

    reply = to_reply(response)

    body = b"".join(reply.parts)
    assert reply.status == 200
    assert reply.headers == {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
    }
    assert read_reply(endpoint, body) == response


@EVERY
def test_a_reply_of_the_wrong_type_is_rejected(endpoint: Endpoint) -> None:
    if endpoint.answer is Answer.NOTHING:
        return

    for body in (b"", b"<html>", b"["):
        with pytest.raises(DecodeError):
            read_reply(endpoint, body)


def test_ids_are_in_the_path_and_the_rest_in_the_query() -> None:
    request = r.GetTrainingRunRequest(training_run_id="a:train:0", access_scope="accessible")

    sent = to_http(ENDPOINTS["get_training_run"], request)

    assert sent.path == "/api/v1/training_runs/a:train:0"
    assert sent.query == {"access_scope": "accessible"}
    assert sent.parts == []
    assert "Content-Type" not in sent.headers


@pytest.mark.parametrize(
    ("run", "checkpoint", "path"),
    [
        ("a b", "weights/x", "a%20b/checkpoints/weights/x"),
        ("a/b", "weights/x", "a%2Fb/checkpoints/weights/x"),
        ("a?b#c", "weights/é", "a%3Fb%23c/checkpoints/weights/%C3%A9"),
        ("{checkpoint_id:path}", "w/x", "%7Bcheckpoint_id:path%7D/checkpoints/w/x"),
        ("a", "weights/x/publish", "a/checkpoints/weights/x/publish"),
    ],
)
def test_path_values_are_escaped(run: str, checkpoint: str, path: str) -> None:
    request = r.CheckpointRequest(training_run_id=run, checkpoint_id=checkpoint)

    sent = to_http(ENDPOINTS["delete_checkpoint"], request)

    assert sent.path == f"/api/v1/training_runs/{path}"


@pytest.mark.parametrize("wrong", ["", ".", "..", "\ud800"])
def test_values_that_cannot_be_in_a_path_are_rejected(wrong: str) -> None:
    for run, checkpoint in [(wrong, "weights/x"), ("a", f"weights/{wrong}"), ("a", wrong)]:
        request = r.CheckpointRequest(training_run_id=run, checkpoint_id=checkpoint)
        with pytest.raises(ValidationError):
            to_http(ENDPOINTS["delete_checkpoint"], request)


def test_a_query_holds_dates_times_and_numbers_as_text() -> None:
    at = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    usage = r.GetBillingUsageRequest(starting_on=at, ending_before=at)
    audit = r.GetAuditLogRequest(day=datetime.date(2026, 1, 2))
    sessions = r.ListSessionsRequest(limit=5)

    queries = [
        to_http(ENDPOINTS[name], request).query
        for name, request in [
            ("get_billing_usage", usage),
            ("get_audit_log", audit),
            ("list_sessions", sessions),
        ]
    ]

    assert queries == [
        {"starting_on": "2026-01-02T00:00:00Z", "ending_before": "2026-01-02T00:00:00Z"},
        {"event_type": "all", "day": "2026-01-02"},
        {"limit": "5", "offset": "0", "access_scope": "owned"},
    ]


def test_a_query_with_unencodable_text_is_rejected() -> None:
    request = r.ListTrainingRunsRequest(project_id="\ud800")

    with pytest.raises(ValidationError, match="project_id"):
        to_http(ENDPOINTS["list_training_runs"], request)


def test_a_secret_is_sent_only_in_its_header() -> None:
    request = r.CopyWeightsRequest(
        source_path="tinker://a/weights/b", weights_access_token="secret"
    )

    sent = to_http(ENDPOINTS["copy_weights"], request)

    assert sent.headers["X-Tinker-Weights-Access-Token"] == "secret"
    assert b"secret" not in b"".join(sent.parts)
    assert received(ENDPOINTS["copy_weights"], sent, {}) == request


@pytest.mark.parametrize("token", ["a\nX-Evil: 1", "a\r", "é", "a\x00"])
def test_an_invalid_header_value_is_rejected(token: str) -> None:
    request = r.CopyWeightsRequest(source_path="x", weights_access_token=token)

    with pytest.raises(ValidationError, match="weights_access_token") as caught:
        to_http(ENDPOINTS["copy_weights"], request)

    assert token not in str(caught.value)


def test_absent_and_null_stay_distinct_on_the_wire() -> None:
    endpoint = ENDPOINTS["set_checkpoint_ttl"]
    names: dict[str, Any] = {"training_run_id": "a", "checkpoint_id": "weights/b"}
    never = r.SetCheckpointTtlRequest(**names, ttl_seconds=None)

    sent = to_http(endpoint, never)

    assert sent.parts == [b'{"ttl_seconds":null}']
    assert received(endpoint, sent, names) == never
    assert read_request(endpoint, names, {}, {}, b"{}") == r.SetCheckpointTtlRequest(**names)


def test_null_from_old_releases_means_absent() -> None:
    body = b'{"model_id": "m", "path": null, "seq_id": null, "overwrite": null, "new": null}'

    request = read_request(ENDPOINTS["save_weights"], {}, {}, {}, body)

    assert request == r.SaveWeightsRequest(model_id="m")


def test_fields_of_newer_releases_are_ignored() -> None:
    body = b'{"model_id": "m", "invented_in_2030": {"a": 1}}'

    assert read_request(ENDPOINTS["save_weights"], {}, {}, {}, body).model_id == "m"


def test_the_path_takes_precedence_over_the_body() -> None:
    """Or a caller could be let through for one thing and act on another."""
    endpoint = ENDPOINTS["assign_session_project"]

    request = read_request(
        endpoint, {"session_id": "mine"}, {}, {}, b'{"session_id": "theirs", "project_id": "p"}'
    )

    assert request.session_id == "mine"


def test_a_request_may_come_as_protobuf_or_as_json() -> None:
    request = corpus.a_request()
    in_protobuf = b"".join(encode_body(request, Format.PROTOBUF))
    endpoint = ENDPOINTS["forward_backward"]
    plain_body = {
        "forward_backward_input": corpus.FORWARD,
        "model_id": "m",
    }

    of_protobuf = read_request(
        endpoint, {}, {}, {"content-type": "application/x-protobuf"}, in_protobuf
    )
    of_json = read_request(
        endpoint, {}, {}, {"content-type": "application/json"}, json.dumps(plain_body).encode()
    )

    assert of_protobuf == request
    assert not of_json.forward_only
    assert of_json.forward_backward_input.data[0].loss_fn_inputs["y"].is_sparse


def test_protobuf_for_a_type_without_protobuf_is_rejected() -> None:
    with pytest.raises(DecodeError, match="no protobuf form"):
        decode_body(b"", t.Cursor, Format.PROTOBUF)
    with pytest.raises(DecodeError, match="no protobuf form"):
        read_request(ENDPOINTS["asample"], {}, {}, {"content-type": "application/x-protobuf"}, b"")


def test_a_body_in_parts_shares_the_caller_s_memory() -> None:
    weights = np.zeros(10_000, dtype="float32")
    datum = t.Datum(t.ModelInput.empty(), {"weights": weights})
    request = t.ForwardBackwardRequest(t.ForwardBackwardInput([datum], "ppo"), "m", 1)

    sent = to_http(ENDPOINTS["forward_backward"], request)

    assert sent.headers["Content-Type"] == "application/x-protobuf"
    assert any(np.shares_memory(np.frombuffer(part, "uint8"), weights) for part in sent.parts)


@pytest.mark.parametrize("format_", Format)
def test_a_protobuf_reply_has_its_content_type(format_: Format) -> None:
    output = corpus.an_output()

    reply = to_reply(output, format_)

    body = b"".join(reply.parts)
    assert reply.headers["Content-Type"] == format_.value
    assert decode_body(body, t.ForwardBackwardOutput, format_) == output


@pytest.mark.parametrize("body", [b"[]", b"5", b"null", b'"x"', b"{"])
@EVERY
def test_a_body_that_is_not_an_object_is_rejected(endpoint: Endpoint, body: bytes) -> None:
    with pytest.raises(DecodeError):
        read_request(endpoint, {}, {}, {}, body)


def test_numeric_strings_are_converted_in_a_query_but_not_in_a_body() -> None:
    by_query = read_request(ENDPOINTS["list_sessions"], {}, {"limit": "5"}, {}, b"")

    assert by_query.limit == 5
    with pytest.raises(DecodeError, match="seq_id"):
        read_request(ENDPOINTS["save_weights"], {}, {}, {}, b'{"model_id": "m", "seq_id": "5x"}')


def test_every_request_with_arrays_is_decoded_by_its_own_decoder() -> None:
    """`read_request` treats them apart, so a new one must be looked at."""
    with_arrays = {e.request for e in ENDPOINTS.values() if issubclass(e.request, Frozen)}

    assert with_arrays == {t.ForwardBackwardRequest, t.OptimStepRequest}
