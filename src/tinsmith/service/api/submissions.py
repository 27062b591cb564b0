"""Submissions: checked, appended, answered with a request id.

A submission is answered once the command is durable. The same submission again gets the same
answer, whatever has become of the command or its session meanwhile. A number that is refused for
good is recorded as spent, so that later commands need not wait for it.
"""

from __future__ import annotations

import asyncio

import msgspec

from tinsmith.errors import BadRequestError, CommandConflictError, TinkerError, UnknownEntryError
from tinsmith.observe.log_fields import bind
from tinsmith.service.api import request_checks
from tinsmith.service.api.api_call import ApiCall
from tinsmith.service.api.data_checks import check_sample
from tinsmith.service.api.lookups import Lookups
from tinsmith.service.api.request_decoding import ON_THREAD_BYTES
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.records import (
    LARGEST_NUMBER,
    Appended,
    ModelEntry,
    QueueId,
    RequestId,
    SessionId,
    Submission,
    TenantId,
    request_id,
)
from tinsmith.types.buffers import Memory
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.types.requests import LoadWeightsRequest, SampleRequest
from tinsmith.wire.decode_limits import DecodeLimits
from tinsmith.wire.endpoint_types import Format
from tinsmith.wire.failures import is_retried, status_of
from tinsmith.wire.json_format import decode as decode_json
from tinsmith.wire.proto_format import read_number
from tinsmith.wire.stored import fingerprint, stored_body, stored_request, stored_sample

NUMBERED = frozenset(
    {"forward_backward", "forward", "optim_step", "load_weights"}
    | {"save_weights", "save_weights_for_sampler", "save_weights_external"}
)
"""Commands that have a number in the queue of their model."""


async def submission(
    call: ApiCall,
    queue_id: str,
    seq_id: int | None,
    session_id: str,
    *,
    kind: str | None = None,
    is_ordered: bool = True,
    clone: int | None = None,
) -> Submission:
    """The call as a command of a queue."""
    kind = kind or call.endpoint.name
    if len(call.body) < ON_THREAD_BYTES:
        payload, told_by = _kept(call, kind)
    else:
        payload, told_by = await asyncio.to_thread(_kept, call, kind)
    return Submission(
        queue_id=QueueId(queue_id),
        seq_id=seq_id,
        kind=kind,
        tenant_id=call.tenant_id,
        session_id=SessionId(session_id),
        fingerprint=told_by,
        payload=payload,
        is_ordered=is_ordered,
        clone=clone,
    )


def _kept(call: ApiCall, kind: str) -> tuple[bytes, bytes]:
    """What is stored of a request, and its fingerprint: its body, with two exceptions.

    A sample is encoded again, because it may come in several forms. A token for another tenant's
    checkpoint was used when it was checked, and is not stored.
    """
    request = call.request
    if isinstance(request, SampleRequest):
        return stored_sample(request)
    if isinstance(request, LoadWeightsRequest) and request.weights_access_token is not None:
        request = msgspec.structs.replace(request, weights_access_token=None)
        payload = stored_request(request)
    else:
        payload = stored_body(call.body, call.format)
    return payload, fingerprint(kind, request, payload)


async def append(call: ApiCall, submitted: Submission) -> Appended:
    """Append a checked command, if its tenant has room for it."""
    bind(model=submitted.queue_id, session=submitted.session_id)
    admission, size = call.context.admission, len(submitted.payload)
    await admission.admit(call.tenant_id, size)
    try:
        appended = await call.ledger.append(submitted)
    finally:
        admission.appended(call.tenant_id, size)
    if appended.is_new:
        admission.accepted(call.tenant_id, appended.request_id, size)
    return appended


async def find_repeated(call: ApiCall, submitted: Submission) -> str | None:
    """The request id of the command that this one repeats, if any."""
    if submitted.seq_id is None:
        return None
    known = request_id(submitted.queue_id, submitted.seq_id)
    try:
        command = await call.ledger.command(known)
    except UnknownEntryError:
        return None
    is_same = (command.kind, command.fingerprint) == (submitted.kind, submitted.fingerprint)
    return known if is_same and command.tenant_id == call.tenant_id else None


async def spend(call: ApiCall, submitted: Submission, error: TinkerError) -> None:
    """Record a number as spent, if it was refused for good and no other command has it."""
    number = submitted.seq_id
    is_final = not is_retried(status_of(error)) and not isinstance(error, CommandConflictError)
    if is_final and number is not None and 0 < number <= LARGEST_NUMBER:
        await call.ledger.spend(submitted.queue_id, number)


class _Numbered(msgspec.Struct):
    """The part of a command that says where it belongs."""

    model_id: str
    seq_id: int


_UNLIMITED = DecodeLimits(memory_bytes=2**62, messages=2**62)
"""For a decoder that takes no memory: it skips all fields but two."""


def number_of(body: Memory, form: Format) -> tuple[str, int]:
    """The model and the number of a command that cannot be decoded: it may have a NaN as null.

    Raises:
        DecodeError: Not even these can be decoded.
    """
    if form is Format.PROTOBUF:
        return read_number(body)
    told = decode_json(body, _Numbered, _UNLIMITED)
    return told.model_id, told.seq_id


async def spend_unread(
    lookups: Lookups, ledger: Ledger, tenant_id: TenantId, model_id: str, number: int
) -> None:
    """As `spend`, for a command that cannot be decoded.

    Raises:
        NotFoundError: The tenant has no such model.
    """
    if 0 < number <= LARGEST_NUMBER:
        model = await lookups.model(tenant_id, model_id)
        await ledger.spend(QueueId(model.id), number)


def accepted(appended: Appended | str, model: ModelEntry | None = None) -> UntypedAPIFuture:
    """The answer to a submission."""
    known = appended if isinstance(appended, str) else appended.request_id
    return UntypedAPIFuture(request_id=known, model_id=None if model is None else model.id)


CLONE_NUMBERS = 10**9
"""A clone's samples are numbered from its own number times this."""
KIND = "asample"


def sequence_ids(request_id: str, count: int) -> list[str]:
    """The ids of a sample's sequences; they follow from its request id."""
    return [f"{request_id}:s{number}" for number in range(count)]


async def submit_sample(call: ApiCall) -> UntypedAPIFuture:
    """Accept the sample that a call asks for; the same one again gets the same answer.

    Raises:
        TinkerError: It is refused; nothing was appended.
    """
    request: SampleRequest = call.request
    if request.sampling_session_id is None:
        raise BadRequestError(
            "sampling_session_id is missing; create a sampler with create_sampling_session first"
        )
    if request.seq_id is not None:
        request_checks.check_number("seq_id", request.seq_id)
    lookups = call.context.lookups
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
        model = request_checks.base_model(call, sampler.base_model)
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
