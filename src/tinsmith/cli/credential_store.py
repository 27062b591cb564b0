"""The file that keeps keys between commands: `~/.tinker/credentials.json`.

It has the form that the official SDK writes and reads, so that either finds what the other stored.
It holds live keys: nobody but its owner may read it, and a change replaces it in one step.

Only `tinsmith auth` writes it; clients read it with `tinsmith.client.auth`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tempfile
from typing import Any

from tinsmith.cli.failures import CommandError

VERSION = 1


class CredentialStore:
    """Keys by id, one of which may be the default."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path.expanduser()

    def default(self) -> tuple[str, dict[str, Any]] | None:
        """The id and the record of the default key, if there is one."""
        stored = self._load()
        key_id = stored["default"]
        record = stored["keys"].get(key_id)
        return None if record is None else (key_id, record)

    def add_default(self, key_id: str, record: dict[str, Any]) -> None:
        """Keep a key, and make it the default."""
        stored = self._load()
        stored["keys"][key_id] = record
        self._save({**stored, "default": key_id})

    def remove(self, key_id: str) -> None:
        """Forget a key; if it was the default, there is none now."""
        stored = self._load()
        del stored["keys"][key_id]
        default = None if stored["default"] == key_id else stored["default"]
        self._save({**stored, "default": default})

    def _load(self) -> dict[str, Any]:
        try:
            stored = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            stored = {}
        except ValueError as exc:
            raise self._unreadable() from exc
        is_known = isinstance(stored, dict) and stored.get("version", VERSION) == VERSION
        if not is_known or not isinstance(stored.get("keys", {}), dict):
            raise self._unreadable()
        # Whatever else is in there stays there.
        return {"version": VERSION, "default": None, "keys": {}, **stored}

    def _unreadable(self) -> CommandError:
        # Its text is not shown: it may be a key.
        return CommandError(
            f"{self._path} is not a file of credentials that this version can read",
            remedy="move it away, and sign in again",
        )

    def _save(self, stored: dict[str, Any]) -> None:
        folder = self._path.parent
        if not folder.is_dir():
            folder.mkdir(mode=0o700, parents=True)
            folder.chmod(0o700)  # whatever the umask
        kept = {name: value for name, value in stored.items() if value is not None}
        handle, new = tempfile.mkstemp(dir=folder, prefix=f".{self._path.name}.")  # mode 0600
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                json.dump(kept, out, indent=2)
                out.flush()
                os.fsync(out.fileno())
            pathlib.Path(new).replace(self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                pathlib.Path(new).unlink()
            raise
