"""The unmodified official SDK works against our wire half, and sends what our client half sends.

Each scenario runs once, in a process of its own, against a loopback server made of
`ENDPOINTS`, `read_request` and `to_reply`; see `official_scenario.py` for what it does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest
from tinker.proto import tinker_public_pb2

from tests.contract.loopback import Call, LoopbackServer
from tests.contract.official_process import said_by
from tests.contract.small_service import JWT, SmallService
from tinsmith.types import ClientConfigResponse
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import read_request, to_http

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0

FLAGS = {
    "by default": ClientConfigResponse(),
    "with every flag": ClientConfigResponse(
        pjwt_auth_enabled=True,
        proto_compress_fwdbwd=True,
        fwdbwd_max_chunk_len=1,
        use_pyqwest_transport=False,
        create_model_via_load_weights=True,
        sample_use_retrieve_futures=True,
        custom_loss_server_side=True,
        sample_join_sampling_session=True,
    ),
}


class Run(NamedTuple):
    flags: ClientConfigResponse
    server: LoopbackServer
    said: dict[str, Any]


@pytest.fixture(scope="module", params=FLAGS)
def run(request: pytest.FixtureRequest) -> Run:
    flags = FLAGS[request.param]
    with LoopbackServer(SmallService(flags)) as server:
        said = said_by(
            *("-m", "tests.contract.official_scenario", server.url),
            environment={"TINKER_TAGS": "a", "NO_PROXY": "*"},
        )
    return Run(flags, server, json.loads(said))


def test_every_call_finds_its_route_and_is_read(run: Run) -> None:
    assert run.server.problems == []
    assert len(run.server.calls) > 60


def test_training_gives_what_the_server_computed(run: Run) -> None:
    logprobs = [[-0.25, -0.375, -0.5], [-1.0]]

    assert run.said["models"] == ["small/model"]
    assert run.said["loss"] == 2.125
    assert run.said["logprobs"] == run.said["forward"] == logprobs
    assert run.said["step"] == {"grad_norm": 0.25}
    assert run.said["dimuon"] == {"grad_norm": 0.5}
    assert run.said["custom loss"] == 0.625
    assert run.said["info"] == "small/model"


def test_a_failed_operation_reaches_the_user_as_such(run: Run) -> None:
    message, category = run.said["failed"]

    assert "learning_rate must not be negative" in message
    assert category == "user"


def test_saving_gives_paths(run: Run) -> None:
    prefix = "tinker://sess-1:train:0/"

    assert run.said["state path"] == prefix + "weights/c1"
    assert run.said["sampler path"] == prefix + "sampler_weights/s1"
    assert run.said["external path"] == prefix + "external_weights/e1"
    assert run.said["resumed"] == "sess-1:train:1"


def test_samples_arrive_with_all_that_was_asked_about_them(run: Run) -> None:
    said = run.said

    for stop_reason, _, tokens, logprobs in said["samples"]:
        assert (stop_reason, tokens, logprobs) == ("length", [6, 7], [-1.5, -1.75])
    assert len({sequence_id for _, sequence_id, _, _ in said["samples"]}) == 2
    assert said["cache hits"] == 2
    assert said["prompt logprobs"] == [None, -3.0, -3.5]
    assert said["last prompt logprob"] == [None, None, -3.5]
    assert said["top prompt"] == [[[1, -0.5], [2, -0.5]], [[1, -0.5]], [[1, -0.5]]]
    assert said["top sampled"] == [
        [[1, -0.5], [2, -0.5], [3, -0.5]],
        [[1, -0.5], [2, -0.5]],
        [[1, -0.5]],
    ]
    assert said["targets"] == [[-1.0, -1.0, -0.5], [-1.0, -1.0, -1.0]]
    assert said["drawn"] == [[[0, 1], [2, 3]], [[-0.0, -0.125], [-0.25, -0.375]]]
    assert said["clone"] == [6, 7]
    assert said["named sampler"] == "small/model"


def test_management_calls_are_answered(run: Run) -> None:
    said = run.said

    assert said["runs"] == ["sess-1:train:0"]
    assert said["run"] == "2026-01-02T03:04:05.678901+00:00"
    assert said["checkpoints"] == ["tinker://sess-1:train:0/weights/c1"]
    assert said["all checkpoints"] == {"offset": 0, "limit": 5, "total_count": 1}
    assert said["weights"] == 8
    assert said["session"] == {"a": "b"}
    assert said["sessions"] == ["sess-1"]
    assert said["statuses"] == [None, "active", "cancelled", "client_finished", "failed"]
    assert said["copy"] == "tinker://copy-1:train:0/weights/c1"
    assert said["trace"] == "https://example.invalid/trace"
    assert said["urls"] == {"adapter_config.json": "https://example.invalid/a"}
    assert said["audit"] == ["saved"]
    assert said["billing"] == [
        "training",
        "sampling_prefill",
        "sampling_sample",
        "checkpoint",
        "storage",
    ]
    assert said["storage"] == 2


def test_a_refusal_reaches_the_user_with_its_detail(run: Run) -> None:
    assert run.said["missing"] == "Error code: 404 - {'detail': 'no such run'}"


def test_our_client_half_sends_the_same_requests(run: Run) -> None:
    """Each call the SDK made, made again from what we read of it: path, query, body, headers."""
    for call in run.server.calls:
        made = to_http(call.endpoint, call.request)

        assert made.method == call.method
        assert unquote(made.path) == unquote(call.path)
        assert _body(call, b"".join(made.parts)) == _body(call, call.body), call.endpoint.name
        assert list(made.query) == list(call.query)
        read_again = read_request(
            call.endpoint,
            _path_fields(call),
            made.query,
            {name.lower(): value for name, value in made.headers.items()},
            b"".join(made.parts),
        )
        assert read_again == call.request
        for name, value in call.endpoint.headers.items():
            assert call.headers[name.lower()] == value
        if made.parts:
            assert call.headers["content-type"] == made.headers["Content-Type"]


def _path_fields(call: Call) -> dict[str, str]:
    return {name: getattr(call.request, name) for name in call.endpoint.path_fields}


def _body(call: Call, body: bytes) -> object:
    """A body as data: JSON with its keys, protobuf with every bit."""
    if call.endpoint.name == "forward_backward":
        message = tinker_public_pb2.ForwardBackwardRequest.FromString(body)
        return message.SerializeToString(deterministic=True)
    return json.loads(body) if body else None


def test_results_are_protobuf_exactly_where_the_sdk_asks_for_it(run: Run) -> None:
    asked = {
        (call.headers["x-tinker-request-type"], call.headers["accept"])
        for call in run.server.named("retrieve_future")
    }

    binary = {kind for kind, accept in asked if accept == "application/x-protobuf"}
    assert binary == {"ForwardBackward", "Forward", "Sample"}
    assert all(accept == "application/json" for kind, accept in asked if kind not in binary)


def test_pending_and_large_results_are_asked_for_again(run: Run) -> None:
    polls = run.server.named("retrieve_future")
    steps = [call for call in polls if call.headers["x-tinker-request-type"] == "OptimStep"]
    samples = [call for call in polls if call.headers["x-tinker-request-type"] == "Sample"]

    succeeded, failed = 2, 1
    assert len(steps) == 2 * succeeded + failed
    assert {call.request.allow_metadata_only for call in samples} == {True, False}
    assert len(samples) == 2 * len(run.server.named("asample"))


def test_credentials_are_exchanged_if_the_flag_says_so(run: Run) -> None:
    keys = {call.headers["x-api-key"] for call in run.server.named("optim_step")}

    if run.flags.pjwt_auth_enabled:
        assert keys == {JWT}
        assert run.said["who"]["email"] == "me@x"
        assert run.server.named("auth_token")
    else:
        assert keys == {"tml-test"}
        assert run.said["who"] is None


def test_bodies_are_compressed_if_the_flag_says_so(run: Run) -> None:
    encodings = {
        call.headers.get("content-encoding") for call in run.server.named("forward_backward")
    }

    assert encodings == ({"zstd"} if run.flags.proto_compress_fwdbwd else {None})


def test_custom_losses_are_uploaded_if_the_flag_says_so(run: Run) -> None:
    assert run.said["loss id"] == ("loss-0" if run.flags.custom_loss_server_side else None)


def test_clones_number_their_samples_apart(run: Run) -> None:
    numbers = [call.request.seq_id for call in run.server.named("asample")]

    assert numbers[:3] == [0, 1, 2]
    assert numbers[3] >= 10**9
    if run.flags.sample_join_sampling_session:
        assert numbers[3] == 7 * 10**9


def test_every_route_is_called_but_those_that_cannot_be(run: Run) -> None:
    called = {call.endpoint.name for call in run.server.calls}
    flagged = {"retrieve_futures", "create_custom_loss", "join_sampling_session", "auth_token"}
    of_others = {name for name, e in ENDPOINTS.items() if e.until or e.is_extension}

    has_flags = run.flags.custom_loss_server_side
    expected = NOT_CALLED.keys() | of_others | (set() if has_flags else flagged)
    assert set(ENDPOINTS) - called == expected


NOT_CALLED = {
    "healthz": "no public method calls it",
    "get_api_key": "command line",
    "delete_api_key": "command line",
    "telemetry": "off in tests",
    "session_heartbeat": "the first beat comes after ten seconds",
    "cancel_future": "only for a sample that is abandoned while it waits",
}


def test_the_session_is_finished(run: Run) -> None:
    (call,) = run.server.named("finish_session")

    assert json.loads(call.body) == {"reason": {"type": "success"}, "detail": None}
    assert call.request.session_id == "sess-1"
