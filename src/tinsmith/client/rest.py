"""Runs, checkpoints and sessions: looking them up, listing them, and taking care of them.

Every call has two faces: `name` returns a future at once, `name_async` gives the value to a
coroutine. The `iter_…` methods walk through a whole listing, a page at a time and only as far as
they are taken.

The calls are in `management/runs.py`, `management/checkpoints.py` and `management/sessions.py`;
here are those about the caller, and those that have moved to `AdminClient`.
"""

from __future__ import annotations

import datetime
import warnings

from tinsmith.client.admin import AdminClient
from tinsmith.client.background import background
from tinsmith.client.futures import APIFuture
from tinsmith.client.management.checkpoints import CheckpointCalls
from tinsmith.client.management.runs import TrainingRunCalls
from tinsmith.client.management.sessions import SessionCalls
from tinsmith.types.service import WhoamiResponse
from tinsmith.types.usage import (
    AuditEventType,
    AuditLogResponse,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageResponse,
)


class RestClient(TrainingRunCalls, CheckpointCalls, SessionCalls):
    """What the service keeps: runs, checkpoints, sessions. It opens no session of its own."""

    def whoami(self, *, timeout: float | None = None) -> APIFuture[WhoamiResponse]:
        """Who the credential belongs to, as the token says that the service gave for it.

        Raises:
            RuntimeError: From the future: the service gives no tokens, and a plain key says
                nothing.
        """

        async def work() -> WhoamiResponse:
            return (await self._ready()).credentials.whoami()

        return background().start(work(), "whoami", timeout)

    async def whoami_async(self, *, timeout: float | None = None) -> WhoamiResponse:
        """As `whoami`."""
        return await self.whoami(timeout=timeout)

    # Moved to AdminClient

    def get_audit_log(
        self,
        event_type: AuditEventType = "all",
        day: datetime.date | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[AuditLogResponse]:
        """Deprecated: `AdminClient.get_audit_log`."""
        return self._admin("get_audit_log").get_audit_log(event_type, day, timeout=timeout)

    async def get_audit_log_async(
        self,
        event_type: AuditEventType = "all",
        day: datetime.date | None = None,
        *,
        timeout: float | None = None,
    ) -> AuditLogResponse:
        """Deprecated: `AdminClient.get_audit_log_async`."""
        admin = self._admin("get_audit_log_async")
        return await admin.get_audit_log(event_type, day, timeout=timeout)

    def get_billing_usage(
        self,
        starting_on: datetime.datetime | str,
        ending_before: datetime.datetime | str,
        *,
        timeout: float | None = None,
    ) -> APIFuture[BillingUsageResponse]:
        """Deprecated: `AdminClient.get_billing_usage`."""
        admin = self._admin("get_billing_usage")
        return admin.get_billing_usage(starting_on, ending_before, timeout=timeout)

    async def get_billing_usage_async(
        self,
        starting_on: datetime.datetime | str,
        ending_before: datetime.datetime | str,
        *,
        timeout: float | None = None,
    ) -> BillingUsageResponse:
        """Deprecated: `AdminClient.get_billing_usage_async`."""
        admin = self._admin("get_billing_usage_async")
        return await admin.get_billing_usage(starting_on, ending_before, timeout=timeout)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None, *, timeout: float | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        """Deprecated: `AdminClient.get_current_checkpoint_storage_usage`."""
        admin = self._admin("get_current_checkpoint_storage_usage")
        return admin.get_current_checkpoint_storage_usage(project_id, timeout=timeout)

    async def get_current_checkpoint_storage_usage_async(
        self, project_id: str | None = None, *, timeout: float | None = None
    ) -> CurrentCheckpointStorageUsageResponse:
        """Deprecated: `AdminClient.get_current_checkpoint_storage_usage_async`."""
        admin = self._admin("get_current_checkpoint_storage_usage_async")
        return await admin.get_current_checkpoint_storage_usage(project_id, timeout=timeout)

    def _admin(self, name: str) -> AdminClient:
        warnings.warn(
            f"RestClient.{name} is deprecated; use AdminClient.{name}", FutureWarning, stacklevel=3
        )
        return AdminClient(self._lease)
