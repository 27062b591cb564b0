"""A local folder of folders that are each being used by somebody, and of what crashes left there.

A staged folder is locked by whoever made it, for as long as that process lives and has not let go
of it. One without a lock was left behind, and whoever finds it may finish or remove it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tinsmith.checkpoints.disk import (
    FolderLock,
    lock,
    make_folders,
    new_token,
    remove_tree,
    try_lock,
)

_TOKEN = re.compile(r"[0-9a-f]{16}")
"""What `new_token` gives."""


class StagedFolder:
    """A folder that is ours until it is removed or let go of."""

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
        """Folders whose makers are gone or have let go of them, one at a time."""
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
