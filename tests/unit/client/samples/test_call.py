from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from tinsmith.client.futures import APIFuture
from tinsmith.client.samples.call import SampleCall
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


def test_a_result_without_the_alternatives_that_were_asked_for_is_an_error() -> None:
    """As in the official SDK, a `RuntimeError`: the service may be too old to know them."""
    call = a_call(prompt_alt_tokens_k=2)

    asyncio.run(settled(call, SampleResponse(sequences=[])))

    with pytest.raises(RuntimeError, match="no prompt_alt_tokens; the service may be too old"):
        call.future.result(0)
    assert isinstance(call.future.exception(0), APIResponseValidationError)
    assert (call.is_over, call.is_drawn) == (True, True)


def test_a_result_has_what_was_asked_for() -> None:
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
