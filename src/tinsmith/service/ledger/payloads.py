"""Payloads: small ones in the database, large ones in files, and a cache of the latest.

A database writes each row twice, to its log and to its table; for large bodies that is what an
append costs. A file is written once: complete, synced and renamed before the row that names it, so
that a row never names less than all of it. A crash in between leaves a file that nothing names,
which the sweep deletes.

`Remembered` caches what this process has just written and will soon read, which saves most queries.
A small payload is cached from its append until this process's scheduler reads it; a small result,
from its settlement until the client that waits for it reads it. Each is returned once, so that
nothing outlives its row for long. Where no other process can change them, claimed commands are
cached until they are settled, because polls ask for them. Everything else is read from the
database.

Only durable data is cached. Knows nothing of databases.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from tinsmith.errors import LedgerDamagedError, LedgerUnavailableError
from tinsmith.observe.disk_faults import fault_of
from tinsmith.service.ledger.records import Command, CommandState, RequestId

INLINE_BYTES = 64 * 1024
"""Up to here a payload is in the database."""
_PARTIAL = ".partial"


class Kept(msgspec.Struct, frozen=True):
    """Where a payload is."""

    size_bytes: int
    file: str | None = None
    digest: bytes | None = None
    content: bytes | None = None


def inline(payload: bytes) -> Kept:
    """A payload that goes into the database itself."""
    return Kept(len(payload), content=payload)


class PayloadFiles:
    """A folder of payloads. Its methods block and may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._being_written: set[str] = set()
        self._making = threading.Lock()
        self._durable_folders: set[str] = set()

    def prepare(self) -> None:
        """Make the folder."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sync_folder(self._folder.parent)

    def write(self, payload: bytes) -> Kept:
        """Write a file; when it returns, the file survives a crash.

        The sweep leaves it alone until `written` is called, when a row names it or none ever will.
        """
        token = secrets.token_hex(16)
        name = f"{token[:2]}/{token}"
        with self._lock:
            self._being_written.add(name)
        path = self._folder / name
        try:
            self._make_folder(path.parent)
            with path.with_suffix(_PARTIAL).open("xb") as file:
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            path.with_suffix(_PARTIAL).rename(path)
            _sync_folder(path.parent)
        except OSError as exc:
            self.delete([name, f"{name}{_PARTIAL}"])
            self.written(name)
            fault = fault_of(exc)
            raise LedgerUnavailableError(
                f"a payload of {len(payload)} bytes could not be written to {self._folder}: {exc}",
                reason=fault.reason,
                remedy=fault.remedy,
            ) from exc
        return Kept(len(payload), file=name, digest=hashlib.sha256(payload).digest())

    def _make_folder(self, folder: Path) -> None:
        """Make a folder of payloads; one that is there may not be durable yet."""
        with self._making:  # whoever finds it there waits until its maker has synced it
            if folder.name not in self._durable_folders:
                folder.mkdir(mode=0o700, exist_ok=True)
                _sync_folder(self._folder)
                self._durable_folders.add(folder.name)

    def written(self, name: str) -> None:
        """The row that names it is durable, or will never be."""
        with self._lock:
            self._being_written.discard(name)

    def read(self, kept: Kept) -> bytes:
        """The bytes of a file.

        Raises:
            LedgerDamagedError: They are not what was written, or the file is missing.
        """
        assert kept.file is not None
        try:
            payload = (self._folder / kept.file).read_bytes()
        except OSError as exc:
            raise LedgerDamagedError(
                f"payload file {self._folder / kept.file} cannot be read: {exc}",
                remedy="restore it from a backup; the command has to be submitted again otherwise",
            ) from exc
        if hashlib.sha256(payload).digest() != kept.digest:
            raise LedgerDamagedError(
                f"payload file {self._folder / kept.file} has {len(payload)} bytes that are not "
                f"the {kept.size_bytes} that were written",
                remedy="check the disk, and restore the file from a backup",
            )
        return payload

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; one that is missing is no error."""
        for name in names:
            (self._folder / name).unlink(missing_ok=True)

    def settled_names(self) -> Iterator[str]:
        """Every file that is not being written now, partial ones of a crash included."""
        for folder in sorted(self._folder.iterdir()):
            for path in folder.iterdir():
                name = f"{folder.name}/{path.name}"
                with self._lock:
                    if name.removesuffix(_PARTIAL) not in self._being_written:
                        yield name


def _sync_folder(folder: Path) -> None:
    """Make a new name in a folder durable; the file's own sync does not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


T = TypeVar("T")

SMALL_BYTES = 4096
MOST = 1024


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended, as the row of its result says."""

    request_id: RequestId
    claimed_by: str | None
    claimed_at: float | None
    settled_at: float
    started_at: float | None
    batch: str | None
    is_failed: bool
    payload_bytes: int
    payload: bytes | None
    """None if it is large."""

    def applied_to(self, command: Command) -> Command:
        """The command, now that it has ended."""
        return msgspec.structs.replace(
            command,
            state=CommandState.SETTLED,
            claimed_by=self.claimed_by,
            claimed_at=self.claimed_at,
            settled_at=self.settled_at,
            started_at=self.started_at,
            batch=self.batch,
            is_failed=self.is_failed,
            result_bytes=self.payload_bytes,
        )


class Remembered(Generic[T]):
    """A bounded cache by request id; the oldest entries are evicted."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, request_id: str, value: T) -> None:
        """Cache a value."""
        self._kept[request_id] = value
        if len(self._kept) > MOST:
            self._kept.popitem(last=False)

    def see(self, request_id: str) -> T | None:
        """The cached value, which stays."""
        return self._kept.get(request_id)

    def take(self, request_id: str) -> T | None:
        """The cached value, which is removed."""
        return self._kept.pop(request_id, None)

    def forget_all(self) -> None:
        """Empty the cache."""
        self._kept.clear()
