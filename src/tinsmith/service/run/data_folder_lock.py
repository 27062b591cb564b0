"""The lock of a data folder: one process runs its embedded service, and others find that process.

The lock ends with its process, however that ends. Its file says who holds it and at which socket
the service listens.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO, Self

import msgspec

from tinsmith.errors import ValidationError

NAME = "embedded.lock"


class LockOwner(msgspec.Struct, frozen=True):
    """The process that holds the lock."""

    pid: int
    unix_socket: str | None = None
    """None while its service is starting."""


class DataFolderLock:
    """A held lock of a data folder, until the end of a `with` block or `release`."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._write(LockOwner(os.getpid()))

    @classmethod
    def try_take(cls, folder: Path) -> Self | None:
        """The lock, or None while another process holds it.

        Raises:
            ValidationError: The folder cannot be used.
        """
        try:
            file = (folder / NAME).open("a+", encoding="utf-8")
        except OSError as exc:
            raise ValidationError(
                f"{folder} cannot be the data folder: {exc.strerror or exc}",
                remedy="set TINSMITH_HOME to a writable folder",
            ) from exc
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return cls(file)

    def publish(self, unix_socket: str) -> None:
        """Write where the service listens."""
        self._write(LockOwner(os.getpid(), unix_socket))

    def _write(self, owner: LockOwner) -> None:
        self._file.truncate(0)
        self._file.write(msgspec.json.encode(owner).decode())
        self._file.flush()

    def release(self) -> None:
        """Release the lock. In a forked child this leaves it to the parent alone."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.truncate(0)
        self.release()


def owner_of(folder: Path) -> LockOwner | None:
    """Who holds the lock, as far as the file says."""
    try:
        return msgspec.json.decode((folder / NAME).read_bytes(), type=LockOwner)
    except (OSError, msgspec.MsgspecError):
        return None  # it is being written or released
