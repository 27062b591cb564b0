"""Submissions: checked, appended, answered with a request id.

An answer is given only when the command is durable. The same submission again gets the first
answer again, whatever has become of the command or its session meanwhile. A number that is refused
for good is noted as spent, so that what comes after it need not wait for it.
"""

from __future__ import annotations

import asyncio

import msgspec

from tinsmith.errors import CommandConflictError, TinkerError, UnknownEntryError
from tinsmith.ledger.base import Ledger
from tinsmith.ledger.records import (
    LARGEST_NUMBER,
    Appended,
    LineId,
    Model,
    SessionId,
    Submission,
    TenantId,
    request_id,
)
from tinsmith.observe.log_fields import bind
from tinsmith.server.call import Call
from tinsmith.server.lookups import Lookups
from tinsmith.types.buffers import Memory
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.types.requests import LoadWeightsRequest, SampleRequest
from tinsmith.wire.endpoint_types import Format
from tinsmith.wire.failures import is_retried, status_of
from tinsmith.wire.json_format import decode as decode_json
from tinsmith.wire.limits import DecodeLimits
from tinsmith.wire.proto_format import read_number
from tinsmith.wire.stored import fingerprint, stored_body, stored_request, stored_sample

NUMBERED = frozenset(
    {"forward_backward", "forward", "optim_step", "load_weights"}
    | {"save_weights", "save_weights_for_sampler", "save_weights_external"}
)
"""Commands that have a number in the line of their model."""
_ASIDE_BYTES = 512 * 1024
"""Larger bodies are written and digested on a thread."""


async def submission(
    call: Call,
    line: str,
    seq_id: int | None,
    session_id: str,
    *,
    kind: str | None = None,
    is_ordered: bool = True,
    clone: int | None = None,
) -> Submission:
    """The call as a command of a line."""
    kind = kind or call.endpoint.name
    if len(call.body) < _ASIDE_BYTES:
        payload, told_by = _kept(call, kind)
    else:
        payload, told_by = await asyncio.to_thread(_kept, call, kind)
    return Submission(
        line=LineId(line),
        seq_id=seq_id,
        kind=kind,
        tenant_id=call.tenant_id,
        session_id=SessionId(session_id),
        fingerprint=told_by,
        payload=payload,
        is_ordered=is_ordered,
        clone=clone,
    )


def _kept(call: Call, kind: str) -> tuple[bytes, bytes]:
    """What is kept of a request, and its fingerprint: its body, with two exceptions.

    A sample is written anew, because it may come in several forms. A token that opens another
    tenant's checkpoint was used when it was checked, and is not kept.
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


async def append(call: Call, submitted: Submission) -> Appended:
    """Append a command that was checked, if its tenant has room for it."""
    bind(model=submitted.line, session=submitted.session_id)
    admission, size = call.service.admission, len(submitted.payload)
    await admission.admit(call.tenant_id, size)
    try:
        appended = await call.ledger.append(submitted)
    finally:
        admission.appended(call.tenant_id, size)
    if appended.is_new:
        admission.accepted(call.tenant_id, appended.request_id, size)
    return appended


async def find_repeated(call: Call, submitted: Submission) -> str | None:
    """The request id of the command that this repeats, if it does."""
    if submitted.seq_id is None:
        return None
    known = request_id(submitted.line, submitted.seq_id)
    try:
        command = await call.ledger.command(known)
    except UnknownEntryError:
        return None
    is_same = (command.kind, command.fingerprint) == (submitted.kind, submitted.fingerprint)
    return known if is_same and command.tenant_id == call.tenant_id else None


async def spend(call: Call, submitted: Submission, error: TinkerError) -> None:
    """Note that a number was refused, if it was refused for good and is nobody else's."""
    number = submitted.seq_id
    is_final = not is_retried(status_of(error)) and not isinstance(error, CommandConflictError)
    if is_final and number is not None and 0 < number <= LARGEST_NUMBER:
        await call.ledger.spend(submitted.line, number)


class _Numbered(msgspec.Struct):
    """As much of a command as says whose it is."""

    model_id: str
    seq_id: int


_UNLIMITED = DecodeLimits(memory_bytes=2**62, messages=2**62)
"""For what takes no memory: all fields but two are passed over."""


def number_of(body: Memory, form: Format) -> tuple[str, int]:
    """The model and the number of a command that cannot be read: a NaN is sent as null, say.

    Raises:
        DecodeError: Not even that much can be.
    """
    if form is Format.PROTOBUF:
        return read_number(body)
    told = decode_json(body, _Numbered, _UNLIMITED)
    return told.model_id, told.seq_id


async def spend_unread(
    lookups: Lookups, ledger: Ledger, tenant_id: TenantId, model_id: str, number: int
) -> None:
    """As `spend`, for a command that cannot be read.

    Raises:
        NotFoundError: The model is none of the tenant's.
    """
    if 0 < number <= LARGEST_NUMBER:
        model = await lookups.model(tenant_id, model_id)
        await ledger.spend(LineId(model.id), number)


def accepted(appended: Appended | str, model: Model | None = None) -> UntypedAPIFuture:
    """What a submission is answered with."""
    known = appended if isinstance(appended, str) else appended.request_id
    return UntypedAPIFuture(request_id=known, model_id=None if model is None else model.id)
