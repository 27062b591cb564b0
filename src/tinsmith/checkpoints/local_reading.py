"""Checkpoints in local folders that locks protect: folders in use, and reading from them.

A `StagingArea` is a folder of such folders, and of what crashes left there. A staged folder is
locked by whoever made it, until it releases the lock or exits. One without a lock was left behind,
and whoever finds it may finish or remove it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from tinsmith.checkpoints.base import PIECE_BYTES, Reading
from tinsmith.checkpoints.disk import (
    FolderLock,
    disk_errors,
    lock,
    make_folders,
    new_token,
    remove_tree,
    try_lock,
)
from tinsmith.checkpoints.manifest import Manifest
from tinsmith.errors import CheckpointDamagedError


class LockedReading(Reading):
    """A folder that is not deleted before `close`."""

    def __init__(self, manifest: Manifest, folder: Path, held: FolderLock) -> None:
        self.manifest = manifest
        self.folder = folder
        self._held = held

    @classmethod
    def try_open(cls, manifest: Manifest, folder: Path) -> LockedReading | None:
        """None if the folder is not there, or is being deleted."""
        try:
            held = try_lock(folder, is_shared=True)
        except FileNotFoundError:
            return None
        if held is None:
            return None
        if not held.is_of(folder):  # it was moved away between being found and being locked
            held.release()
            return None
        return cls(manifest, folder, held)

    def close(self) -> None:
        """`Reading.close`."""
        self._held.release()


class Pieces(Iterator[bytes]):
    """Part of a file, piece by piece. Its reading ends with it, also if it is never begun."""

    def __init__(self, reading: Reading, file: str, start: int, stop: int) -> None:
        self._reading = reading
        self._left = stop - start
        self._name = f"{reading.manifest.path}, file {file}"
        with contextlib.ExitStack() as undo:
            undo.callback(reading.close)
            with disk_errors(f"{self._name} cannot be opened"):
                self._file = (reading.folder / file).open("rb")
            self._file.seek(start)
            undo.pop_all()

    def __next__(self) -> bytes:
        if self._left <= 0:
            self.close()
            raise StopIteration
        with disk_errors(f"{self._name} cannot be read"):
            piece = self._file.read(min(self._left, PIECE_BYTES))
        if not piece:
            self.close()
            raise CheckpointDamagedError(f"{self._name} was truncated")
        self._left -= len(piece)
        return piece

    def close(self) -> None:
        """Close the file; called at the end, and by callers that stop early."""
        self._left = 0
        self._file.close()
        self._reading.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it was never opened
            self.close()


_TOKEN = re.compile(r"[0-9a-f]{16}")
"""What `new_token` gives."""


class StagedFolder:
    """A folder that is ours until it is removed or released."""

    def __init__(self, folder: Path, held: FolderLock) -> None:
        self.folder = folder
        self._held = held

    def remove(self) -> None:
        """Delete it with all that is in it."""
        remove_tree(self.folder)
        self._held.release()

    def leave(self) -> None:
        """Let go of it as it is; it will be found by `left_behind`."""
        self._held.release()


class StagingArea:
    """The folder that holds them; made if it is missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_folders(folder)

    def make(self) -> StagedFolder:
        """A new, empty folder."""
        # The lock on the whole: nobody may find the folder before it is locked.
        with lock(self.folder):
            folder = self.folder / new_token()
            folder.mkdir(mode=0o700)
            return StagedFolder(folder, lock(folder))

    def left_behind(self) -> Iterator[StagedFolder]:
        """Folders whose owners are gone or have released them, one at a time."""
        for folder in list(self.folder.iterdir()):
            if not _TOKEN.fullmatch(folder.name):
                continue  # not made here: somebody else's folder has this name too
            with lock(self.folder):
                try:
                    held = try_lock(folder)
                except FileNotFoundError:  # removed meanwhile
                    continue
            if held is not None and held.is_of(folder):
                yield StagedFolder(folder, held)
            elif held is not None:
                held.release()
