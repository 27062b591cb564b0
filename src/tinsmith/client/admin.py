"""What an organisation's administrators ask for: usage, storage and the audit log."""

from __future__ import annotations

import datetime

from tinsmith.client.background import background
from tinsmith.client.futures import APIFuture
from tinsmith.client.management.base import ManagementClient
from tinsmith.client.management.redirects import call_and_follow
from tinsmith.errors import ValidationError
from tinsmith.types import requests as r
from tinsmith.types.usage import (
    AuditEventType,
    AuditLogResponse,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageResponse,
)


class AdminClient(ManagementClient):
    """Usage, storage and the audit log of the caller's organisation.

    Its calls need a role there: one that sees bills, or for the audit log an administrator's.
    Without it they fail with `PermissionDeniedError`.
    """

    def get_audit_log(
        self,
        event_type: AuditEventType = "all",
        day: datetime.date | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[AuditLogResponse]:
        """What was done, oldest first.

        Args:
            event_type: To what it was done.
            day: From midnight to midnight UTC; None for what the service gives of itself, which is
                for ours every day.
            timeout: Seconds after which the call is given up.
        """
        request = r.GetAuditLogRequest(event_type=event_type, day=day)
        return background().start(self._audit_log(request), "get_audit_log", timeout)

    async def get_audit_log_async(
        self,
        event_type: AuditEventType = "all",
        day: datetime.date | None = None,
        *,
        timeout: float | None = None,
    ) -> AuditLogResponse:
        """As `get_audit_log`."""
        return await self.get_audit_log(event_type, day, timeout=timeout)

    async def _audit_log(self, request: r.GetAuditLogRequest) -> AuditLogResponse:
        log: AuditLogResponse = await call_and_follow(await self._ready(), "get_audit_log", request)
        return log

    def get_billing_usage(
        self,
        starting_on: datetime.datetime | str,
        ending_before: datetime.datetime | str,
        *,
        timeout: float | None = None,
    ) -> APIFuture[BillingUsageResponse]:
        """What was used, by the hour.

        Costs are estimates before credits, and missing where the service does not know them yet;
        before `cost_data_through` they come from invoices. What the last hours used may be missing.

        Args:
            starting_on: A full hour, as a time or as text of RFC 3339; UTC if it has no offset.
            ending_before: A full hour, at most 14 days later.
            timeout: Seconds after which the call is given up.

        Raises:
            ValueError: A time is none.
        """
        request = r.GetBillingUsageRequest(
            starting_on=_time("starting_on", starting_on),
            ending_before=_time("ending_before", ending_before),
        )
        return self._start("get_billing_usage", request, timeout)

    async def get_billing_usage_async(
        self,
        starting_on: datetime.datetime | str,
        ending_before: datetime.datetime | str,
        *,
        timeout: float | None = None,
    ) -> BillingUsageResponse:
        """As `get_billing_usage`."""
        return await self.get_billing_usage(starting_on, ending_before, timeout=timeout)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None, *, timeout: float | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        """What checkpoints take now, by project and owner; of all projects if none is named."""
        request = r.GetCurrentCheckpointStorageUsageRequest(project_id=project_id)
        return self._start("get_current_checkpoint_storage_usage", request, timeout)

    async def get_current_checkpoint_storage_usage_async(
        self,
        project_id: str | None = None,
        *,
        timeout: float | None = None,
    ) -> CurrentCheckpointStorageUsageResponse:
        """As `get_current_checkpoint_storage_usage`."""
        return await self.get_current_checkpoint_storage_usage(project_id, timeout=timeout)


def _time(name: str, given: datetime.datetime | str) -> datetime.datetime:
    """A time with its offset from UTC; text of RFC 3339 and the like is read."""
    try:
        time = (
            given
            if isinstance(given, datetime.datetime)
            else datetime.datetime.fromisoformat(given)
        )
    except (TypeError, ValueError) as exc:
        raise ValidationError(
            f"{name} is {given!r:.100}, not a time", remedy="pass one like 2026-07-13T00:00Z"
        ) from exc
    return time if time.tzinfo is not None else time.replace(tzinfo=datetime.UTC)
