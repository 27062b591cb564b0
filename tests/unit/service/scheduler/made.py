"""Commands for tests of the scheduler's parts."""

from __future__ import annotations

from tinsmith.service.ledger.records import Command, QueueId, SessionId, TenantId


def a_command(
    queue_id: str = "m",
    number: int = 0,
    *,
    kind: str = "forward_backward",
    tenant: str = "t",
    payload_bytes: int = 160,
) -> Command:
    """A claimed command."""
    return Command(
        ordinal=number,
        queue_id=QueueId(queue_id),
        seq_id=number,
        kind=kind,
        tenant_id=TenantId(tenant),
        session_id=SessionId("s"),
        clone=None,
        is_ordered=True,
        fingerprint=b"",
        payload_bytes=payload_bytes,
        created_at=0.0,
    )
