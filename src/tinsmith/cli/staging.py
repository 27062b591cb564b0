"""The folder in which a download grows until it is whole: `<target>.partial`, beside its target.

It holds the files under `files/`, what is known of each in `state.json`, and a lock, so that two
processes do not write to one another's parts. When everything is there, `place` moves it to its
name in one step; before that nothing has the final name.

Knows nothing of HTTP.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
from types import TracebackType
from typing import Any, Self

from tinsmith.cli.failures import CommandError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_STATE = "state.json"
_LOCK = "lock"


class Staging:
    """One download under way; a context manager that holds its lock.

    Args:
        target: What the download is to become.
        resume: Go on with what an earlier one left, and leave what this one could not finish.
    """

    def __init__(self, target: pathlib.Path, *, resume: bool = True) -> None:
        self.target = target
        self.folder = target.with_name(f"{target.name}.partial")
        self.files = self.folder / "files"
        self._resume = resume
        self._lock: int | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        if not self._resume:
            self.clear()
        self.files.mkdir(exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        has_parts = any(path.is_file() for path in self.files.rglob("*"))
        if not self._resume or kind is None or not has_parts:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    def _take_lock(self) -> None:
        self._lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(self._lock)
            raise CommandError(
                f"another process is downloading to {self.target}",
                remedy="wait for it, or choose another place with --output",
            ) from exc

    def clear(self) -> None:
        """Forget what an earlier download left."""
        shutil.rmtree(self.files, ignore_errors=True)
        (self.folder / _STATE).unlink(missing_ok=True)

    def path_of(self, name: str) -> pathlib.Path:
        """Where a file of the download goes; makes the folders above it.

        Raises:
            CommandError: The name leads out of the download.
        """
        path = self.files.joinpath(*safe_parts(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def keep_only(self, names: list[str]) -> None:
        """Remove files that an earlier download left and this one does not have."""
        kept = {self.path_of(name) for name in names}
        for path in [path for path in self.files.rglob("*") if path.is_file()]:
            if path not in kept:
                path.unlink()

    def load(self) -> dict[str, Any]:
        """What an earlier download noted; empty if there is nothing that can be read."""
        try:
            noted = json.loads((self.folder / _STATE).read_text())
        except (OSError, ValueError):
            return {}
        return noted if isinstance(noted, dict) else {}

    def save(self, state: dict[str, Any]) -> None:
        """Note how far the download is, in one step. The bytes it speaks of must be on disk."""
        new = self.folder / f"{_STATE}.new"
        with contextlib.suppress(FileNotFoundError):  # the download was given up
            new.write_text(json.dumps(state))
            new.replace(self.folder / _STATE)

    def place(self, made: pathlib.Path, *, replace: bool = False) -> None:
        """Give what was made its final name.

        Args:
            made: A file or folder of this download.
            replace: Whether a folder of that name may be replaced; a file always is.

        Raises:
            CommandError: The target has come to exist meanwhile.
        """
        if made.is_dir() and self.target.exists():
            if not replace:
                raise exists_already(self.target)
            # In the download's own folder, which is removed in the end.
            self.target.rename(self.folder / "replaced")
        made.replace(self.target)


def exists_already(target: pathlib.Path) -> CommandError:
    """The error for a folder that is there."""
    return CommandError(
        f"{target} exists", remedy="--force replaces it; --output chooses another place"
    )


def safe_parts(name: str) -> list[str]:
    """The parts of a relative path from elsewhere, if it stays where it is put.

    Raises:
        CommandError: It leads out, or it is nothing that a file should be called.
    """
    parts = [part for part in name.split("/") if part != "."]
    is_plain = name.isprintable() and "\\" not in name
    if not parts or not is_plain or any(part in ("", "..") for part in parts):
        raise CommandError(
            f"the checkpoint names a file {name!r:.200}, which would be written elsewhere",
            remedy="nothing was written there; tell the operator of the service",
        )
    return parts
