"""Prompts that travel as memory: the same samples, the same numbers, and text where it must be."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tinsmith.client.background import background
from tinsmith.client.retry import RetryBudget
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.errors import BadRequestError
from tinsmith.testing import ReceivedRequest, ScriptedService, running_service
from tinsmith.types import EncodedTextChunk, ImageChunk, ModelInput, SampleResponse, SamplingParams
from tinsmith.wire.content import is_packed

WAIT_S = 60.0
PARAMS = SamplingParams(max_tokens=4, seed=1)
QUICK = RetryBudget(delay_base_s=0.01, delay_max_s=0.05)
OFFERED: dict[str, Any] = {
    "long_poll_s": 5.0,
    "tinsmith_batch_items": 64,
    "tinsmith_inline_bytes": 65536,
    "tinsmith_packed_prompts": True,
    "tinsmith_stream": True,
}
SAMPLES = ("asample", "asample_many", "asample_stream")
IMAGE = ImageChunk(data=b"\x89PNG" + bytes(range(256)), format="png", expected_tokens=3)
LONG = EncodedTextChunk(list(range(900)))


def prompts(count: int, tokens: int = 500) -> list[ModelInput]:
    return [ModelInput.from_ints([*range(tokens - 1), 7 + number % 90]) for number in range(count)]


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    with running_service(**OFFERED) as service:
        yield service


@pytest.fixture
def sampler(service: ScriptedService) -> Iterator[SamplingClient]:
    with ServiceClient(base_url=service.base_url, api_key=service.api_key, retry=QUICK) as client:
        yield client.create_sampling_client(base_model="Qwen/Qwen3-8B")


@contextlib.contextmanager
def gathering() -> Iterator[None]:
    """Nothing leaves while the block lasts; what it makes leaves together."""
    over = threading.Event()
    background().call_soon(lambda: over.wait(WAIT_S))
    try:
        yield
    finally:
        over.set()


def sent(service: ScriptedService, *, packed: bool) -> list[ReceivedRequest]:
    """The requests with samples whose prompts were packed, or those whose prompts were text."""
    return [
        received
        for received in service.requests()
        if received.endpoint in SAMPLES
        and is_packed(received.headers.get("content-type")) is packed
    ]


def numbers_of(requests: list[ReceivedRequest]) -> list[int]:
    """The numbers of the samples in these requests, each as often as it came."""
    numbers: list[int] = []
    for received in requests:
        if received.endpoint == "asample_many":
            numbers += [fields["seq_id"] for fields in received.request.samples]
        else:
            numbers.append(received.request.seq_id)
    return numbers


def number_of(response: SampleResponse) -> int:
    """The number that a sample was sent under."""
    return int(response.sequences[0].sequence_id.split(":")[-2])


def drawn(service: ScriptedService, given: list[ModelInput]) -> list[list[int]]:
    """What a new sampler draws for these prompts, with log-probabilities of each token of them."""
    with ServiceClient(base_url=service.base_url, api_key=service.api_key) as client:
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        futures = [
            sampler.sample(prompt, 2, PARAMS, include_prompt_logprobs=True) for prompt in given
        ]
        responses = [future.result(WAIT_S) for future in futures]
    found: list[Any] = []
    for response in responses:
        found.append([sequence.tokens for sequence in response.sequences])
        found.append(response.prompt_logprobs)
    return found


def test_the_packed_prompts_flag_changes_the_encoding_and_nothing_else(
    service: ScriptedService,
) -> None:
    """Text, images between text, and prompts too short to be worth it."""
    given = [
        *prompts(20),
        *prompts(5, tokens=3),
        ModelInput([LONG, IMAGE, LONG, EncodedTextChunk([5])]),
        ModelInput([IMAGE, LONG]),
        ModelInput([IMAGE, EncodedTextChunk([5, 6])]),
    ]
    with running_service(**{**OFFERED, "tinsmith_packed_prompts": False}) as unoffered:
        expected = drawn(unoffered, given)
        assert sent(unoffered, packed=True) == []

    assert drawn(service, given) == expected
    assert sent(service, packed=True)


def test_a_service_without_the_packed_prompts_flag_gets_plain_requests() -> None:
    with (
        running_service(keep_bodies=True) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        sampler.sample(ModelInput([LONG]), 1, PARAMS).result(WAIT_S)

        [received] = service.requests("asample")
        assert received.headers["content-type"] == "application/json"
        assert received.body is not None
        assert b"897,898,899]" in received.body


def test_a_single_sample_is_packed_too(sampler: SamplingClient, service: ScriptedService) -> None:
    sampler.sample(prompts(1)[0], 1, PARAMS).result(WAIT_S)

    [received] = sent(service, packed=True)
    assert received.endpoint == "asample"
    assert received.body_bytes < 4 * 500 + 600


def test_a_stream_is_packed_too(sampler: SamplingClient, service: ScriptedService) -> None:
    prompt = prompts(1)[0]
    expected = sampler.sample(prompt, 1, PARAMS).result(WAIT_S)

    events = list(sampler.sample_stream(prompt, 1, PARAMS))

    assert events[-1].response is not None
    assert events[-1].response.sequences[0].tokens == expected.sequences[0].tokens
    assert [r.endpoint for r in sent(service, packed=True)] == ["asample", "asample_stream"]


@pytest.mark.parametrize(
    "fault", [{"lose_reply": True}, {"half_reply": True}, {"reset": True}, {"status": 503}]
)
@pytest.mark.parametrize("endpoint", ["asample", "asample_many"])
def test_after_a_lost_reply_the_same_seq_ids_are_resent_and_sampled_once(
    endpoint: str, fault: dict[str, Any], sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.add(endpoint, times=2, **fault)
    given = prompts(60)

    futures = [sampler.sample(prompt, 1, PARAMS) for prompt in given]

    responses = [future.result(WAIT_S) for future in futures]
    assert [number_of(response) for response in responses] == list(range(60))
    assert set(numbers_of(sent(service, packed=True))) == set(range(60))
    assert sent(service, packed=False) == []


def test_a_packed_sample_may_be_retried_as_json(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    """It arrived packed, the reply was a refusal, and as text it is known and drawn once."""
    service.faults.add("asample", times=1, after_work=True, status=400, body={"detail": "spoiled"})

    response = sampler.sample(prompts(1)[0], 1, PARAMS).result(WAIT_S)

    assert number_of(response) == 0
    assert numbers_of(sent(service, packed=True)) == [0]
    assert numbers_of(sent(service, packed=False)) == [0]
    assert [r.status for r in service.requests("asample")] == [400, 200]


@pytest.mark.parametrize("count", [1, 30])
def test_a_service_that_stops_accepting_packed_prompts_gets_json(
    count: int, service: ScriptedService, sampler: SamplingClient
) -> None:
    service.account.flags["tinsmith_packed_prompts"] = False  # another version took its place

    for _ in range(2):
        with gathering():
            futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(count)]
        for future in futures:
            assert len(future.result(WAIT_S).sequences) == 1

    assert [r.status for r in sent(service, packed=True)] == [415]
    assert sorted(numbers_of(sent(service, packed=False))) == list(range(2 * count))


def test_a_stream_falls_back_to_json_if_packed_prompts_are_rejected(
    service: ScriptedService, sampler: SamplingClient
) -> None:
    service.account.flags["tinsmith_packed_prompts"] = False

    events = list(sampler.sample_stream(prompts(1)[0], 1, PARAMS))

    assert events[-1].response is not None
    [refused], [_] = sent(service, packed=True), sent(service, packed=False)
    assert refused.status == 415


def test_an_invalid_packed_prompt_fails_alone_with_the_json_error_message(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    bad = ModelInput.from_ints([-1] * 200)
    service.faults.add(
        "asample",
        times=None,
        when=lambda received: received.request is not None and -1 in tokens_of(received),
        status=400,
        body={"detail": "no token has this number"},
    )
    with gathering():
        futures = [
            sampler.sample(prompt, 1, PARAMS) for prompt in [*prompts(10), bad, *prompts(10)]
        ]

    with pytest.raises(BadRequestError, match="no token has this number"):
        futures.pop(10).result(WAIT_S)
    assert len([future.result(WAIT_S) for future in futures]) == 20
    assert [r.status for r in sent(service, packed=True)] == [400]


def tokens_of(received: ReceivedRequest) -> list[int]:
    tokens: list[int] = received.request.prompt.to_ints()
    return tokens


def test_a_batch_is_filled_by_its_encoded_size() -> None:
    """Packed prompts take four bytes for a token, and so many more of them share a request."""
    tokens, most_bytes = 1000, 64 * 1024
    with (
        running_service(**{**OFFERED, "tinsmith_batch_bytes": most_bytes}) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        with gathering():
            futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(60, tokens)]
        for future in futures:
            future.result(WAIT_S)

        batches = service.requests("asample_many")
        assert {batch.status for batch in batches} == {200}
        assert max(batch.body_bytes for batch in batches) <= most_bytes
        *full, _ = sorted(batches, key=lambda batch: len(batch.request.samples), reverse=True)
        assert full
        for batch in full:  # one more would have been too much
            assert batch.body_bytes * (1 + 1 / len(batch.request.samples)) > most_bytes


def test_a_prompt_above_the_batch_limit_is_sent_alone_and_packed() -> None:
    with (
        running_service(**{**OFFERED, "tinsmith_batch_bytes": 2000}) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(10, tokens=1000)]
        for future in futures:
            future.result(WAIT_S)

        assert service.requests("asample_many") == []
        assert len(sent(service, packed=True)) == 10


def test_cancelled_samples_leave_the_queue_and_the_rest_continue(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    with gathering():
        futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(20)]
        for future in futures[::2]:
            future.cancel()

    for future in futures[1::2]:
        future.result(WAIT_S)
    assert len(numbers_of(sent(service, packed=True))) == 10


def test_long_prompts_are_encoded_as_they_are_sent_not_all_in_advance() -> None:
    """Between two of them the loop has a turn, so that bodies do not pile up in memory."""
    with (
        running_service(long_poll_s=1.0) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        loop = background().loop
        counts: list[int] = []
        is_over = threading.Event()

        def look() -> None:
            counts.append(len(sampler._sampler._sender._in_flight))
            if not is_over.is_set():
                loop.call_soon(look)

        with gathering():
            background().call_soon(look)
            futures = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts(30, tokens=15_000)]
        try:
            for future in futures:
                future.result(WAIT_S)
        finally:
            is_over.set()

        assert max(after - before for before, after in itertools.pairwise(counts)) <= 10
