"""The secret that tokens and download addresses are signed with: a file in the data folder.

It is made once, so that both outlive a restart. A secret that is lost cannot be brought back, and
costs little: whoever holds a token or an address asks for another. So a new one is made, and that
is told.
"""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from tinsmith.errors import ValidationError

_log = logging.getLogger(__name__)

FILE = "secret"
SECRET_BYTES = 32


def read_secret(data: Path, *, was_used: bool) -> bytes:
    """The secret of a data folder; a new one where there is none that can be used.

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
            remedy="see that the file and its folder belong to the user that runs the service",
        ) from exc


def _tell(path: Path, kept: bytes | None) -> None:
    state = "is missing" if kept is None else f"has {len(kept)} bytes instead of {SECRET_BYTES}"
    _log.warning(
        "%s %s, and a new one is made. Download addresses and tokens from before are refused, and "
        "clients ask for new ones. To keep the old ones valid, restore the file from a backup and "
        "restart",
        path,
        state,
    )


def _make(path: Path) -> bytes:
    made = secrets.token_bytes(SECRET_BYTES)
    written = path.with_suffix(f".{os.getpid()}")
    with os.fdopen(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(made)
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)
    return made
