"""Start-up: how clients are asked to behave, credentials, health, and what is served."""

from __future__ import annotations

import msgspec

from tinsmith.errors import APIStatusError, BadRequestError
from tinsmith.ledger import audit
from tinsmith.ledger.records import ApiKey, Tenant
from tinsmith.server.call import Call, Handler
from tinsmith.types.events import TelemetryResponse
from tinsmith.types.extensions import ServiceFlags
from tinsmith.types.service import (
    ApiKeyOwner,
    ApiKeyResponse,
    AuthTokenResponse,
    ClientDynamicConfigResponse,
    GetServerCapabilitiesResponse,
    HealthResponse,
    OrganisationDetails,
    SupportedModel,
    UserDetails,
)

MOST_CHUNK_BYTES = 5_000_000
_UNAVAILABLE = 503


async def client_config(call: Call) -> ServiceFlags:
    """The flags by which a current client uses all that is here, and our own what is ours."""
    settings = call.settings
    return ServiceFlags(
        pjwt_auth_enabled=settings.offers_tokens,
        # Official clients wait for ever behind a call of theirs of which any chunk but the first
        # was refused, if they sent its chunks in parallel. One after another, they go on.
        parallel_fwdbwd_chunks=False,
        proto_compress_fwdbwd=True,
        fwdbwd_max_chunk_len=min(1024, settings.most_datums),
        fwdbwd_max_chunk_bytes_count=min(MOST_CHUNK_BYTES, settings.body_bytes // 2),
        create_model_via_load_weights=True,
        sample_use_retrieve_futures=True,
        custom_loss_server_side=True,
        sample_join_sampling_session=True,
        tinsmith_batch_items=settings.batch_items,
        tinsmith_batch_bytes=min(settings.batch_bytes, settings.body_bytes),
        tinsmith_inline_bytes=settings.answer_inline_bytes,
        tinsmith_stream=settings.offers_streams,
        tinsmith_packed_prompts=True,
        tinsmith_import_bytes=call.service.imports.largest_bytes,
        tinsmith_parallel_chunks=True,
    )


async def client_dynamic_config(call: Call) -> ClientDynamicConfigResponse:  # noqa: ARG001
    """The flags that are asked for again and again."""
    return ClientDynamicConfigResponse(sample_cancel_enabled=True)


async def auth_token(call: Call) -> AuthTokenResponse:
    """A short-lived token for the credential."""
    credentials = call.service.credentials
    holder = await credentials.holder(call.headers.get("x-api-key"))
    return AuthTokenResponse(jwt=credentials.token(holder))


async def healthz(call: Call) -> HealthResponse:
    """Whether commands are being accepted and run."""
    report = call.ledger.board.readiness
    if not report.is_ready:
        raise APIStatusError(
            report.problem or "the service is starting", status_code=_UNAVAILABLE, retry_after_s=1.0
        )
    await call.ledger.entries(Tenant).count()  # raises if the ledger cannot be read
    return HealthResponse(status="ok")


async def get_server_capabilities(call: Call) -> GetServerCapabilitiesResponse:
    """The base models, under all their names."""
    return GetServerCapabilitiesResponse(
        supported_models=[
            SupportedModel(
                model_name=name,
                max_context_length=model.max_context,
                trainable=True,
                sampleable=True,
                alias_of=model.alias_of,
            )
            for name, model in call.parts.base_models.items()
        ]
    )


async def get_api_key(call: Call) -> ApiKeyResponse:
    """What is known of the key that was sent."""
    holder = await call.service.credentials.holder(call.headers.get("x-api-key"))
    key, tenant = holder.key, holder.tenant
    return ApiKeyResponse(
        key_id=int(key.id[:8], 16) if key is not None else 0,
        name=key.name if key is not None else "no key is needed here",
        note=key.shown if key is not None else "",
        details=ApiKeyOwner(
            org_details=OrganisationDetails(name=tenant.name),
            user_details=UserDetails(email=f"{tenant.id}@tinsmith.invalid"),
        ),
    )


async def delete_api_key(call: Call) -> None:
    """Revoke the key that was sent."""
    credentials = call.service.credentials
    holder = await credentials.holder(call.headers.get("x-api-key"))
    if holder.key is None:
        raise BadRequestError("no key was sent, and none is needed here")
    now = call.ledger.now()
    await call.ledger.entries(ApiKey).change(holder.key.id, lambda key: _revoked(key, now))
    credentials.forget()
    await audit.note(
        call.ledger,
        call.tenant_id,
        audit.KEY_REVOKED,
        details={"name": holder.key.name, "shown": holder.key.shown},
        change=audit.change_id("revoke", holder.key.id),
    )


async def telemetry(call: Call) -> TelemetryResponse:  # noqa: ARG001
    """Accepted and let go: bodies may hold credentials, so nothing of them is kept or logged."""
    return TelemetryResponse(status="accepted")


def _revoked(key: ApiKey, now: float) -> ApiKey:
    return msgspec.structs.replace(key, revoked_at=key.revoked_at or now)


HANDLERS: dict[str, Handler] = {
    "client_config": client_config,
    "client_dynamic_config": client_dynamic_config,
    "auth_token": auth_token,
    "healthz": healthz,
    "get_server_capabilities": get_server_capabilities,
    "get_api_key": get_api_key,
    "delete_api_key": delete_api_key,
    "telemetry": telemetry,
}
OPEN = frozenset({"healthz"})
