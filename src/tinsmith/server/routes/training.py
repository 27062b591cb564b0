"""Models, and the commands submitted to them."""

from __future__ import annotations

import asyncio

from tinsmith.engines.base import BaseModel
from tinsmith.errors import BadRequestError, NotFoundError, TinkerError
from tinsmith.ledger.model_config import read_config, read_optimizer, write_config
from tinsmith.ledger.records import CheckpointEntry, CustomLoss, Model, SessionId, TenantId
from tinsmith.server import checks, data_checks
from tinsmith.server.call import Call, Handler
from tinsmith.server.intake import accepted, append, find_repeated, spend, submission
from tinsmith.server.loss_graphs import check_custom_loss
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.types.record import to_plain
from tinsmith.types.requests import (
    CreateCustomLossRequest,
    CreateModelRequest,
    ForwardBackwardRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinsmith.types.training import GetInfoResponse, LoraConfig, ModelData, OptimizerConfig

DEFAULT_RANK = 32
_CHECK_ASIDE_BYTES = 512 * 1024


# Making models


async def create_model(call: Call) -> UntypedAPIFuture:
    """Make a model with a fresh adapter."""
    request: CreateModelRequest = call.request
    base = checks.base_model(call, request.base_model)
    lora = request.lora_config or LoraConfig(rank=min(DEFAULT_RANK, base.max_rank))
    checks.check_lora(base, lora)
    return await _create(call, base, lora, request.optimizer_config)


async def load_weights(call: Call) -> UntypedAPIFuture:
    """Load a checkpoint into a model, or make a model of it."""
    request: LoadWeightsRequest = call.request
    if request.model_id is not None:
        return await submit(call)
    if request.session_id is None or request.model_seq_id is None:
        raise BadRequestError("load_weights names a model_id, or session_id and model_seq_id")
    checks.check_path(request.path)
    saved = await _readable(call, request)
    lora, optimizer = read_config(saved.details)
    name = str(saved.details.get("base_model", ""))
    if request.base_model and not checks.is_same_model(call, request.base_model, name):
        raise checks.refuse("base_model", request.base_model, f"{request.path} is of {name}")
    base = checks.base_model(call, name, f"the base model of {request.path}")
    checks.check_lora(base, lora)
    return await _create(call, base, lora, request.optimizer_config or optimizer)


async def _create(
    call: Call, base: BaseModel, lora: LoraConfig, optimizer: OptimizerConfig
) -> UntypedAPIFuture:
    """Number 0 of a new line. The entry comes first: recovery finds models by their entries."""
    request: CreateModelRequest | LoadWeightsRequest = call.request
    number = request.model_seq_id or 0
    checks.check_number("model_seq_id", number, checks.LARGEST_CREATED)
    checks.check_optimizer(optimizer)
    checks.check_metadata("user_metadata", request.user_metadata)
    lookups = call.service.lookups
    session = await lookups.session(call.tenant_id, request.session_id or "")
    line = f"{session.id}:train:{number}"
    submitted = await submission(call, line, 0, session.id)
    try:
        await lookups.open_session(call.tenant_id, session.id)
        model = Model(
            id=line,
            tenant_id=call.tenant_id,
            created_at=call.ledger.now(),
            session_id=SessionId(session.id),
            base_model=base.name,
            config=write_config(lora, optimizer),
            user_metadata=request.user_metadata,
        )
        quotas = call.service.quotas
        async with quotas.turn(call.tenant_id):
            # It is there if this is a second try: the first may have been refused behind it.
            if await call.ledger.entries(Model).get(line) is None:
                await quotas.check_models(call.tenant_id)
            await call.ledger.entries(Model).add(model)
        answer = accepted(await append(call, submitted), model)
        # If the session has ended meanwhile, whoever ended it may have looked before it was there.
        await call.service.sessions.release_if_ended(model)
        return answer
    except TinkerError:
        repeated = await find_repeated(call, submitted)
        if repeated is None:
            raise
        return UntypedAPIFuture(request_id=repeated, model_id=line)


async def _readable(call: Call, request: LoadWeightsRequest) -> CheckpointEntry:
    """The checkpoint that is to be loaded, which may be another tenant's if it agreed."""
    also_of: TenantId | None = None
    if request.weights_access_token is not None:
        holder = await call.service.credentials.holder(request.weights_access_token)
        also_of = holder.tenant.tenant_id
    return await call.service.lookups.readable_checkpoint(
        call.tenant_id, request.path, also_of=also_of
    )


# Commands of a model


async def submit(call: Call) -> UntypedAPIFuture:
    """Put a command into its model's line."""
    model = await call.service.lookups.model(call.tenant_id, call.request.model_id)
    number = getattr(call.request, "seq_id", None) or None  # 0 stands for none
    if number is not None:
        checks.check_number("seq_id", number)
    submitted = await submission(call, model.id, number, model.session_id)
    try:
        await call.service.lookups.open_session(call.tenant_id, model.session_id)
        await _check(call, model)
        return accepted(await append(call, submitted), model)
    except TinkerError as exc:
        # A retry of what was accepted gets its answer, whatever became of the model since.
        repeated = await find_repeated(call, submitted)
        if repeated is None:
            await spend(call, submitted, exc)
            raise
        return accepted(repeated, model)


async def _check(call: Call, model: Model) -> None:
    request = call.request
    if isinstance(request, ForwardBackwardRequest):
        await _check_pass(call, model)
    elif isinstance(request, OptimStepRequest):
        checks.check_step(request, read_optimizer(model.config))
    elif isinstance(request, LoadWeightsRequest):
        await _check_load(call, model)
    elif isinstance(
        request, SaveWeightsRequest | SaveWeightsForSamplerRequest | SaveWeightsExternalRequest
    ):
        checks.check_save(model.id, request)
        await call.service.quotas.check_storage(call.tenant_id)


async def _check_pass(call: Call, model: Model) -> None:
    given = call.request.forward_backward_input
    base = checks.base_model(call, model.base_model)
    if len(call.body) < _CHECK_ASIDE_BYTES:
        loss_id = data_checks.check_pass(given, base, call.settings)
    else:
        loss_id = await asyncio.to_thread(data_checks.check_pass, given, base, call.settings)
    if loss_id is not None:
        await _check_custom(call, model, loss_id)


async def _check_custom(call: Call, model: Model, loss_id: str) -> None:
    """A custom loss is of the model's own session, and its inputs are there."""
    loss = await call.service.lookups.custom_loss(call.tenant_id, loss_id)
    if loss.session_id != model.session_id:
        raise NotFoundError(f"there is no custom loss {loss_id!r:.200}")
    names = [str(given["name"]) for given in loss.graph["inputs"][1:]]
    for index, datum in enumerate(call.request.forward_backward_input.data):
        missing = [name for name in names if name not in datum.loss_fn_inputs]
        if missing:
            raise BadRequestError(
                f"data[{index}].loss_fn_inputs has no {', '.join(missing)}, which loss "
                f"{loss.name!r:.80} needs"
            )


async def _check_load(call: Call, model: Model) -> None:
    request: LoadWeightsRequest = call.request
    path = checks.check_path(request.path)
    try:
        saved = await _readable(call, request)
    except NotFoundError:
        # It may be one that a command before this one is to save.
        run = await call.service.lookups.model(call.tenant_id, path.training_run_id)
        base = run.base_model
    else:
        base = str(saved.details.get("base_model", model.base_model))
    if not checks.is_same_model(call, base, model.base_model):
        raise checks.refuse("path", request.path, f"it is of {base}, not of {model.base_model}")


# Losses


async def create_custom_loss(call: Call) -> UntypedAPIFuture:
    """Keep an uploaded loss; it can be used in its session."""
    request: CreateCustomLossRequest = call.request
    checks.check_number("custom_loss_seq_id", request.custom_loss_seq_id, checks.LARGEST_CREATED)
    checks.check_texts(("name", request.name))
    check_custom_loss(request)
    lookups = call.service.lookups
    session = await lookups.session(call.tenant_id, request.session_id)
    line = f"{session.id}:loss"
    submitted = await submission(
        call, line, request.custom_loss_seq_id, session.id, is_ordered=False
    )
    try:
        await lookups.open_session(call.tenant_id, session.id)
        loss = CustomLoss(
            id=f"{line}:{request.custom_loss_seq_id}",
            tenant_id=call.tenant_id,
            created_at=call.ledger.now(),
            session_id=SessionId(session.id),
            name=request.name,
            graph={"inputs": to_plain(request.inputs), "graph": to_plain(request.graph)},
        )
        await call.ledger.entries(CustomLoss).add(loss)
        return accepted(await append(call, submitted))
    except TinkerError:
        repeated = await find_repeated(call, submitted)
        if repeated is None:
            raise
        return accepted(repeated)


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
    "load_weights": load_weights,
    "forward_backward": submit,
    "forward": submit,
    "optim_step": submit,
    "save_weights": submit,
    "save_weights_for_sampler": submit,
    "save_weights_external": submit,
    "unload_model": submit,
    "create_custom_loss": create_custom_loss,
    "get_info": get_info,
}
