"""The news of one sampler and clone, as both kinds of polls for it ask."""

from __future__ import annotations

from tinsmith.errors import BadRequestError
from tinsmith.ledger.records import LARGEST_NUMBER, Completion, LineId
from tinsmith.server.call import Call
from tinsmith.types.extensions import ResultsRetrieveRequest
from tinsmith.types.requests import FuturesRetrieveRequest


async def told_completions(
    call: Call, request: FuturesRetrieveRequest | ResultsRetrieveRequest
) -> list[Completion]:
    """Let go of the results that the client has; then what ended since, as soon as there is some.

    Ids of other samplers, and so of other tenants, are passed by.
    """
    target, cursor = request.target, request.prev_cursor
    if not 0 <= cursor <= LARGEST_NUMBER:
        raise BadRequestError(f"prev_cursor is {cursor}; it may be 0 to {LARGEST_NUMBER}")
    if not 0 <= target.cloned_sampler_id <= LARGEST_NUMBER:
        raise BadRequestError(f"cloned_sampler_id may be 0 to {LARGEST_NUMBER}")
    sampler = await call.service.lookups.sampler(call.tenant_id, target.sampling_session_id)
    own = f"{sampler.id}:"
    retrieved = [known for known in request.retrieved_request_ids if known.startswith(own)]
    if retrieved:
        await call.ledger.acknowledge(retrieved)
    line, clone = LineId(sampler.id), target.cloned_sampler_id
    found = await call.ledger.completions(line, clone, after=cursor)
    if not found:
        waiting = call.ledger.wait_completions(
            line, clone, after=cursor, timeout_s=_timeout_s(call, request.timeout)
        )
        found = await call.service.waits.until(waiting, call) or []
    for entry in found:
        call.service.admission.settled(call.tenant_id, entry.request_id)
    return found


def _timeout_s(call: Call, asked: float | None) -> float:
    longest = call.settings.long_poll_s
    return longest if asked is None else max(0.0, min(asked, longest))
