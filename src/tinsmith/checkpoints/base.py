"""What every store of checkpoints promises. `tests/contract/test_checkpoints.py` holds each to it.

A checkpoint is a flat folder of files under a `CheckpointPath`. The store never looks into them.

    with store.begin(path, origin=request_id) as staging:
        write_adapter(staging.folder, …)        # format.py, or an engine's own files
        manifest = staging.commit()

    with store.open(path) as reading:
        read_adapter(reading.folder)

True of every store:

- **Whole or not at all.** A checkpoint is there when `commit` returned, and survives a power cut.
  Whatever happens before, `kill -9` and a full disk included, leaves what was there before, and
  rubbish that `sweep` removes.
- **Immutable.** What is committed never changes. An overwriting commit puts another in its place in
  one step; whoever opened the old one reads it to its end.
- **Twice is once.** A commit whose `origin` equals that of the checkpoint in place gives that one,
  so that a command that is run again after a crash does not trip over its own first run.
- **Errors.** A disk that is full is a `StorageFullError`, one that does not answer or refuses a
  `CheckpointUnavailableError`; nothing was changed, or all of it, which `origin` tells. Bytes
  that are not those that were written are a `CheckpointDamagedError`.

All methods block, for as long as the disk or the network takes, and may be called from any thread.
A coroutine calls them with `asyncio.to_thread`; there is no second, async face. Several processes
may use one store at a time.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from tinsmith.checkpoints.checks import check_digests
from tinsmith.checkpoints.manifest import Manifest
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

        Nobody may write to the folder any more. Afterwards, whether it went well or not, it is
        gone: to try again, begin again.

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
        """Let go of it; the folder may vanish from now on. A second time does nothing."""

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
        """The checkpoint as a local folder. From a URL it is fetched, and kept for the next time.

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
        try:
            check_digests(path, reading.folder, reading.manifest)
        except BaseException:
            reading.close()
            raise
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
            version: That of the manifest which the range was chosen by; None takes what is there.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint, version, or file in it.
            ValidationError: The range is not inside the file.
        """

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
        """Remove what crashes left and what readers have let go of; returns how many remains.

        Call it at the start and now and then. It leaves alone what is being written or read, in
        this process or in another.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the store. What was begun is not discarded; the next `sweep` does that."""

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
        """The room that is left for more; None where nobody can say."""
        return None

    def size(self, path: CheckpointPath) -> int:
        """Bytes of all files; raises as `info` does."""
        return self.info(path).size_bytes

    def snapshots(self, model_id: str) -> list[CheckpointPath]:
        """The snapshots of a model, by position."""
        found = [path for path in self.paths(model_id) if path.kind == SNAPSHOTS]
        return sorted(found, key=lambda path: path.position)

    @abc.abstractmethod
    def verify(self, path: CheckpointPath) -> Manifest:
        """Read every byte and compare it with what was written.

        Raises:
            CheckpointDamagedError: A file is missing or differs.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
