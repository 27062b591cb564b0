"""Reading a checkpoint that is a local folder, which a lock keeps from being deleted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tinsmith.checkpoints.base import PIECE_BYTES, Reading
from tinsmith.checkpoints.disk import FolderLock, disk_errors, try_lock
from tinsmith.checkpoints.manifest import Manifest
from tinsmith.errors import CheckpointDamagedError


class LockedReading(Reading):
    """A folder that nobody deletes before `close`."""

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
        try:
            with disk_errors(f"{self._name} cannot be opened"):
                self._file = (reading.folder / file).open("rb")
            self._file.seek(start)
        except BaseException:
            reading.close()
            raise

    def __next__(self) -> bytes:
        if self._left <= 0:
            self.close()
            raise StopIteration
        with disk_errors(f"{self._name} cannot be read"):
            piece = self._file.read(min(self._left, PIECE_BYTES))
        if not piece:
            self.close()
            raise CheckpointDamagedError(f"{self._name} is shorter than it was")
        self._left -= len(piece)
        return piece

    def close(self) -> None:
        """Let go of the file; called at the end, and by whoever gives up."""
        self._left = 0
        self._file.close()
        self._reading.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it was never opened
            self.close()
