"""Tokens of a sample as they are drawn: early, whole, once, and given up when nobody wants them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from tinsmith.client.retry import RetryBudget
from tinsmith.client.samples.stream_reader import SampleEvent
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.engine.fake.sampling import RunningSample
from tinsmith.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    IncompleteResultError,
    RequestFailedError,
    ValidationError,
)
from tinsmith.testing import ScriptedService, StreamedReply, running_service
from tinsmith.types import ModelInput, SampleResponse, SamplingParams

WAIT_S = 60.0
PROMPT = ModelInput.from_ints([5, 6, 7])
PARAMS = SamplingParams(max_tokens=12, seed=1, stop=[])
QUICK = RetryBudget(delay_base_s=0.01, delay_max_s=0.05)


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    with running_service(long_poll_s=0.5, tinsmith_stream=True) as service:
        yield service


@pytest.fixture
def sampler(service: ScriptedService) -> Iterator[SamplingClient]:
    with ServiceClient(base_url=service.base_url, api_key=service.api_key, retry=QUICK) as client:
        yield client.create_sampling_client(base_model="Qwen/Qwen3-8B")


def gathered(events: list[SampleEvent], sequences: int) -> list[tuple[list[int], list[float]]]:
    """The tokens and logprobs of each sequence, joined."""
    joined: list[tuple[list[int], list[float]]] = [([], []) for _ in range(sequences)]
    for event in events:
        joined[event.index][0].extend(event.tokens)
        joined[event.index][1].extend(event.logprobs or [])
    return joined


def assert_whole(events: list[SampleEvent], expected: SampleResponse) -> None:
    """The events bring each token of the expected answer once, and at last the answer itself."""
    response = events[-1].response
    assert response is not None
    assert [event.response for event in events[:-1]] == [None] * (len(events) - 1)
    for sequence, wanted, (tokens, logprobs) in zip(
        response.sequences,
        expected.sequences,
        gathered(events, len(expected.sequences)),
        strict=True,
    ):
        assert tokens == sequence.tokens == wanted.tokens
        assert logprobs == pytest.approx(wanted.logprobs)
    ends = [(event.index, event.stop_reason) for event in events if event.stop_reason]
    assert sorted(ends) == [(i, s.stop_reason) for i, s in enumerate(expected.sequences)]


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_stream_whose_result_lacks_a_requested_field_fails_like_a_sample(
    sampler: SamplingClient,
    service: ScriptedService,
    monkeypatch: pytest.MonkeyPatch,
    is_streamed: bool,
) -> None:
    """The service is too old for what was asked, and ignores it."""
    monkeypatch.setattr(RunningSample, "_alt_tokens", lambda *_: None)
    if not is_streamed:
        service.faults.add("asample_stream", status=404)

    with pytest.raises(IncompleteResultError, match="no prompt_alt_tokens"):
        list(sampler.sample_stream(PROMPT, 1, PARAMS, prompt_alt_tokens_k=2, timeout=WAIT_S))


def test_s41_a_stream_returns_what_a_sample_returns(sampler: SamplingClient) -> None:
    expected = sampler.sample(PROMPT, 3, PARAMS).result(WAIT_S)

    events = list(sampler.sample_stream(PROMPT, 3, PARAMS, timeout=WAIT_S))

    assert_whole(events, expected)
    assert len({s.sequence_id for s in events[-1].response.sequences}) == 3  # type: ignore[union-attr]


def test_s41_the_first_token_arrives_before_the_server_has_finished(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    held = service.faults.hold_stream(after_tokens=1)
    stream = sampler.sample_stream(PROMPT, 1, PARAMS, timeout=WAIT_S)

    first = next(stream)
    held.wait_held(1)

    assert len(first.tokens) == 1
    assert service.in_flight("asample_stream") == 1
    held.release()
    assert stream.result().sequences[0].tokens[0] == first.tokens[0]


@pytest.mark.parametrize("sequences", [1, 3])
def test_s41_cut_connections_lose_and_repeat_no_tokens(
    sampler: SamplingClient, service: ScriptedService, sequences: int
) -> None:
    expected = sampler.sample(PROMPT, sequences, PARAMS).result(WAIT_S)
    for after in (0, 1, 5, 0, 3):
        service.faults.cut_stream(after_tokens=after, nth=service_cuts(service))
    stream = sampler.sample_stream(PROMPT, sequences, PARAMS, timeout=WAIT_S)

    events = list(stream)

    assert_whole(events, expected)
    sent = service.requests("asample_stream")
    assert len(sent) == 6
    assert len({received.request.seq_id for received in sent}) == 1
    counts = [r.headers.get("last-event-id", "0").split(".") for r in sent]
    had = [sum(map(int, count)) for count in counts]
    assert had == sorted(had)
    assert had[-1] > 0


def service_cuts(service: ScriptedService) -> int:
    """The number of the next connection that no rule is for."""
    return len(service.faults._stream) + 1


def test_s41_a_connection_cut_at_every_token_still_delivers_all_tokens(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    expected = sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)
    service.faults.cut_stream(after_tokens=1, times=12)

    events = list(sampler.sample_stream(PROMPT, 1, PARAMS, timeout=WAIT_S))

    assert_whole(events, expected)


@pytest.mark.parametrize("fault", [{"lose_reply": True}, {"reset": True}, {"status": 503}])
def test_s41_a_lost_or_failed_submission_is_retried_under_its_seq_id(
    sampler: SamplingClient, service: ScriptedService, fault: dict[str, object]
) -> None:
    service.faults.add("asample_stream", times=2, **fault)

    response = sampler.sample_stream(PROMPT, 1, PARAMS, timeout=WAIT_S).result()

    assert len(response.sequences) == 1
    assert {received.request.seq_id for received in service.requests("asample_stream")} == {0}


def test_s41_a_stream_obeys_the_limiter(sampler: SamplingClient, service: ScriptedService) -> None:
    service.faults.add("asample_stream", status=429, headers={"retry-after-ms": "700"})

    sampler.sample_stream(PROMPT, 1, PARAMS, timeout=WAIT_S).result()

    first, second = service.requests("asample_stream")
    assert second.arrived_at - first.arrived_at >= 0.7
    assert first.request.seq_id == second.request.seq_id


def test_s8_a_paused_stream_holds_back_new_samples(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    paused = service.faults.pause("asample", reason="no room", retry_after_ms=60_000)
    stream = sampler.sample_stream(PROMPT, 1, PARAMS, timeout=WAIT_S)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reading = pool.submit(stream.result)
        deadline = time.monotonic() + 60
        while sampler.limiter.pause().state == "open" and time.monotonic() < deadline:
            time.sleep(0.01)

        reason = sampler.limiter.pause().reason
        paused.release()

        assert len(reading.result(WAIT_S).sequences) == 1
    assert reason == "no room"
    assert sampler.limiter.pause().state == "open"  # the tokens ended the hold, not its minute


def test_leaving_the_loop_closes_the_connection_and_cancels_the_sample(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    held = service.faults.hold_stream(after_tokens=2)
    with sampler.sample_stream(PROMPT, 1, PARAMS, timeout=WAIT_S) as stream:
        for _ in stream:
            break

    cancelled = service.wait_requests("cancel_future", 1)

    assert cancelled[0].request.request_id.endswith(":0")
    assert list(stream) == []
    with pytest.raises(RuntimeError, match="closed before its end"):
        stream.result()
    service.wait_ended("asample_stream", 1)
    assert service.requests("asample_stream")[0].client_left
    held.release()


def test_dropping_a_stream_cancels_the_sample(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.hold_stream(after_tokens=1)
    stream = sampler.sample_stream(PROMPT, 1, PARAMS)
    next(stream)

    del stream
    gc.collect()

    assert len(service.wait_requests("cancel_future", 1)) == 1


def test_a_cancelled_coroutine_cancels_the_sample(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    held = service.faults.hold_stream(after_tokens=1)

    async def read_all() -> None:
        async for _ in sampler.sample_stream_async(PROMPT, 1, PARAMS):
            pass

    async def scenario() -> None:
        task = asyncio.create_task(read_all())
        await held.wait_held_async(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())

    assert len(service.wait_requests("cancel_future", 1)) == 1


def test_a_stream_closed_before_its_request_id_arrives_is_cancelled_too(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    held = service.faults.hold("asample_stream", times=1)
    stream = sampler.sample_stream(PROMPT, 1, PARAMS)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reading = pool.submit(next, stream, None)
        held.wait_held(1)

        stream.close()

        with pytest.raises(concurrent.futures.CancelledError):
            reading.result(WAIT_S)
    cancelled = service.wait_requests("cancel_future", 1)
    assert cancelled[0].request.request_id.endswith(":0")
    assert [received.request.seq_id for received in service.requests("asample")] == [0]
    held.release()


def test_a_stream_that_takes_too_long_fails_and_is_cancelled(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.hold_stream(after_tokens=1)
    stream = sampler.sample_stream(PROMPT, 1, PARAMS, timeout=2.0)

    with pytest.raises(APITimeoutError, match="not done within"):
        list(stream)

    assert len(service.wait_requests("cancel_future", 1)) == 1


def test_streams_on_the_user_s_event_loop_run_concurrently(sampler: SamplingClient) -> None:
    expected = sampler.sample(PROMPT, 2, PARAMS).result(WAIT_S)

    async def one() -> list[SampleEvent]:
        return [event async for event in sampler.sample_stream_async(PROMPT, 2, PARAMS)]

    async def scenario() -> list[list[SampleEvent]]:
        return await asyncio.gather(*(one() for _ in range(20)))

    for events in asyncio.run(scenario()):
        assert_whole(events, expected)


@pytest.mark.usefixtures("eager_switching")
def test_s44_streams_that_are_cut_and_read_by_many_threads_stay_complete(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    expected = sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S)
    service.faults.cut_stream(after_tokens=3, times=16)

    async def scenario() -> list[list[SampleEvent]]:
        streams = [sampler.sample_stream(PROMPT, 1, PARAMS, timeout=WAIT_S) for _ in range(8)]
        return await asyncio.gather(*(asyncio.to_thread(list, stream) for stream in streams))

    for events in asyncio.run(scenario()):
        assert_whole(events, expected)


def test_a_failed_sample_fails_its_stream(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.fail_command("asample", category="user", error="no such token")

    with pytest.raises(RequestFailedError, match="no such token"):
        list(sampler.sample_stream(PROMPT, 1, PARAMS, timeout=WAIT_S))

    assert service.requests("cancel_future") == []


def test_a_lost_sample_is_resampled_before_its_first_token(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.expire_results("asample", times=1)
    service.faults.add("asample_stream", times=1, lose_reply=True)

    response = sampler.sample_stream(PROMPT, 1, PARAMS, timeout=WAIT_S).result()

    assert len(response.sequences) == 1
    numbers = [received.request.seq_id for received in service.requests("asample_stream")]
    assert numbers == [0, 0, 1]


def test_a_sample_lost_after_its_first_token_is_an_error(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.cut_stream(after_tokens=2)
    service.faults.add("asample_stream", nth=2, status=410)
    stream = sampler.sample_stream(PROMPT, 1, PARAMS, timeout=WAIT_S)

    with pytest.raises(APIStatusError) as raised:
        list(stream)

    assert raised.value.status_code == 410


def test_a_stream_that_always_breaks_fails(service: ScriptedService) -> None:
    hasty = RetryBudget(total_s=0.3, delay_base_s=0.01, delay_max_s=0.05)
    with ServiceClient(base_url=service.base_url, api_key=service.api_key, retry=hasty) as client:
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        service.faults.cut_stream(after_tokens=0, times=None)

        with pytest.raises(APIConnectionError):
            list(sampler.sample_stream(PROMPT, 1, PARAMS, timeout=WAIT_S))


def test_a_service_without_streaming_gives_all_tokens_at_the_end() -> None:
    with (
        running_service(long_poll_s=0.5) as service,
        ServiceClient(base_url=service.base_url, api_key=service.api_key) as client,
    ):
        sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
        expected = sampler.sample(PROMPT, 2, PARAMS).result(WAIT_S)

        events = list(sampler.sample_stream(PROMPT, 2, PARAMS, timeout=WAIT_S))

        assert_whole(events, expected)
        assert service.requests("asample_stream") == []


def test_if_streaming_stops_a_plain_sample_is_sent_under_the_same_seq_id(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    service.faults.add("asample_stream", status=404)

    response = sampler.sample_stream(PROMPT, 1, PARAMS, timeout=WAIT_S).result()

    assert len(response.sequences) == 1
    assert [received.request.seq_id for received in service.requests("asample")] == [0]


def test_options_of_a_stream_are_checked_before_anything_is_sent(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    with pytest.raises(ValidationError):
        sampler.sample_stream(PROMPT, 1, PARAMS, prompt_alt_tokens_k=-1)
    with pytest.raises(TypeError, match="temperature"):
        sampler.sample_stream(PROMPT, 1, PARAMS, temperature=1.0)

    assert service.requests("asample_stream") == []


def test_prompt_logprobs_come_with_the_last_event(sampler: SamplingClient) -> None:
    expected = sampler.compute_logprobs(PROMPT).result(WAIT_S)

    response = sampler.sample_stream(
        PROMPT, 1, PARAMS, include_prompt_logprobs=True, timeout=WAIT_S
    ).result()

    assert response.prompt_logprobs == expected


def served(service: ScriptedService, *events: bytes) -> None:
    """Have every stream bring these bytes and then end."""

    async def pieces() -> AsyncIterator[bytes]:
        for event in events:
            yield event

    headers = {"Content-Type": "text/event-stream"}
    service.answers["asample_stream"] = lambda _: StreamedReply(200, headers, pieces())


OPEN = b'event: open\ndata: {"request_id": "r", "sample_sequence_ids": ["s"]}\n\n'


@pytest.mark.parametrize(
    "event",
    [
        b"event: tokens\ndata: not json\n\n",
        b'event: tokens\ndata: {"index": 7, "offset": 0, "tokens": [1]}\n\n',
        b'event: tokens\ndata: {"index": -1, "offset": 0, "tokens": [1]}\n\n',
        b'event: tokens\ndata: {"index": 0, "offset": -5, "tokens": [1]}\n\n',
        b'event: tokens\ndata: {"index": 0, "offset": 0, "tokens": [1], "logprobs": []}\n\n',
        b'event: result\ndata: {"payload": "!!!"}\n\n',
        b'event: result\ndata: {"payload": "AAAA"}\n\n',
        b"event: open\ndata: []\n\n",
    ],
)
def test_an_invalid_stream_event_is_a_typed_error(
    sampler: SamplingClient, service: ScriptedService, event: bytes
) -> None:
    served(service, OPEN, event)

    with pytest.raises(APIResponseValidationError):
        list(sampler.sample_stream(PROMPT, 1, PARAMS, timeout=WAIT_S))


def test_s41_tokens_before_a_broken_event_are_delivered(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    token = b'event: tokens\ndata: {"index": 0, "offset": 0, "tokens": [7]}\n\n'
    served(service, OPEN + token + b"event: tokens\ndata: {}\n\n")
    stream = sampler.sample_stream(PROMPT, 1, PARAMS, timeout=WAIT_S)

    assert next(stream).tokens == [7]
    with pytest.raises(APIResponseValidationError):
        next(stream)


def test_unknown_events_and_comments_are_ignored(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    token = b'event: tokens\ndata: {"index": 0, "offset": 0, "tokens": [7], "new": 1}\n\n'
    failed = b'event: failed\ndata: {"error": "the end", "category": "user"}\n\n'
    served(service, OPEN, b": still here\n\n", b"event: later\ndata: {}\n\n", token, failed)
    stream = sampler.sample_stream(PROMPT, 1, PARAMS, timeout=WAIT_S)

    assert next(stream).tokens == [7]
    with pytest.raises(RequestFailedError, match="the end"):
        next(stream)


def test_s41_an_unread_stream_uses_little_memory(
    sampler: SamplingClient, service: ScriptedService
) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        yield OPEN
        yield b'event: tokens\ndata: {"index": 0, "offset": 0, "tokens": [7]}\n\n'
        while True:
            yield b": " + b"x" * 65536 + b"\n\n"
            sent += 65536

    headers = {"Content-Type": "text/event-stream"}
    service.answers["asample_stream"] = lambda _: StreamedReply(200, headers, endless())
    stream = sampler.sample_stream(PROMPT, 1, PARAMS)
    assert next(stream).tokens == [7]

    deadline, before = time.monotonic() + 60, -1
    while before != sent and time.monotonic() < deadline:  # until the server is held up
        before = sent
        time.sleep(0.3)

    assert before == sent
    assert sent < 64 * 1024 * 1024
    stream.close()


FORKED = """
import os, sys, time, tinsmith
from tinsmith.client.samples import stream_reader
client = tinsmith.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
params = tinsmith.SamplingParams(max_tokens=12, seed=1, stop=[])
stream = sampler.sample_stream(tinsmith.ModelInput.from_ints([5, 6, 7]), 1, params)
next(stream)
child = os.fork()
if child == 0:
    stream.close()
    time.sleep(0.2)
    os._exit(0)
os.waitpid(child, 0)
print("closed", flush=True)
sys.stdin.readline()
assert len(stream.result().sequences[0].tokens) == 12
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_that_closes_a_stream_does_not_close_its_parent_s(
    service: ScriptedService,
) -> None:
    held = service.faults.hold_stream(after_tokens=3)
    command = [
        *(sys.executable, "-W", "ignore::DeprecationWarning"),
        *("-c", FORKED, service.base_url, service.api_key),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stdout.readline() == "closed\n"
        held.release()
        running.communicate("\n", timeout=WAIT_S)

    assert running.returncode == 0
    assert len(service.requests("asample_stream")) == 1  # it did not have to connect again
    assert service.requests("cancel_future") == []
