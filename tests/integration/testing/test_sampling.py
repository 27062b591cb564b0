"""Samples: drawn by seed, stopped as asked, told of by long polls and by the poller."""

from __future__ import annotations

import threading
import time

import pytest

from tests.integration.testing.caller import (
    TOKENS,
    Caller,
    asample,
    calling,
    forward_backward,
    optim_step,
)
from tinsmith import types as t
from tinsmith.types import requests as r


def news(
    caller: Caller,
    sampler_id: str,
    cursor: int = 0,
    *,
    has: list[str] | None = None,
    clone: int = 0,
) -> t.FuturesRetrieveResponse:
    target = r.SamplingSessionFuturesTarget(sampling_session_id=sampler_id, cloned_sampler_id=clone)
    request = r.FuturesRetrieveRequest(
        target=target, prev_cursor=cursor, retrieved_request_ids=has or []
    )
    answer = caller.ask("retrieve_futures", request)
    assert isinstance(answer, t.FuturesRetrieveResponse)
    return answer


def test_submission_names_as_many_sequences_as_come_back() -> None:
    with calling() as caller:
        sampler_id = caller.new_sampler()

        submitted = caller.ask("asample", asample(sampler_id, 0, num_samples=3))
        response = caller.result("asample", submitted.request_id)

        assert len(set(submitted.sample_sequence_ids)) == len(response.sequences) == 3
        assert [len(sequence.tokens) for sequence in response.sequences] == [4, 4, 4]


def test_sampled_logprobs_are_those_that_training_sees() -> None:
    """A ratio of new to old probability begins at exactly 1."""
    with calling() as caller:
        session_id = caller.new_session()
        model_id = caller.new_model(session_id)
        caller.do("forward_backward", forward_backward(model_id, 1))
        caller.do("optim_step", optim_step(model_id, 2))
        save = r.SaveWeightsForSamplerRequest(
            model_id=model_id, seq_id=3, sampling_session_seq_id=0
        )
        sampler_id = caller.do("save_weights_for_sampler", save).sampling_session_id

        sequence = caller.do("asample", asample(sampler_id, 0)).sequences[0]
        tokens = [*TOKENS[-1:], *sequence.tokens]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 4}
        datum = t.Datum(t.ModelInput.from_ints(tokens[:-1]), inputs)
        batch = r.ForwardBackwardRequest(
            t.ForwardBackwardInput([datum], "cross_entropy"), model_id, 4, forward_only=True
        )

        output = caller.do("forward_backward", batch)

        assert output.loss_fn_outputs[0]["logprobs"].data == sequence.logprobs


def test_same_submission_twice_has_the_same_ids_and_another_body_is_refused() -> None:
    with calling() as caller:
        sampler_id = caller.new_sampler()

        first, second = (caller.ask("asample", asample(sampler_id, 0)) for _ in range(2))
        other = caller.call("asample", asample(sampler_id, 0, num_samples=2))

        assert first == second
        assert other.status == 400


def test_result_can_be_read_again_until_the_poller_says_it_has_it() -> None:
    with calling() as caller:
        sampler_id = caller.new_sampler()
        request_id = caller.ask("asample", asample(sampler_id, 0)).request_id
        assert caller.poll(request_id).body == caller.poll(request_id).body

        caller.ask("asample", asample(sampler_id, 1))
        news(caller, sampler_id, has=[request_id])

        assert caller.poll(request_id).status == 410


def test_pending_poll_is_held_and_then_told_to_try_again() -> None:
    with calling(long_poll_s=0.3) as caller:
        sampler_id = caller.new_sampler()
        with caller.service.faults.hold_commands(on="asample"):
            request_id = caller.ask("asample", asample(sampler_id, 0)).request_id
            began = time.monotonic()

            reply = caller.poll(request_id)

        assert time.monotonic() - began >= 0.3
        assert reply.status == 408
        assert reply.plain == {
            "type": "try_again",
            "request_id": request_id,
            "queue_state": "active",
        }


def test_poll_is_released_as_soon_as_the_work_is_done() -> None:
    with calling(long_poll_s=3600.0) as caller:
        sampler_id = caller.new_sampler()
        hold = caller.service.faults.hold_commands(on="asample")
        request_id = caller.ask("asample", asample(sampler_id, 0)).request_id
        release = threading.Timer(0.2, hold.release)
        release.start()

        reply = caller.poll(request_id)

        assert reply.status == 200
        release.join()


def test_large_result_is_answered_by_its_size_where_that_is_allowed() -> None:
    with calling(inline_bytes=10) as caller:
        request_id = caller.ask("asample", asample(caller.new_sampler(), 0)).request_id

        peek, whole = caller.poll(request_id, metadata_only=True), caller.poll(request_id)

        assert peek.plain == {
            "status": "complete_metadata",
            "response_payload_size": len(whole.body),
        }
        assert whole.headers["content-type"] == "application/x-protobuf"


def test_old_clients_get_samples_as_json() -> None:
    with calling() as caller:
        old = Caller(caller.service, accept="application/json")
        request_id = old.ask(
            "asample", asample(old.new_sampler(), 0, prompt_logprobs=True)
        ).request_id

        plain = old.poll(request_id).plain

        assert plain["sequences"][0]["stop_reason"] == "length"
        assert plain["prompt_logprobs"][0] is None


def test_unknown_request_is_404_and_expired_result_410() -> None:
    with calling(result_lifetime_s=0.0) as caller:
        request_id = caller.ask("asample", asample(caller.new_sampler(), 0)).request_id

        assert caller.poll("nobody").status == 404
        assert caller.poll(request_id).status == 410


def test_poller_tells_what_ended_since_its_cursor_until_the_cursor_moves() -> None:
    with calling() as caller:
        sampler_id = caller.new_sampler()
        ids = [caller.ask("asample", asample(sampler_id, n)).request_id for n in range(2)]

        first, again = news(caller, sampler_id), news(caller, sampler_id)

        assert first == again
        assert [one.request_id for one in first.completions] == ids
        sizes = [
            one.model_dump()["response_payload_uncompressed_size"] for one in first.completions
        ]
        assert sizes == [len(caller.poll(request_id).body) for request_id in ids]
        third = caller.ask("asample", asample(sampler_id, 2)).request_id
        later = news(caller, sampler_id, first.cursor)
        assert [one.request_id for one in later.completions] == [third]
        assert later.cursor > first.cursor


def test_poller_is_held_while_nothing_ends() -> None:
    with calling(long_poll_s=0.3) as caller:
        sampler_id = caller.new_sampler()
        began = time.monotonic()

        answer = news(caller, sampler_id, cursor=5)

        assert time.monotonic() - began >= 0.3
        assert (answer.completions, answer.cursor) == ([], 5)


def test_poller_of_an_unknown_sampler_is_404() -> None:
    with calling() as caller:
        request = r.FuturesRetrieveRequest(
            target=r.SamplingSessionFuturesTarget(sampling_session_id="nobody")
        )

        assert caller.call("retrieve_futures", request).status == 404


def test_clones_get_numbers_of_their_own_and_news_of_their_own() -> None:
    with calling() as caller:
        sampler_id = caller.new_sampler()
        join = r.JoinSamplingSessionRequest(sampling_session_id=sampler_id)
        numbers = [caller.ask("join_sampling_session", join).client_counter for _ in range(2)]
        assert numbers == [1, 2]
        first, second = (
            caller.ask("asample", asample(sampler_id, clone * 10**9)).request_id
            for clone in numbers
        )

        for clone, request_id in [(1, first), (2, second)]:
            completions = news(caller, sampler_id, clone=clone).completions
            assert [one.request_id for one in completions] == [request_id]


def test_cancelled_sample_ends_as_failed() -> None:
    with calling() as caller:
        sampler_id = caller.new_sampler()
        with caller.service.faults.hold_commands(on="asample"):
            request_id = caller.ask("asample", asample(sampler_id, 0)).request_id
            caller.ask("cancel_future", r.FutureCancelRequest(request_id=request_id))

            failed = caller.poll(request_id).plain

            assert "cancelled" in failed["error"]
            assert news(caller, sampler_id).completions == [t.FutureFailed(request_id=request_id)]


def test_sampler_is_the_same_when_asked_for_again_and_another_is_refused() -> None:
    with calling() as caller:
        session_id = caller.new_session()

        assert caller.new_sampler(session_id) == caller.new_sampler(session_id)
        other = r.CreateSamplingSessionRequest(
            session_id=session_id, sampling_session_seq_id=0, base_model="another/model"
        )
        assert caller.call("create_sampling_session", other).status == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"num_samples": 0},
        {"prompt": []},
        {"params": {"max_tokens": 0}},
        {"params": {"top_p": 0.0}},
        {"prompt_logprobs_last_n": 1},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 3},
    ],
)
def test_sample_that_cannot_be_drawn_is_refused(fields: dict[str, object]) -> None:
    with calling() as caller:
        reply = caller.call("asample", asample(caller.new_sampler(), 0, **fields))

        assert reply.status == 400
        assert reply.plain["detail"]
