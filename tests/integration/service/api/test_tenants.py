"""Another tenant's anything is a 404, with the very bytes of what does not exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.integration.service.api.calls import (
    PROTOBUF,
    a_model,
    a_pass,
    a_sample,
    a_sampler,
    a_session,
    a_step,
    ok,
    post,
    result,
)
from tests.integration.service.api.running import RunningServer
from tinsmith.service.ledger.records import CheckpointEntry, TenantId
from tinsmith.wire.endpoint_types import Endpoint
from tinsmith.wire.endpoints import ENDPOINTS

UNKNOWN = "session-" + "0" * 32
NO_IDS = {
    "client_config",
    "client_dynamic_config",
    "auth_token",
    "healthz",
    "get_server_capabilities",
    "get_api_key",
    "delete_api_key",
    "telemetry",
    "create_session",
    "list_sessions",
    "search_sessions",
    "search_checkpoints",
    "external_weights_upload_start",
    "external_weights_upload_finish",  # in test_uploads.py
    "list_training_runs",
    "list_user_checkpoints",
    "get_billing_usage",
    "get_current_checkpoint_storage_usage",
    "get_audit_log",
}
"""Endpoints whose requests name nothing of anybody's."""
ITEMS = {"asample_many", "fetch_results"}
"""Endpoints that answer 404 inside of a 200."""


def request_for(endpoint: Endpoint, session: str) -> tuple[str, dict[str, Any] | bytes | None]:
    """A whole request to an endpoint about the things of a session."""
    model, sampler = f"{session}:train:0", f"{session}:sample:0"
    path = f"tinker://{model}/weights/one"
    target = {"type": "sampling_session", "sampling_session_id": sampler}
    bodies: dict[str, Any] = {
        "session_heartbeat": {"session_id": session},
        "finish_session": {"reason": {"type": "success"}, "detail": None},
        "assign_session_project": {"project_id": "p"},
        "create_model": {"session_id": session, "model_seq_id": 5, "base_model": "alias"},
        "unload_model": {"model_id": model},
        "forward_backward": a_pass(model, 9),
        "forward": None,
        "optim_step": a_step(model, 9),
        "save_weights": {"model_id": model, "path": "two", "seq_id": 9},
        "save_weights_for_sampler": {"model_id": model, "path": "two", "seq_id": 9},
        "save_weights_external": {"model_id": model, "path": "two", "seq_id": 9},
        "load_weights": {"model_id": model, "path": path, "seq_id": 9},
        "create_custom_loss": {
            "session_id": session,
            "custom_loss_seq_id": 0,
            "name": "f",
            "inputs": [{"name": "logprobs", "rank": 1}],
            "graph": A_GRAPH,
        },
        "get_info": {"model_id": model},
        "get_weights_info_by_tinker_path": {"tinker_path": path},
        "create_sampling_session": {
            "session_id": session,
            "sampling_session_seq_id": 3,
            "base_model": "alias",
        },
        "join_sampling_session": {"sampling_session_id": sampler},
        "asample": a_sample(sampler, 7),
        "asample_stream": a_sample(sampler, 7),
        "asample_many": {"samples": [a_sample(sampler, 7)]},
        "retrieve_future": {"request_id": f"{sampler}:0"},
        "cancel_future": {"request_id": f"{sampler}:0"},
        "retrieve_futures": {"target": target, "retrieved_request_ids": [f"{sampler}:0"]},
        "retrieve_results": {
            "target": target,
            "retrieved_request_ids": [f"{sampler}:0"],
            "inline_bytes": 9999,
        },
        "fetch_results": {"request_ids": [f"{sampler}:0"]},
        "copy_weights": {"source_path": path},
        "set_checkpoint_ttl": {"ttl_seconds": 4000},
    }
    is_export = endpoint.name == "get_external_weights_urls"
    fields = {
        "session_id": session,
        "sampler_id": sampler,
        "training_run_id": model,
        "checkpoint_id": "external_weights/one" if is_export else "weights/one",
        "name": session,
    }
    address = endpoint.path.replace(":path}", "}").format(**fields)
    if endpoint.name == "forward":
        given = {"data": [A_DATUM], "loss_fn": "cross_entropy"}
        return address, {"forward_input": given, "model_id": model, "seq_id": 9}
    if endpoint.method in ("GET", "DELETE"):
        return address, None
    return address, bodies.get(endpoint.name, {})


A_GRAPH = {
    "format": 1,
    "nodes": [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}},
        {
            "op": "call_method",
            "name": "total",
            "target": "sum",
            "args": [{"ref": "logprobs"}],
            "kwargs": {},
        },
        {
            "op": "output",
            "name": "output",
            "target": "output",
            "args": [{"tuple": [{"ref": "total"}, {"dict": {}}]}],
            "kwargs": {},
        },
    ],
}
A_DATUM = {
    "model_input": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]},
        "weights": {"data": [1.0, 1.0], "dtype": "float32", "shape": [2]},
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """One server for all probes: each has a session of its own."""
    with RunningServer(with_keys=True, long_poll_s=0.05) as server:
        yield server


def send(http: httpx.Client, endpoint: Endpoint, session: str) -> httpx.Response:
    path, body = request_for(endpoint, session)
    if isinstance(body, bytes):
        return http.request(endpoint.method, path, content=body, headers=PROTOBUF)
    return http.request(endpoint.method, path, json=body)


def alices_things(server: RunningServer, http: httpx.Client) -> str:
    """A session with a model, a sampler, a sample and a checkpoint."""
    session = a_session(http)
    model, sampler = a_model(http, session), a_sampler(http, session)
    ok(post(http, "asample", a_sample(sampler)))
    assert result(http, f"{sampler}:0").status_code == 200
    entry = CheckpointEntry(
        id=f"tinker://{model}/weights/one",
        tenant_id=TenantId("alice"),
        created_at=server.ledger.now(),
        run_id=model,
        checkpoint_id="weights/one",
        details={"base_model": "Qwen/Qwen3-8B"},
    )
    server.run(server.ledger.entries(CheckpointEntry).add(entry))
    return session


@pytest.mark.parametrize("name", sorted(ENDPOINTS.keys() - NO_IDS))
def test_resources_of_another_tenant_are_not_found(name: str, server: RunningServer) -> None:
    """Whatever bob asks about alice's things he is told as about things that do not exist."""
    endpoint = ENDPOINTS[name]
    with server.http() as alice, server.http("bob") as bob:
        session = alices_things(server, alice)

        probed = send(bob, endpoint, session)
        unknown = send(bob, endpoint, UNKNOWN)

        assert probed.status_code == (200 if name in ITEMS else 404)
        assert probed.text.replace(session, UNKNOWN) == unknown.text
        sampler = f"{session}:sample:0"
        assert result(alice, f"{sampler}:0").status_code == 200, "and nothing was changed"


@pytest.mark.parametrize("name", sorted(ENDPOINTS.keys() - NO_IDS))
def test_each_probe_is_a_valid_request_for_its_endpoint(name: str, server: RunningServer) -> None:
    """A probe that is refused for its form would prove nothing."""
    with server.http() as alice:
        session = alices_things(server, alice)

        reply = send(alice, ENDPOINTS[name], session)

        assert reply.status_code not in (400, 422), reply.text


def test_the_list_of_endpoints_without_ids_is_right() -> None:
    """A new endpoint with an id cannot be forgotten here."""
    for name in NO_IDS:
        names = {field.name for field in msgspec.structs.fields(ENDPOINTS[name].request)}
        assert not {n for n in names if n.endswith("_id")} - {
            "session_id",  # of a search and of telemetry, which find nothing of others
            "project_id",
            "destination_project_id",
            "upload_id",  # in test_uploads.py
        }


def test_the_probes_would_find_a_leak(server: RunningServer) -> None:
    """Asked by alice herself, the same requests do find her things."""
    with server.http() as alice:
        session = alices_things(server, alice)

        for name in ("get_info", "retrieve_future", "optim_step", "asample", "get_sampler"):
            assert send(alice, ENDPOINTS[name], session).status_code == 200, name
