"""Models, and the commands submitted to them."""

from __future__ import annotations

import asyncio

from tinsmith.engine.base import BaseModel
from tinsmith.errors import BadRequestError, NotFoundError, TinkerError
from tinsmith.service.api import data_checks, request_checks
from tinsmith.service.api.api_call import ApiCall, Handler
from tinsmith.service.api.loss_graphs import check_custom_loss
from tinsmith.service.api.request_decoding import ON_THREAD_BYTES
from tinsmith.service.api.submissions import accepted, append, find_repeated, spend, submission
from tinsmith.service.ledger.model_config import read_config, read_optimizer, write_config
from tinsmith.service.ledger.records import (
    CheckpointEntry,
    CustomLossEntry,
    ModelEntry,
    SessionId,
    TenantId,
)
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


# Creating models


async def create_model(call: ApiCall) -> UntypedAPIFuture:
    """Create a model with a new adapter."""
    request: CreateModelRequest = call.request
    base = request_checks.base_model(call, request.base_model)
    lora = request.lora_config or LoraConfig(rank=min(DEFAULT_RANK, base.max_rank))
    request_checks.check_lora(base, lora)
    return await _create(call, base, lora, request.optimizer_config)


async def load_weights(call: ApiCall) -> UntypedAPIFuture:
    """Load a checkpoint into a model, or create a model from it."""
    request: LoadWeightsRequest = call.request
    if request.model_id is not None:
        return await submit(call)
    if request.session_id is None or request.model_seq_id is None:
        raise BadRequestError("load_weights needs a model_id, or a session_id and model_seq_id")
    request_checks.check_path(request.path)
    saved = await _readable(call, request)
    lora, optimizer = read_config(saved.details)
    name = str(saved.details.get("base_model", ""))
    if request.base_model and not request_checks.is_same_model(call, request.base_model, name):
        raise request_checks.refuse(
            "base_model", request.base_model, f"{request.path} was trained on {name}"
        )
    base = request_checks.base_model(call, name, f"the base model of {request.path}")
    request_checks.check_lora(base, lora)
    return await _create(call, base, lora, request.optimizer_config or optimizer)


async def _create(
    call: ApiCall, base: BaseModel, lora: LoraConfig, optimizer: OptimizerConfig
) -> UntypedAPIFuture:
    """Number 0 of a new queue. The entry comes first: recovery finds models by their entries."""
    request: CreateModelRequest | LoadWeightsRequest = call.request
    number = request.model_seq_id or 0
    request_checks.check_number("model_seq_id", number, request_checks.LARGEST_CREATED)
    request_checks.check_optimizer(optimizer)
    request_checks.check_metadata("user_metadata", request.user_metadata)
    lookups = call.context.lookups
    session = await lookups.session(call.tenant_id, request.session_id or "")
    queue_id = f"{session.id}:train:{number}"
    submitted = await submission(call, queue_id, 0, session.id)
    try:
        await lookups.open_session(call.tenant_id, session.id)
        model = ModelEntry(
            id=queue_id,
            tenant_id=call.tenant_id,
            created_at=call.ledger.now(),
            session_id=SessionId(session.id),
            base_model=base.name,
            config=write_config(lora, optimizer),
            user_metadata=request.user_metadata,
        )
        quotas = call.context.quotas
        async with quotas.turn(call.tenant_id):
            # In a retry it exists: the first attempt may have been refused after adding it.
            if await call.ledger.entries(ModelEntry).get(queue_id) is None:
                await quotas.check_models(call.tenant_id)
            await call.ledger.entries(ModelEntry).add(model)
        answer = accepted(await append(call, submitted), model)
        # If the session ended meanwhile, that may have missed the new model.
        await call.context.sessions.release_if_ended(model)
        return answer
    except TinkerError:
        repeated = await find_repeated(call, submitted)
        if repeated is None:
            raise
        return UntypedAPIFuture(request_id=repeated, model_id=queue_id)


async def _readable(call: ApiCall, request: LoadWeightsRequest) -> CheckpointEntry:
    """The checkpoint to load, which may be another tenant's with its consent."""
    also_of: TenantId | None = None
    if request.weights_access_token is not None:
        holder = await call.context.authenticator.holder(request.weights_access_token)
        also_of = holder.tenant.tenant_id
    return await call.context.lookups.readable_checkpoint(
        call.tenant_id, request.path, also_of=also_of
    )


# Commands of a model


async def submit(call: ApiCall) -> UntypedAPIFuture:
    """Append a command to its model's queue."""
    model = await call.context.lookups.model(call.tenant_id, call.request.model_id)
    number = getattr(call.request, "seq_id", None) or None  # 0 means none
    if number is not None:
        request_checks.check_number("seq_id", number)
    submitted = await submission(call, model.id, number, model.session_id)
    try:
        await call.context.lookups.open_session(call.tenant_id, model.session_id)
        await _check(call, model)
        return accepted(await append(call, submitted), model)
    except TinkerError as exc:
        # A retry of an accepted command gets its answer, whatever became of the model since.
        repeated = await find_repeated(call, submitted)
        if repeated is None:
            await spend(call, submitted, exc)
            raise
        return accepted(repeated, model)


async def _check(call: ApiCall, model: ModelEntry) -> None:
    request = call.request
    if isinstance(request, ForwardBackwardRequest):
        await _check_pass(call, model)
    elif isinstance(request, OptimStepRequest):
        request_checks.check_step(request, read_optimizer(model.config))
    elif isinstance(request, LoadWeightsRequest):
        await _check_load(call, model)
    elif isinstance(
        request, SaveWeightsRequest | SaveWeightsForSamplerRequest | SaveWeightsExternalRequest
    ):
        request_checks.check_save(model.id, request)
        await call.context.quotas.check_storage(call.tenant_id)


async def _check_pass(call: ApiCall, model: ModelEntry) -> None:
    given = call.request.forward_backward_input
    base = request_checks.base_model(call, model.base_model)
    if len(call.body) < ON_THREAD_BYTES:
        loss_id = data_checks.check_pass(given, base, call.settings)
    else:
        loss_id = await asyncio.to_thread(data_checks.check_pass, given, base, call.settings)
    if loss_id is not None:
        await _check_custom(call, model, loss_id)


async def _check_custom(call: ApiCall, model: ModelEntry, loss_id: str) -> None:
    """Check that a custom loss belongs to the model's session, and that its inputs are given."""
    loss = await call.context.lookups.custom_loss(call.tenant_id, loss_id)
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


async def _check_load(call: ApiCall, model: ModelEntry) -> None:
    request: LoadWeightsRequest = call.request
    path = request_checks.check_path(request.path)
    try:
        saved = await _readable(call, request)
    except NotFoundError:
        # An earlier command of this queue may be about to save it.
        run = await call.context.lookups.model(call.tenant_id, path.training_run_id)
        base = run.base_model
    else:
        base = str(saved.details.get("base_model", model.base_model))
    if not request_checks.is_same_model(call, base, model.base_model):
        raise request_checks.refuse(
            "path", request.path, f"it was trained on {base}, not on {model.base_model}"
        )


# Losses


async def create_custom_loss(call: ApiCall) -> UntypedAPIFuture:
    """Store an uploaded loss; it can be used in its session."""
    request: CreateCustomLossRequest = call.request
    request_checks.check_number(
        "custom_loss_seq_id", request.custom_loss_seq_id, request_checks.LARGEST_CREATED
    )
    request_checks.check_texts(("name", request.name))
    check_custom_loss(request)
    lookups = call.context.lookups
    session = await lookups.session(call.tenant_id, request.session_id)
    queue_id = f"{session.id}:loss"
    submitted = await submission(
        call, queue_id, request.custom_loss_seq_id, session.id, is_ordered=False
    )
    try:
        await lookups.open_session(call.tenant_id, session.id)
        loss = CustomLossEntry(
            id=f"{queue_id}:{request.custom_loss_seq_id}",
            tenant_id=call.tenant_id,
            created_at=call.ledger.now(),
            session_id=SessionId(session.id),
            name=request.name,
            graph={"inputs": to_plain(request.inputs), "graph": to_plain(request.graph)},
        )
        await call.ledger.entries(CustomLossEntry).add(loss)
        return accepted(await append(call, submitted))
    except TinkerError:
        repeated = await find_repeated(call, submitted)
        if repeated is None:
            raise
        return accepted(repeated)


async def get_info(call: ApiCall) -> GetInfoResponse:
    """The model's configuration, and how a client finds its tokenizer."""
    model = await call.context.lookups.model(call.tenant_id, call.request.model_id)
    lora, optimizer = read_config(model.config)
    base = call.context.base_models.get(model.base_model)
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
