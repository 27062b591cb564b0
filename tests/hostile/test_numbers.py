"""Numbers that are sent to break the service that counts with them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.service.served import BASE_MODEL, Served, serving
from tests.integration.service.api.calls import a_sample, a_sampler, a_step, post
from tests.integration.service.api.running import RunningServer
from tinsmith.wire.endpoints import ENDPOINTS

HUGE = 2**63 - 1


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served")) as running:
        yield running


def a_real_model(http: httpx.Client) -> str:
    made = post(http, "create_session", {"tags": [], "sdk_version": "0.36.0"}).json()
    session = made["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL}
    assert post(http, "create_model", body).status_code == 200
    return f"{session}:train:0"


def finish(http: httpx.Client, model: str) -> httpx.Response:
    session = model.partition(":")[0]
    path = ENDPOINTS["finish_session"].path.replace("{session_id}", session)
    return http.post(path, json={"reason": {"type": "success"}, "detail": None})


@pytest.mark.parametrize("number", [HUGE, 2**63, 2**64, 10**30, -1, -(2**63)])
def test_a_seq_id_too_large_to_leave_room_for_the_session_end_is_rejected(
    number: int, served: Served
) -> None:
    """The end of a session is appended behind all commands of its models."""
    with httpx.Client(base_url=served.base_url, timeout=30) as http:
        model = a_real_model(http)

        reply = post(http, "optim_step", a_step(model, number))

        assert reply.status_code == 400, reply.text
        assert "seq_id" in reply.text
        assert post(http, "optim_step", a_step(model, 1)).status_code == 200
        assert finish(http, model).status_code == 204


def test_the_largest_accepted_seq_id_leaves_room_for_the_session_end(served: Served) -> None:
    with httpx.Client(base_url=served.base_url, timeout=30) as http:
        model = a_real_model(http)
        assert post(http, "optim_step", a_step(model, 2**62)).status_code == 200

        without = post(http, "optim_step", {"model_id": model, "adam_params": {}})

        assert without.status_code == 200, without.text
        assert finish(http, model).status_code == 204


def test_a_stream_of_too_many_sequences_is_rejected_before_allocating_memory() -> None:
    with RunningServer(with_keys=True) as server, server.http() as http:
        sampler = a_sampler(http)
        tracemalloc.start()
        try:
            body = a_sample(sampler, num_samples=10_000_000)
            reply = http.post(ENDPOINTS["asample_stream"].path, json=body)
            _, most_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert reply.status_code == 400
        assert "num_samples" in reply.text
        assert most_bytes < 20_000_000
