"""Samples that are sent and fetched at once, without a task each, and what may go wrong on the way.

A call is begun at once where a connection is kept, so each test draws a sample first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tinsmith.client.calls import EMPTY_400_BUDGET
from tinsmith.client.retry import RetryBudget
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.errors import BadRequestError, ClosedError
from tinsmith.testing import ScriptedService, running_service
from tinsmith.types import ModelInput, SamplingParams

WAIT_S = 60.0
PROMPT = ModelInput.from_ints([5, 6, 7])
PARAMS = SamplingParams(max_tokens=4, seed=1)
FAULTS: list[dict[str, Any]] = [
    {"status": 500},
    {"empty_400": True},
    {"reset": True},
    {"lose_reply": True},
    {"half_reply": True},
]


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    with running_service(long_poll_s=0.5, sample_use_retrieve_futures=True) as service:
        yield service


@pytest.fixture
def client(service: ScriptedService) -> Iterator[ServiceClient]:
    retry = RetryBudget(delay_base_s=0.01, delay_max_s=0.1)
    with ServiceClient(base_url=service.base_url, api_key=service.api_key, retry=retry) as client:
        yield client


@pytest.fixture
def sampler(client: ServiceClient, service: ScriptedService) -> SamplingClient:
    sampler = client.create_sampling_client(base_model="m")
    sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)
    service.forget_requests()
    return sampler


@pytest.mark.parametrize("endpoint", ["asample", "retrieve_futures", "retrieve_future"])
def test_where_all_is_well_there_is_no_task(
    endpoint: str, sampler: SamplingClient, client: ServiceClient, service: ScriptedService
) -> None:
    session = client.holder.session
    held = service.faults.hold(endpoint)
    tasks_before = set(session._tasks)

    future = sampler.sample(PROMPT, 1, PARAMS)
    service.wait_requests(endpoint, 1)

    assert session.begun
    assert set(session._tasks) <= tasks_before
    held.release()
    assert len(future.result(WAIT_S).sequences) == 1
    assert len(session.begun) <= 1  # the poll that says what has arrived


@pytest.mark.parametrize("fault", FAULTS, ids=[next(iter(fault)) for fault in FAULTS])
def test_a_submission_that_failed_is_tried_again_under_its_key(
    fault: dict[str, Any], sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.add("asample", **fault)

    result = sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)

    sent = service.requests("asample")
    assert len(result.sequences) == 1
    assert len(sent) == 2
    assert len({request.headers["x-idempotency-key"] for request in sent}) == 1
    # A connection that was lost without a byte is no try: the server had most likely closed it.
    is_try = not {"lose_reply", "reset"} & fault.keys()
    counts = [request.headers["x-stainless-retry-count"] for request in sent]
    assert counts == (["0", "1"] if is_try else ["0", "0"])


@pytest.mark.parametrize("fault", FAULTS, ids=[next(iter(fault)) for fault in FAULTS])
def test_a_fetch_that_failed_is_made_again(
    fault: dict[str, Any], sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.add("retrieve_future", **fault)

    result = sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)

    assert len(result.sequences) == 1
    assert len(service.requests("retrieve_future")) == 2


def test_samples_that_succeed_make_room_for_empty_400s_again(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    for _ in range(2):
        service.faults.add("asample", times=EMPTY_400_BUDGET, empty_400=True)
        for _ in range(EMPTY_400_BUDGET):
            sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)


def test_a_429_pauses_and_leaves_the_sample_its_number(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.add("asample", status=429, headers={"retry-after-ms": "50"})

    sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)

    first, second = service.requests("asample")
    assert first.request.seq_id == second.request.seq_id
    assert second.arrived_at - first.arrived_at >= 0.05


def test_a_refusal_is_told_to_its_caller_alone(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.add("asample", status=400, body={"detail": "too long"})

    refused = sampler.sample(PROMPT, 1, PARAMS)
    with pytest.raises(BadRequestError, match="too long"):
        refused.result(WAIT_S)

    assert len(sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S).sequences) == 1


@pytest.mark.parametrize("fault", FAULTS, ids=[next(iter(fault)) for fault in FAULTS])
def test_a_poll_that_failed_is_made_again(
    fault: dict[str, Any], sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.add("retrieve_futures", **fault)

    for _ in range(3):  # one may still be told by the poll that was made before
        assert len(sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S).sequences) == 1

    service.wait_requests("retrieve_futures", 3)


def test_closing_ends_a_poll_and_whoever_waits_for_it(
    sampler: SamplingClient, client: ServiceClient, service: ScriptedService
) -> None:
    service.faults.hold_commands("asample")
    future = sampler.sample(PROMPT, 1, PARAMS)
    service.wait_requests("asample", 1)

    client.close().result(WAIT_S)

    with pytest.raises(ClosedError):
        future.result(WAIT_S)
    assert client.holder.session.begun == set()


@pytest.mark.parametrize("endpoint", ["asample", "retrieve_future"])
def test_closing_ends_a_call_that_is_not_answered(
    endpoint: str, sampler: SamplingClient, client: ServiceClient, service: ScriptedService
) -> None:
    service.faults.hold(endpoint)
    future = sampler.sample(PROMPT, 1, PARAMS)
    service.wait_requests(endpoint, 1)

    client.close().result(WAIT_S)

    with pytest.raises(ClosedError):
        future.result(WAIT_S)
    assert client.holder.session.begun == set()


@pytest.mark.parametrize("endpoint", ["asample", "retrieve_future"])
def test_a_sample_that_is_given_up_meanwhile_stays_given_up(
    endpoint: str, sampler: SamplingClient, service: ScriptedService
) -> None:
    held = service.faults.hold(endpoint, times=1)
    future = sampler.sample(PROMPT, 1, PARAMS)
    service.wait_requests(endpoint, 1)

    assert future.cancel()
    held.release()

    assert len(sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S).sequences) == 1
    assert future.cancelled()
