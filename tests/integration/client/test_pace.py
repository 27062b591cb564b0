"""Whatever a server says of delays, it is neither flooded with second tries nor tried for ever."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tinsmith.client.retry import RetryBudget
from tinsmith.client.samples.stream import SampleStream
from tinsmith.client.service import ServiceClient
from tinsmith.errors import APIStatusError, ClosedError, RateLimitError
from tinsmith.testing import ReceivedRequest, ScriptedService, running_service
from tinsmith.types import AdamParams, ModelInput, SamplingParams

WAIT_S = 60.0
PROMPT = ModelInput.from_ints([5, 6, 7])
LONG_PROMPT = ModelInput.from_ints([5] * 50)
PARAMS = SamplingParams(max_tokens=4, seed=1)
HASTY = RetryBudget(total_s=2.0)
LONG = RetryBudget(total_s=120.0)
SOON_S = 60.0
EXTENDED: dict[str, Any] = {"tinsmith_batch_items": 32, "tinsmith_inline_bytes": 65536}
STREAMED: dict[str, Any] = {"tinsmith_stream": True}


def client_of(service: ScriptedService, retry: RetryBudget = HASTY) -> ServiceClient:
    return ServiceClient(base_url=service.base_url, api_key=service.api_key, retry=retry)


def a_step(client: ServiceClient) -> Callable[[], object]:
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
    return lambda: training.optim_step(AdamParams()).result(WAIT_S)


def a_sample(client: ServiceClient) -> Callable[[], object]:
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    return lambda: sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)


def some_samples(client: ServiceClient) -> Callable[[], object]:
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    return lambda: sampler.sample_many([PROMPT] * 4, PARAMS, timeout=WAIT_S)


def a_stream(client: ServiceClient) -> Callable[[], object]:
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    return lambda: list(sampler.sample_stream(PROMPT, 1, PARAMS, timeout=WAIT_S))


@pytest.mark.parametrize(
    "headers", [{"retry-after": "0"}, {"retry-after-ms": "1"}], ids=["none", "short"]
)
@pytest.mark.parametrize(
    ("prepare", "on", "status", "flags"),
    [
        (a_step, "optim_step", 503, {}),
        (a_step, "retrieve_future", 503, {}),
        (a_sample, "asample", 503, {}),
        (a_sample, "asample", 429, {}),
        (some_samples, "asample", 503, EXTENDED),
        (some_samples, "asample", 429, EXTENDED),
        (a_stream, "asample_stream", 503, STREAMED),
        (a_stream, "asample_stream", 429, STREAMED),
    ],
    ids=[
        *("submit", "poll", "sample-503", "sample-429", "batch-503", "batch-429"),
        *("stream-503", "stream-429"),
    ],
)
def test_a_server_that_asks_for_no_delay_is_not_flooded(
    prepare: Callable[[ServiceClient], Callable[[], object]],
    on: str,
    status: int,
    flags: dict[str, Any],
    headers: dict[str, str],
) -> None:
    with running_service(long_poll_s=0.5, **flags) as service, client_of(service) as client:
        ask = prepare(client)
        service.forget_requests()
        service.faults.add(on, times=None, status=status, headers=headers)

        with pytest.raises(APIStatusError):
            ask()

        # 5, 10, 20, 40, … ms: about nine fit into the budget for each call, and not thousands.
        requests = service.requests(on) + service.requests("asample_many")
        assert 2 <= len(requests) <= (12 if prepare is not some_samples else 48)


@pytest.mark.parametrize("flags", [{}, EXTENDED], ids=["plain", "extended"])
def test_a_first_429_pauses_for_as_long_as_the_server_says(flags: dict[str, Any]) -> None:
    ours = RetryBudget(delay_base_s=3600.0, delay_max_s=3600.0)  # no test ends that waits for it
    with running_service(long_poll_s=0.5, **flags) as service, client_of(service, ours) as client:
        ask = a_sample(client)
        service.faults.add("asample", times=3, status=429, headers={"retry-after-ms": "40"})
        began = time.monotonic()

        ask()

        assert time.monotonic() - began >= 0.12


# Refused for ever


@pytest.mark.parametrize("flags", [{}, EXTENDED], ids=["plain", "extended"])
def test_samples_that_are_all_rejected_fail_within_the_retry_budget(
    flags: dict[str, Any],
) -> None:
    with running_service(long_poll_s=0.5, **flags) as service, client_of(service) as client:
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        service.faults.add("asample", times=None, status=429, headers={"retry-after-ms": "100"})

        # Most of them never leave: after each pause a few are sent, and refused.
        futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(200)]

        for future in futures:
            with pytest.raises(RateLimitError) as caught:
                future.result(WAIT_S)
        assert "attempt(s)" in caught.value.__notes__[-1]
        assert "they are retried for 2 s" in caught.value.__notes__[-1]
        service.faults.clear()
        assert sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S).sequences


def test_a_stream_that_is_always_rejected_fails_within_the_retry_budget() -> None:
    with running_service(**STREAMED) as service, client_of(service) as client:
        ask = a_stream(client)
        headers = {"retry-after-ms": "100"}
        service.faults.add("asample_stream", times=None, status=429, headers=headers)

        with pytest.raises(RateLimitError) as caught:
            ask()

        assert "attempt(s)" in caught.value.__notes__[-1]


@pytest.mark.parametrize("flags", [{}, EXTENDED], ids=["plain", "extended"])
def test_no_sample_is_abandoned_while_the_server_accepts_some(flags: dict[str, Any]) -> None:
    count = itertools.count(1)

    def is_refused(_: ReceivedRequest) -> bool:
        return next(count) % 4 != 0

    with running_service(long_poll_s=0.5, **flags) as service, client_of(service) as client:
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        headers = {"retry-after-ms": "100"}
        service.faults.add("asample", when=is_refused, times=None, status=429, headers=headers)
        began = time.monotonic()

        futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(60)]

        assert all(future.result(WAIT_S).sequences for future in futures)
        assert time.monotonic() - began > 2 * HASTY.total_s  # the last have waited for longer


@pytest.mark.parametrize("shares_a_line", [True, False], ids=["its-line", "another-line"])
@pytest.mark.parametrize("flags", [{}, EXTENDED], ids=["plain", "extended"])
def test_a_sample_that_is_always_rejected_does_not_delay_others(
    flags: dict[str, Any], shares_a_line: bool
) -> None:
    """It is not the first to leave after every pause, and others need not wait for its end."""
    with running_service(long_poll_s=0.5, **flags) as service, client_of(service, LONG) as client:
        refused_one = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        sampler = (
            refused_one
            if shares_a_line
            else client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        )
        headers = {"retry-after-ms": "100"}
        service.faults.add("asample", when=_is_long, times=None, status=429, headers=headers)
        refused = refused_one.sample(LONG_PROMPT, 1, PARAMS)
        service.wait_requests("asample", 1)

        futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(30)]

        assert all(future.result(SOON_S).sequences for future in futures)
        assert not refused.done()


def test_a_stream_that_is_always_rejected_does_not_delay_samples() -> None:
    flags = {"long_poll_s": 0.5, **STREAMED}
    with running_service(**flags) as service, client_of(service, LONG) as client:
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        headers = {"retry-after-ms": "100"}
        service.faults.add("asample_stream", times=None, status=429, headers=headers)
        stream = sampler.sample_stream(PROMPT, 1, PARAMS)
        reader = threading.Thread(target=_read_refused, args=[stream])
        reader.start()
        service.wait_requests("asample_stream", 1)

        futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(30)]

        assert all(future.result(SOON_S).sequences for future in futures)
        client.close().result(WAIT_S)
        reader.join(WAIT_S)


def _is_long(received: ReceivedRequest) -> bool:
    return bool(received.request.prompt.length == LONG_PROMPT.length)


def _read_refused(stream: SampleStream) -> None:
    with pytest.raises(ClosedError):
        list(stream)


def test_failures_before_a_sample_was_created_do_not_use_up_its_budget() -> None:
    with running_service(long_poll_s=0.5) as service, client_of(service) as client:
        ask = a_sample(client)
        headers = {"retry-after-ms": "500"}
        service.faults.add("asample", times=None, status=429, headers=headers)
        with pytest.raises(RateLimitError):
            ask()
        service.faults.clear()
        service.faults.add("asample", times=1, status=429, headers=headers)

        ask()


# How long a server may ask for


@pytest.mark.parametrize("status", [429, 503])
def test_s31_the_longest_honoured_retry_after_is_configurable(status: int) -> None:
    impatient = RetryBudget(retry_after_max_s=0.2)
    with running_service(long_poll_s=0.5) as service, client_of(service, impatient) as client:
        ask = a_sample(client)
        service.faults.add("asample", times=2, status=status, headers={"retry-after": "50"})
        began = time.monotonic()

        ask()

        assert time.monotonic() - began >= 0.4
