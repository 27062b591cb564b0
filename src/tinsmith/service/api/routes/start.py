"""Start-up: client flags, credentials, health, and the supported models."""

from __future__ import annotations

import msgspec

from tinsmith.errors import APIStatusError, BadRequestError
from tinsmith.service.api.api_call import ApiCall, Handler
from tinsmith.service.ledger import audit
from tinsmith.service.ledger.records import ApiKey, Tenant
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


async def client_config(call: ApiCall) -> ServiceFlags:
    """The flags with which clients use everything that this service offers."""
    settings = call.settings
    return ServiceFlags(
        pjwt_auth_enabled=settings.offers_tokens,
        # An official client that sends chunks in parallel waits for ever if any chunk but the first
        # is refused. Sent one after another, it continues.
        parallel_fwdbwd_chunks=False,
        # With this transport an official client on Python 3.11 to 3.13 may abort (SIGABRT) when
        # its program ends: threads in Rust are still reading replies. httpx takes 1.3 to 2 times
        # the CPU of it.
        use_pyqwest_transport=False,
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
        tinsmith_parallel_chunks=True,
    )


async def client_dynamic_config(call: ApiCall) -> ClientDynamicConfigResponse:  # noqa: ARG001
    """The flags that clients request repeatedly."""
    return ClientDynamicConfigResponse(sample_cancel_enabled=True)


async def auth_token(call: ApiCall) -> AuthTokenResponse:
    """A short-lived token for the credential."""
    credentials = call.context.authenticator
    holder = await credentials.holder(call.headers.get("x-api-key"))
    return AuthTokenResponse(jwt=credentials.token(holder))


async def healthz(call: ApiCall) -> HealthResponse:
    """Whether commands are accepted and run."""
    report = call.ledger.board.readiness
    if not report.is_ready:
        raise APIStatusError(
            report.problem or "the service is starting", status_code=_UNAVAILABLE, retry_after_s=1.0
        )
    await call.ledger.entries(Tenant).count()  # raises if the ledger cannot be read
    return HealthResponse(status="ok")


async def get_server_capabilities(call: ApiCall) -> GetServerCapabilitiesResponse:
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
            for name, model in call.context.base_models.items()
        ]
    )


async def get_api_key(call: ApiCall) -> ApiKeyResponse:
    """The key of this request."""
    holder = await call.context.authenticator.holder(call.headers.get("x-api-key"))
    key, tenant = holder.key, holder.tenant
    return ApiKeyResponse(
        key_id=int(key.id[:8], 16) if key is not None else 0,
        name=key.name if key is not None else "no key is needed",
        note=key.shown if key is not None else "",
        details=ApiKeyOwner(
            org_details=OrganisationDetails(name=tenant.name),
            user_details=UserDetails(email=f"{tenant.id}@tinsmith.invalid"),
        ),
    )


async def delete_api_key(call: ApiCall) -> None:
    """Revoke the key of this request."""
    credentials = call.context.authenticator
    holder = await credentials.holder(call.headers.get("x-api-key"))
    if holder.key is None:
        raise BadRequestError("the request has no key, and needs none")
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


async def telemetry(call: ApiCall) -> TelemetryResponse:  # noqa: ARG001
    """Accept and discard it: bodies may contain credentials, so nothing is stored or logged."""
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
