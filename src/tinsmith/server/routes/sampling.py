"""Samplers: made from base models and checkpoints, joined, shown, and sampled from."""

from __future__ import annotations

import msgspec

from tinsmith.errors import BadRequestError
from tinsmith.ledger.records import Sampler, SessionId
from tinsmith.server import checks
from tinsmith.server.call import Call, Handler
from tinsmith.server.samples import submit_sample
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.types.requests import CreateSamplingSessionRequest
from tinsmith.types.sampling import (
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    JoinSamplingSessionResponse,
)


async def create_sampling_session(call: Call) -> CreateSamplingSessionResponse:
    """Make a sampler of a base model or a checkpoint; the same one if asked again."""
    request: CreateSamplingSessionRequest = call.request
    number = request.sampling_session_seq_id
    checks.check_number("sampling_session_seq_id", number, checks.LARGEST_CREATED)
    session = await call.service.lookups.open_session(call.tenant_id, request.session_id)
    sampler = Sampler(
        id=f"{session.id}:sample:{number}",
        tenant_id=call.tenant_id,
        created_at=call.ledger.now(),
        session_id=SessionId(session.id),
        base_model=await _base_model(call, request),
        model_path=request.model_path,
    )
    kept = await call.ledger.entries(Sampler).add(sampler)
    if (kept.base_model, kept.model_path) != (sampler.base_model, sampler.model_path):
        raise BadRequestError(
            f"sampling_session_seq_id {number} was used for another sampler; numbers are used once"
        )
    return CreateSamplingSessionResponse(sampling_session_id=kept.id)


async def _base_model(call: Call, request: CreateSamplingSessionRequest) -> str:
    if request.model_path is None:
        if request.base_model is None:
            raise BadRequestError("a sampler needs a base_model or a model_path")
        return checks.base_model(call, request.base_model).name
    checks.check_path(request.model_path)
    saved = await call.service.lookups.readable_checkpoint(call.tenant_id, request.model_path)
    name = str(saved.details.get("base_model", ""))
    return checks.base_model(call, name, f"the base model of {request.model_path}").name


async def join_sampling_session(call: Call) -> JoinSamplingSessionResponse:
    """Give a clone its number. One whose answer was lost asks again, and its number is unused."""
    sampler = await call.service.lookups.sampler(call.tenant_id, call.request.sampling_session_id)
    joined = await call.ledger.entries(Sampler).change(sampler.id, _with_one_more)
    call.service.lookups.forget(sampler)
    return JoinSamplingSessionResponse(client_counter=joined.clones)


def _with_one_more(sampler: Sampler) -> Sampler:
    return msgspec.structs.replace(sampler, clones=sampler.clones + 1)


async def get_sampler(call: Call) -> GetSamplerResponse:
    """What a sampler samples from."""
    sampler = await call.service.lookups.sampler(call.tenant_id, call.request.sampler_id)
    # Weights that were saved without a name are the service's own affair.
    is_nameless = sampler.own_files is not None
    base = call.parts.base_models.get(sampler.base_model)
    return GetSamplerResponse(
        sampler_id=sampler.id,
        base_model=sampler.base_model,
        model_path=None if is_nameless else sampler.model_path,
        tokenizer_id=None if base is None else base.tokenizer_id,
    )


async def asample(call: Call) -> UntypedAPIFuture:
    """Accept a sample."""
    return await submit_sample(call)


HANDLERS: dict[str, Handler] = {
    "create_sampling_session": create_sampling_session,
    "join_sampling_session": join_sampling_session,
    "get_sampler": get_sampler,
    "asample": asample,
}
