"""Creates models for training, new or from a checkpoint, and unloads them.

The service's flags say how a model is created from a checkpoint: by one call, or by reading the
checkpoint's settings, creating a model with them, and loading the weights.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tinsmith.client.lease import SessionLease
from tinsmith.client.limits import Budget
from tinsmith.client.poller import Poll
from tinsmith.client.session import Session
from tinsmith.client.settings import Secret
from tinsmith.client.training import TrainingClient
from tinsmith.errors import ValidationError
from tinsmith.types import requests as r
from tinsmith.types.futures import UntypedAPIFuture
from tinsmith.types.runs import WeightsInfoResponse
from tinsmith.types.service import AuthTokenResponse
from tinsmith.types.training import (
    AdamOptimizerConfig,
    CreateModelResponse,
    LoraConfig,
    OptimizerConfig,
    UnloadModelResponse,
)


class ResumeSource(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that a model is resumed from."""

    path: str
    base_model: str | None = None
    """Replaces the checkpoint's own."""
    user_metadata: dict[str, Any] | None = None
    token: Secret | None = None
    """A credential of another account that may read the checkpoint."""
    optimizer: OptimizerConfig | None = None
    with_optimizer: bool = False
    """Whether the optimizer's state is loaded too."""


async def create_model(
    lease: SessionLease,
    base_model: str,
    lora: LoraConfig,
    user_metadata: dict[str, Any] | None,
    optimizer: OptimizerConfig | None,
) -> TrainingClient:
    """Create a model with a new adapter, and wait until it can be trained."""
    if not (lora.train_mlp or lora.train_attn or lora.train_unembed):
        raise ValidationError(
            "train_mlp, train_attn and train_unembed are all False",
            remedy="set at least one of them to True",
        )
    session = lease.session
    request = r.CreateModelRequest(
        session_id=await session.session_id(),
        model_seq_id=session.next_number("model"),
        base_model=base_model,
        user_metadata=user_metadata,
        lora_config=lora,
        optimizer_config=optimizer or AdamOptimizerConfig(),
    )
    submitted: UntypedAPIFuture = await session.call("create_model", request)
    made: CreateModelResponse = await Poll(session, submitted.request_id, "CreateModel").result()
    session.model_ids.append(made.model_id)
    return TrainingClient(lease, made.model_id)


async def create_from_state(lease: SessionLease, source: ResumeSource) -> TrainingClient:
    """Create a model from a checkpoint, and wait until it is loaded."""
    session = lease.session
    flags = await session.ready()
    if flags.create_model_via_load_weights:
        return await _create_by_loading(lease, source)
    info = await _weights_info(session, source)
    if not info.is_lora or info.lora_rank is None:
        raise ValidationError(f"{source.path} is not a checkpoint of an adapter")
    lora = LoraConfig(
        rank=info.lora_rank,
        train_mlp=info.train_mlp is not False,
        train_attn=info.train_attn is not False,
        train_unembed=info.train_unembed is not False,
    )
    # The state of one kind of optimizer is meaningless to another.
    optimizer = info.optimizer_config if source.with_optimizer else source.optimizer
    client = await create_model(
        lease, source.base_model or info.base_model, lora, source.user_metadata, optimizer
    )
    token = None if source.token is None else source.token.reveal()
    await client.load_weights(source.path, token, with_optimizer=source.with_optimizer)
    return client


async def _create_by_loading(lease: SessionLease, source: ResumeSource) -> TrainingClient:
    session = lease.session
    session_id = await session.session_id()
    number = session.next_number("model")
    request = r.LoadWeightsRequest(
        session_id=session_id,
        model_seq_id=number,
        base_model=source.base_model,
        user_metadata=source.user_metadata,
        path=source.path,
        optimizer=source.with_optimizer,
        optimizer_config=source.optimizer,
        weights_access_token=None if source.token is None else source.token.reveal(),
    )
    submitted: UntypedAPIFuture = await session.call("load_weights", request)
    room = Budget(session.flags.inflight_response_bytes_semaphore_size)
    await Poll(session, submitted.request_id, "LoadWeights", room=room).result()
    model_id = f"{session_id}:train:{number}"  # the service's own scheme, which it need not return
    session.model_ids.append(model_id)
    return TrainingClient(lease, model_id)


async def _weights_info(session: Session, source: ResumeSource) -> WeightsInfoResponse:
    """The base model and settings of a checkpoint, read by the account that may."""
    credential = source.token
    if credential is not None and session.flags.pjwt_auth_enabled:
        given: AuthTokenResponse = await session.call(
            "auth_token", r.AuthTokenRequest(), credential=credential
        )
        credential = Secret(given.jwt)
    info: WeightsInfoResponse = await session.call(
        "get_weights_info_by_tinker_path",
        r.WeightsInfoRequest(tinker_path=source.path),
        credential=credential,
    )
    return info


async def unload_model(lease: SessionLease, model_id: str) -> UnloadModelResponse:
    """Have the service unload a model, and wait until it has."""
    session = lease.session
    await session.ready()
    submitted: UntypedAPIFuture = await session.call(
        "unload_model", r.UnloadModelRequest(model_id=model_id)
    )
    gone: UnloadModelResponse = await Poll(session, submitted.request_id, "UnloadModel").result()
    return gone
