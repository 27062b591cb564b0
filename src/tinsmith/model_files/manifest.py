"""What is known of a kept model: where its files came from, and their digests."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from tinsmith.errors import BaseModelDamagedError

MANIFEST = "tinsmith-model.json"
_VERSION = 1


class KeptFile(msgspec.Struct, frozen=True):
    """One file of a model."""

    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A kept model."""

    version: int = _VERSION
    name: str
    pulled_at: float
    """Seconds since 1970."""
    source: dict[str, str]
    files: dict[str, KeptFile]

    @property
    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(file.size_bytes for file in self.files.values())


def kept_files(folder: Path) -> dict[str, KeptFile]:
    """The files of a folder, with their digests as they are now."""
    return {
        path.name: KeptFile(path.stat().st_size, sha256_of(path))
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }


def sha256_of(path: Path) -> str:
    """The digest of a file's content."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def read_manifest(folder: Path) -> Manifest | None:
    """What is known of the model in a folder; None if the folder is none of ours.

    Raises:
        BaseModelDamagedError: The manifest cannot be read.
    """
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (msgspec.MsgspecError, UnicodeError) as exc:
        raise BaseModelDamagedError(
            f"{folder / MANIFEST} cannot be read: {exc}",
            remedy="`tinsmith model pull NAME --force` fetches the model anew",
        ) from exc


def differences(folder: Path, manifest: Manifest) -> list[str]:
    """In which files a folder differs from its manifest; reads every byte."""
    return [
        name
        for name, file in manifest.files.items()
        if not (folder / name).is_file() or sha256_of(folder / name) != file.sha256
    ]
