"""Many samples in one request, and their results in one answer; docs/extensions.md says how.

Streams of tokens are in `streams.py`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from tinsmith.errors import (
    BadRequestError,
    BodyTooLargeError,
    NotFoundError,
    ResultGoneError,
    TinkerError,
)
from tinsmith.service.api.api_call import ApiCall, Handler
from tinsmith.service.api.long_polls import told_completions
from tinsmith.service.api.submissions import KIND, submit_sample
from tinsmith.service.ledger.records import Completion, QueueId
from tinsmith.types import extensions as x
from tinsmith.types.buffers import Memory
from tinsmith.types.requests import SampleRequest
from tinsmith.wire.endpoint_types import Format
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import request_from_fields
from tinsmith.wire.failures import reply_from_error, retry_after_s, status_of
from tinsmith.wire.stored import read_failure, result_body

MOST_LINGER_S = 0.1


def offered(call: ApiCall, flag: int | bool) -> None:
    """Raise a 404, as any other service would, if this one does not offer a route."""
    if not flag:
        raise NotFoundError(f"there is no {call.endpoint.method} {call.endpoint.path}")


def check_identity(request: SampleRequest) -> None:
    """Check that a sample has an identity: on our own routes it may be repeated by another one."""
    if request.sampling_session_id is None or request.seq_id is None:
        raise BadRequestError("sampling_session_id and seq_id are required here")


# Many samples in one request


async def asample_many(call: ApiCall) -> x.SampleManyResponse:
    """Accept or refuse each sample independently of the others."""
    settings, samples = call.settings, call.request.samples
    offered(call, settings.batch_items)
    if not samples:
        raise BadRequestError("samples is empty")
    if len(samples) > settings.batch_items:
        raise BodyTooLargeError(
            f"the request has {len(samples)} samples; the maximum is {settings.batch_items}"
        )
    if len(call.body) > settings.batch_bytes:
        raise BodyTooLargeError(
            f"the body has {len(call.body)} bytes; the maximum is {settings.batch_bytes}"
        )
    # Together, so that they share a commit.
    items = await asyncio.gather(*(_item(call, fields) for fields in samples))
    return x.SampleManyResponse(items=items)


async def _item(call: ApiCall, fields: dict[str, Any]) -> x.SampleManyItem:
    try:
        request = request_from_fields(ENDPOINTS[KIND], fields)
        check_identity(request)
        accepted = await submit_sample(dataclasses.replace(call, request=request))
    except TinkerError as exc:
        delay_s = retry_after_s(
            {name.lower(): value for name, value in reply_from_error(exc).headers.items()}
        )
        return x.SampleManyItem(
            status=status_of(exc),
            detail=str(exc),
            retry_after_ms=None if delay_s is None else delay_s * 1000,
        )
    return x.SampleManyItem(
        request_id=accepted.request_id, sample_sequence_ids=accepted.sample_sequence_ids
    )


# Results in the poll, and many at once


async def retrieve_results(call: ApiCall) -> x.ResultsRetrieveResponse:
    """Completed samples as soon as there are any, with small results included."""
    request: x.ResultsRetrieveRequest = call.request
    offered(call, call.settings.answer_inline_bytes)
    if len(request.retrieved_request_ids) > x.MOST_REPORTED:
        raise BodyTooLargeError(f"at most {x.MOST_REPORTED} results can be reported at once")
    found = await told_completions(call, request, tells_holds=True)
    target = request.target
    queue_id = QueueId(target.sampling_session_id)
    if found and request.linger_ms > 0:
        await asyncio.sleep(min(request.linger_ms / 1000, MOST_LINGER_S))
        found = await call.ledger.completions(
            queue_id, target.cloned_sampler_id, after=request.prev_cursor
        )
    completions, cursor = await _carried(call, found)
    queue = call.ledger.board.queue_state(queue_id)
    call.context.reported_pauses.tell(queue_id, target.cloned_sampler_id, queue)
    return x.ResultsRetrieveResponse(
        completions=completions,
        cursor=cursor,
        queue_state=queue.state,
        queue_state_reason=queue.reason,
        retry_after_ms=None if queue.retry_after_s is None else queue.retry_after_s * 1000,
    )


async def _carried(call: ApiCall, found: list[Completion]) -> tuple[list[x.ResultCompletion], int]:
    """The completions with small results, as many as fit, and the cursor of the last."""
    request: x.ResultsRetrieveRequest = call.request
    largest = min(request.inline_bytes, call.settings.answer_inline_bytes)
    left_bytes, cursor = request.answer_bytes, request.prev_cursor
    completions: list[x.ResultCompletion] = []
    for entry in found:
        completion = await _completion(call, entry, largest)
        if isinstance(completion, x.ResultFinished) and completion.payload is not None:
            left_bytes -= len(completion.payload)
            if left_bytes < 0 and completions:
                break
        completions.append(completion)
        cursor = entry.cursor
    return completions, cursor


async def _completion(call: ApiCall, entry: Completion, largest: int) -> x.ResultCompletion:
    size = entry.result_bytes - 1  # without the letter of its format
    if not entry.is_failed and size > largest:
        return x.ResultFinished(
            request_id=entry.request_id, response_payload_uncompressed_size=size
        )
    result = await _result(call, entry.request_id)
    if isinstance(result, x.ResultFinished | x.ResultFailed):
        return result
    if entry.is_failed:
        return x.ResultFailed(request_id=entry.request_id)
    return x.ResultFinished(request_id=entry.request_id, response_payload_uncompressed_size=size)


async def fetch_results(call: ApiCall) -> x.ResultsFetchResponse:
    """The results that exist, as many as fit into an answer."""
    request: x.ResultsFetchRequest = call.request
    offered(call, call.settings.answer_inline_bytes)
    if len(request.request_ids) > x.MOST_FETCHED:
        raise BodyTooLargeError(f"at most {x.MOST_FETCHED} results can be fetched at once")
    results: list[x.FetchedResult] = []
    left_bytes = request.answer_bytes
    for request_id in request.request_ids:
        result = await _own_result(call, request_id)
        if isinstance(result, x.ResultFinished):
            left_bytes -= len(result.payload or b"")
        if left_bytes < 0 and results:
            break
        results.append(result)
    return x.ResultsFetchResponse(results=results)


async def _own_result(call: ApiCall, request_id: str) -> x.FetchedResult:
    try:
        command = await call.context.lookups.command(call.tenant_id, request_id)
    except NotFoundError:
        return x.ResultUnknown(request_id=request_id)
    if command.kind != KIND:
        return x.ResultUnknown(request_id=request_id)
    return await _result(call, request_id)


async def _result(call: ApiCall, request_id: str) -> x.FetchedResult:
    """The result of a sample of this tenant."""
    try:
        result = await call.ledger.result(request_id)
    except ResultGoneError:
        return x.ResultGone(request_id=request_id)
    if result is None:
        return x.ResultPending(request_id=request_id)
    if result.is_failed:
        failure = read_failure(result.payload)
        return x.ResultFailed(
            request_id=request_id, error=failure.error, category=failure.category.value
        )
    payload = sample_payload(result.payload)
    return x.ResultFinished(
        request_id=request_id,
        response_payload_uncompressed_size=len(payload),
        payload=bytes(payload),
    )


def sample_payload(kept: Memory) -> Memory:
    """A stored sample as the protobuf message that clients read."""
    return result_body(KIND, kept, Format.PROTOBUF)[1]


HANDLERS: dict[str, Handler] = {
    "asample_many": asample_many,
    "retrieve_results": retrieve_results,
    "fetch_results": fetch_results,
}
