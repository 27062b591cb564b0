"""Models, and the commands submitted to them."""

from __future__ import annotations

from tinsmith.errors import TinkerError
from tinsmith.ledger.model_config import read_config, write_config
from tinsmith.ledger.records import Model, SessionId
from tinsmith.server import checks
from tinsmith.server.call import Call, Handler
from tinsmith.server.intake import accepted, append, find_repeated, spend, submission
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.types.requests import CreateModelRequest
from tinsmith.types.training import GetInfoResponse, LoraConfig, ModelData

DEFAULT_RANK = 32


async def create_model(call: Call) -> UntypedAPIFuture:
    """Make a model with a fresh adapter: number 0 of its line."""
    request: CreateModelRequest = call.request
    checks.check_number("model_seq_id", request.model_seq_id, checks.LARGEST_CREATED)
    session = await call.service.lookups.session(call.tenant_id, request.session_id)
    line = f"{session.id}:train:{request.model_seq_id}"
    submitted = submission(call, line, 0, session.id)
    try:
        await call.service.lookups.open_session(call.tenant_id, session.id)
        base = checks.base_model(call, request.base_model)
        lora = request.lora_config or LoraConfig(rank=min(DEFAULT_RANK, base.max_rank))
        checks.check_lora(base, lora)
        checks.check_metadata("user_metadata", request.user_metadata)
        await call.service.admission.check_models(call.tenant_id)
        model = Model(
            id=line,
            tenant_id=call.tenant_id,
            created_at=call.ledger.now(),
            session_id=SessionId(session.id),
            base_model=base.name,
            config=write_config(lora, request.optimizer_config),
            user_metadata=request.user_metadata,
        )
        model = await call.ledger.entries(Model).add(model)
        return accepted(await append(call, submitted), model)
    except TinkerError:
        repeated = await find_repeated(call, submitted)
        if repeated is None:
            raise
        return accepted(repeated)


async def submit(call: Call) -> UntypedAPIFuture:
    """Put a command into its model's line."""
    model = await call.service.lookups.model(call.tenant_id, call.request.model_id)
    number = getattr(call.request, "seq_id", None) or None  # 0 stands for none
    submitted = submission(call, model.id, number, model.session_id)
    try:
        await call.service.lookups.open_session(call.tenant_id, model.session_id)
        return accepted(await append(call, submitted), model)
    except TinkerError as exc:
        repeated = await find_repeated(call, submitted)
        if repeated is None:
            await spend(call, submitted, exc)
            raise
        return accepted(repeated, model)


async def get_info(call: Call) -> GetInfoResponse:
    """What a model is, and by what a client finds its tokenizer."""
    model = await call.service.lookups.model(call.tenant_id, call.request.model_id)
    lora, optimizer = read_config(model.config)
    base = call.parts.base_models.get(model.base_model)
    return GetInfoResponse(
        type="get_info",
        model_data=ModelData(
            arch=None if base is None else base.architecture,
            model_name=model.base_model,
            tokenizer_id=(base and base.tokenizer_id) or model.base_model,
        ),
        model_id=model.id,
        optimizer_config=optimizer,
        is_lora=True,
        lora_rank=lora.rank,
        model_name=model.base_model,
    )


HANDLERS: dict[str, Handler] = {
    "create_model": create_model,
    "forward_backward": submit,
    "forward": submit,
    "optim_step": submit,
    "get_info": get_info,
}
