"""Remembers outside the ledger that a service had API keys, so that their loss never opens it.

Without any key a service serves whoever reaches it. That is meant for one which never had a key; a
ledger that was damaged, deleted or replaced by an older one has none either. The fact is a file in
the data folder. A service that finds it, and no key in its ledger, does not start.
"""

from __future__ import annotations

import logging
from pathlib import Path

from tinsmith.checkpoints.disk import sync_folder
from tinsmith.errors import ValidationError

_log = logging.getLogger(__name__)

FILE = "has-keys"
_TEXT = (
    "This service has API keys. While this file is here, it does not start without any, so that a "
    "lost ledger opens it to nobody. Delete the file to serve without keys.\n"
)


def note_keys(data: Path) -> None:
    """Remember that there are keys. That it cannot be written down is logged."""
    path = data / FILE
    if path.exists():
        return
    try:
        path.write_text(_TEXT, encoding="utf-8")
        path.chmod(0o600)
        sync_folder(data)
    except OSError as exc:
        _log.warning("%s cannot be written: %s", path, exc)


def check_keys_lost(data: Path) -> None:
    """To be called where there is no key.

    Raises:
        ValidationError: There were some.
    """
    path = data / FILE
    if path.exists():
        raise ValidationError(
            "the service had API keys and its ledger has none now: it would be open to everyone "
            "who can reach it",
            remedy="restore the ledger from a backup, or run `tinsmith key create` and give "
            f"clients the new key; to serve without keys, delete {path}",
        )
