"""Notes outside the ledger that a service has API keys, so that losing them never opens it.

A service without any key serves everyone who reaches it. That is meant for one that never had a
key; but a ledger that was damaged, deleted or replaced by an older copy has none either. So a file
in the data folder says that there were keys, and a service that finds it, but no key in its ledger,
does not start.
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
    """Write the file. If that fails, it is logged."""
    path = data / FILE
    if path.exists():
        return
    try:
        path.write_text(_TEXT, encoding="utf-8")
        path.chmod(0o600)
        sync_folder(data)
    except OSError as exc:
        _log.warning("could not write %s, which guards against lost API keys: %s", path, exc)


def check_keys_lost(data: Path) -> None:
    """Check a service whose ledger has no key.

    Raises:
        ValidationError: There were keys before.
    """
    path = data / FILE
    if path.exists():
        raise ValidationError(
            "the service had API keys and its ledger has none now: it would be open to everyone "
            "who can reach it",
            remedy="restore the ledger from a backup, or run `tinsmith key create` and give "
            f"clients the new key; to serve without keys, delete {path}",
        )
