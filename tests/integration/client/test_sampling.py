"""Sampling against a service: pace, refusals, lost results, and thousands at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time

import numpy
import pytest

from tinsmith.client.samples import sample_call, sender
from tinsmith.client.samples.request_texts import EarlyText, early_text
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.errors import APIStatusError, BadRequestError, NotFoundError, ValidationError
from tinsmith.testing import ScriptedService, running_service
from tinsmith.types import (
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    ModelInputChunk,
    SamplingParams,
    TensorData,
)

WAIT_S = 60.0
PROMPT = ModelInput.from_ints([5, 6, 7])
PARAMS = SamplingParams(max_tokens=4, seed=1)


@pytest.fixture
def sampler(client: ServiceClient) -> SamplingClient:
    return client.create_sampling_client(base_model="Qwen/Qwen3-8B")


def test_each_sampled_sequence_has_tokens_logprobs_and_a_unique_id(sampler: SamplingClient) -> None:
    response = sampler.sample(PROMPT, 3, PARAMS).result(WAIT_S)

    assert len(response.sequences) == 3
    assert len({sequence.sequence_id for sequence in response.sequences}) == 3
    for sequence in response.sequences:
        assert sequence.logprobs is not None
        assert len(sequence.tokens) == len(sequence.logprobs)


def test_the_async_variant_returns_the_result_itself(sampler: SamplingClient) -> None:
    response = asyncio.run(sampler.sample_async(PROMPT, 1, PARAMS))

    assert len(response.sequences) == 1


def test_prompt_logprobs_are_none_for_the_first_token(sampler: SamplingClient) -> None:
    logprobs = sampler.compute_logprobs(PROMPT).result(WAIT_S)

    assert logprobs[0] is None
    assert all(isinstance(value, float) for value in logprobs[1:])
    assert asyncio.run(sampler.compute_logprobs_async(PROMPT)) == logprobs


@pytest.mark.parametrize(
    "picture",
    [
        ImageAssetPointerChunk(format="png", location="https://h/a.png"),
        ImageChunk(data=b"\x89PNG", format="png"),
    ],
)
def test_an_image_whose_token_count_only_the_service_knows_is_sent(
    sampler: SamplingClient, service: ScriptedService, picture: ModelInputChunk
) -> None:
    prompt = PROMPT.append(picture)

    # It is the service that says no: the fake engine fetches and measures no pictures.
    with pytest.raises(APIStatusError, match=r"ImageChunk is unknown|does not fetch"):
        sampler.sample(prompt, 1, PARAMS).result(WAIT_S)

    assert service.requests("asample")[0].request.prompt == prompt


def test_every_option_reaches_the_wire(sampler: SamplingClient, service: ScriptedService) -> None:
    target = TensorData([[1, 2], [3, -1]], "int64")

    response = sampler.sample(
        PROMPT,
        1,
        PARAMS,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        target_prompt_logprobs=target,
        prompt_alt_tokens_k=2,
        prompt_logprobs_last_n=1,
    ).result(WAIT_S)

    sent = service.requests("asample")[0].request
    assert sent.target_prompt_logprobs == target
    assert (sent.topk_prompt_logprobs, sent.prompt_alt_tokens_k) == (2, 2)
    assert response.prompt_logprobs is not None
    assert response.prompt_logprobs[:2] == [None, None]
    assert response.prompt_alt_tokens is not None


def test_later_changes_of_the_caller_s_array_do_not_change_the_request(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    targets = numpy.array([[1, 2], [3, 4]], dtype=numpy.int64)
    sampler._sampler.session.limiter.rate_limited(0.2, "so that it has not left yet")

    sample = sampler.sample(
        PROMPT, 1, PARAMS, target_prompt_logprobs=TensorData.from_numpy(targets)
    )
    targets[:] = 9
    sample.result(WAIT_S)

    sent = service.requests("asample")[-1].request
    assert sent.target_prompt_logprobs.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("most_early_bytes", [0, sender.MOST_EARLY_BYTES])
def test_prompts_are_sent_unchanged_whether_encoded_early_or_late(
    sampler: SamplingClient,
    service: ScriptedService,
    most_early_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    early: list[EarlyText | None] = []

    def counted(prompt: ModelInput) -> EarlyText | None:
        early.append(early_text(prompt))
        return early[-1]

    monkeypatch.setattr(sample_call, "early_text", counted)
    monkeypatch.setattr(sender, "MOST_EARLY_BYTES", most_early_bytes)
    limiter = sampler._sampler.session.limiter
    limiter.queue_paused(WAIT_S, "what the service reads, in this process, is a list too")
    futures, asked = [], []
    for number in range(8):
        ids = list(range(number, number + 500))
        asked.append(ids.copy())
        futures.append(sampler.sample(ModelInput.from_ints(ids), 1, PARAMS))
        ids[:] = [9]

    limiter.queue_active(time.monotonic())
    for future in futures:
        future.result(WAIT_S)

    assert (len(early) == 8) is bool(most_early_bytes)
    assert None not in early[1:]  # the first list was not kept: nobody had asked for one
    sent = sorted(one.request.prompt.to_ints() for one in service.requests("asample"))
    assert sent == asked


def test_queued_prompts_are_encoded_early_up_to_a_byte_limit(
    sampler: SamplingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    early: list[EarlyText | None] = []
    monkeypatch.setattr(sample_call, "early_text", lambda prompt: early.append(early_text(prompt)))
    monkeypatch.setattr(sender, "MOST_EARLY_BYTES", 20_000)  # a prompt of 500 counts for 4,012
    limiter = sampler._sampler.session.limiter
    limiter.queue_paused(WAIT_S, "so that all of them wait")

    futures = [sampler.sample(ModelInput.from_ints(list(range(500))), 1, PARAMS) for _ in range(20)]

    assert 5 <= len(early) <= 7  # one that passes from the inbox to the line is in neither
    limiter.queue_active(time.monotonic())
    for future in futures:
        future.result(WAIT_S)


def test_a_sample_that_cannot_be_encoded_fails_alone(sampler: SamplingClient) -> None:
    broken = SamplingParams(max_tokens=4, stop=["\ud800"])  # half a character

    samples = [sampler.sample(PROMPT, 1, params) for params in (PARAMS, broken, PARAMS)]

    assert len(samples[0].result(WAIT_S).sequences) == 1
    assert len(samples[2].result(WAIT_S).sequences) == 1
    with pytest.raises(ValidationError, match="cannot be encoded as UTF-8"):
        samples[1].result(WAIT_S)


def test_invalid_options_are_rejected_before_anything_is_sent(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    with pytest.raises(ValidationError):
        _ = sampler.sample(PROMPT, 1, PARAMS, prompt_logprobs_last_n=1)
    with pytest.raises(ValidationError):
        _ = sampler.sample(PROMPT, 1, PARAMS, prompt_alt_tokens_k=-1)
    with pytest.raises(ValidationError):
        _ = sampler.sample(PROMPT, 1, PARAMS, target_prompt_logprobs=TensorData([1.0], "float32"))

    assert service.requests("asample") == []


def test_s1_four_hundred_samples_from_threads_are_all_in_flight_at_once(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    held = service.faults.hold("asample")

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        futures = list(pool.map(lambda _: sampler.sample(PROMPT, 1, PARAMS), range(400)))
        held.wait_held(400, timeout_s=60)
        in_flight = service.in_flight("asample")
        held.release()

    assert in_flight == 400
    assert all(len(future.result(WAIT_S).sequences) == 1 for future in futures)


def test_s1_four_hundred_samples_from_coroutines_are_all_in_flight_at_once(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    held = service.faults.hold("asample")

    async def scenario() -> int:
        tasks = [asyncio.create_task(sampler.sample_async(PROMPT, 1, PARAMS)) for _ in range(400)]
        await held.wait_held_async(400, timeout_s=60)
        held.release()
        return len(await asyncio.gather(*tasks))

    assert asyncio.run(scenario()) == 400


def test_s3_a_429_pauses_the_samples_of_every_client_of_its_key(
    service: ScriptedService, sampler: SamplingClient
) -> None:
    with ServiceClient(base_url=service.base_url, api_key=service.api_key) as other_client:
        other = other_client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        service.faults.add("asample", times=1, status=429, headers={"retry-after-ms": "1500"})
        refused = sampler.sample(PROMPT, 1, PARAMS)
        refused_at = service.wait_requests("asample", 1)[0].arrived_at
        deadline = time.monotonic() + 60
        while sampler.limiter.pause().state == "open" and time.monotonic() < deadline:
            time.sleep(0.005)

        later = [client.sample(PROMPT, 1, PARAMS) for client in (sampler, other) * 5]
        for future in (refused, *later):
            future.result(WAIT_S)

    arrivals = [received.arrived_at for received in service.requests("asample")[1:]]
    assert len(arrivals) == 11
    assert min(arrivals) - refused_at >= 1.5


def test_s3_a_rejected_sample_keeps_its_seq_id(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.add("asample", times=2, status=429, headers={"retry-after-ms": "10"})

    sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)

    assert [received.request.seq_id for received in service.requests("asample")] == [0, 0, 0]


def test_s8_a_paused_queue_holds_back_new_samples_while_polls_continue(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    paused = service.faults.pause(
        "asample",
        queue_state="paused_capacity",
        reason="no room",
        retry_after_ms=60_000,
        poll_after_s=0.05,
        times=1,
    )
    first = sampler.sample(PROMPT, 1, PARAMS)
    deadline = time.monotonic() + 60
    while sampler.limiter.pause().state == "open" and time.monotonic() < deadline:
        time.sleep(0.01)

    second = sampler.sample(PROMPT, 1, PARAMS)
    polls = len(service.requests("retrieve_future"))
    service.wait_requests("retrieve_future", polls + 2)
    assert len(service.requests("asample")) == 1
    assert sampler.limiter.pause().reason == "no room"
    paused.release()

    first.result(WAIT_S)
    second.result(WAIT_S)  # the first one's result ended the hold, long before its minute


def test_s6_a_result_that_the_server_lost_is_resampled(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.expire_results("asample", times=1)

    sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)

    assert [received.request.seq_id for received in service.requests("asample")] == [0, 1]


def test_s6_a_permanent_rejection_is_raised_immediately(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.add("asample", times=None, status=400, body={"detail": "too long"})

    with pytest.raises(BadRequestError, match="too long"):
        _ = sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)

    assert len(service.requests("asample")) == 1


def test_an_abandoned_sample_is_cancelled_on_the_server() -> None:
    with (
        running_service(long_poll_s=5.0, sample_cancel_enabled=True) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        service.faults.hold_commands("asample")
        sample = sampler.sample(PROMPT, 1, PARAMS)
        service.wait_requests("retrieve_future", 1)

        sample.cancel()

        cancelled = service.wait_requests("cancel_future", 1)
        assert cancelled[0].request.request_id


def test_a_thousand_samples_all_complete(sampler: SamplingClient) -> None:
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(1000)]

    answers = [future.result(WAIT_S) for future in futures]

    ids = [answer.sequences[0].sequence_id for answer in answers]
    assert len(set(ids)) == 1000


def test_s22_with_four_hundred_hung_samples_everything_else_works(
    client: ServiceClient, sampler: SamplingClient, service: ScriptedService
) -> None:
    held = service.faults.hold("asample")
    hung = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(400)]
    held.wait_held(400, timeout_s=60)

    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
    path = training.save_state("beside").result(WAIT_S).path

    assert path.endswith("beside")
    held.release()
    for sample in hung:
        sample.result(WAIT_S)


def test_a_sampler_of_saved_weights_samples_from_them(client: ServiceClient) -> None:
    training = client.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
    saved = training.save_weights_for_sampler("s1").result(WAIT_S)

    by_path = client.create_sampling_client(model_path=saved.path)
    by_training = training.create_sampling_client(saved.path)
    ephemeral = training.save_weights_and_get_sampling_client()

    for sampler in (by_path, by_training, ephemeral):
        assert len(sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S).sequences) == 1
    assert by_path.get_base_model() == "Qwen/Qwen3-8B"


def test_a_model_or_checkpoint_to_sample_from_is_required(client: ServiceClient) -> None:
    with pytest.raises(ValidationError):
        client.create_sampling_client().result()
    with pytest.raises(ValidationError, match="tinker://"):
        client.create_sampling_client(model_path="/tmp/weights").result()


def test_an_unknown_checkpoint_is_not_found(client: ServiceClient) -> None:
    with pytest.raises(NotFoundError):
        client.create_sampling_client(model_path="tinker://none/sampler_weights/none").result()
