"""What stores check alike: whether a commit may write, whether files are what was written."""

from __future__ import annotations

from pathlib import Path

from tinsmith.checkpoints.manifest import Manifest, survey
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.errors import (
    CheckpointDamagedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ValidationError,
)


def not_found(path: CheckpointPath) -> CheckpointNotFoundError:
    """The error for a path under which nothing is."""
    return CheckpointNotFoundError(f"there is no checkpoint {path}")


def already_there(
    path: CheckpointPath, current: Manifest | None, origin: str, *, overwrite: bool
) -> Manifest | None:
    """What a commit gives without writing; None if it is to write.

    Raises:
        CheckpointExistsError: Another is there that is not to be overwritten.
    """
    if current is not None and origin and current.origin == origin:
        return current
    if current is not None and not overwrite:
        raise CheckpointExistsError(f"{path} exists", remedy="save with another name or overwrite")
    return None


def check_version(path: CheckpointPath, manifest: Manifest, version: str | None) -> None:
    """Refuse what has taken the place of a version; None stands for any.

    Raises:
        CheckpointNotFoundError: It was overwritten.
    """
    if version not in (None, manifest.version):
        raise CheckpointNotFoundError(f"{path} was overwritten since it was looked at")


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
                f"{path}: file {file.name} is not the one that was written",
                remedy="check the disk, and restore the file from a backup",
            )
