"""The manifest of a checkpoint: its files with sizes and digests, as JSON beside them.

A checkpoint exists when its manifest does. A manifest is written last and atomically, so it
never lists files that are missing.

Also the checks that all stores make: whether a commit may write, and whether files are what was
written.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Self

import msgspec

from tinsmith.checkpoints.disk import new_token
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.errors import (
    CheckpointDamagedError,
    CheckpointExistsError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    ValidationError,
)

FORMAT_VERSION = 1
"""Of the manifest and of how files lie in a store. A newer one is refused."""
MANIFEST = "checkpoint.json"
MANIFEST_BYTES_MAX = 1 << 20
FILES_MAX = 1000
_PIECE_BYTES = 1 << 20
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_VERSION = re.compile(r"[0-9a-f]{16}")


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    name: str
    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds. It never changes; an overwritten checkpoint has another."""

    format_version: int
    path: str
    """The checkpoint's, so that a file system that ignores case cannot mix up two."""
    version: str
    """New with each commit: the folder that holds the files, and a tag for downloads."""
    origin: str
    """Who made it, as told to `begin`."""
    files: tuple[FileEntry, ...]
    """In the order of their names."""

    @classmethod
    def new(cls, path: CheckpointPath, origin: str, files: tuple[FileEntry, ...]) -> Self:
        """That of a checkpoint that is about to be committed, under a version of its own."""
        return cls(
            format_version=FORMAT_VERSION,
            path=str(path),
            version=new_token(),
            origin=origin,
            files=files,
        )

    @property
    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(file.size_bytes for file in self.files)

    def file(self, name: str) -> FileEntry | None:
        """The file with this name, if there is one."""
        return next((file for file in self.files if file.name == name), None)

    def encode(self) -> bytes:
        """As JSON, to be written."""
        return msgspec.json.format(msgspec.json.encode(self)) + b"\n"


def decode(content: bytes, path: CheckpointPath) -> Manifest | None:
    """Read a manifest; None if it is that of another checkpoint, whose name differs in case.

    Raises:
        CheckpointDamagedError: It is not a manifest.
        CheckpointFormatError: It is of a newer version.
    """
    try:
        version = msgspec.json.decode(content, type=_Versioned).format_version
        if version != FORMAT_VERSION:
            raise CheckpointFormatError(
                f"{path} has format {version}; this version of tinsmith reads {FORMAT_VERSION}",
                remedy="use the version of tinsmith that wrote it, or a newer one",
            )
        manifest = msgspec.json.decode(content, type=Manifest)
        _check(manifest)
    except (msgspec.MsgspecError, RecursionError, ValidationError, UnicodeError) as exc:
        raise CheckpointDamagedError(
            f"cannot read {MANIFEST} of {path}: {exc}",
            remedy="restore it from a backup, or delete the checkpoint",
        ) from exc
    return manifest if manifest.path == str(path) else None


class _Versioned(msgspec.Struct):
    format_version: int


def _check(manifest: Manifest) -> None:
    """Refuse what could lead elsewhere or was never written by us."""
    if not _VERSION.fullmatch(manifest.version):
        raise ValidationError("invalid version")
    names = [file.name for file in manifest.files]
    if names != sorted(set(names)) or len(names) > FILES_MAX:
        raise ValidationError("the files are not sorted, or there are too many")
    for file in manifest.files:
        check_file_name(file.name)
        if file.size_bytes < 0 or not re.fullmatch(r"[0-9a-f]{64}", file.sha256):
            raise ValidationError(f"file {file.name} has no size or no digest")


def check_file_name(name: str) -> None:
    """Refuse a file's name that could mean something else than a file in its folder."""
    if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
        raise ValidationError(
            f"file name {name!r:.120} is not allowed",
            remedy="use up to 100 letters, digits, dots, dashes and underscores",
        )


def survey(folder: Path, *, sync: bool) -> tuple[FileEntry, ...]:
    """The files of a folder with their digests; `sync` makes each of them durable on the way.

    Raises:
        ValidationError: It holds something else than plain files with plain names, or nothing.
    """
    found = sorted(folder.iterdir())
    if not 1 <= len(found) <= FILES_MAX:
        raise ValidationError(f"the folder has {len(found)} files; expected 1 to {FILES_MAX}")
    entries = []
    for file in found:
        check_file_name(file.name)
        if file.is_symlink() or not file.is_file():
            raise ValidationError(f"{file.name} is not a regular file")
        entries.append(_entry(file, sync=sync))
    return tuple(entries)


def _entry(file: Path, *, sync: bool) -> FileEntry:
    digest, size_bytes = hashlib.sha256(), 0
    with file.open("rb") as content:
        if sync:
            os.fsync(content.fileno())
        while piece := content.read(_PIECE_BYTES):
            digest.update(piece)
            size_bytes += len(piece)
    return FileEntry(file.name, size_bytes, digest.hexdigest())


def not_found(path: CheckpointPath) -> CheckpointNotFoundError:
    """The error for a path under which nothing is."""
    return CheckpointNotFoundError(f"there is no checkpoint {path}")


def already_there(
    path: CheckpointPath, current: Manifest | None, origin: str, *, overwrite: bool
) -> Manifest | None:
    """What a commit gives without writing; None if it is to write.

    Raises:
        CheckpointExistsError: Another checkpoint exists and must not be overwritten.
    """
    if current is not None and origin and current.origin == origin:
        return current
    if current is not None and not overwrite:
        raise CheckpointExistsError(
            f"{path} already exists", remedy="choose another name, or overwrite it"
        )
    return None


def check_version(path: CheckpointPath, manifest: Manifest, version: str | None) -> None:
    """Refuse a version that has been replaced; None accepts any.

    Raises:
        CheckpointNotFoundError: It was overwritten.
    """
    if version not in (None, manifest.version):
        raise CheckpointNotFoundError(f"{path} has been overwritten")


def checked_range(
    path: CheckpointPath, manifest: Manifest, file: str, start: int, stop: int | None
) -> int:
    """Where the range ends; raises as `CheckpointStore.read` does."""
    entry = manifest.file(file)
    if entry is None:
        raise CheckpointNotFoundError(f"{path} has no file {file!r:.120}")
    stop = entry.size_bytes if stop is None else stop
    if not 0 <= start <= stop <= entry.size_bytes:
        raise ValidationError(
            f"range is {start} to {stop}; file {file} of {path} has {entry.size_bytes} bytes"
        )
    return stop


def check_sizes(path: CheckpointPath, folder: Path, manifest: Manifest) -> None:
    """Refuse a folder in which a file is missing or has another size."""
    for file in manifest.files:
        try:
            size_bytes = (folder / file.name).stat().st_size
        except FileNotFoundError:
            size_bytes = None
        if size_bytes != file.size_bytes:
            raise CheckpointDamagedError(
                f"{path}: file {file.name} has {size_bytes} bytes; {file.size_bytes} were written",
                remedy="check the disk, and restore the file from a backup",
            )


def check_digests(path: CheckpointPath, folder: Path, manifest: Manifest) -> None:
    """Refuse a folder in which a file is not the one that was written."""
    found = {file.name: file for file in survey(folder, sync=False)}
    for file in manifest.files:
        if found.get(file.name) != file:
            raise CheckpointDamagedError(
                f"{path}: file {file.name} has changed since it was written",
                remedy="check the disk, and restore the file from a backup",
            )
