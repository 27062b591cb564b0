"""What a source of models promises, and what all of them need: progress, room and errors.

A source fetches one model. `cache.py` decides where to, checks that it is whole, and gives it its
name.
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

Tell = Callable[[str, int, int | None], None]
"""Is told what is being done, how many bytes of it are done, and of how many if that is known."""

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_LOOK_S = 0.2
MAKE_ROOM = "make room on the disk, or choose another with TINSMITH_HOME"


class Source(Protocol):
    """Somewhere that one model can be fetched from."""

    @property
    def kind(self) -> str:
        """What the source is called: in commands, in manifests, and for its folder of work."""

    @property
    def caution(self) -> str:
        """What whoever takes the model from here instead of from elsewhere should know."""

    def fetch(self, work: Path, tell: Tell) -> tuple[Path, dict[str, str]]:
        """Fetch the model, check what came, and make a plain Hugging Face folder of it.

        Nobody else uses `work` meanwhile. What an earlier try left there may be gone on with; a try
        that fails or is killed may leave anything.

        Args:
            work: A folder of the source's own.
            tell: Called with the progress, from any thread.

        Returns:
            The folder, which is below `work` and holds the model's files alone, and where they came
            from, for the manifest.

        Raises:
            BaseModelNotFoundError: The source does not have it.
            BaseModelUnavailableError: The source cannot be reached or used; another one might.
            BaseModelFormatError: It has something that is not a model as we know them.
            BaseModelDamagedError: What came is not what the source promised.
            OSError: The disk said no.
        """


@contextlib.contextmanager
def telling_growth(what: str, folder: Path, total: int | None, tell: Tell) -> Iterator[None]:
    """Tell how large a folder is while others write to it.

    pip and the hub's library show bars of their own or nothing; what they have written is there to
    be seen for both.
    """
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(_LOOK_S):
            tell(what, _size_bytes(folder), total)

    tell(what, 0, total)
    watcher = threading.Thread(target=look, name="tinsmith-model-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    tell(what, _size_bytes(folder) if total is None else total, total)


def check_room(folder: Path, needed_bytes: int) -> None:
    """Refuse to begin what cannot end.

    Raises:
        BaseModelNoRoomError: The disk has less than that free.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise BaseModelNoRoomError(
            f"{folder} has {free_bytes >> 20} MB of room, and {needed_bytes >> 20} MB are needed",
            remedy=MAKE_ROOM,
        )


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn an error of the operating system into ours; `what` says what was being done."""
    try:
        yield
    except OSError as exc:
        raise disk_error(what, exc) from exc


def disk_error(what: str, error: OSError) -> BaseModelError:
    """The error of ours that stands for one of the operating system."""
    if is_full(error):
        return BaseModelNoRoomError(f"{what}: no room left: {error}", remedy=MAKE_ROOM)
    return BaseModelUnavailableError(
        f"{what}: {error}", remedy="see that the disk is there and may be written to"
    )


def is_full(error: OSError) -> bool:
    """Whether it says that nothing more can be written."""
    return error.errno in _NO_ROOM


def _size_bytes(folder: Path) -> int:
    """The size of all files below a folder; those that vanish meanwhile do not count."""
    size = 0
    for inner, _, names in os.walk(folder):  # unlike rglob it passes over folders that vanish
        for name in names:
            with contextlib.suppress(OSError):
                size += Path(inner, name).stat().st_size
    return size
