"""One poll for all samples of a sampler, and what happens when it fails."""

from __future__ import annotations

import pytest

from tinsmith.client.retry import RetryBudget
from tinsmith.client.service import ServiceClient
from tinsmith.errors import RequestFailedError
from tinsmith.testing import running_service
from tinsmith.types import ModelInput, SamplingParams

WAIT_S = 60.0
PROMPT = ModelInput.from_ints([5, 6, 7])
PARAMS = SamplingParams(max_tokens=4, seed=1)


def test_samples_share_one_poll_and_fetch_their_results_once() -> None:
    with (
        running_service(long_poll_s=5.0, sample_use_retrieve_futures=True) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        held = service.faults.hold_commands("asample")
        futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(50)]
        service.wait_requests("asample", 50)

        assert service.requests("retrieve_future") == []
        held.release()
        for future in futures:
            assert len(future.result(WAIT_S).sequences) == 1

        assert len(service.requests("retrieve_future")) == 50
        assert service.in_flight("retrieve_futures") <= 1


def test_received_results_are_acknowledged() -> None:
    with (
        running_service(long_poll_s=0.3, sample_use_retrieve_futures=True) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")

        sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)
        polls = service.wait_requests("retrieve_futures", 2)

        reported = [ids for poll in polls if (ids := poll.request.retrieved_request_ids)]
        fetched = service.requests("retrieve_future")[0].request.request_id
        assert [fetched] in reported


def test_received_failures_are_acknowledged_too() -> None:
    """The service need not keep them any longer."""
    with (
        running_service(long_poll_s=0.3, sample_use_retrieve_futures=True) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        service.faults.fail_command("asample", category="user")

        with pytest.raises(RequestFailedError):
            sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)
        polls = service.wait_requests("retrieve_futures", 2)

        fetched = service.requests("retrieve_future")[0].request.request_id
        assert polls[-1].request.retrieved_request_ids == [fetched]


def test_a_failed_sample_raises_its_own_error() -> None:
    with (
        running_service(long_poll_s=0.3, sample_use_retrieve_futures=True) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        service.faults.fail_command("asample", category="user", error="no such token")

        with pytest.raises(RequestFailedError, match="no such token"):
            sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)
        assert len(sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S).sequences) == 1


@pytest.mark.parametrize("status", [404, 422])
def test_a_service_that_stops_offering_session_polls_is_polled_per_sample(status: int) -> None:
    with (
        running_service(long_poll_s=0.3, sample_use_retrieve_futures=True) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        service.faults.add("retrieve_futures", times=None, status=status)

        for _ in range(3):
            assert len(sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S).sequences) == 1

        assert len(service.requests("retrieve_futures")) == 1


def test_polls_that_fail_temporarily_are_retried_with_the_same_cursor() -> None:
    retry = RetryBudget(delay_base_s=0.01)
    with (
        running_service(long_poll_s=0.3, sample_use_retrieve_futures=True) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key, retry=retry) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        service.faults.add("retrieve_futures", times=2, status=503)

        assert len(sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S).sequences) == 1

        cursors = [poll.request.prev_cursor for poll in service.requests("retrieve_futures")[:3]]
        assert cursors == [0, 0, 0]


def test_acknowledgements_of_a_failed_poll_are_sent_again() -> None:
    with (
        running_service(long_poll_s=0.3, sample_use_retrieve_futures=True) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        service.faults.add(
            "retrieve_futures",
            when=lambda poll: bool(poll.request.retrieved_request_ids),
            status=503,
        )

        sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)
        polls = service.wait_requests("retrieve_futures", 3)

        fetched = service.requests("retrieve_future")[0].request.request_id
        assert [poll.request.retrieved_request_ids for poll in polls[-2:]] == [[fetched]] * 2
