"""Whether a sample's result is what was asked for.

A service that is too old for an option ignores it, and draws the sample all the same. Whoever asked
for it is told, rather than handed a result that looks right. The official SDK does the same.
"""

from __future__ import annotations

import math

from tinsmith.errors import IncompleteResultError
from tinsmith.types.buffers import Numbers
from tinsmith.types.requests import SampleRequest
from tinsmith.types.sampling import SampleResponse


def lack_of(
    request: SampleRequest, response: SampleResponse, request_id: str | None
) -> IncompleteResultError | None:
    """What is wrong with the result, as an error; None if nothing is."""
    if request.prompt_alt_tokens_k > 0 and response.prompt_alt_tokens is None:
        return _ignored("prompt_alt_tokens_k", "has no prompt_alt_tokens", request_id)
    last_n, logprobs = request.prompt_logprobs_last_n, response.prompt_logprob_numbers
    if last_n is not None and logprobs is not None:
        before = logprobs.slice(0, max(0, len(logprobs) - last_n))
        if not _are_all_nan(before):
            what = f"has prompt logprobs before the last {last_n}"
            return _ignored("prompt_logprobs_last_n", what, request_id)
    return None


def _ignored(option: str, what: str, request_id: str | None) -> IncompleteResultError:
    return IncompleteResultError(
        message=f"the result of {request_id} {what}",
        request_id=request_id,
        remedy=f"the service may be too old for {option}",
    )


def _are_all_nan(numbers: Numbers) -> bool:
    values = numbers.view()
    if not values:
        return True
    # Nearly always they are the same bits: a look at each one of a long prompt takes a millisecond.
    first = bytes(numbers.memory[: values.itemsize])
    return math.isnan(values[0]) and (
        first * len(values) == numbers.memory or all(map(math.isnan, values))
    )
