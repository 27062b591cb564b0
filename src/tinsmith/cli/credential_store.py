"""The file with stored API keys: `~/.tinker/credentials.json`.

It has the official SDK's format, so either program finds the keys that the other stored. Only its
owner can read it, and it is replaced atomically. `tinsmith auth` writes it; clients read it with
`tinsmith.client.auth`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tempfile
from typing import Any

from tinsmith.cli.command_errors import CommandError

VERSION = 1


class CredentialStore:
    """Stored keys by id, one of which may be the default."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path.expanduser()

    def default(self) -> tuple[str, dict[str, Any]] | None:
        """The id and the record of the default key, if there is one."""
        stored = self._load()
        key_id = stored["default"]
        record = stored["keys"].get(key_id)
        return None if record is None else (key_id, record)

    def add_default(self, key_id: str, record: dict[str, Any]) -> None:
        """Store a key and make it the default."""
        stored = self._load()
        stored["keys"][key_id] = record
        self._save({**stored, "default": key_id})

    def remove(self, key_id: str) -> None:
        """Delete a key; if it was the default, there is no default afterwards."""
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
        # Fields that we do not know are kept.
        return {"version": VERSION, "default": None, "keys": {}, **stored}

    def _unreadable(self) -> CommandError:
        # Without the parser's message, which may quote a key.
        return CommandError(
            f"cannot read {self._path}: it is not a credentials file of a known version",
            remedy="move the file away, then run `tinsmith auth login`",
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
