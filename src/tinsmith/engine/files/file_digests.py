"""Digests of the files of an adapter, for files that go from one process to another."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from tinsmith.errors import CheckpointFormatError

CHUNK_BYTES = 1 << 20


def digest_of(folder: Path) -> str:
    """The digest of the names and bytes of all files in a folder."""
    digest = hashlib.blake2b(digest_size=24)
    for file in files_in(folder):
        name = file.name.encode()
        digest.update(len(name).to_bytes(4, "little") + name)
        digest.update(file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as opened:
            while chunk := opened.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def check_digest(folder: Path, expected: str) -> None:
    """Check that the files of a folder are those that were saved.

    Raises:
        CheckpointFormatError: They are not.
    """
    try:
        found = digest_of(folder)
    except OSError as exc:
        raise CheckpointFormatError(f"the saved files cannot be read: {exc}") from exc
    if found != expected:
        raise CheckpointFormatError(
            f"the saved files are damaged: their digest is {found}, expected {expected}"
        )


def files_in(folder: Path) -> list[Path]:
    """The files of a folder, in the order of their names."""
    with os.scandir(folder) as found:
        return sorted(Path(one.path) for one in found if one.is_file())
