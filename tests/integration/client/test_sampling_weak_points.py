"""Weak points of the official SDK's sampling, by their numbers: none of them is inherited."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import weakref
from typing import Any

import pytest

import tinsmith
from tinsmith.client.retry import RetryBudget
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.errors import APIError
from tinsmith.testing import ScriptedService, running_service
from tinsmith.types import ModelInput, SamplingParams

WAIT_S = 60.0
PROMPT = ModelInput.from_ints([5, 6, 7])
PARAMS = SamplingParams(max_tokens=4, seed=1)
EXTENDED: dict[str, Any] = {
    "tinsmith_batch_items": 32,
    "tinsmith_inline_bytes": 65536,
    "tinsmith_stream": True,
}


def client_of(service: ScriptedService, **options: Any) -> ServiceClient:
    return ServiceClient(base_url=service.base_url, api_key=service.api_key, **options)


FORKED = """
import os, sys, tinsmith
client = tinsmith.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
prompt, params = tinsmith.ModelInput.from_ints([1, 2]), tinsmith.SamplingParams(max_tokens=2)
under_way = sampler.sample(prompt, 1, params)
child = os.fork()
if child == 0:
    refused = 0
    for call in (
        lambda: sampler.sample(prompt, 1, params).result(20),
        lambda: sampler.sample_many([prompt], params, timeout=20),
        lambda: sampler.sample_stream(prompt, 1, params, timeout=20).result(),
    ):
        try:
            call()
        except RuntimeError as error:
            refused += "forked" in str(error)
    os._exit(refused)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
under_way.result(20)
sampler.sample(prompt, 1, params).result(20)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("flags", [{}, EXTENDED], ids=["plain", "extended"])
def test_a_sampler_used_before_a_fork_is_rejected_immediately_in_the_child(
    flags: dict[str, Any],
) -> None:
    with running_service(long_poll_s=0.5, **flags) as service:
        service.faults.delay_commands("asample", delay_s=0.3, times=1)
        finished = subprocess.run(
            [
                *(sys.executable, "-W", "ignore::DeprecationWarning"),
                *("-c", FORKED, service.base_url, service.api_key),
            ],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("flags", [{}, EXTENDED], ids=["plain", "extended"])
def test_a_service_that_does_not_hold_polls_open_is_not_flooded(flags: dict[str, Any]) -> None:
    with running_service(long_poll_s=0.0, **flags) as service, client_of(service) as client:
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        held = service.faults.hold_commands("asample")
        future = sampler.sample(PROMPT, 1, PARAMS)
        held.wait_held(1)
        time.sleep(1.0)
        polls = service.requests("retrieve_results") + service.requests("retrieve_future")
        held.release()

        assert len(future.result(WAIT_S).sequences) == 1
        assert len(polls) <= 10


@pytest.mark.parametrize("flags", [{}, EXTENDED], ids=["plain", "extended"])
@pytest.mark.parametrize("status", [500, 503])
def test_submissions_that_always_fail_raise_within_the_retry_budget(
    flags: dict[str, Any], status: int
) -> None:
    hasty = RetryBudget(total_s=0.5, delay_base_s=0.05)
    with (
        running_service(long_poll_s=0.5, **flags) as service,
        client_of(service, retry=hasty) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        service.faults.add(("asample", "asample_many"), times=None, status=status)
        futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(10)]

        for future in futures:
            with pytest.raises(APIError):
                future.result(WAIT_S)


def test_a_misspelt_setting_is_rejected_and_the_error_names_the_right_one() -> None:
    with pytest.raises(tinsmith.UnknownFieldError, match="max_tokens"):
        SamplingParams(max_token=5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "flags", [{"sample_use_retrieve_futures": True}, EXTENDED], ids=["plain", "extended"]
)
def test_results_of_timed_out_samples_are_dropped_and_acknowledged(
    flags: dict[str, Any],
) -> None:
    polls = {**flags, "long_poll_s": 0.5, "sample_cancel_enabled": False}
    with running_service(**polls) as service, client_of(service) as client:
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        held = service.faults.hold_commands("asample")
        late = [sampler.sample(PROMPT, 1, PARAMS, timeout=3.0) for _ in range(20)]
        held.wait_held(20)
        for future in late:
            with pytest.raises(tinsmith.APITimeoutError):
                future.result(WAIT_S)
        held.release()
        # Streamed ones are announced to the poll as well.
        sampler.sample_stream(PROMPT, 1, PARAMS).result()
        sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)

        told = sampler._sampler._feed
        assert told is not None
        deadline = time.monotonic() + WAIT_S
        while told._retrieved and time.monotonic() < deadline:
            time.sleep(0.01)
        reported = {
            request_id
            for poll in (
                *service.requests("retrieve_results"),
                *service.requests("retrieve_futures"),
            )
            for request_id in poll.request.retrieved_request_ids
        }
        assert len(reported) == 22
        assert len(told._unclaimed) == 0


def test_bodies_in_flight_never_exceed_their_byte_budget() -> None:
    small = ModelInput.from_ints(list(range(100, 200)))
    large = ModelInput.from_ints(list(range(1000, 3000)))
    with (
        running_service(long_poll_s=0.5, sample_dispatch_bytes_semaphore_size=4000) as service,
        client_of(service) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        held = service.faults.hold("asample")
        futures = [sampler.sample(prompt, 1, PARAMS) for prompt in [small] * 10 + [large] + [small]]
        most_bytes = 0
        seen: set[int] = set()
        while len(seen) < 12:
            held.wait_held(1)
            under_way = [r for r in service.requests("asample") if not r.is_ended]
            bodies = [r.body_bytes for r in under_way]
            assert sum(bodies) <= 4000 or len(bodies) == 1
            most_bytes = max(most_bytes, *bodies)
            seen.update(r.number for r in service.requests("asample"))
            held.release(1)
        held.release()

        assert all(len(future.result(WAIT_S).sequences) == 1 for future in futures)
        assert most_bytes > 4000  # the large one went, alone


def test_dropped_samplers_with_their_own_settings_keep_nothing_alive() -> None:
    with running_service(long_poll_s=0.2, **EXTENDED) as service:
        gone: list[weakref.ref[Any]] = []
        for number in range(20):
            client = client_of(service)
            config = tinsmith.RetryConfig(progress_timeout=100.0 + number)
            sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B", retry_config=config)
            sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)
            sampler.sample_stream(PROMPT, 1, PARAMS).result()
            gone += [weakref.ref(sampler), weakref.ref(sampler._lease)]
            del client, sampler
        gc.collect()

        assert [ref() for ref in gone if ref() is not None] == []
        deadline = time.monotonic() + 60
        while len(service.requests("finish_session")) < 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(service.requests("finish_session")) == 20


def test_a_long_sample_many_can_show_progress() -> None:
    told: list[int] = []
    with running_service(long_poll_s=0.5) as service, client_of(service) as client:
        sampler: SamplingClient = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        sampler.sample_many([PROMPT] * 5, PARAMS, progress=lambda done, _: told.append(done))

    assert told == [1, 2, 3, 4, 5]
