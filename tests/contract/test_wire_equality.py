"""What our client puts on the wire is what the official SDK puts there, but for what is listed.

`wire_scenario.py` is run by both, unchanged, each against services of its own. The requests that
arrived are compared one by one: route, query, headers that mean something, and body, as JSON or as
the official protobuf messages. Each entry of the tables below is a conscious difference and has
its line in docs/divergences.md. What the service has decoded of each request is compared with what
was sent, and what both clients read of its replies with what it computed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest
from tinker.proto import tinker_public_pb2

from tests.contract.official_process import said_by
from tests.contract.wire_scenario import BASE_MODEL
from tests.numerics.small_models import make_model
from tinsmith.testing import ReceivedRequest, ScriptedService, running_service
from tinsmith.wire.content import decompress, is_protobuf
from tinsmith.wire.decode_limits import DEFAULT_LIMITS
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import to_http

SCENARIO = Path(__file__).with_name("wire_scenario.py")
TIME_LIMIT_S = 150

CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "every flag": {
        "pjwt_auth_enabled": True,
        "proto_compress_fwdbwd": True,
        "parallel_fwdbwd_chunks": False,
        "use_pyqwest_transport": False,
        "sample_use_retrieve_futures": True,
        "sample_join_sampling_session": True,
        "sample_cancel_enabled": True,
        "create_model_via_load_weights": True,
        "inline_bytes": 64,
    },
    "losses": {"custom_loss_server_side": True, "engine": "embedded"},
}
DAYS = ("default", "every flag")

POLLS = {"retrieve_future", "retrieve_futures", "session_heartbeat"}
"""Compared apart: how often they come is a matter of time."""
START_UP = {"client_config", "client_dynamic_config", "auth_token"}
"""Compared apart: the official SDK asks anew for management, we ask once for each client."""
TRANSPORT = {"host", "connection", "content-length"}
"""Headers of the connection, not of the call."""
OUR_OWN = {
    "accept-encoding",
    "user-agent",
    "x-idempotency-key",
    "x-stainless-arch",
    "x-stainless-async",
    "x-stainless-os",
    "x-stainless-runtime",
    "x-stainless-runtime-version",
}
"""Headers about the client itself: ours says that it is tinsmith, and not on what it runs."""
MANAGEMENT = {"x-sdk-method", "x-sdk-version"}
"""We send them wherever a sampler is looked up, the official SDK not from `get_base_model`."""
POLL_HEADERS = {"x-stainless-raw-response", "x-stainless-retry-count"}
"""Always the same in polls, and so left out by us."""
SMALL_RESULTS = {"CreateModel", "CreateCustomLoss", "LoadWeights"}
"""Their results are an id or a path; when we make a model we do not ask for their size first."""
CLONE_NUMBERS = 1_000_000_000
"""Numbers of samples from here on begin at a random multiple of it."""


class Sent(NamedTuple):
    """A request as far as it is compared."""

    endpoint: str | None
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


class Day(NamedTuple):
    said: list[dict[str, Any]]
    services: dict[str, ScriptedService]


def spend(interpreter: list[str], stack: contextlib.ExitStack, model: Path) -> Day:
    """Run the scenario against a service for each case."""
    services = {
        name: stack.enter_context(
            running_service(
                **{
                    "long_poll_s": 20.0,
                    "fwdbwd_max_chunk_len": 2,
                    "keep_bodies": True,
                    "base_models": [f"{BASE_MODEL}={model}"],
                    **flags,
                }
            )
        )
        for name, flags in CASES.items()
    }
    for name in DAYS:
        services[name].faults.fail_command("optim_step", nth=4, error="too steep", category="user")
    parts = [
        f"{'day' if name in DAYS else name}={service.base_url}"
        for name, service in services.items()
    ]
    said = said_by(
        *(*interpreter, str(SCENARIO), "tml-test", *parts),
        environment={"TINKER_API_KEY": "tml-test", "TINKER_TAGS": "a"},
    )
    return Day([json.loads(line) for line in said.splitlines()], services)


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Day, Day]]:
    model = tmp_path_factory.mktemp("model")
    make_model(model)
    with contextlib.ExitStack() as stack:
        yield spend([], stack, model), spend(["-m", "tinsmith.as_tinker"], stack, model)


# Results


def test_both_clients_return_the_same_results(days: tuple[Day, Day]) -> None:
    official, ours = days

    assert ours.said == official.said
    assert len(official.said) == len(CASES)


@pytest.mark.parametrize("case", DAYS)
def test_a_loss_is_the_negative_sum_of_the_logprobs(days: tuple[Day, Day], case: str) -> None:
    for name, count in (("one chunk", 1), ("many chunks", 5), ("forward", 1)):
        trained = said_in(days, case)["train"][name]
        assert len(trained["logprobs"]) == count
        total = -sum(map(sum, trained["logprobs"]))
        assert trained["metrics"]["loss:sum"] == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("case", DAYS)
def test_a_failed_command_raises_its_error_and_category(days: tuple[Day, Day], case: str) -> None:
    said = said_in(days, case)

    assert said["train"]["failed"] == ["user", True]
    assert said["managed"]["missing"] == [404, True]


@pytest.mark.parametrize("case", DAYS)
def test_paths_name_the_model_and_the_kind_of_weights(days: tuple[Day, Day], case: str) -> None:
    said = said_in(days, case)

    prefix = f"tinker://{said['train']['info'][0]}"
    assert said["saved"] == {
        "state": f"{prefix}/weights/c1",
        "again": f"{prefix}/weights/c1",
        "sampler": f"{prefix}/sampler_weights/s1",
        "external": f"{prefix}/external_weights/e1",
    }


@pytest.mark.parametrize("case", DAYS)
def test_samples_arrive_with_every_requested_field(days: tuple[Day, Day], case: str) -> None:
    said = said_in(days, case)["sample"]
    second, third = said["logprobs"][1:]
    dense, sparse = said["everything"]

    assert said["logprobs"][0] is None
    assert said["last"] == [None, None, third]
    for one in (dense, sparse):
        assert one["prompt"] == [None, second, third]
        assert [row and len(row) for row in one["top prompt"]] == [None, 3, 3]
        assert [len(row) for row in one["top sampled"]] == [2, 2]
        for row, logprob in zip(one["top sampled"], one["sequence"][2], strict=True):
            assert row[0][1] >= logprob
        assert [[len(row) for row in part] for part in one["drawn"]] == [[2, 2], [2, 2]]
    # Both asked for the prompt's own tokens and for one that follows none of them.
    assert dense["targets"] == [[second, dense["targets"][0][1]], [0.0, third]]
    assert sparse["targets"] == [[-1.0, -1.0, second], [third, -1.0, -1.0]]


def said_in(days: tuple[Day, Day], case: str) -> dict[str, Any]:
    """What the official SDK said; ours says the same."""
    return days[0].said[list(CASES).index(case)]


def test_an_uploaded_loss_is_run_by_the_service(days: tuple[Day, Day]) -> None:
    said = said_in(days, "losses")

    assert said["loss"][0] and said["loss"][1:] == ["weighted", ["weights"]]
    assert said["handle"]["logprobs"] == said["built in"]["logprobs"]
    total = said["built in"]["metrics"]["loss:sum"]
    assert said["handle"]["metrics"]["loss:sum"] == pytest.approx(total, rel=1e-5)
    assert said["handle"]["metrics"]["custom/weight:sum"] == 3.0
    for day in days:
        passes = day.services["losses"].requests("forward_backward")
        names = [one.request.forward_backward_input.loss_fn for one in passes]
        assert names.count("custom") == 1


def test_an_uploaded_loss_is_run_by_the_client_if_the_service_runs_none(
    days: tuple[Day, Day],
) -> None:
    said = said_in(days, "default")["custom"]

    assert said["loss"][0] is None
    total = said["built in"]["metrics"]["loss:sum"]
    assert said["handle"]["metrics"]["loss:sum"] == pytest.approx(total, rel=1e-5)
    for day in days:
        assert day.services["default"].requests("create_custom_loss") == []


# Requests


@pytest.mark.parametrize("case", CASES)
def test_each_request_is_the_same(days: tuple[Day, Day], case: str) -> None:
    official, ours = (in_order(day.services[case]) for day in days)

    assert [one.endpoint for one in ours] == [one.endpoint for one in official]
    for mine, theirs in zip(ours, official, strict=True):
        assert mine == theirs
    assert len(ours) > (70 if case in DAYS else 8)


def in_order(service: ScriptedService) -> list[Sent]:
    """What was asked for, in order; the chunks of a call, which travel together, by number."""
    sent: list[Sent] = []
    chunks: list[Sent] = []
    for received in service.requests():
        if received.endpoint in POLLS | START_UP:
            continue
        if received.endpoint == "forward_backward":
            chunks.append(comparable(received))
            continue
        sent += [*sorted(chunks, key=lambda one: one.body.seq_id), comparable(received)]
        chunks.clear()
    return sent


def comparable(received: ReceivedRequest) -> Sent:
    body = body_of(received)
    headers = {
        name: value for name, value in received.headers.items() if name not in TRANSPORT | OUR_OWN
    }
    headers["x-idempotency-key"] = "given" if "x-idempotency-key" in received.headers else "none"
    headers["x-api-key"] = headers["x-api-key"][:3]  # a token is new each time
    if received.endpoint == "get_sampler":
        headers = {name: value for name, value in headers.items() if name not in MANAGEMENT}
    if body is None:
        headers.pop("content-type", None)
    if isinstance(body, dict) and body.get("seq_id", 0) >= CLONE_NUMBERS:
        body["seq_id"] %= CLONE_NUMBERS
    return Sent(received.endpoint, received.method, received.path, received.query, headers, body)


def body_of(received: ReceivedRequest) -> Any:
    """JSON as it was sent, or the official message; None if nothing was sent."""
    if not received.body:
        return None
    encoding = received.headers.get("content-encoding")
    return as_data(received, bytes(decompress(received.body, encoding, DEFAULT_LIMITS)))


def as_data(received: ReceivedRequest, body: bytes) -> Any:
    """A body of such a request: JSON, or the official message."""
    if not body:
        return None
    if is_protobuf(received.headers.get("content-type")):
        return tinker_public_pb2.ForwardBackwardRequest.FromString(body)
    return json.loads(body)


def test_the_first_chunk_of_a_call_is_sent_last(days: tuple[Day, Day]) -> None:
    for day in days:
        chunks = day.services["default"].requests("forward_backward")
        assert [one.request.seq_id for one in chunks[:4]][0::3] == [1, 2]
        assert sorted(one.request.seq_id for one in chunks[1:3]) == [3, 4]


@pytest.mark.parametrize("case", CASES)
def test_a_request_is_decoded_completely(days: tuple[Day, Day], case: str) -> None:
    """What the service read of a request gives, encoded again, what was sent."""
    for received in days[0].services[case].requests():
        assert received.endpoint is not None and received.request is not None, received.path
        endpoint = ENDPOINTS[received.endpoint]
        made = to_http(endpoint, received.request)
        body = b"".join(made.parts)

        assert made.method == received.method
        assert unquote(made.path) == unquote(received.path)
        assert dict(made.query) == received.query
        assert as_data(received, body) == body_of(received), received.endpoint
        for name, value in endpoint.headers.items():
            assert received.headers[name.lower()] == value
        if body:
            assert received.headers["content-type"] == made.headers["Content-Type"]


def test_every_route_that_can_be_called_is_called(days: tuple[Day, Day]) -> None:
    called = {one.endpoint for each in days[0].services.values() for one in each.requests()}
    of_others = {name for name, e in ENDPOINTS.items() if e.until or e.is_extension}

    assert ENDPOINTS.keys() - called == NOT_CALLED.keys() | of_others


NOT_CALLED = {
    "healthz": "no public method calls it",
    "get_api_key": "command line",
    "delete_api_key": "command line",
    "telemetry": "off in tests",
    "session_heartbeat": "the first beat comes after ten seconds",
    "cancel_future": "only for a sample that is abandoned while it waits",
    "external_weights_upload_start": "not in the official release that is compared",
    "external_weights_upload_finish": "not in the official release that is compared",
    "search_checkpoints": "not in the official release that is compared",
}


def test_clones_use_separate_seq_id_ranges(days: tuple[Day, Day]) -> None:
    for case in DAYS:
        samples = days[0].services[case].requests("asample")
        ranges = [one.request.seq_id // CLONE_NUMBERS for one in samples]
        clones = [one for one in ranges if one]
        assert ranges[0] == 0 and len(set(clones)) == len(clones) == 2
    assert clones == [1, 2]  # by the service, which counts those that join


def test_a_refused_chunk_blocks_later_calls_of_the_official_sdk_only() -> None:
    """It sends the first chunk last, and not at all if another is refused; its turn never ends."""
    said = []
    for interpreter in ([], ["-m", "tinsmith.as_tinker"]):
        with running_service(fwdbwd_max_chunk_len=1) as service:
            program = str(SCENARIO.with_name("refused_chunk.py"))
            printed = said_by(*interpreter, program, service.base_url, service.api_key)
            said.append(json.loads(printed))

    official, ours = said
    assert official == {"bad": "BadRequestError", "after": "TimeoutError"}
    assert ours == {"bad": "BadRequestError", "after": "done"}


# What comes beside them


@pytest.mark.parametrize("case", CASES)
def test_results_are_polled_with_the_same_requests(days: tuple[Day, Day], case: str) -> None:
    official, ours = (first_polls(day.services[case]) for day in days)

    assert ours == official
    assert len(ours) > (40 if case in DAYS else 5)


def first_polls(service: ScriptedService) -> list[Any]:
    """How each result is asked for the first time."""
    polls = []
    for received in service.requests("retrieve_future"):
        headers = {
            name: value
            for name, value in received.headers.items()
            if name not in TRANSPORT | OUR_OWN | POLL_HEADERS
        }
        headers["x-api-key"] = headers["x-api-key"][:3]
        if headers["x-tinker-request-iteration"] != "0":
            assert "x-tinker-create-promise-roundtrip-time" not in headers
            continue
        assert float(headers.pop("x-tinker-create-promise-roundtrip-time")) >= 0
        body = body_of(received)
        assert body.pop("request_id")
        if headers["x-tinker-request-type"] in SMALL_RESULTS:
            body.pop("allow_metadata_only")
        polls.append([headers, body])
    return polls


def test_results_are_protobuf_where_the_sdk_asks_for_it(days: tuple[Day, Day]) -> None:
    polls = [p for case in DAYS for p in days[0].services[case].requests("retrieve_future")]
    accepted = {(one.headers["x-tinker-request-type"], one.headers["accept"]) for one in polls}

    binary = {kind for kind, accept in accepted if accept == "application/x-protobuf"}
    assert binary == {"ForwardBackward", "Forward", "Sample"}
    assert all(accept == "application/json" for kind, accept in accepted if kind not in binary)


def test_all_samples_are_acknowledged_in_the_session_poll(days: tuple[Day, Day]) -> None:
    asked, reported = zip(*(session_polls(day.services["every flag"]) for day in days), strict=True)

    assert asked[0] == asked[1]
    assert reported[0] & reported[1]


def session_polls(service: ScriptedService) -> tuple[set[Any], set[str]]:
    bodies = [body_of(received) for received in service.requests("retrieve_futures")]
    fields = {tuple(sorted(body)) for body in bodies}
    return fields, {request_id for body in bodies for request_id in body["retrieved_request_ids"]}


@pytest.mark.parametrize("case", DAYS)
def test_config_requests_are_the_same_and_fewer(days: tuple[Day, Day], case: str) -> None:
    for endpoint in ("client_config", "client_dynamic_config"):
        official, ours = (
            [comparable(one)._replace(headers={}) for one in day.services[case].requests(endpoint)]
            for day in days
        )
        assert ours[0] == official[0]
        assert 0 < len(ours) < len(official)


def test_every_listed_header_difference_is_real(days: tuple[Day, Day]) -> None:
    """A table that lists too much would hide a mistake."""
    official, ours = (day.services["default"].requests("asample")[0].headers for day in days)

    assert [name for name in OUR_OWN if ours.get(name) == official.get(name)] == []
