"""Why a disk operation failed: full, read-only, no permission, and so on.

Each fault has a reason that names no folder, so clients may see it, and a remedy for the operator.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

import msgspec

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_PROBED_BYTES = 64 * 1024


class DiskFault(msgspec.Struct, frozen=True):
    """The cause of a failed disk operation."""

    reason: str
    """For clients."""
    remedy: str
    """For the operator."""


FULL = DiskFault("its disk is full", "free disk space and retry")
READ_ONLY = DiskFault(
    "its disk is read-only",
    "remount the file system read-write; the system log (dmesg) says why it is read-only",
)
FORBIDDEN = DiskFault(
    "it may not write to its folder",
    "give the user that runs the service access to the folder and its files (chown, chmod)",
)
GONE = DiskFault(
    "its folder is missing", "check that the disk is mounted and the folder is the right one"
)
FAILING = DiskFault("its disk reports errors", "check the system log (dmesg), and replace the disk")
NO_DESCRIPTORS = DiskFault(
    "it has no file descriptor left", "raise the limit of open files (ulimit -n) and restart"
)
OTHER = DiskFault(
    "its disk does not respond", "check that the disk is mounted, has free space and is writable"
)
_BY_NUMBER = {
    **dict.fromkeys(NO_ROOM, FULL),
    errno.EROFS: READ_ONLY,
    errno.EACCES: FORBIDDEN,
    errno.EPERM: FORBIDDEN,
    errno.ENOENT: GONE,
    errno.ENOTDIR: GONE,
    errno.ENODEV: GONE,
    errno.ESTALE: GONE,
    errno.EIO: FAILING,
    errno.EMFILE: NO_DESCRIPTORS,
    errno.ENFILE: NO_DESCRIPTORS,
}


def fault_of(error: OSError) -> DiskFault:
    """The fault behind an error."""
    return _BY_NUMBER.get(error.errno or 0, OTHER)


def probe(folder: Path) -> DiskFault | None:
    """Write a small file, and return the fault if that fails.

    For errors of libraries that hide the error of the system.
    """
    path = folder / f".probe-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, bytes(_PROBED_BYTES))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as exc:
        return fault_of(exc)
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return None
