"""Types of the service itself: health, models, client configuration and API keys."""

from __future__ import annotations

from typing import Literal

from tinsmith.types.record import Record


class HealthResponse(Record):
    """The service is running."""

    status: Literal["ok"]


class SupportedModel(Record):
    """A base model that can be trained or sampled."""

    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None
    alias_of: str | None = None
    """The model that this name is an alias of; only from tinsmith services."""


class GetServerCapabilitiesResponse(Record):
    """The models that the service offers."""

    supported_models: list[SupportedModel]


class ClientConfigResponse(Record):
    """Flags that a client reads when it starts; the defaults apply to missing ones."""

    pjwt_auth_enabled: bool = False
    credential_default_source: str = "api_key"
    sample_dispatch_bytes_semaphore_size: int = 10 * 1024 * 1024
    inflight_response_bytes_semaphore_size: int = 50 * 1024 * 1024
    parallel_fwdbwd_chunks: bool = True
    proto_compress_fwdbwd: bool = False
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    fwdbwd_dispatch_bytes_semaphore_size: int = 50_000_000
    billing_exception_max_pause_duration_sec: int = 3600
    sample_no_retries: bool = False
    sample_enable_stuck_detection: bool = True
    sample_max_concurrent_requests: int = 2000
    use_pyqwest_transport: bool = True
    create_model_via_load_weights: bool = False
    sample_use_retrieve_futures: bool = False
    custom_loss_server_side: bool = False
    sample_join_sampling_session: bool = False


class ClientDynamicConfigResponse(Record):
    """Flags that a client refreshes periodically."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


class AuthTokenResponse(Record):
    """A short-lived credential."""

    jwt: str


class WhoamiResponse(Record):
    """The owner of the credential."""

    user_urn: str
    org_urn: str
    email: str | None = None


class OrganisationDetails(Record):
    """The organization of an API key."""

    name: str


class UserDetails(Record):
    """The user of an API key."""

    email: str


class ApiKeyOwner(Record):
    """The owner of an API key."""

    org_details: OrganisationDetails
    user_details: UserDetails


class ApiKeyResponse(Record):
    """An API key and its owner."""

    key_id: int
    name: str
    note: str
    details: ApiKeyOwner
