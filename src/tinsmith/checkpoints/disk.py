"""Crash-safe operations on a local disk: durable names, locks, and errors as ours.

Locks are `flock`s on folders: they end with the process, however it ends, and hold between
processes as well as between two holders in one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from tinsmith.errors import CheckpointUnavailableError, StorageFullError
from tinsmith.observe.disk_faults import NO_ROOM, fault_of

try:
    import fcntl
except ImportError:  # not on Windows: there, one process at a time
    fcntl = None  # type: ignore[assignment]


class FolderLock:
    """A held lock on a folder, or on a file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def is_of(self, path: Path) -> bool:
        """Whether this path still leads to what is locked."""
        assert self._descriptor is not None
        try:
            return os.path.samestat(os.fstat(self._descriptor), path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Let go. A second time does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        # Of a caller that was cancelled: what nobody holds any more must not stay locked.
        self.release()


def lock(path: Path, *, is_shared: bool = False) -> FolderLock:
    """Wait for a lock on what is there."""
    return _locked(path, is_shared=is_shared, waits=True)


def try_lock(path: Path, *, is_shared: bool = False) -> FolderLock | None:
    """A lock, or None while somebody else has one that excludes it."""
    try:
        return _locked(path, is_shared=is_shared, waits=False)
    except BlockingIOError:
        return None


def check_locks(folder: Path) -> None:
    """Refuse a file system on which folders cannot be locked; NFS is one."""
    try:
        lock(folder).release()
    except OSError as exc:
        raise CheckpointUnavailableError(
            f"{folder} cannot be locked: {exc}",
            remedy="choose a folder on a local disk, or the URL of an object store",
        ) from exc


def _locked(path: Path, *, is_shared: bool, waits: bool) -> FolderLock:
    descriptor = os.open(path, os.O_RDONLY)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        if fcntl is not None:
            mode = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
            fcntl.flock(descriptor, mode if waits else mode | fcntl.LOCK_NB)
        undo.pop_all()
    return FolderLock(descriptor)


def new_token() -> str:
    """A unique name."""
    return secrets.token_hex(8)


def make_folders(folder: Path) -> None:
    """Make a folder and those above it, each of them durable."""
    if not folder.is_dir():
        make_folders(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder.parent)


def write_durably(file: Path, content: bytes) -> None:
    """Write a new file; when it returns, its content survives a power cut, its name not yet."""
    with file.open("xb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; a file's own sync does not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_empty(folder: Path, *, up_to: Path) -> None:
    """Remove a folder and those above it, as far as they are empty, below `up_to`."""
    with contextlib.suppress(OSError):
        while folder != up_to:
            folder.rmdir()
            folder = folder.parent


def remove_tree(folder: Path) -> None:
    """Remove a folder and its content; what cannot be removed stays for the next sweep."""
    shutil.rmtree(folder, ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file that never changes, or copy it where links are not supported."""
    try:
        target.hardlink_to(source)
    except OSError:
        target.unlink(missing_ok=True)
        shutil.copyfile(source, target)


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn an error of the operating system into ours; `what` says what was being done."""
    try:
        yield
    except OSError as exc:
        raise disk_error(what, exc) from exc


def disk_error(what: str, error: OSError) -> CheckpointUnavailableError:
    """Our error for one of the operating system."""
    fault = fault_of(error)
    kind = StorageFullError if error.errno in NO_ROOM else CheckpointUnavailableError
    return kind(f"{what}: {error}", reason=fault.reason, remedy=fault.remedy)
