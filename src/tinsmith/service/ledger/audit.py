"""The audit log: an entry for every change that a tenant makes to its data.

Events are named `<object>.<action>`, such as `checkpoint.deleted`; the log can be filtered by
object.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.fenced import FencedLedger
from tinsmith.service.ledger.records import AuditEntry, TenantId

CHECKPOINT_CREATED = "checkpoint.created"
CHECKPOINT_COPIED = "checkpoint.copied"
CHECKPOINT_PUBLISHED = "checkpoint.published"
CHECKPOINT_UNPUBLISHED = "checkpoint.unpublished"
CHECKPOINT_TTL_SET = "checkpoint.ttl_set"
CHECKPOINT_DELETED = "checkpoint.deleted"
CHECKPOINT_EXPIRED = "checkpoint.expired"
CHECKPOINT_IMPORTED = "checkpoint.imported"
SESSION_ASSIGNED = "project.session_assigned"
KEY_REVOKED = "organization.key_revoked"


def change_id(*parts: str) -> str:
    """The id of a change that its retries share: the same for the same parts."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()


async def note(
    ledger: Ledger | FencedLedger,
    tenant_id: TenantId,
    event: str,
    *,
    details: dict[str, Any] | None = None,
    run_id: str | None = None,
    tinker_path: str | None = None,
    change: str | None = None,
) -> None:
    """Write an audit entry.

    Args:
        ledger: The ledger to write to.
        tenant_id: Who made the change.
        event: What was done.
        details: Further fields; never a secret.
        run_id: The run that was changed.
        tinker_path: The checkpoint that was changed.
        change: From `change_id`; with it, a repeated change is recorded once.
    """
    await ledger.entries(AuditEntry).add(
        AuditEntry(
            id=f"audit-{change or secrets.token_hex(16)}",
            tenant_id=tenant_id,
            created_at=ledger.now(),
            event=event,
            details=details or {},
            model_id=run_id,
            tinker_path=tinker_path,
        )
    )


async def is_noted(ledger: Ledger, tenant_id: TenantId, change: str) -> bool:
    """Whether a change was made before."""
    entry = await ledger.entries(AuditEntry).get(f"audit-{change}")
    return entry is not None and entry.tenant_id == tenant_id
