"""Commands and results as the ledger keeps them."""

from __future__ import annotations

import pytest

from tinsmith.errors import DecodeError, RequestErrorCategory
from tinsmith.types import (
    AdamParams,
    ModelInput,
    OptimStepResponse,
    RequestFailedResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
)
from tinsmith.types.requests import OptimStepRequest, SampleRequest, SaveWeightsForSamplerRequest
from tinsmith.wire import json_format, stored
from tinsmith.wire.endpoint_types import Format


def a_sample(seq_id: int = 0) -> SampleRequest:
    return SampleRequest(
        prompt=ModelInput.from_ints([1, 2]),
        sampling_params=SamplingParams(max_tokens=3),
        sampling_session_id="s:sample:0",
        seq_id=seq_id,
    )


def test_a_command_is_decoded_from_its_stored_body() -> None:
    step = OptimStepRequest(model_id="m", seq_id=3, optim_params=AdamParams(learning_rate=0.5))
    body = b"".join(json_format.encode_parts(step))

    read = stored.read_stored("optim_step", stored.stored_body(body, Format.JSON))

    assert read == step


def test_a_payload_without_a_format_is_rejected() -> None:
    with pytest.raises(DecodeError, match="unknown format"):
        stored.read_stored("optim_step", b"")


def test_a_sample_has_one_fingerprint_however_its_body_was_written() -> None:
    sample = a_sample()
    spaced = json_format.encode(sample).replace(b",", b" ,\n")

    first = stored.fingerprint("asample", sample, stored.stored_request(sample))
    again = stored.fingerprint("asample", sample, stored.stored_body(spaced, Format.JSON))
    other = stored.fingerprint("asample", a_sample(1), stored.stored_request(a_sample(1)))

    assert first == again
    assert first != other


@pytest.mark.parametrize("tokens", [[1, 2], list(range(10_000))], ids=["short", "long"])
def test_a_stored_sample_round_trips_and_its_fingerprint_covers_the_tokens(
    tokens: list[int],
) -> None:
    sample = a_sample().model_copy(update={"prompt": ModelInput.from_ints(tokens)})
    changed = sample.model_copy(update={"prompt": ModelInput.from_ints([*tokens[:-1], 7])})

    payload, told_by = stored.stored_sample(sample)

    assert stored.read_stored("asample", payload) == sample
    assert stored.stored_sample(changed)[1] != told_by


def test_a_truncated_stored_sample_is_rejected() -> None:
    payload, _ = stored.stored_sample(a_sample())

    for length in range(len(payload)):
        with pytest.raises(DecodeError):
            stored.read_stored("asample", payload[:length])


def test_a_retried_save_for_a_new_sampler_may_name_another_sampler() -> None:
    prints = {
        stored.fingerprint(
            "save_weights_for_sampler",
            request := SaveWeightsForSamplerRequest(
                model_id="m", seq_id=4, sampling_session_seq_id=number
            ),
            stored.stored_request(request),
        )
        for number in (0, 1)
    }

    assert len(prints) == 1


def test_a_result_is_returned_in_the_requested_format_if_available() -> None:
    answer = SampleResponse([SampledSequence(stop_reason="length", tokens=[5], logprobs=[-0.5])])
    kept = stored.stored_result("asample", answer)

    new_format, new_body = stored.result_body("asample", kept, Format.PROTOBUF)
    old_format, old_body = stored.result_body("asample", kept, Format.JSON)

    assert (new_format, old_format) == (Format.PROTOBUF, Format.JSON)
    assert bytes(new_body) == kept[1:]
    assert json_format.decode(old_body, SampleResponse) == answer
    assert stored.read_result("asample", kept) == answer


def test_a_result_without_protobuf_is_json_whatever_is_requested() -> None:
    kept = stored.stored_result("optim_step", OptimStepResponse(metrics={"norm": 1.0}))

    format, body = stored.result_body("optim_step", kept, Format.PROTOBUF)  # noqa: A001

    assert format is Format.JSON
    assert json_format.decode(body, OptimStepResponse).metrics == {"norm": 1.0}


def test_a_failure_is_kept_with_its_category() -> None:
    failure = RequestFailedResponse(error="no", category=RequestErrorCategory.User)

    assert stored.read_failure(stored.stored_failure(failure)) == failure
