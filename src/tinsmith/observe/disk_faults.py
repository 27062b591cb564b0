"""What is wrong with a disk, in words: a full one, a read-only one and one that is not ours differ.

Each has a reason, which names no folder and may be told to anybody, and a remedy for whoever runs
the service.
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
    """Why a disk refuses."""

    reason: str
    """For anybody."""
    remedy: str
    """For the operator."""


FULL = DiskFault("its disk is full", "make room on the disk and try again")
READ_ONLY = DiskFault(
    "its disk is read-only",
    "mount the file system for writing again; the system's log (dmesg) says why it is read-only",
)
FORBIDDEN = DiskFault(
    "it may not write to its folder",
    "give the folder and its files to the user that runs the service, with chown or chmod",
)
GONE = DiskFault(
    "its folder is missing", "see that the disk is mounted, and that it is the right folder"
)
FAILING = DiskFault(
    "its disk reports errors", "look into the system's log (dmesg), and replace the disk"
)
NO_DESCRIPTORS = DiskFault(
    "it has no file descriptor left", "raise the limit of open files (ulimit -n) and restart"
)
OTHER = DiskFault(
    "its disk does not answer", "see that the disk is there, has room and may be written to"
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
    """Why an operation on a disk failed."""
    return _BY_NUMBER.get(error.errno or 0, OTHER)


def probe(folder: Path) -> DiskFault | None:
    """Try to write a small file; says what is wrong, or None if it could be written.

    For errors of libraries that do not pass on what the system said.
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
