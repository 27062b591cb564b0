"""A cache of adapter files on this machine: by digest, with a bound, least recently used first out.

Sampler weights are loaded from a folder that is only there during the call. Their files are kept
here, so that more replicas can load the same weights when demand asks for it. Equal files are kept
once, under the digest of their names and bytes; a copy that does not match its digest any more is
not used. Whoever finds nothing here has the weights loaded from the checkpoint store again.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections import OrderedDict
from pathlib import Path

from tinsmith.engine.base import WeightsId
from tinsmith.engine.files.file_digests import digest_of, files_in


class WeightsCache:
    """The cached files. Its methods block; they may be called from any thread.

    Args:
        folder: Where they are; it belongs to this object alone, and is emptied.
        most_bytes: What they may take together.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._folder = folder
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._digests: dict[WeightsId, str] = {}
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def keep(self, weights_id: WeightsId, source: Path) -> str:
        """Copy the files of a folder, and return their digest; too large ones are not kept."""
        digest, size = digest_of(source), _size_of(source)
        with self._lock:
            if size > self._most_bytes:
                return digest
            if digest not in self._sizes:
                self._copy(source, digest)
            self._digests[weights_id] = digest
            self._sizes[digest] = size
            self._sizes.move_to_end(digest)
            while sum(self._sizes.values()) > self._most_bytes:
                self._delete(next(iter(self._sizes)))
        return digest

    def find(self, weights_id: WeightsId) -> Path | None:
        """The folder of the files; None if they are not here, or are damaged."""
        with self._lock:
            digest = self._digests.get(weights_id)
            if digest is None or digest not in self._sizes:
                return None
            folder = self._folder / digest
            try:
                is_good = digest_of(folder) == digest
            except OSError:
                is_good = False
            if not is_good:
                self._delete(digest)
                return None
            self._sizes.move_to_end(digest)
            return folder

    def drop(self, weights_id: WeightsId) -> None:
        """Forget weights; their files go unless others have the same."""
        with self._lock:
            digest = self._digests.pop(weights_id, None)
            if digest is not None and digest not in self._digests.values():
                self._delete(digest)

    def _copy(self, source: Path, digest: str) -> None:
        partial = self._folder / f"{digest}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for file in files_in(source):
            shutil.copyfile(file, partial / file.name)
        partial.rename(self._folder / digest)

    def _delete(self, digest: str) -> None:
        self._sizes.pop(digest, None)
        shutil.rmtree(self._folder / digest, ignore_errors=True)


def _size_of(folder: Path) -> int:
    sizes = 0
    for file in files_in(folder):
        with contextlib.suppress(OSError):
            sizes += file.stat().st_size
    return sizes
