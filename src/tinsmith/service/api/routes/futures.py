"""Long polls for one result or for the completed samples of a sampler, and cancellation."""

from __future__ import annotations

from tinsmith.errors import BadRequestError, RequestErrorCategory, ResultGoneError
from tinsmith.service.api.api_call import ApiCall, Handler
from tinsmith.service.api.long_polls import told_completions
from tinsmith.service.ledger.records import Command, Completion, Settlement
from tinsmith.types.futures import (
    FutureCompletion,
    FutureFailed,
    FutureFinished,
    FuturesRetrieveResponse,
    MetadataOnlyResponse,
    RequestFailedResponse,
    TryAgainResponse,
)
from tinsmith.types.record import Record
from tinsmith.types.requests import (
    FutureCancelRequest,
    FutureRetrieveRequest,
    FuturesRetrieveRequest,
)
from tinsmith.wire.content import accepts_protobuf
from tinsmith.wire.endpoint_types import Format
from tinsmith.wire.exchange import HttpReply, to_reply
from tinsmith.wire.stored import result_body, stored_failure

_PENDING = 408
"""Clients poll again after this status without logging it."""


async def retrieve_future(call: ApiCall) -> Record | HttpReply:
    """The result once there is one, or after a while that it is pending."""
    request: FutureRetrieveRequest = call.request
    lookups = call.context.lookups
    waiting = lookups.settled_command(
        call.tenant_id, request.request_id, timeout_s=call.settings.long_poll_s
    )
    command = await call.context.long_polls.until(waiting, call)
    if command is None:
        command = await lookups.command(call.tenant_id, request.request_id)
    if not command.is_settled:
        return _not_yet(call, command)
    call.context.admission.settled(call.tenant_id, command.request_id)
    return await _finished(call, command, allow_metadata_only=request.allow_metadata_only)


async def _finished(
    call: ApiCall, command: Command, *, allow_metadata_only: bool
) -> Record | HttpReply:
    size = command.result_bytes - 1  # without the letter of its format
    is_large = size > call.settings.inline_bytes
    if allow_metadata_only and is_large and not command.is_failed and not command.is_gone:
        return MetadataOnlyResponse(response_payload_size=size)
    result = await call.ledger.result(command.request_id)
    if result is None:
        raise ResultGoneError(f"the result of {command.request_id} has been deleted")
    wanted = Format.PROTOBUF if accepts_protobuf(call.headers.get("accept")) else Format.JSON
    written, body = result_body(command.kind, result.payload, wanted)
    return HttpReply(200, {"Content-Type": written.value}, [body])


def _not_yet(call: ApiCall, command: Command) -> HttpReply:
    queue = call.ledger.board.queue_state(command.queue_id)
    told = TryAgainResponse(
        request_id=command.request_id,
        queue_state=queue.state,
        queue_state_reason=queue.reason,
        retry_after_ms=None if queue.retry_after_s is None else queue.retry_after_s * 1000,
    )
    reply = to_reply(told)
    return HttpReply(_PENDING, reply.headers, reply.parts)


async def retrieve_futures(call: ApiCall) -> FuturesRetrieveResponse:
    """Completed samples, as soon as there are any."""
    request: FuturesRetrieveRequest = call.request
    found = await told_completions(call, request)
    return FuturesRetrieveResponse(
        completions=[_completion(entry) for entry in found],
        cursor=found[-1].cursor if found else request.prev_cursor,
    )


def _completion(entry: Completion) -> FutureCompletion:
    if entry.is_failed:
        return FutureFailed(request_id=entry.request_id)
    return FutureFinished(
        request_id=entry.request_id, response_payload_uncompressed_size=entry.result_bytes - 1
    )


async def cancel_future(call: ApiCall) -> None:
    """Fail a sample that has not ended, and free its resources.

    Commands of a model cannot be cancelled: later ones depend on them.
    """
    request: FutureCancelRequest = call.request
    command = await call.context.lookups.command(call.tenant_id, request.request_id)
    if command.is_ordered:
        raise BadRequestError(f"{command.kind} cannot be cancelled; only samples can")
    failure = RequestFailedResponse(
        error=f"{command.request_id} was cancelled by its client",
        category=RequestErrorCategory.User,
    )
    await call.ledger.cancel(
        Settlement(request_id=command.request_id, payload=stored_failure(failure), is_failed=True)
    )
    call.context.admission.settled(call.tenant_id, command.request_id)


HANDLERS: dict[str, Handler] = {
    "retrieve_future": retrieve_future,
    "retrieve_futures": retrieve_futures,
    "cancel_future": cancel_future,
}
