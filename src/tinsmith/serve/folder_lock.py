"""Who runs the embedded service of a data folder: one process at a time, and how others reach it.

The lock ends with its process, however that ends. The file says who has it and at which socket the
service is; it is there for people and for the processes that come second.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO, Self

import msgspec

from tinsmith.errors import ValidationError

NAME = "embedded.lock"


class Owner(msgspec.Struct, frozen=True):
    """The process that has the lock."""

    pid: int
    unix_socket: str | None = None
    """None while its service is starting."""


class FolderLock:
    """The lock of a data folder, held. In a `with` block, or until `let_go`."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._write(Owner(os.getpid()))

    @classmethod
    def try_take(cls, folder: Path) -> Self | None:
        """The lock, or None while another process has it.

        Raises:
            ValidationError: The folder cannot be used.
        """
        try:
            file = (folder / NAME).open("a+", encoding="utf-8")
        except OSError as exc:
            raise ValidationError(
                f"{folder} cannot be the data folder: {exc.strerror or exc}",
                remedy="set TINSMITH_HOME to a folder that can be written to",
            ) from exc
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return cls(file)

    def tell(self, unix_socket: str) -> None:
        """Say where the service is."""
        self._write(Owner(os.getpid(), unix_socket))

    def _write(self, owner: Owner) -> None:
        self._file.truncate(0)
        self._file.write(msgspec.json.encode(owner).decode())
        self._file.flush()

    def let_go(self) -> None:
        """Let another process have it.

        In a forked child, where it is the parent's, this leaves it to the parent alone.
        """
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.truncate(0)
        self.let_go()


def owner_of(folder: Path) -> Owner | None:
    """Who has the lock, as far as it has said so."""
    try:
        return msgspec.json.decode((folder / NAME).read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError):
        return None  # it is just being written, or let go of
