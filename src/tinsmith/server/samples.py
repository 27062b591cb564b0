"""Samples, by whichever route they come: checked, appended, and what their sequences are called."""

from __future__ import annotations

from tinsmith.errors import BadRequestError, TinkerError
from tinsmith.ledger.records import RequestId
from tinsmith.server import checks
from tinsmith.server.call import Call
from tinsmith.server.data_checks import check_sample
from tinsmith.server.intake import append, find_repeated, submission
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.types.requests import SampleRequest

CLONE_NUMBERS = 10**9
"""A clone's samples are numbered from its own number times this."""
KIND = "asample"


def sequence_ids(request_id: str, count: int) -> list[str]:
    """What the sequences of a sample are called; they follow from its request id."""
    return [f"{request_id}:s{number}" for number in range(count)]


async def submit_sample(call: Call) -> UntypedAPIFuture:
    """Accept the sample that a call asks for; the same one again gets the same answer.

    Raises:
        TinkerError: It is refused, and nothing was appended.
    """
    request: SampleRequest = call.request
    if request.sampling_session_id is None:
        raise BadRequestError(
            "sampling_session_id is missing; make a sampler with create_sampling_session first"
        )
    if request.seq_id is not None:
        checks.check_number("seq_id", request.seq_id)
    lookups = call.service.lookups
    sampler = await lookups.sampler(call.tenant_id, request.sampling_session_id)
    submitted = await submission(
        call,
        sampler.id,
        request.seq_id,
        sampler.session_id,
        kind=KIND,
        is_ordered=False,
        clone=(request.seq_id or 0) // CLONE_NUMBERS,
    )
    try:
        await lookups.open_session(call.tenant_id, sampler.session_id)
        model = checks.base_model(call, sampler.base_model)
        check_sample(request, model, call.settings)
        appended = await append(call, submitted)
        request_id: str = appended.request_id
    except TinkerError:
        repeated = await find_repeated(call, submitted)
        if repeated is None:
            raise
        request_id = repeated
    return UntypedAPIFuture(
        request_id=RequestId(request_id),
        sample_sequence_ids=sequence_ids(request_id, request.num_samples),
    )
