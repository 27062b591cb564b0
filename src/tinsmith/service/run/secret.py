"""The secret that signs tokens and download URLs: a file in the data folder, or in the database.

It is created once, so that both outlive a restart. Losing it costs little, because clients ask for
new tokens and URLs; so a new one is created, and that is logged.

Servers that share a database share the secret too: what one signs, the others accept. The first of
them stores the secret of its data folder, which may be one from before there were others.
"""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from tinsmith.errors import ValidationError
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.records import SessionEntry, SigningSecret, TenantId

_log = logging.getLogger(__name__)

FILE = "secret"
ID = "secret"
SECRET_BYTES = 32


async def signing_secret(ledger: Ledger, data: Path) -> bytes:
    """The secret of a service.

    Raises:
        ValidationError: A file is needed and cannot be read or written.
    """
    if not ledger.is_shared:
        return read_secret(data, was_used=await ledger.entries(SessionEntry).count() > 0)
    secrets_of_ledger = ledger.entries(SigningSecret)
    found = await secrets_of_ledger.get(ID)
    if found is None:
        path = data / FILE
        given = read_secret(data, was_used=False) if path.exists() else _new_secret()
        found = await secrets_of_ledger.add(
            SigningSecret(
                id=ID, tenant_id=TenantId(""), created_at=ledger.now(), secret=given.hex()
            )
        )
    return bytes.fromhex(found.secret)


def read_secret(data: Path, *, was_used: bool) -> bytes:
    """The secret of a data folder; a new one if there is none, or none that can be used.

    Args:
        data: The data folder.
        was_used: Whether the service has had clients, who may hold what the old secret signed.

    Raises:
        ValidationError: The file cannot be read or written.
    """
    path = data / FILE
    try:
        kept = path.read_bytes() if path.exists() else None
        if kept is not None and len(kept) == SECRET_BYTES:
            return kept
        if kept is not None or was_used:
            _tell(path, kept)
        return _make(path)
    except OSError as exc:
        raise ValidationError(
            f"the secret {path} cannot be read or written: {exc.strerror or exc}",
            remedy="check that the file and its folder belong to the user that runs the service",
        ) from exc


def _tell(path: Path, kept: bytes | None) -> None:
    state = "is missing" if kept is None else f"has {len(kept)} bytes instead of {SECRET_BYTES}"
    _log.warning(
        "%s %s, so a new secret was created; earlier tokens and download URLs are refused, and "
        "clients ask for new ones. To keep the earlier ones valid, restore the file and restart",
        path,
        state,
    )


def _make(path: Path) -> bytes:
    made = _new_secret()
    written = path.with_suffix(f".{os.getpid()}")
    with os.fdopen(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(made)
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)
    return made


def _new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)
