"""A checkpoint as one tar, made while it is sent and the same bytes each time.

Because the bytes are known before they are made, any part of an archive can be asked for: its size
and where each file lies follow from the manifest alone.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator

from tinsmith.checkpoints.base import CheckpointStore
from tinsmith.checkpoints.manifest import FileEntry, Manifest
from tinsmith.checkpoints.paths import CheckpointPath

_BLOCK = tarfile.BLOCKSIZE


class Archive:
    """The tar of one checkpoint."""

    def __init__(self, store: CheckpointStore, path: CheckpointPath, manifest: Manifest) -> None:
        self._store = store
        self._path = path
        self._parts: list[tuple[int, bytes | FileEntry]] = []
        self.size_bytes = 0
        for file in manifest.files:
            self._add(_header(file), _BLOCK)
            self._add(file, file.size_bytes)
            self._add(bytes(-file.size_bytes % _BLOCK), -file.size_bytes % _BLOCK)
        self._add(bytes(2 * _BLOCK), 2 * _BLOCK)

    def _add(self, part: bytes | FileEntry, size: int) -> None:
        if size:
            self._parts.append((self.size_bytes, part))
            self.size_bytes += size

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """The bytes from `start` to `stop`, in pieces; files are opened one after another."""
        for begin, part in self._parts:
            size = len(part) if isinstance(part, bytes) else part.size_bytes
            first, last = max(start, begin) - begin, min(stop, begin + size) - begin
            if first >= last:
                continue
            if isinstance(part, bytes):
                yield part[first:last]
            else:
                yield from self._store.read(self._path, part.name, first, last)


def _header(file: FileEntry) -> bytes:
    entry = tarfile.TarInfo(file.name)
    entry.size = file.size_bytes
    return entry.tobuf(tarfile.GNU_FORMAT)  # which takes files of any size
