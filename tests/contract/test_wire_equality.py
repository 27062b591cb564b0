"""What our client puts on the wire is what the official SDK puts there, but for what is listed.

`wire_scenario.py` is run by both, unchanged, each against services of its own. The requests that
arrived are compared one by one: route, query, headers that mean something, and body, as JSON or as
the official protobuf messages. Each entry of the tables below is a conscious difference and has
its line in docs/divergences.md.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tinker.proto import tinker_public_pb2

from tests.contract.official_process import said_by
from tinsmith.testing import ReceivedRequest, ScriptedService, running_service
from tinsmith.wire.content import decompress, is_protobuf
from tinsmith.wire.limits import DEFAULT_LIMITS

SCENARIO = Path(__file__).with_name("wire_scenario.py")
TIME_LIMIT_S = 150

CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "every flag": {
        "pjwt_auth_enabled": True,
        "proto_compress_fwdbwd": True,
        "parallel_fwdbwd_chunks": False,
        "custom_loss_server_side": True,
        "sample_use_retrieve_futures": True,
        "sample_join_sampling_session": True,
        "sample_cancel_enabled": True,
        "create_model_via_load_weights": True,
        "inline_bytes": 64,
    },
}

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


def spend(interpreter: list[str], stack: contextlib.ExitStack) -> Day:
    """Run the scenario against a service for each case."""
    services = {
        name: stack.enter_context(
            running_service(
                **{
                    "long_poll_s": 20.0,
                    "fwdbwd_max_chunk_len": 2,
                    "keep_bodies": True,
                    **flags,
                }
            )
        )
        for name, flags in CASES.items()
    }
    urls = [service.base_url for service in services.values()]
    said = said_by(
        *(*interpreter, str(SCENARIO), "tml-test", *urls),
        environment={"TINKER_API_KEY": "tml-test", "TINKER_TAGS": "a"},
        may_abort=not interpreter,  # else it is ours
    )
    return Day([json.loads(line) for line in said.splitlines()], services)


@pytest.fixture(scope="module")
def days() -> Iterator[tuple[Day, Day]]:
    with contextlib.ExitStack() as stack:
        yield spend([], stack), spend(["-m", "tinsmith.as_tinker"], stack)


def test_both_saw_the_same(days: tuple[Day, Day]) -> None:
    official, ours = days

    assert ours.said == official.said
    assert len(official.said) == len(CASES)


# Requests


@pytest.mark.parametrize("case", CASES)
def test_requests_are_the_same_one_by_one(days: tuple[Day, Day], case: str) -> None:
    official, ours = (in_order(day.services[case]) for day in days)

    assert [one.endpoint for one in ours] == [one.endpoint for one in official]
    for mine, theirs in zip(ours, official, strict=True):
        assert mine == theirs
    assert len(ours) > 70


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
    body = bytes(
        decompress(received.body, received.headers.get("content-encoding"), DEFAULT_LIMITS)
    )
    if is_protobuf(received.headers.get("content-type")):
        return tinker_public_pb2.ForwardBackwardRequest.FromString(body)
    return json.loads(body)


def test_the_first_chunk_of_a_call_comes_last(days: tuple[Day, Day]) -> None:
    for day in days:
        chunks = day.services["default"].requests("forward_backward")
        assert [one.request.seq_id for one in chunks[:4]][0::3] == [1, 2]
        assert sorted(one.request.seq_id for one in chunks[1:3]) == [3, 4]


# What comes beside them


@pytest.mark.parametrize("case", CASES)
def test_results_are_asked_for_alike(days: tuple[Day, Day], case: str) -> None:
    official, ours = (first_polls(day.services[case]) for day in days)

    assert ours == official
    assert len(ours) > 40


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


def test_all_samples_are_acknowledged_in_the_session_poll(days: tuple[Day, Day]) -> None:
    asked, reported = zip(*(session_polls(day.services["every flag"]) for day in days), strict=True)

    assert asked[0] == asked[1]
    assert reported[0] & reported[1]


def session_polls(service: ScriptedService) -> tuple[set[Any], set[str]]:
    bodies = [body_of(received) for received in service.requests("retrieve_futures")]
    fields = {tuple(sorted(body)) for body in bodies}
    return fields, {request_id for body in bodies for request_id in body["retrieved_request_ids"]}


@pytest.mark.parametrize("case", CASES)
def test_introductions_are_the_same_and_no_more_often(days: tuple[Day, Day], case: str) -> None:
    for endpoint in ("client_config", "client_dynamic_config"):
        official, ours = (
            [comparable(one)._replace(headers={}) for one in day.services[case].requests(endpoint)]
            for day in days
        )
        assert ours[0] == official[0]
        assert 0 < len(ours) < len(official)


def test_every_listed_difference_is_one(days: tuple[Day, Day]) -> None:
    """A table that lists too much would hide a mistake."""
    official, ours = (day.services["default"].requests("asample")[0].headers for day in days)

    assert [name for name in OUR_OWN if ours.get(name) == official.get(name)] == []
