"""Many samples in one request and many results in one answer: fewer exchanges, nothing lost."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tinsmith.client.background import background
from tinsmith.client.poller import Poll
from tinsmith.client.retry import RetryBudget
from tinsmith.client.samples import result_feed
from tinsmith.client.samples.sampler import Sampler
from tinsmith.client.samples.sender import error_of
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.errors import APITimeoutError, BadRequestError, ClosedError, RequestFailedError
from tinsmith.testing import ReceivedRequest, ScriptedService, running_service
from tinsmith.types import ModelInput, SampleResponse, SamplingParams
from tinsmith.types.extensions import SampleManyItem

WAIT_S = 60.0
PROMPT = ModelInput.from_ints([5, 6, 7])
PARAMS = SamplingParams(max_tokens=4, seed=1)
QUICK = RetryBudget(delay_base_s=0.01, delay_max_s=0.05)
OFFERED: dict[str, Any] = {
    "long_poll_s": 5.0,
    "tinsmith_batch_items": 64,
    "tinsmith_inline_bytes": 65536,
    "sample_cancel_enabled": True,
}


def prompts(count: int) -> list[ModelInput]:
    return [ModelInput.from_ints([5, 6, 7 + number]) for number in range(count)]


@pytest.fixture
def offered() -> dict[str, Any]:
    """What the service offers beside `OFFERED`."""
    return {}


@pytest.fixture
def service(offered: dict[str, Any]) -> Iterator[ScriptedService]:
    with running_service(**{**OFFERED, **offered}) as service:
        yield service


@pytest.fixture
def client(service: ScriptedService) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=service.base_url, api_key=service.api_key, retry=QUICK) as client:
        yield client


@pytest.fixture
def sampler(client: ServiceClient) -> SamplingClient:
    return client.create_sampling_client(base_model="Qwen/Qwen3-8B")


def sent_numbers(service: ScriptedService) -> list[int]:
    """The numbers of the samples in the order in which they came, each as often as it came."""
    return [number for number, _ in _sent(service)]


def arrivals(service: ScriptedService) -> dict[int, list[float]]:
    """By the number of a sample, when it came."""
    found: dict[int, list[float]] = {}
    for number, arrived_at in _sent(service):
        found.setdefault(number, []).append(arrived_at)
    return found


def _sent(service: ScriptedService) -> Iterator[tuple[int, float]]:
    for received in service.requests():
        if received.endpoint == "asample":
            yield received.request.seq_id, received.arrived_at
        elif received.endpoint == "asample_many":
            for fields in received.request.samples:
                yield fields["seq_id"], received.arrived_at


def number_of(response: SampleResponse) -> int:
    """The number that a sample was sent under."""
    return int(response.sequences[0].sequence_id.split(":")[-2])


def has_seq_id(*numbers: int) -> Any:
    """Holds for samples with one of these numbers."""

    def holds(received: ReceivedRequest) -> bool:
        return received.request.seq_id in numbers

    return holds


def test_a_burst_of_samples_uses_few_submissions_and_few_polls(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    held = service.faults.hold_commands("asample")
    all_made = threading.Event()
    background().call_soon(lambda: all_made.wait(WAIT_S))  # none leaves before all are made
    futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(400)]
    all_made.set()
    deadline = time.monotonic() + 60
    while len(sent_numbers(service)) < 400 and time.monotonic() < deadline:
        time.sleep(0.005)
    held.release()

    responses = [future.result(WAIT_S) for future in futures]

    assert [number_of(response) for response in responses] == list(range(400))
    # Requests on several connections may overtake each other.
    assert sorted(sent_numbers(service)) == list(range(400))
    assert service.requests("retrieve_future") == []
    assert len(service.requests("asample_many")) + len(service.requests("asample")) < 200
    assert len(service.requests("retrieve_results")) < 200


def test_results_equal_those_of_a_service_without_batching(sampler: SamplingClient) -> None:
    with (
        running_service(long_poll_s=1.0) as plain_service,
        ServiceClient(
            base_url=plain_service.base_url, api_key=plain_service.api_key
        ) as plain_client,
    ):
        plain = plain_client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        options: dict[str, Any] = {"include_prompt_logprobs": True, "topk_sample_logprobs": 2}
        for prompt in prompts(5):
            expected = plain.sample(prompt, 3, PARAMS, **options).result(WAIT_S)
            got = sampler.sample(prompt, 3, PARAMS, **options).result(WAIT_S)
            assert [s.tokens for s in got.sequences] == [s.tokens for s in expected.sequences]
            assert [s.logprobs for s in got.sequences] == [s.logprobs for s in expected.sequences]
            assert got.prompt_logprobs == expected.prompt_logprobs


def test_a_service_without_the_flags_gets_plain_requests() -> None:
    with (
        running_service(long_poll_s=0.5) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(50)]
        for future in futures:
            future.result(WAIT_S)

        routes = {received.path for received in service.requests()}
        assert not any("/tinsmith/" in route for route in routes)
        assert len(service.requests("asample")) == 50


@pytest.mark.parametrize(
    "flags",
    [{"tinsmith_batch_items": 16}, {"tinsmith_inline_bytes": 65536}],
    ids=["batches alone", "results alone"],
)
def test_each_extension_works_without_the_other(flags: dict[str, Any]) -> None:
    with (
        running_service(long_poll_s=1.0, **flags) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(100)]

        assert [number_of(future.result(WAIT_S)) for future in futures] == list(range(100))
        assert bool(service.requests("asample_many")) is ("tinsmith_batch_items" in flags)
        assert bool(service.requests("retrieve_results")) is ("tinsmith_inline_bytes" in flags)


@pytest.mark.parametrize(
    "fault", [{"lose_reply": True}, {"half_reply": True}, {"reset": True}, {"status": 503}]
)
@pytest.mark.parametrize("endpoint", ["asample_many", "retrieve_results", "fetch_results"])
def test_lost_and_broken_replies_lose_and_repeat_no_sample(
    endpoint: str, fault: dict[str, Any], sampler: SamplingClient, service: ScriptedService
) -> None:
    if endpoint == "fetch_results":
        service.account.flags["tinsmith_inline_bytes"] = 1  # nothing is small enough
    service.faults.add(endpoint, times=2, **fault)

    futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(100)]

    responses = [future.result(WAIT_S) for future in futures]
    assert [number_of(response) for response in responses] == list(range(100))
    assert set(sent_numbers(service)) == set(range(100))


def test_s3_items_rejected_with_429_wait_and_keep_their_seq_ids(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    refused = range(3, 60, 7)
    service.faults.add(
        "asample",
        when=has_seq_id(*refused),
        times=len(refused),
        status=429,
        headers={"retry-after-ms": "300"},
    )
    held = service.faults.hold("asample_many", times=1)  # so that the rest is gathered
    first = sampler.sample(PROMPT, 1, PARAMS)
    futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(63)]
    held.release()

    responses = [future.result(WAIT_S) for future in (first, *futures)]

    assert [number_of(response) for response in responses] == list(range(64))
    counts = {number: sent_numbers(service).count(number) for number in range(64)}
    assert all(counts[number] == 2 for number in refused)
    assert sum(counts.values()) == 64 + len(refused)


def test_s3_a_429_of_one_item_pauses_all_samples_of_the_key(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.add("asample", when=has_seq_id(0), status=429, headers={"retry-after-ms": "800"})
    futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(2)]
    deadline = time.monotonic() + 60
    while sampler.limiter.pause().state == "open" and time.monotonic() < deadline:
        time.sleep(0.002)

    futures += [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(20)]
    for future in futures:
        future.result(WAIT_S)

    came = arrivals(service)
    refused_at, again_at = came[0]
    # The second of all may have left before the answer to the first.
    held = [again_at, *(at for number in range(2, 22) for at in came[number])]
    assert min(held) >= refused_at + 0.79  # a timer may be early by its clock's resolution


def test_s3_the_pause_after_an_item_s_429_is_capped_like_that_of_a_request() -> None:
    refused = error_of(SampleManyItem(status=429, retry_after_ms=1e15))

    assert RetryBudget().wait_s(0, refused.retry_after_s) == 60


def test_one_bad_sample_does_not_fail_others_in_its_batch(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.add("asample", when=has_seq_id(5), status=400, body={"detail": "too long"})
    futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(20)]

    with pytest.raises(BadRequestError, match="too long"):
        futures[5].result(WAIT_S)

    others = [future for index, future in enumerate(futures) if index != 5]
    assert len([future.result(WAIT_S) for future in others]) == 19
    assert sent_numbers(service).count(5) == 1


def test_items_with_transient_failures_are_retried(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.add("asample", when=has_seq_id(2, 7), times=4, status=503)
    futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(20)]

    responses = [future.result(WAIT_S) for future in futures]

    assert [number_of(response) for response in responses] == list(range(20))
    assert sent_numbers(service).count(2) + sent_numbers(service).count(7) == 6


def test_failed_samples_raise_their_own_errors(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.fail_command(
        "asample", when=has_seq_id(1), category="user", error="no such token"
    )
    futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(4)]

    with pytest.raises(RequestFailedError, match="no such token"):
        futures[1].result(WAIT_S)
    assert [number_of(futures[index].result(WAIT_S)) for index in (0, 2, 3)] == [0, 2, 3]
    assert service.requests("retrieve_future") == []


def test_s6_results_that_the_server_lost_are_resampled(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.expire_results("asample", times=3)
    futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(10)]

    responses = [future.result(WAIT_S) for future in futures]

    assert len({number_of(response) for response in responses}) == 10
    assert sorted(sent_numbers(service)) == list(range(13))


def test_results_that_arrive_out_of_order_reach_their_own_samples(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.reorder_completions("asample", count=30, apart_s=0.001)
    futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(30)]

    assert [number_of(future.result(WAIT_S)) for future in futures] == list(range(30))


@pytest.mark.parametrize("offered", [{"tinsmith_inline_bytes": 1}])
def test_results_that_are_too_large_for_the_poll_are_fetched_together(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    held = service.faults.hold_commands("asample")
    futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(50)]
    deadline = time.monotonic() + 60
    while len(sent_numbers(service)) < 50 and time.monotonic() < deadline:
        time.sleep(0.005)
    held.release()

    assert [number_of(future.result(WAIT_S)) for future in futures] == list(range(50))
    fetches = len(service.requests("fetch_results")) + len(service.requests("retrieve_future"))
    assert 0 < fetches < 50


def test_received_results_are_acknowledged_once_and_then_dropped(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(10)]
    for future in futures:
        future.result(WAIT_S)
    deadline = time.monotonic() + 60
    while len(reported(service)) < 10 and time.monotonic() < deadline:
        time.sleep(0.005)

    assert len(reported(service)) == len(set(reported(service))) == 10


def test_sequential_samples_take_two_requests_each(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    """Reports ride on the poll of the next sample, and nothing is slept over."""
    for _ in range(20):
        sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)

    assert len(service.requests("asample")) == 20
    assert len(service.requests("retrieve_results")) == 20


def reported(service: ScriptedService) -> list[str]:
    polls = service.requests("retrieve_results")
    return [request_id for poll in polls for request_id in poll.request.retrieved_request_ids]


@pytest.mark.parametrize("endpoint", ["asample_many", "retrieve_results"])
@pytest.mark.parametrize("status", [404, 405])
def test_a_service_that_stops_offering_batching_gets_plain_requests(
    endpoint: str, status: int, sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.add(endpoint, times=None, status=status)

    for _ in range(2):
        futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(20)]
        for future in futures:
            assert len(future.result(WAIT_S).sequences) == 1

    assert len(service.requests(endpoint)) <= 2  # a second may have been under way
    assert set(sent_numbers(service)) == set(range(40))


def test_a_batch_that_is_rejected_as_a_whole_is_sent_one_by_one(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.add("asample_many", times=1, status=413)
    futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(30)]

    assert [number_of(future.result(WAIT_S)) for future in futures] == list(range(30))


def test_a_batch_respects_the_limits_of_the_service() -> None:
    limits = {"tinsmith_batch_items": 5, "tinsmith_batch_bytes": 2000}
    with (
        running_service(**{**OFFERED, **limits}) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        long_prompt = ModelInput.from_ints(list(range(1000)))
        futures = [sampler.sample(prompt, 1, PARAMS) for prompt in [*prompts(40), long_prompt]]
        for future in futures:
            future.result(WAIT_S)

        batches = service.requests("asample_many")
        assert batches
        assert max(len(batch.request.samples) for batch in batches) <= 5
        assert max(batch.body_bytes for batch in batches) <= 2000
        assert {batch.status for batch in batches} == {200}
        assert max(r.body_bytes for r in service.requests("asample")) > 2000


def test_cancelled_samples_are_cancelled_on_the_server_and_the_rest_complete(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    held = service.faults.hold_commands("asample")
    futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(200)]
    deadline = time.monotonic() + 60
    while len(sent_numbers(service)) < 200 and time.monotonic() < deadline:
        time.sleep(0.005)
    service.wait_requests("retrieve_results", 1)

    for future in futures[::2]:
        assert future.cancel()
    cancels = service.wait_requests("cancel_future", 100)
    held.release()

    assert [number_of(future.result(WAIT_S)) for future in futures[1::2]] == list(range(1, 200, 2))
    assert len({received.request.request_id for received in cancels}) == 100


def test_a_sample_that_is_cancelled_while_it_is_submitted_is_cancelled_on_the_server(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.hold_commands("asample")
    held = service.faults.hold("asample", times=1)
    future = sampler.sample(PROMPT, 1, PARAMS)
    held.wait_held(1)

    future.cancel()
    held.release()

    assert len(service.wait_requests("cancel_future", 1)) == 1


def test_cancellations_use_few_connections() -> None:
    with (
        running_service(**OFFERED, sample_cancel_max_batch_size=5) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        service.faults.hold_commands("asample")
        held = service.faults.hold("cancel_future")
        futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(50)]
        service.wait_requests("retrieve_results", 1)
        deadline = time.monotonic() + 60
        while len(sent_numbers(service)) < 50 and time.monotonic() < deadline:
            time.sleep(0.005)
        for future in futures:
            future.cancel()
        held.wait_held(1)
        held.release()

        service.wait_requests("cancel_future", 50)
        assert held.most_held <= 5


def test_a_timeout_ends_one_sample_and_no_other(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    held = service.faults.hold_commands("asample")
    late = sampler.sample(PROMPT, 1, PARAMS, timeout=2.0)
    patient = sampler.sample(PROMPT, 1, PARAMS)

    with pytest.raises(APITimeoutError, match=r"not done within 2 s"):
        late.result(WAIT_S)

    assert len(service.wait_requests("cancel_future", 1)) == 1
    held.release()
    assert len(patient.result(WAIT_S).sequences) == 1


def test_cancelling_a_coroutine_cancels_its_sample(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.hold_commands("asample")

    async def scenario() -> None:
        task = asyncio.create_task(sampler.sample_async(PROMPT, 1, PARAMS))
        await service.wait_requests_async("retrieve_results", 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())

    assert len(service.wait_requests("cancel_future", 1)) == 1


def test_s18_samples_in_flight_fail_when_the_client_is_closed(
    client: ServiceClient, sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.hold_commands("asample")
    submitted = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(50)]
    service.wait_requests("retrieve_results", 1)
    sampler.limiter.rate_limited(60.0)
    waiting = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(50)]

    client.close().result(WAIT_S)

    for future in (*submitted, *waiting):
        with pytest.raises(ClosedError):
            future.result(WAIT_S)
    with pytest.raises(ClosedError):
        sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)


def test_s8_a_paused_queue_reported_by_the_poll_holds_back_new_samples(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    paused = service.faults.pause("asample", reason="no room", retry_after_ms=60_000, times=1)
    first = sampler.sample(PROMPT, 1, PARAMS)
    deadline = time.monotonic() + 60
    while sampler.limiter.pause().state == "open" and time.monotonic() < deadline:
        time.sleep(0.005)

    second = sampler.sample(PROMPT, 1, PARAMS)
    assert sampler.limiter.pause().reason == "no room"
    assert sent_numbers(service) == [0]
    paused.release()

    assert number_of(first.result(WAIT_S)) == 0
    assert number_of(second.result(WAIT_S)) == 1


def test_s8_the_pause_of_a_queue_is_capped(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    """Who gave up all samples hears of no end of the pause."""
    service.faults.pause("asample", retry_after_ms=1e15, times=1)
    sample = sampler.sample(PROMPT, 1, PARAMS)
    deadline = time.monotonic() + 60
    while sampler.limiter.pause().state == "open" and time.monotonic() < deadline:
        time.sleep(0.005)

    pause = sampler.limiter.pause()
    sample.cancel()

    assert pause.state == "queue_paused"
    assert pause.until - time.monotonic() <= 60


@pytest.mark.parametrize("broken", [(Sampler, "_await_result"), (Poll, "_read")])
def test_an_internal_error_fails_the_sample_instead_of_leaving_it_pending(
    monkeypatch: pytest.MonkeyPatch, broken: tuple[type, str]
) -> None:
    """Such as no memory for a reply."""

    def run_out(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(*broken, run_out)
    with (
        running_service(sample_use_retrieve_futures=True) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        samples = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(3)]

        for sample in samples:
            with pytest.raises(MemoryError):
                sample.result(timeout=WAIT_S)


def test_results_of_a_clone_s_samples_reach_the_clone(sampler: SamplingClient) -> None:
    clone = SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key="tml-test")
    futures = [
        (one, one.sample(prompt, 1, PARAMS)) for prompt in prompts(20) for one in (sampler, clone)
    ]

    for one, future in futures:
        is_clone = number_of(future.result(WAIT_S)) >= 10**9
        assert is_clone is (one is clone)


def test_s18_a_closed_client_sends_no_more_reports(
    sampler: SamplingClient, client: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_feed, "REPORT_AFTER_S", 60.0)
    sampler.sample(prompts(1)[0], 1, PARAMS).result(WAIT_S)
    feed = sampler._sampler._feed
    assert feed is not None

    client.close().result(WAIT_S)
    background().run(asyncio.sleep(0.05))

    assert not feed._is_polling


def test_samples_of_a_dropped_sampling_client_complete(
    client: ServiceClient, service: ScriptedService
) -> None:
    del client
    with ServiceClient(base_url=service.base_url, api_key=service.api_key) as other:
        futures = [
            other.create_sampling_client(base_model="Qwen/Qwen3-8B").sample(prompt, 1, PARAMS)
            for prompt in prompts(5)
        ]
        assert len([future.result(WAIT_S) for future in futures]) == 5


@pytest.mark.usefixtures("eager_switching")
def test_s44_every_sample_settles_despite_many_threads_cancellations_and_faults(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.add("asample_many", times=3, lose_reply=True)
    service.faults.add("retrieve_results", times=3, half_reply=True)
    service.faults.add(
        "asample",
        when=lambda received: received.request.seq_id % 50 == 7,
        times=8,
        status=429,
        headers={"retry-after-ms": "20"},
    )

    def work(thread: int) -> int:
        futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(50)]
        for future in futures[thread % 3 :: 10]:
            future.cancel()
        settled = 0
        for future in futures:
            try:
                settled += len(future.result(WAIT_S).sequences)
            except concurrent.futures.CancelledError:
                settled += 1
        return settled

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(work, range(8)))

    assert counts == [50] * 8
