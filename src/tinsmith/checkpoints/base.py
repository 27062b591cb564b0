"""The contract of checkpoint stores; `tests/contract/test_checkpoints.py` checks every store.

A checkpoint is a flat folder of files under a `CheckpointPath`. The store never looks into them.

    with store.begin(path, origin=request_id) as staging:
        write_adapter(staging.folder, …)        # format.py, or an engine's own files
        manifest = staging.commit()

    with store.open(path) as reading:
        read_adapter(reading.folder)

True of every store:

- **Whole or not at all.** A checkpoint is there when `commit` returned, and survives a power cut.
  A failure before that, including `kill -9` and a full disk, leaves the previous checkpoint, and
  files that `sweep` removes.
- **Immutable.** What is committed never changes. An overwriting commit puts another in its place in
  one step; whoever opened the old one reads it to its end.
- **Twice is once.** A commit whose `origin` equals that of the checkpoint in place gives that one,
  so that a command that is run again after a crash does not trip over its own first run.
- **Errors.** A disk that is full is a `StorageFullError`, one that does not answer or refuses a
  `CheckpointUnavailableError`; nothing was changed, or all of it, which `origin` tells. Bytes
  that are not those that were written are a `CheckpointDamagedError`.

All methods block, for as long as the disk or the network takes, and may be called from any thread.
A coroutine calls them with `asyncio.to_thread`; there is no async variant. Several processes
may use one store at a time.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from tinsmith.checkpoints.manifest import Manifest, check_digests
from tinsmith.checkpoints.paths import SNAPSHOTS, CheckpointPath
from tinsmith.errors import CheckpointNotFoundError

PIECE_BYTES = 1 << 20
"""How much of a file is held in memory at a time."""


class Staging(abc.ABC):
    """A checkpoint that is being written. A context manager: leaving it uncommitted discards it.

    Attributes:
        path: What it is to become.
        folder: An empty local folder. Put files into it, no folders, with names of letters,
            digits, dots, dashes and underscores.
    """

    path: CheckpointPath
    folder: Path

    @abc.abstractmethod
    def commit(self, *, overwrite: bool = False) -> Manifest:
        """Make the files the checkpoint; when it returns they are durable and can be opened.

        Nothing may write to the folder any more. It is deleted in any case; to retry, call `begin`
        again.

        Raises:
            CheckpointExistsError: The path is taken, by another origin, and `overwrite` is false.
            ValidationError: The folder is empty or holds anything but plain files.
        """

    @abc.abstractmethod
    def discard(self) -> None:
        """Delete the files. After a commit, or a second time, it does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.discard()


class Reading(abc.ABC):
    """A checkpoint that is being read, and stays as it is until `close`. A context manager.

    Attributes:
        manifest: Its files.
        folder: A local folder that holds them. Not to be written to.
    """

    manifest: Manifest
    folder: Path

    @abc.abstractmethod
    def close(self) -> None:
        """Release it; the folder may be deleted from now on. Repeating it is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class CheckpointStore(abc.ABC):
    """Checkpoints by path. The promises are those at the top of this file."""

    @abc.abstractmethod
    def begin(self, path: CheckpointPath, *, origin: str = "") -> Staging:
        """Start writing a checkpoint.

        Args:
            path: What it is to become. It may be taken: that is decided by `commit`.
            origin: Who makes it, such as the id of a command. Empty: each is another.
        """

    @abc.abstractmethod
    def info(self, path: CheckpointPath) -> Manifest:
        """The files of a checkpoint, with sizes and digests.

        Raises:
            CheckpointNotFoundError: There is none.
            CheckpointFormatError: It was written by a newer version.
        """

    @abc.abstractmethod
    def open(self, path: CheckpointPath) -> Reading:
        """The checkpoint as a local folder. From a URL it is fetched and cached.

        Sizes are compared with the manifest, and digests when files are fetched.

        Raises:
            CheckpointNotFoundError: There is none.
        """

    def open_whole(self, path: CheckpointPath) -> Reading:
        """As `open`, for what is to be computed with: every byte is one that was written.

        Raises:
            CheckpointNotFoundError: There is none.
            CheckpointDamagedError: A file is missing or differs.
        """
        reading = self.open(path)
        with contextlib.ExitStack() as undo:
            undo.callback(reading.close)
            check_digests(path, reading.folder, reading.manifest)
            undo.pop_all()
        return reading

    @abc.abstractmethod
    def read(
        self,
        path: CheckpointPath,
        file: str,
        start: int = 0,
        stop: int | None = None,
        *,
        version: str | None = None,
    ) -> Iterator[bytes]:
        """Bytes `start` to `stop` of one file, in pieces of `PIECE_BYTES` at most.

        The checkpoint is opened before this returns and closed when the iterator ends or is closed;
        an overwrite meanwhile does not show.

        Args:
            version: That of the manifest which the range was chosen by; None accepts any.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint, version, or file in it.
            ValidationError: The range is not inside the file.
        """

    def keep_beside(
        self,
        path: CheckpointPath,
        name: str,
        content: Callable[[], Iterator[bytes]],
        *,
        version: str,
    ) -> bool:
        """Keep a file that was made from a checkpoint, for `signed_url`, unless it is there.

        It is in no manifest, appears as a whole, and is deleted with this version.

        Args:
            path: The checkpoint.
            name: What to call it; one that no file of a checkpoint can have.
            content: Makes the file. It is the same each time: two servers may do it at once.
            version: That of the checkpoint's manifest.

        Returns:
            False if the store has no signed URLs; nothing was kept then.
        """
        del path, name, content, version
        return False

    def signed_url(
        self, path: CheckpointPath, file: str, *, version: str, lifetime_s: int, shown_as: str = ""
    ) -> str | None:
        """A URL at which anyone can GET a file from the store itself, for a while.

        Whether there is such a file is not checked.

        Args:
            path: The checkpoint.
            file: The file's name.
            version: That of the checkpoint's manifest.
            lifetime_s: How long the URL is valid.
            shown_as: What browsers call the file; its name by default.

        Returns:
            None if the store cannot be reached by URL.
        """
        del path, file, version, lifetime_s, shown_as
        return None

    @abc.abstractmethod
    def delete(self, path: CheckpointPath) -> bool:
        """Delete a checkpoint; says whether there was one. Readers keep what they opened."""

    @abc.abstractmethod
    def copy(self, source: CheckpointPath, target: CheckpointPath, *, origin: str = "") -> Manifest:
        """Make `target` a checkpoint with the same files. Either may be deleted without the other.

        Raises:
            CheckpointNotFoundError: There is no source.
            CheckpointExistsError: The target is taken, by another origin.
        """

    @abc.abstractmethod
    def paths(self, run_id: str | None = None) -> Iterator[CheckpointPath]:
        """All checkpoints that there are, of one run or of all; internal ones too. In no order."""

    @abc.abstractmethod
    def sweep(self) -> int:
        """Remove leftovers of crashes and files that readers have released; returns their number.

        Call it at the start and now and then. It leaves alone what is being written or read, in
        this process or in another.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Release the store. Unfinished writes are not discarded; the next `sweep` removes them."""

    def check(self, *, writes: bool = False) -> None:  # noqa: B027 - memory needs none
        """Look whether the store can be used.

        Args:
            writes: Whether to write something small too, and not only to read.

        Raises:
            CheckpointUnavailableError: It cannot be.
        """

    def exists(self, path: CheckpointPath) -> bool:
        """Whether there is a checkpoint."""
        try:
            self.info(path)
        except CheckpointNotFoundError:
            return False
        return True

    def free_bytes(self) -> int | None:
        """The free space; None if it is unknown."""
        return None

    def size(self, path: CheckpointPath) -> int:
        """Bytes of all files; raises as `info` does."""
        return self.info(path).size_bytes

    def snapshots(self, model_id: str) -> list[CheckpointPath]:
        """The snapshots of a model, by position."""
        found = [path for path in self.paths(model_id) if path.kind == SNAPSHOTS]
        return sorted(found, key=lambda path: path.position)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
