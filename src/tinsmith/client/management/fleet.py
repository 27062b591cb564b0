"""What operators of a tinsmith service ask for: its replicas. For `tinsmith fleet`."""

from __future__ import annotations

from tinsmith.client.futures import APIFuture
from tinsmith.client.management.base import ManagementClient
from tinsmith.types.extensions import FleetResponse, ReplicaRequest, ReplicaStatus
from tinsmith.types.requests import EmptyRequest


class FleetClient(ManagementClient):
    """The replicas of the service's engine.

    Calls fail with `NotFoundError` unless the key is an operator's.
    """

    def list_replicas(self, *, timeout: float | None = None) -> APIFuture[FleetResponse]:
        """The replicas, what they hold, their load and their losses."""
        return self._start("list_replicas", EmptyRequest(), timeout)

    def drain_replica(self, name: str, *, timeout: float | None = None) -> APIFuture[ReplicaStatus]:
        """Have everything moved off a replica, and close it. Returns before that is done."""
        return self._start("drain_replica", ReplicaRequest(name=name), timeout)

    def resume_replica(
        self, name: str, *, timeout: float | None = None
    ) -> APIFuture[ReplicaStatus]:
        """Have a drained replica used again."""
        return self._start("resume_replica", ReplicaRequest(name=name), timeout)
