from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import pytest

from tinsmith.client.futures import APIFuture
from tinsmith.client.samples.sample_call import SampleCall
from tinsmith.errors import APIResponseValidationError
from tinsmith.types import ModelInput, SampleResponse, SamplingParams, TensorData
from tinsmith.types.requests import SampleRequest
from tinsmith.types.sampling import PromptAltTokens


def a_call(**asked: int) -> SampleCall:
    request = SampleRequest(
        prompt=ModelInput.from_ints([5, 6]),
        num_samples=1,
        sampling_params=SamplingParams(),
        **cast(Any, asked),
    )
    return SampleCall(cast(Any, None), request, APIFuture("sample 7"), None)


def test_a_result_without_the_requested_alternatives_is_an_error() -> None:
    """As in the official SDK, a `RuntimeError`: the service may be too old to know them."""
    call = a_call(prompt_alt_tokens_k=2)

    asyncio.run(settled(call, SampleResponse(sequences=[])))

    with pytest.raises(RuntimeError, match="no prompt_alt_tokens; the service may be too old"):
        call.future.result(0)
    assert isinstance(call.future.exception(0), APIResponseValidationError)
    assert (call.is_over, call.is_drawn) == (True, True)


@pytest.mark.parametrize("early", [[-1.0, -1.0], [math.nan, -1.0]])
def test_more_prompt_logprobs_than_requested_are_an_error(early: list[float]) -> None:
    """As in the official SDK: the service was to leave them out, and may be too old for that."""
    call = a_call(prompt_logprobs_last_n=2)

    asyncio.run(settled(call, SampleResponse([], prompt_logprobs_np=[*early, -2.0, -3.0])))

    with pytest.raises(RuntimeError, match="before the last 2; the service may be too old"):
        call.future.result(0)


@pytest.mark.parametrize("last_n", [1, 2, 3, 9])
def test_logprobs_of_the_end_of_a_prompt_are_returned(last_n: int) -> None:
    left_out = [math.nan, -math.nan, math.nan][: max(0, 4 - last_n)]
    logprobs = [*left_out, *[-1.0] * (4 - len(left_out))]
    call = a_call(prompt_logprobs_last_n=last_n)

    asyncio.run(settled(call, SampleResponse([], prompt_logprobs_np=logprobs)))

    assert call.future.result(0).prompt_logprobs is not None


def test_a_result_contains_everything_requested() -> None:
    drawn = PromptAltTokens(
        tokens=TensorData(data=[1, 2], dtype="int64", shape=[1, 2]),
        logprobs=TensorData(data=[-1.0, -2.0], dtype="float32", shape=[1, 2]),
    )
    asked, unasked = a_call(prompt_alt_tokens_k=2), a_call()

    asyncio.run(settled(asked, SampleResponse(sequences=[], prompt_alt_tokens=drawn)))
    asyncio.run(settled(unasked, SampleResponse(sequences=[])))

    assert asked.future.result(0).prompt_alt_tokens == drawn
    assert unasked.future.result(0).prompt_alt_tokens is None


async def settled(call: SampleCall, response: SampleResponse) -> None:
    call.settle(response)
