"""What `RetryConfig` says is what samples do."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import time
from collections.abc import Iterator
from typing import Any

import pytest

import tinsmith
from tinsmith.client.retry import RetryBudget
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.errors import (
    APIConnectionError,
    APIStatusError,
    InternalServerError,
    RateLimitError,
    RequestFailedError,
    ValidationError,
)
from tinsmith.testing import ScriptedService, running_service
from tinsmith.types import ModelInput, SamplingParams

WAIT_S = 60.0
PROMPT = ModelInput.from_ints([5, 6, 7])
PARAMS = SamplingParams(max_tokens=4, seed=1)
PLAIN: dict[str, Any] = {"long_poll_s": 0.5, "sample_cancel_enabled": True}
EXTENDED: dict[str, Any] = {**PLAIN, "tinsmith_batch_items": 32, "tinsmith_inline_bytes": 65536}


@pytest.fixture(params=[PLAIN, EXTENDED], ids=["plain", "extended"])
def service(request: pytest.FixtureRequest) -> Iterator[ScriptedService]:
    with running_service(**request.param) as service:
        yield service


@pytest.fixture
def client(service: ScriptedService) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=service.base_url, api_key=service.api_key) as client:
        yield client


def sampler_with(client: ServiceClient, **fields: Any) -> SamplingClient:
    config = tinsmith.RetryConfig(**fields)
    return client.create_sampling_client(base_model="Qwen/Qwen3-8B", retry_config=config)


def accepted(service: ScriptedService) -> int:
    """How many samples have been submitted."""
    batches = service.requests("asample_many")
    return len(service.requests("asample")) + sum(len(b.request.samples) for b in batches)


def test_max_connections_bounds_the_samples_in_flight(
    client: ServiceClient, service: ScriptedService
) -> None:
    sampler = sampler_with(client, max_connections=6)
    held = service.faults.hold_commands("asample")
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(20)]
    held.wait_held(6)

    held.release(2)
    held.wait_held(6)  # two came back, and so two more have left
    before = accepted(service)
    held.release()

    assert all(len(future.result(WAIT_S).sequences) == 1 for future in futures)
    assert before == 8
    assert held.most_held == 6


def test_a_cancelled_sample_frees_its_slot_for_the_next(
    client: ServiceClient, service: ScriptedService
) -> None:
    sampler = sampler_with(client, max_connections=1)
    held = service.faults.hold_commands("asample", times=1)
    first, second = (sampler.sample(PROMPT, 1, PARAMS) for _ in range(2))
    held.wait_held(1)

    first.cancel()

    assert len(second.result(WAIT_S).sequences) == 1


def test_samples_without_progress_fail_after_the_progress_timeout(
    client: ServiceClient, service: ScriptedService
) -> None:
    sampler = sampler_with(client, progress_timeout=2.0)
    service.faults.hold_commands("asample", times=3)
    stuck = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(3)]

    for future in stuck:
        with pytest.raises(APIConnectionError, match="no progress"):
            future.result(WAIT_S)

    assert len(service.wait_requests("cancel_future", 3)) == 3
    assert len(sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S).sequences) == 1


def test_a_result_counts_as_progress_for_all(
    client: ServiceClient, service: ScriptedService
) -> None:
    sampler = sampler_with(client, progress_timeout=4.0)
    held = service.faults.hold_commands("asample", times=1)
    slow = sampler.sample(PROMPT, 1, PARAMS)
    held.wait_held(1)

    ends_at = time.monotonic() + 5.0
    while time.monotonic() < ends_at:
        sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)
        time.sleep(0.05)
    was_done = slow.done()
    held.release()

    assert not was_done
    assert len(slow.result(WAIT_S).sequences) == 1


def test_without_a_config_samples_have_no_progress_timeout(
    client: ServiceClient, service: ScriptedService
) -> None:
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    held = service.faults.hold_commands("asample")

    future = sampler.sample(PROMPT, 1, PARAMS)
    held.wait_held(1)

    assert sampler._sampler._sender._watch is None  # no clock is running
    held.release()
    assert future.result(WAIT_S).sequences


@pytest.mark.parametrize("where", ["config", "service"])
def test_stuck_detection_can_be_switched_off(where: str) -> None:
    flags = {"sample_enable_stuck_detection": False} if where == "service" else {}
    with (
        running_service(**PLAIN, **flags) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = sampler_with(
            client, progress_timeout=0.2, enable_stuck_detection=where == "service"
        )
        held = service.faults.hold_commands("asample")
        future = sampler.sample(PROMPT, 1, PARAMS)
        held.wait_held(1)
        time.sleep(0.5)
        was_done = future.done()
        held.release()

        assert not was_done
        assert len(future.result(WAIT_S).sequences) == 1


def test_without_retry_logic_the_first_failure_is_raised(
    client: ServiceClient, service: ScriptedService
) -> None:
    sampler = sampler_with(client, enable_retry_logic=False)
    service.faults.add("asample", times=1, status=503)

    with pytest.raises(InternalServerError):
        sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)

    assert len(service.requests("asample")) == 1


def test_without_retry_logic_a_lost_result_is_not_resampled(
    client: ServiceClient, service: ScriptedService
) -> None:
    sampler = sampler_with(client, enable_retry_logic=False)
    service.faults.expire_results("asample", times=1)

    with pytest.raises(APIStatusError) as raised:
        sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)

    assert raised.value.status_code == 410


def test_without_retry_logic_pauses_are_still_respected(
    client: ServiceClient, service: ScriptedService
) -> None:
    sampler = sampler_with(client, enable_retry_logic=False)
    service.faults.add("asample", status=429, headers={"retry-after-ms": "50"})

    assert len(sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S).sequences) == 1


def test_the_config_sets_retry_delays_and_timeouts(
    client: ServiceClient, service: ScriptedService
) -> None:
    sampler = sampler_with(
        client,
        progress_timeout=2.0,
        retry_delay_base=0.3,
        retry_delay_max=0.3,
        jitter_factor=0.0,
        enable_stuck_detection=False,
    )
    service.faults.add("asample", times=None, status=503)

    with pytest.raises(InternalServerError):
        sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)

    arrivals = [received.arrived_at for received in service.requests("asample")]
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert 2 <= len(arrivals) <= 7
    assert min(gaps) >= 0.29
    assert sampler.retry_budget.total_s == 2.0
    assert sampler.retry_budget.delay_base_s == 0.3


def test_the_config_sets_how_long_polls_are_retried(
    client: ServiceClient, service: ScriptedService
) -> None:
    patient = {"progress_timeout": 0.6, "retry_delay_base": 0.1, "enable_stuck_detection": False}
    polls = ("retrieve_future", "retrieve_futures", "retrieve_results")
    service.faults.add(polls, times=None, status=503)
    for fields, most_polls in ((patient, 10), ({"enable_retry_logic": False}, 2)):
        service.forget_requests()

        with pytest.raises(InternalServerError):
            sampler_with(client, **fields).sample(PROMPT, 1, PARAMS).result(WAIT_S)

        assert sum(len(service.requests(name)) for name in polls) <= most_polls


def test_the_config_sets_how_long_streams_are_retried() -> None:
    with (
        running_service(**PLAIN, tinsmith_stream=True) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = sampler_with(client, progress_timeout=0.6, retry_delay_base=0.1)
        service.faults.add("asample_stream", times=None, status=503)

        with pytest.raises(InternalServerError) as caught:
            list(sampler.sample_stream(PROMPT, 1, PARAMS, timeout=WAIT_S))

        assert "attempt(s)" in caught.value.__notes__[-1]


def test_without_retry_logic_samples_that_are_all_rejected_fail(
    client: ServiceClient, service: ScriptedService
) -> None:
    sampler = sampler_with(client, enable_retry_logic=False, progress_timeout=0.5)
    service.faults.add("asample", times=None, status=429, headers={"retry-after-ms": "50"})

    with pytest.raises(RateLimitError):
        sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)

    assert len(service.requests()) > 1


def test_errors_named_in_the_config_are_resampled(
    client: ServiceClient, service: ScriptedService
) -> None:
    sampler = sampler_with(client, retryable_exceptions=(RequestFailedError,))
    service.faults.fail_command("asample", times=2)

    response = sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)

    assert response.sequences[0].sequence_id.endswith(":2:s0")
    service.faults.fail_command("asample", times=None, error="for good")
    with pytest.raises(RequestFailedError, match="for good"):
        sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)


@pytest.mark.parametrize("call", ["sample", "compute_logprobs"])
def test_a_service_may_forbid_resampling(call: str) -> None:
    with (
        running_service(**PLAIN, sample_no_retries=True) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        service.faults.expire_results("asample", times=1)
        asked = {"sample": (PROMPT, 1, PARAMS), "compute_logprobs": (PROMPT,)}[call]

        with pytest.raises(APIStatusError):
            getattr(sampler, call)(*asked).result(WAIT_S)


def test_without_a_config_the_service_bounds_the_samples_in_flight() -> None:
    with (
        running_service(**PLAIN, sample_max_concurrent_requests=3) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        held = service.faults.hold_commands("asample")
        futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(10)]
        held.wait_held(3)
        held.release()

        assert all(len(future.result(WAIT_S).sequences) == 1 for future in futures)
        assert held.most_held == 3


def test_two_clients_of_one_sampler_each_have_their_own_limit(
    client: ServiceClient, service: ScriptedService
) -> None:
    first = sampler_with(client, max_connections=2)
    second = SamplingClient.create(
        first.holder,
        sampling_session_id=first._sampling_session_id,
        retry_config=tinsmith.RetryConfig(max_connections=2),
    ).result(WAIT_S)
    held = service.faults.hold_commands("asample")

    futures = [one.sample(PROMPT, 1, PARAMS) for one in (first, second) for _ in range(4)]
    held.wait_held(4)
    held.release()

    assert all(len(future.result(WAIT_S).sequences) == 1 for future in futures)
    assert held.most_held == 4


def test_without_a_config_the_client_s_own_retry_budget_applies(service: ScriptedService) -> None:
    mine = RetryBudget(total_s=12.0)
    with ServiceClient(base_url=service.base_url, api_key=service.api_key, retry=mine) as client:
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")

        assert sampler.retry_budget == mine


def test_a_pickled_client_keeps_its_config_and_no_key(
    client: ServiceClient, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", service.api_key)
    sampler = sampler_with(client, progress_timeout=33.0)

    pickled = pickle.dumps(sampler)
    clone = pickle.loads(pickled)

    assert service.api_key.encode() not in pickled
    assert clone.retry_budget == sampler.retry_budget
    assert len(clone.sample(PROMPT, 1, PARAMS).result(WAIT_S).sequences) == 1


def test_every_way_to_create_a_sampler_accepts_a_config(client: ServiceClient) -> None:
    config = tinsmith.RetryConfig(progress_timeout=44.0)
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
    saved = training.save_weights_for_sampler("s1").result(WAIT_S)

    samplers = [
        training.save_weights_and_get_sampling_client(retry_config=config),
        training.create_sampling_client(saved.path, retry_config=config),
        client.create_sampling_client(model_path=saved.path, retry_config=config),
        SamplingClient.create(
            client.holder, base_model="Qwen/Qwen3-8B", retry_config=config
        ).result(WAIT_S),
    ]

    assert {sampler.retry_budget.total_s for sampler in samplers} == {44.0}


def test_a_config_is_a_value_that_can_be_changed_and_compared() -> None:
    config = tinsmith.RetryConfig()

    assert dataclasses.replace(config, max_connections=None) != config
    assert {config: 1}[tinsmith.RetryConfig()] == 1
    for wrong in ({"max_connections": 0}, {"progress_timeout": 0}, {"jitter_factor": 2.0}):
        with pytest.raises(ValidationError):
            tinsmith.RetryConfig(**wrong)


def test_with_a_config_a_service_that_was_reached_before_is_still_retried() -> None:
    """It is not given up as an address at which nothing ever ran."""
    with running_service(**PLAIN) as service:
        client = ServiceClient(
            base_url=service.base_url,
            api_key=service.api_key,
            retry=RetryBudget(first_contact_s=0.2, delay_base_s=0.1),
        )
        sampler = sampler_with(client)
        service.faults.add("asample", times=None, reset=True)

        future = sampler.sample(PROMPT, 1, PARAMS)

        with pytest.raises(TimeoutError):
            future.result(2.0)
        future.cancel()
        client.close().result(WAIT_S)
