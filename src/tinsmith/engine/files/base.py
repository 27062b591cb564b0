"""The contract of a download source, and what all of them need: progress, disk space, errors.

A source downloads one model. `cache.py` chooses the folder, checks that the model is complete, and
moves it to its final name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from tinsmith.errors import BaseModelError, BaseModelNoRoomError, BaseModelUnavailableError

ReportProgress = Callable[[str, int, int | None], None]
"""Called with the current activity, the bytes done, and the total bytes if known."""

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_LOOK_S = 0.2
MAKE_ROOM = "free disk space, or choose another disk with TINSMITH_HOME"


class DownloadSource(Protocol):
    """A place from which one model can be downloaded."""

    @property
    def kind(self) -> str:
        """The source's name in commands, in manifests, and for its work folder."""

    @property
    def caution(self) -> str:
        """How a model from this source differs from the published one; shown to the user."""

    def fetch(self, work: Path, report: ReportProgress) -> tuple[Path, dict[str, str]]:
        """Download the model, verify it, and turn it into a plain Hugging Face folder.

        No other process uses `work` during the call. The source may resume from files of an earlier
        attempt; an attempt that fails or is killed may leave any files behind.

        Args:
            work: A folder that only this source uses.
            report: Called with the progress, from any thread.

        Returns:
            The folder, which is below `work` and contains only the model's files, and their origin
            for the manifest.

        Raises:
            BaseModelNotFoundError: The source does not have the model.
            BaseModelUnavailableError: The source cannot be reached or used; another one might.
            BaseModelFormatError: The source has it in a format that we cannot load.
            BaseModelDamagedError: The downloaded files do not match the source's digests.
            OSError: A file could not be read or written.
        """


@contextlib.contextmanager
def reporting_growth(
    what: str, folder: Path, total: int | None, report: ReportProgress
) -> Iterator[None]:
    """Report the size of a folder while another library downloads into it.

    pip and `huggingface_hub` have no common way to report progress, but the size of the files that
    they have written is visible for both.
    """
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(_LOOK_S):
            report(what, _size_bytes(folder), total)

    report(what, 0, total)
    watcher = threading.Thread(target=look, name="tinsmith-model-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    report(what, _size_bytes(folder) if total is None else total, total)


def check_room(folder: Path, needed_bytes: int) -> None:
    """Check the free disk space before a download starts.

    Raises:
        BaseModelNoRoomError: Fewer than `needed_bytes` bytes are free.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise BaseModelNoRoomError(
            f"{folder} has {free_bytes >> 20} MB free, but {needed_bytes >> 20} MB are needed",
            remedy=MAKE_ROOM,
        )


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Convert an `OSError` into a `BaseModelError`; `what` says which operation failed."""
    try:
        yield
    except OSError as exc:
        raise disk_error(what, exc) from exc


def disk_error(what: str, error: OSError) -> BaseModelError:
    """The `BaseModelError` for an `OSError`."""
    if is_full(error):
        return BaseModelNoRoomError(f"{what}: the disk is full: {error}", remedy=MAKE_ROOM)
    return BaseModelUnavailableError(
        f"{what}: {error}", remedy="check that the disk is mounted and writable"
    )


def is_full(error: OSError) -> bool:
    """Whether the error says that the disk or the user's quota is full."""
    return error.errno in _NO_ROOM


def _size_bytes(folder: Path) -> int:
    """The total size of the files below a folder. Files that vanish meanwhile do not count."""
    size = 0
    for inner, _, names in os.walk(folder):  # unlike rglob it skips folders that vanish
        for name in names:
            with contextlib.suppress(OSError):
                size += Path(inner, name).stat().st_size
    return size
