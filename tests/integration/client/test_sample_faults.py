"""Faults while samples are submitted, polled for and fetched over connections that are kept alive.

Each test draws a sample first, so that there is a kept connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tinsmith.client.retry import RetryBudget
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.client.session import EMPTY_400_BUDGET
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
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)
    service.forget_requests()
    return sampler


@pytest.mark.parametrize("fault", FAULTS, ids=[next(iter(fault)) for fault in FAULTS])
def test_a_failed_submission_is_retried_under_its_idempotency_key(
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
def test_a_failed_fetch_is_retried(
    fault: dict[str, Any], sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.add("retrieve_future", **fault)

    result = sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)

    assert len(result.sequences) == 1
    assert len(service.requests("retrieve_future")) == 2


def test_successful_samples_reset_the_empty_400_budget(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    for _ in range(2):
        service.faults.add("asample", times=EMPTY_400_BUDGET, empty_400=True)
        for _ in range(EMPTY_400_BUDGET):
            sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)


def test_a_429_pauses_and_the_sample_keeps_its_seq_id(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.add("asample", status=429, headers={"retry-after-ms": "50"})

    sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)

    first, second = service.requests("asample")
    assert first.request.seq_id == second.request.seq_id
    assert second.arrived_at - first.arrived_at >= 0.05


def test_a_rejection_is_raised_to_its_own_caller_only(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.add("asample", status=400, body={"detail": "too long"})

    refused = sampler.sample(PROMPT, 1, PARAMS)
    with pytest.raises(BadRequestError, match="too long"):
        refused.result(WAIT_S)

    assert len(sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S).sequences) == 1


@pytest.mark.parametrize("fault", FAULTS, ids=[next(iter(fault)) for fault in FAULTS])
def test_a_failed_poll_is_retried(
    fault: dict[str, Any], sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.add("retrieve_futures", **fault)

    for _ in range(3):  # one may still be told by the poll that was made before
        assert len(sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S).sequences) == 1

    service.wait_requests("retrieve_futures", 3)


def test_closing_ends_a_poll_and_its_waiters(
    sampler: SamplingClient, client: ServiceClient, service: ScriptedService
) -> None:
    service.faults.hold_commands("asample")
    future = sampler.sample(PROMPT, 1, PARAMS)
    service.wait_requests("asample", 1)

    client.close().result(WAIT_S)

    with pytest.raises(ClosedError):
        future.result(WAIT_S)
    assert not client.holder.session._tasks


@pytest.mark.parametrize("endpoint", ["asample", "retrieve_future"])
def test_closing_ends_an_unanswered_call(
    endpoint: str, sampler: SamplingClient, client: ServiceClient, service: ScriptedService
) -> None:
    service.faults.hold(endpoint)
    future = sampler.sample(PROMPT, 1, PARAMS)
    service.wait_requests(endpoint, 1)

    client.close().result(WAIT_S)

    with pytest.raises(ClosedError):
        future.result(WAIT_S)
    assert not client.holder.session._tasks


@pytest.mark.parametrize("endpoint", ["asample", "retrieve_future"])
def test_a_sample_cancelled_during_a_request_stays_cancelled(
    endpoint: str, sampler: SamplingClient, service: ScriptedService
) -> None:
    held = service.faults.hold(endpoint, times=1)
    future = sampler.sample(PROMPT, 1, PARAMS)
    service.wait_requests(endpoint, 1)

    assert future.cancel()
    held.release()

    assert len(sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S).sequences) == 1
    assert future.cancelled()
