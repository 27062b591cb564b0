"""Every endpoint of the table answers what the table promises."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration.testing.caller import (
    Caller,
    asample,
    calling,
    forward_backward,
    optim_step,
)
from tinsmith import types as t
from tinsmith.testing.service import ScriptedService
from tinsmith.types import extensions as x
from tinsmith.types import requests as r
from tinsmith.types.record import to_plain
from tinsmith.wire.endpoint_types import Answer
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import read_reply

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


class World:
    """A service with one of everything in it."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.session_id = caller.new_session()
        self.model_id = caller.new_model(self.session_id)
        self.sampler_id = caller.new_sampler(self.session_id)
        save = r.SaveWeightsRequest(model_id=self.model_id, path="c1", seq_id=1)
        self.path: str = caller.do("save_weights", save).path
        export = r.SaveWeightsExternalRequest(model_id=self.model_id, path="e1", seq_id=2)
        caller.do("save_weights_external", export)
        self.request_id: str = caller.ask("asample", asample(self.sampler_id, 0)).request_id

    def checkpoint(self, name: str = "weights/c1") -> dict[str, str]:
        return {"training_run_id": self.model_id, "checkpoint_id": name}


GRAPH = t.CustomLossGraph(
    nodes=[
        t.CustomLossNode(op="placeholder", name="logprobs", target="logprobs"),
        t.CustomLossNode(
            op="output",
            name="output",
            target="output",
            args=[{"tuple": [{"ref": "logprobs"}, {"dict": {"custom/m:sum": {"ref": "x"}}}]}],
        ),
    ]
)

Make = Callable[[World], Any]
REQUESTS: dict[str, Make] = {
    "client_config": lambda _: r.ClientConfigRequest(sdk_version="0.36.0"),
    "client_dynamic_config": lambda _: r.ClientConfigRequest(sdk_version="0.36.0"),
    "auth_token": lambda _: r.AuthTokenRequest(),
    "healthz": lambda _: r.EmptyRequest(),
    "get_server_capabilities": lambda _: r.EmptyRequest(),
    "get_api_key": lambda _: r.EmptyRequest(),
    "delete_api_key": lambda _: r.EmptyRequest(),
    "telemetry": lambda _: r.TelemetrySendRequest(
        events=[], platform="Linux", sdk_version="0.36.0", session_id="s", process_uuid="p"
    ),
    "create_session": lambda _: r.CreateSessionRequest(tags=[], sdk_version="0.36.0"),
    "session_heartbeat": lambda w: r.SessionHeartbeatRequest(session_id=w.session_id),
    "finish_session": lambda w: r.FinishSessionRequest(
        session_id=w.session_id, reason=t.ClientSessionFinishSuccess()
    ),
    "list_sessions": lambda _: r.ListSessionsRequest(),
    "search_sessions": lambda _: r.SessionSearchRequest(),
    "get_session": lambda w: r.GetSessionRequest(session_id=w.session_id),
    "assign_session_project": lambda w: r.AssignSessionProjectRequest(
        session_id=w.session_id, project_id="p2"
    ),
    "export_session_trace": lambda w: r.ExportSessionTraceRequest(session_id=w.session_id),
    "create_model": lambda w: r.CreateModelRequest(
        session_id=w.session_id, model_seq_id=1, base_model="Qwen/Qwen3-8B"
    ),
    "unload_model": lambda w: r.UnloadModelRequest(model_id=w.model_id),
    "forward_backward": lambda w: forward_backward(w.model_id, 3),
    "forward": lambda w: forward_backward(w.model_id, 3, forward_only=True),
    "optim_step": lambda w: optim_step(w.model_id, 3),
    "save_weights": lambda w: r.SaveWeightsRequest(model_id=w.model_id, path="c2", seq_id=3),
    "save_weights_for_sampler": lambda w: r.SaveWeightsForSamplerRequest(
        model_id=w.model_id, path="s1", seq_id=3
    ),
    "save_weights_external": lambda w: r.SaveWeightsExternalRequest(
        model_id=w.model_id, path="e2", seq_id=3
    ),
    "load_weights": lambda w: r.LoadWeightsRequest(model_id=w.model_id, seq_id=3, path=w.path),
    "create_custom_loss": lambda w: r.CreateCustomLossRequest(
        session_id=w.session_id, custom_loss_seq_id=0, name="f", inputs=[], graph=GRAPH
    ),
    "get_info": lambda w: r.GetInfoRequest(model_id=w.model_id),
    "get_weights_info_by_tinker_path": lambda w: r.WeightsInfoRequest(tinker_path=w.path),
    "create_sampling_session": lambda w: r.CreateSamplingSessionRequest(
        session_id=w.session_id, sampling_session_seq_id=1, model_path=w.path
    ),
    "join_sampling_session": lambda w: r.JoinSamplingSessionRequest(
        sampling_session_id=w.sampler_id
    ),
    "get_sampler": lambda w: r.GetSamplerRequest(sampler_id=w.sampler_id),
    "asample": lambda w: asample(w.sampler_id, 1),
    "retrieve_future": lambda w: r.FutureRetrieveRequest(request_id=w.request_id),
    "retrieve_futures": lambda w: r.FuturesRetrieveRequest(
        target=r.SamplingSessionFuturesTarget(sampling_session_id=w.sampler_id)
    ),
    "cancel_future": lambda w: r.FutureCancelRequest(request_id=w.request_id),
    "asample_many": lambda w: x.SampleManyRequest(samples=[to_plain(asample(w.sampler_id, 2))]),
    "retrieve_results": lambda w: x.ResultsRetrieveRequest(
        target=r.SamplingSessionFuturesTarget(sampling_session_id=w.sampler_id), inline_bytes=1000
    ),
    "fetch_results": lambda w: x.ResultsFetchRequest(request_ids=[w.request_id]),
    "asample_stream": lambda w: asample(w.sampler_id, 3),
    "list_training_runs": lambda _: r.ListTrainingRunsRequest(),
    "get_training_run": lambda w: r.GetTrainingRunRequest(training_run_id=w.model_id),
    "list_checkpoints": lambda w: r.ListCheckpointsRequest(training_run_id=w.model_id),
    "list_model_checkpoints": lambda w: r.ListCheckpointsRequest(training_run_id=w.model_id),
    "list_user_checkpoints": lambda _: r.ListUserCheckpointsRequest(),
    "get_external_weights_urls": lambda w: r.CheckpointRequest(
        **w.checkpoint("external_weights/e1")
    ),
    "get_checkpoint_archive_url": lambda w: r.CheckpointRequest(**w.checkpoint()),
    "publish_checkpoint": lambda w: r.CheckpointRequest(**w.checkpoint()),
    "unpublish_checkpoint": lambda w: r.CheckpointRequest(**w.checkpoint()),
    "set_checkpoint_ttl": lambda w: r.SetCheckpointTtlRequest(**w.checkpoint(), ttl_seconds=None),
    "delete_checkpoint": lambda w: r.CheckpointRequest(**w.checkpoint()),
    "copy_weights": lambda w: r.CopyWeightsRequest(source_path=w.path, destination_project_id="p"),
    "get_billing_usage": lambda _: r.GetBillingUsageRequest(
        starting_on=NOW, ending_before=NOW + datetime.timedelta(days=1)
    ),
    "get_current_checkpoint_storage_usage": lambda _: r.GetCurrentCheckpointStorageUsageRequest(),
    "get_audit_log": lambda _: r.GetAuditLogRequest(),
}


@pytest.fixture(scope="module")
def caller() -> Iterator[Caller]:
    with calling(tinsmith_batch_items=8, tinsmith_inline_bytes=65536, tinsmith_stream=True) as made:
        yield made


@pytest.mark.parametrize("name", [name for name, e in ENDPOINTS.items() if e.is_extension])
def test_an_extension_that_is_not_switched_on_is_not_there(name: str) -> None:
    with calling() as caller:
        reply = caller.call(name, REQUESTS[name](World(caller)))

    assert reply.status == 404


@pytest.mark.parametrize("name", ENDPOINTS)
def test_endpoint_answers_what_its_row_promises(caller: Caller, name: str) -> None:
    """The reply has the row's type; a future's result has that of its kind."""
    world, endpoint = World(caller), ENDPOINTS[name]
    request = REQUESTS[name](world)

    reply = caller.call(name, request)

    assert 200 <= reply.status < 300, reply.body
    if endpoint.answer is Answer.DIRECT:
        assert isinstance(read_reply(endpoint, reply.body), endpoint.response)
    elif endpoint.answer is Answer.FUTURE:
        caller.result(name, reply.plain["request_id"])
    else:
        assert endpoint.answer is not Answer.NOTHING or reply.body == b""
    received = caller.service.requests(name)[-1]
    assert (received.method, received.status) == (endpoint.method, reply.status)
    assert received.request == request


def test_every_endpoint_has_one_handler() -> None:
    service = ScriptedService()

    assert set(service._handlers) == set(ENDPOINTS)


@pytest.mark.parametrize(
    "name", [n for n, e in ENDPOINTS.items() if {"model_id", "session_id"} & set(e.identity)]
)
def test_work_for_what_is_not_there_is_refused_with_404(caller: Caller, name: str) -> None:
    world = World(caller)
    world.session_id = world.model_id = "nobody"
    request = REQUESTS[name](world)

    reply = caller.call(name, request)

    assert (reply.status, "nobody" in reply.plain["detail"]) == (404, True)


def test_unknown_path_is_404_and_wrong_method_405(caller: Caller) -> None:
    assert caller.send("GET", "/api/v1/nothing").status == 404
    wrong = caller.send("GET", "/api/v1/asample")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert caller.service.requests()[-1].endpoint is None


def test_wrong_key_is_401_everywhere_but_at_the_health_check(caller: Caller) -> None:
    for name in ("client_config", "get_server_capabilities"):
        reply = caller.call(name, REQUESTS[name](World(caller)), X_API_Key="tml-other")
        assert reply.status == 401
    assert caller.send("GET", "/api/v1/healthz", headers={"X-API-Key": ""}).status == 200


def test_exchanged_token_is_as_good_as_the_key(caller: Caller) -> None:
    token = caller.ask("auth_token", r.AuthTokenRequest()).jwt

    reply = caller.call("get_server_capabilities", r.EmptyRequest(), X_API_Key=token)

    assert reply.status == 200


def test_body_that_is_no_such_request_is_400_with_a_body(caller: Caller) -> None:
    for body, kind in [(b"{", "application/json"), (b"\xff", "application/x-protobuf")]:
        reply = caller.send("POST", "/api/v1/forward_backward", body, {"Content-Type": kind})
        assert (reply.status, "detail" in reply.plain) == (400, True)
    assert caller.service.requests("forward_backward")[-1].request is None
