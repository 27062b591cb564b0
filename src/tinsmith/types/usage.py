"""Types of usage: billing, storage and the audit log."""

from __future__ import annotations

import datetime
from typing import Any, Literal, TypeAlias

from tinsmith.types.record import Record, Tagged


class TrainingBillingEvent(Tagged, tag="training"):
    """Training tokens."""

    token_count: int


class SamplingPrefillBillingEvent(Tagged, tag="sampling_prefill"):
    """Prompt tokens, cached or not."""

    cached: bool
    token_count: int


class SamplingSampleBillingEvent(Tagged, tag="sampling_sample"):
    """Sampled tokens."""

    token_count: int


class CheckpointBillingEvent(Tagged, tag="checkpoint"):
    """Saved checkpoints."""

    count: int


class StorageBillingEvent(Tagged, tag="storage"):
    """Stored checkpoints."""

    gigabyte_hours: float


BillingEventInfo: TypeAlias = (
    TrainingBillingEvent
    | SamplingPrefillBillingEvent
    | SamplingSampleBillingEvent
    | CheckpointBillingEvent
    | StorageBillingEvent
)


class BillingUsageEvent(Record):
    """The usage of one hour, for one purpose."""

    bucket_start: datetime.datetime
    bucket_end: datetime.datetime
    base_model: str | None = None
    user_id: str | None = None
    user_name: str | None = None
    session_id: str | None = None
    project_id: str | None = None
    estimated_cost_usd: float | None = None
    effective_rate_usd_per_million_tokens: float | None = None
    effective_rate_usd_per_gigabyte_month: float | None = None
    event_info: BillingEventInfo


class BillingUsageSession(Record):
    """A session in a usage report."""

    user_metadata: dict[str, str] | None = None


class BillingUsageResponse(Record):
    """Usage by the hour, and its sessions."""

    data: list[BillingUsageEvent]
    sessions: dict[str, BillingUsageSession] = {}
    cost_data_through: datetime.datetime | None = None


class CurrentCheckpointStorageUsageItem(Record):
    """The current checkpoint storage of one owner."""

    project_id: str | None = None
    org_user_urn: str | None = None
    user_email: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class CurrentCheckpointStorageUsageResponse(Record):
    """The current checkpoint storage by owner."""

    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[CurrentCheckpointStorageUsageItem]


AuditEventType: TypeAlias = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class AuditLogEntry(Record):
    """One entry of the audit log."""

    timestamp: datetime.datetime
    event: str
    event_details: dict[str, Any] = {}
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLogResponse(Record):
    """Entries of the audit log, in order."""

    entries: list[AuditLogEntry]
