"""Opens a store of checkpoints by its address; a variant is loaded when it is chosen."""

from __future__ import annotations

import urllib.parse
from pathlib import Path

from tinsmith.checkpoints.base import CheckpointStore
from tinsmith.checkpoints.folder_store import FolderStore
from tinsmith.errors import ValidationError


def open_store(
    address: str | Path, *, work: Path | None = None, must_exist: bool = False
) -> CheckpointStore:
    """A store at a folder, or at any URL that fsspec can write to, such as `s3://bucket/folder`.

    Args:
        address: A folder's path, a `file://` URL, or another URL.
        work: For URLs, a local folder for what is being written and what was fetched. It has to be
            the same after a restart, so that `sweep` finds what a crash left.
        must_exist: Whether a folder that has no store is refused: its disk may not be mounted.

    Raises:
        ValidationError: The address is a URL that cannot be used, or `work` is missing.
        CheckpointUnavailableError: The folder cannot be made, or has no store and should.
    """
    text = str(address)
    if isinstance(address, Path) or "://" not in text:
        return FolderStore(Path(address).expanduser(), must_exist=must_exist)
    if text.startswith("file://"):
        # As a folder, where renaming is one step, which fsspec does not promise.
        folder = Path(urllib.parse.unquote(urllib.parse.urlsplit(text).path))
        return FolderStore(folder, must_exist=must_exist)
    if work is None:
        raise ValidationError(f"{text} needs a local folder for temporary files: pass `work`")
    from tinsmith.checkpoints.url_store import UrlStore

    return UrlStore(text, work)
