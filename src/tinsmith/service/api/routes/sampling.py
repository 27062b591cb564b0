"""Samplers: created from base models and checkpoints, joined, shown, and sampled from."""

from __future__ import annotations

import msgspec

from tinsmith.errors import BadRequestError
from tinsmith.service.api import request_checks
from tinsmith.service.api.api_call import ApiCall, Handler
from tinsmith.service.api.submissions import submit_sample
from tinsmith.service.ledger.records import SamplerEntry, SessionId
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.types.requests import CreateSamplingSessionRequest
from tinsmith.types.sampling import (
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    JoinSamplingSessionResponse,
)


async def create_sampling_session(call: ApiCall) -> CreateSamplingSessionResponse:
    """Create a sampler for a base model or a checkpoint; the same one if repeated."""
    request: CreateSamplingSessionRequest = call.request
    number = request.sampling_session_seq_id
    request_checks.check_number("sampling_session_seq_id", number, request_checks.LARGEST_CREATED)
    session = await call.context.lookups.open_session(call.tenant_id, request.session_id)
    sampler = SamplerEntry(
        id=f"{session.id}:sample:{number}",
        tenant_id=call.tenant_id,
        created_at=call.ledger.now(),
        session_id=SessionId(session.id),
        base_model=await _base_model(call, request),
        model_path=request.model_path,
    )
    kept = await call.ledger.entries(SamplerEntry).add(sampler)
    if (kept.base_model, kept.model_path) != (sampler.base_model, sampler.model_path):
        raise BadRequestError(
            f"sampling_session_seq_id {number} was used for another sampler; use each number once"
        )
    return CreateSamplingSessionResponse(sampling_session_id=kept.id)


async def _base_model(call: ApiCall, request: CreateSamplingSessionRequest) -> str:
    if request.model_path is None:
        if request.base_model is None:
            raise BadRequestError("a sampler needs a base_model or a model_path")
        return request_checks.base_model(call, request.base_model).name
    request_checks.check_path(request.model_path)
    saved = await call.context.lookups.readable_checkpoint(call.tenant_id, request.model_path)
    name = str(saved.details.get("base_model", ""))
    return request_checks.base_model(call, name, f"the base model of {request.model_path}").name


async def join_sampling_session(call: ApiCall) -> JoinSamplingSessionResponse:
    """Assign a clone its number. If the answer is lost, a repeated call wastes one number."""
    sampler = await call.context.lookups.sampler(call.tenant_id, call.request.sampling_session_id)
    joined = await call.ledger.entries(SamplerEntry).change(sampler.id, _with_one_more)
    call.context.lookups.forget(sampler)
    return JoinSamplingSessionResponse(client_counter=joined.clones)


def _with_one_more(sampler: SamplerEntry) -> SamplerEntry:
    return msgspec.structs.replace(sampler, clones=sampler.clones + 1)


async def get_sampler(call: ApiCall) -> GetSamplerResponse:
    """What a sampler samples from."""
    sampler = await call.context.lookups.sampler(call.tenant_id, call.request.sampler_id)
    # The paths of unnamed weights are internal.
    is_nameless = sampler.own_files is not None
    base = call.context.base_models.get(sampler.base_model)
    return GetSamplerResponse(
        sampler_id=sampler.id,
        base_model=sampler.base_model,
        model_path=None if is_nameless else sampler.model_path,
        tokenizer_id=None if base is None else base.tokenizer_id,
    )


async def asample(call: ApiCall) -> UntypedAPIFuture:
    """Accept a sample."""
    return await submit_sample(call)


HANDLERS: dict[str, Handler] = {
    "create_sampling_session": create_sampling_session,
    "join_sampling_session": join_sampling_session,
    "get_sampler": get_sampler,
    "asample": asample,
}
