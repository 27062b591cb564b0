"""The service itself: its health, what it offers, and how it asks its clients to behave."""

from __future__ import annotations

from typing import Literal

from tinsmith.types.record import Record


class HealthResponse(Record):
    """The service runs."""

    status: Literal["ok"]


class SupportedModel(Record):
    """A base model that can be trained or sampled."""

    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None
    alias_of: str | None = None
    """Of which model this is only another name; a field of our own service."""


class GetServerCapabilitiesResponse(Record):
    """What the service offers."""

    supported_models: list[SupportedModel]


class ClientConfigResponse(Record):
    """Flags that a client reads once at its start, with what an empty answer means."""

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
    """Flags that a client reads again every so often."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


class AuthTokenResponse(Record):
    """A short-lived credential."""

    jwt: str


class WhoamiResponse(Record):
    """Who the credential belongs to."""

    user_urn: str
    org_urn: str
    email: str | None = None


class OrganisationDetails(Record):
    """The organisation of a key."""

    name: str


class UserDetails(Record):
    """The user of a key."""

    email: str


class ApiKeyOwner(Record):
    """Who a key was made for."""

    org_details: OrganisationDetails
    user_details: UserDetails


class ApiKeyResponse(Record):
    """A key as the command line shows it after a login."""

    key_id: int
    name: str
    note: str
    details: ApiKeyOwner
