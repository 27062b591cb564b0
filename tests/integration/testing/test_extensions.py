"""The extensions as they travel: what `docs/extensions.md` says, read from the socket."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.testing.caller import Caller, Reply, asample, calling
from tinsmith import types as t
from tinsmith.types import extensions as x
from tinsmith.types import requests as r
from tinsmith.types.record import to_plain
from tinsmith.wire import json_format, proto_samples
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.sse import EventDecoder, ServerSentEvent

FLAGS: dict[str, Any] = {
    "long_poll_s": 0.2,
    "tinsmith_batch_items": 8,
    "tinsmith_batch_bytes": 4000,
    "tinsmith_inline_bytes": 65536,
    "tinsmith_stream": True,
}


@pytest.fixture
def caller() -> Iterator[Caller]:
    with calling(**FLAGS) as caller:
        yield caller


def many(*samples: r.SampleRequest) -> x.SampleManyRequest:
    return x.SampleManyRequest(samples=[to_plain(sample) for sample in samples])


def poll(sampler: str, **fields: Any) -> x.ResultsRetrieveRequest:
    target = r.SamplingSessionFuturesTarget(sampling_session_id=sampler)
    return x.ResultsRetrieveRequest(**{"target": target, "inline_bytes": 65536, **fields})


def events_of(body: bytes) -> list[ServerSentEvent]:
    return EventDecoder().feed(body)


def tokens_of(events: list[ServerSentEvent]) -> list[x.StreamedTokens]:
    told = [event.data for event in events if event.event == "tokens"]
    return [json_format.decode(data, x.StreamedTokens) for data in told]


def single_tokens(events: list[ServerSentEvent]) -> list[tuple[int, int, int]]:
    """The sequence, the place and the id of each token."""
    return [
        (told.index, told.offset + place, token)
        for told in tokens_of(events)
        for place, token in enumerate(told.tokens)
    ]


def test_extension_flags_are_in_the_client_config(caller: Caller) -> None:
    flags = caller.ask("client_config", r.ClientConfigRequest(sdk_version="0.36.0"))

    assert flags.tinsmith_batch_items == 8
    assert flags.tinsmith_stream


def test_batch_items_are_answered_in_order_and_independently(caller: Caller) -> None:
    sampler = caller.new_sampler()
    bad = asample(sampler, 1, params={"top_p": 0.0})
    nobody = asample("nobody", 0)
    request = many(asample(sampler, 0), bad, nobody, asample(sampler, 2))
    broken = x.SampleManyRequest(samples=[*request.samples, {"prompt": 5}, {"seq_id": 9}])

    answer = caller.ask("asample_many", broken)

    statuses = [item.status for item in answer.items]
    assert statuses == [None, 400, 404, None, 400, 400]
    assert [item.request_id for item in answer.items][::3] == [f"{sampler}:0", f"{sampler}:2"]


def test_a_resent_batch_gets_the_same_answer(caller: Caller) -> None:
    sampler = caller.new_sampler()
    request = many(asample(sampler, 0), asample(sampler, 1))

    first, again = (caller.ask("asample_many", request) for _ in range(2))
    alone = caller.ask("asample", asample(sampler, 1))

    assert first == again
    assert alone.request_id == first.items[1].request_id


def test_a_different_body_under_a_known_seq_id_is_rejected(caller: Caller) -> None:
    sampler = caller.new_sampler()
    caller.ask("asample", asample(sampler, 0))

    answer = caller.ask("asample_many", many(asample(sampler, 0, prompt=[9])))

    assert answer.items[0].status == 400


def test_a_batch_beyond_the_limits_is_rejected_as_a_whole(caller: Caller) -> None:
    sampler = caller.new_sampler()
    too_many = many(*(asample(sampler, number) for number in range(9)))
    too_large = many(asample(sampler, 0, prompt=list(range(2000))))

    assert caller.call("asample_many", too_many).status == 413
    assert caller.call("asample_many", too_large).status == 413
    assert caller.call("asample_many", many()).status == 400
    assert caller.ask("retrieve_results", poll(sampler)).completions == []


def test_results_are_inlined_and_kept_until_acknowledged(caller: Caller) -> None:
    sampler = caller.new_sampler()
    caller.ask("asample_many", many(asample(sampler, 0), asample(sampler, 1)))

    first = caller.ask("retrieve_results", poll(sampler))
    again = caller.ask("retrieve_results", poll(sampler))  # as if the answer had been lost
    after = caller.ask(
        "retrieve_results",
        poll(sampler, prev_cursor=first.cursor, retrieved_request_ids=[f"{sampler}:0"]),
    )
    fetched = caller.ask(
        "fetch_results",
        x.ResultsFetchRequest(request_ids=[f"{sampler}:0", f"{sampler}:1", "nobody"]),
    )

    assert first == again
    for completion in first.completions:
        response = proto_samples.decode_sample_response(completion.payload)
        assert len(response.sequences[0].tokens) == 4
    assert (after.completions, after.cursor) == ([], first.cursor)
    kinds = [type(result) for result in fetched.results]
    assert kinds == [x.ResultGone, x.ResultFinished, x.ResultUnknown]


def test_an_answer_that_would_be_too_large_is_split(caller: Caller) -> None:
    sampler = caller.new_sampler()
    caller.ask("asample_many", many(*(asample(sampler, number) for number in range(5))))
    size = len(caller.ask("retrieve_results", poll(sampler)).completions[0].payload)

    seen: list[str] = []
    cursor = 0
    while True:
        answer = caller.ask(
            "retrieve_results", poll(sampler, prev_cursor=cursor, answer_bytes=2 * size)
        )
        if not answer.completions:
            break
        assert len(answer.completions) <= 2
        seen += [completion.request_id for completion in answer.completions]
        cursor = answer.cursor

    assert seen == [f"{sampler}:{number}" for number in range(5)]


def test_a_result_above_the_client_s_limit_is_announced_by_its_size(caller: Caller) -> None:
    sampler = caller.new_sampler()
    caller.ask("asample", asample(sampler, 0))

    answer = caller.ask("retrieve_results", poll(sampler, inline_bytes=1))

    (told,) = answer.completions
    assert told.payload is None
    assert told.response_payload_uncompressed_size > 1


def test_the_first_result_is_fetched_however_large(caller: Caller) -> None:
    sampler = caller.new_sampler()
    caller.ask("asample_many", many(asample(sampler, 0), asample(sampler, 1)))

    answer = caller.ask(
        "fetch_results",
        x.ResultsFetchRequest(request_ids=[f"{sampler}:0", f"{sampler}:1"], answer_bytes=1),
    )

    assert [result.request_id for result in answer.results] == [f"{sampler}:0"]


def test_a_stream_resumes_after_any_position(caller: Caller) -> None:
    sampler = caller.new_sampler()
    request = asample(sampler, 0, num_samples=2)
    whole = events_of(caller.call("asample_stream", request).body)
    expected = single_tokens(whole)

    kinds = [event.event for event in whole]
    assert (kinds[0], set(kinds[1:-1]), kinds[-1]) == ("open", {"tokens"}, "result")
    for event in whole[1:-1]:
        counts = [int(count) for count in str(event.id).split(".")]
        reply = caller.call("asample_stream", request, Last_Event_ID=str(event.id))
        rest = single_tokens(events_of(reply.body))
        assert sorted(rest) == sorted(one for one in expected if one[1] >= counts[one[0]])


def test_a_streamed_sample_can_also_be_polled(caller: Caller) -> None:
    sampler = caller.new_sampler()
    request = asample(sampler, 0)
    streamed = events_of(caller.call("asample_stream", request).body)

    polled: t.SampleResponse = caller.result("asample", caller.ask("asample", request).request_id)

    tokens = [token for told in tokens_of(streamed) for token in told.tokens]
    assert tokens == polled.sequences[0].tokens


@pytest.mark.parametrize("position", ["x", "1.2", "-1", "²"])
def test_an_invalid_stream_position_is_rejected(caller: Caller, position: str) -> None:
    request = asample(caller.new_sampler(), 0)

    reply = caller.call("asample_stream", request, Last_Event_ID=position)

    assert reply.status == 400


def test_a_sample_without_a_seq_id_cannot_be_streamed(caller: Caller) -> None:
    request = asample(caller.new_sampler(), 0).model_copy(update={"seq_id": None})

    assert caller.call("asample_stream", request).status == 400


# Prompts as memory


def packed(caller: Caller, endpoint: str, text: bytes, arrays: bytes = b"") -> Reply:
    body = len(text).to_bytes(4, "little") + text + arrays
    headers = {"Content-Type": "application/x-tinsmith-packed"}
    return caller.send("POST", ENDPOINTS[endpoint].path, body, headers)


def packed_sample(sampler: str, number: int, tokens: int) -> bytes:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": {"packed": tokens}}]}
    plain = to_plain(asample(sampler, number))
    return json_format.encode({**plain, "prompt": prompt})


def test_a_packed_sample_equals_the_json_sample() -> None:
    tokens = struct.pack("<3i", 1, 2, 3)
    with calling(**FLAGS, tinsmith_packed_prompts=True) as caller:
        sampler = caller.new_sampler()
        first = packed(caller, "asample", packed_sample(sampler, 0, 3), tokens)
        text = b'{"samples":[%b]}' % packed_sample(sampler, 0, 3)
        again = packed(caller, "asample_many", text, tokens)

        as_text = caller.ask("asample", asample(sampler, 0, prompt=[1, 2, 3]))
        other = caller.call("asample", asample(sampler, 0, prompt=[1, 2, 4]))

    assert first.plain["request_id"] == as_text.request_id
    assert again.plain["items"][0]["request_id"] == as_text.request_id
    assert other.status == 400


@pytest.mark.parametrize("endpoint", ["asample", "asample_many", "asample_stream"])
def test_a_packed_body_without_the_flag_is_a_415(caller: Caller, endpoint: str) -> None:
    assert packed(caller, endpoint, b"{}").status == 415


def test_an_inconsistent_packed_body_is_a_400_and_does_nothing() -> None:
    with calling(**FLAGS, tinsmith_packed_prompts=True) as caller:
        sampler = caller.new_sampler()
        samples = b",".join(packed_sample(sampler, number, 3) for number in range(2))
        reply = packed(caller, "asample_many", b'{"samples":[%b]}' % samples, bytes(20))
        taken = caller.ask("asample", asample(sampler, 0, prompt=[9]))

    assert reply.status == 400
    assert "exceed the packed body" in reply.plain["detail"]
    assert taken.request_id
