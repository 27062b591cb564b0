"""What was used and by whom: billing, storage and the audit log."""

from __future__ import annotations

import datetime
from typing import Any, Literal, TypeAlias

from tinsmith.types.record import Record, Tagged


class TrainingBillingEvent(Tagged, tag="training"):
    """Tokens trained on."""

    type = "training"
    token_count: int


class SamplingPrefillBillingEvent(Tagged, tag="sampling_prefill"):
    """Prompt tokens read, and whether they were cached."""

    type = "sampling_prefill"
    cached: bool
    token_count: int


class SamplingSampleBillingEvent(Tagged, tag="sampling_sample"):
    """Tokens sampled."""

    type = "sampling_sample"
    token_count: int


class CheckpointBillingEvent(Tagged, tag="checkpoint"):
    """Checkpoints written."""

    type = "checkpoint"
    count: int


class StorageBillingEvent(Tagged, tag="storage"):
    """Checkpoints kept."""

    type = "storage"
    gigabyte_hours: float


BillingEventInfo: TypeAlias = (
    TrainingBillingEvent
    | SamplingPrefillBillingEvent
    | SamplingSampleBillingEvent
    | CheckpointBillingEvent
    | StorageBillingEvent
)


class BillingUsageEvent(Record):
    """What was used in one hour, for one purpose."""

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
    """A session named in a usage report."""

    user_metadata: dict[str, str] | None = None


class BillingUsageResponse(Record):
    """Usage by hour, and the sessions it names."""

    data: list[BillingUsageEvent]
    sessions: dict[str, BillingUsageSession] = {}
    cost_data_through: datetime.datetime | None = None


class CurrentCheckpointStorageUsageItem(Record):
    """What one owner's checkpoints take now."""

    project_id: str | None = None
    org_user_urn: str | None = None
    user_email: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class CurrentCheckpointStorageUsageResponse(Record):
    """What checkpoints take now, by owner."""

    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[CurrentCheckpointStorageUsageItem]


AuditEventType: TypeAlias = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class AuditLogEntry(Record):
    """One thing that was done."""

    timestamp: datetime.datetime
    event: str
    event_details: dict[str, Any] = {}
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLogResponse(Record):
    """What was done, in order."""

    entries: list[AuditLogEntry]
