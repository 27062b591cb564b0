"""Checkpoints in a folder of a disk whose file system has locks on folders: any local one.

    <root>/runs/<run>/<kind>/<name>/checkpoint.json      the manifest, which names the version
    <root>/runs/<run>/<kind>/<name>/<version>/…          the files
    <root>/editions/…/<edition>/…                        the same, of paths with an edition
    <root>/snapshots/<model>/<position>/…                the same, for snapshots of the scheduler
    <root>/samplers/<sampler>/weights/…                  the same, for weights without a name
    <root>/staging/<token>/target                        which checkpoint is being changed
    <root>/staging/<token>/files/…                       what is being written
    <root>/lock                                          held for the short steps that change names

Why versions: a folder with files in it cannot be replaced by another in one step, a file can. So
the files go into a folder of a new name, and the manifest, renamed over the old one, is the one
step that makes them the checkpoint.

Every change starts with a folder in `staging/` that names its target and is locked by the process
that makes the change. A folder there without a lock was left by a crash, or is kept because a
reader still holds an old version; `sweep` looks at what it names, and only there. Readers hold a
lock on the version that they read, so that no process deletes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from tinsmith.checkpoints import manifest as manifests
from tinsmith.checkpoints.base import CheckpointStore, Staging
from tinsmith.checkpoints.disk import (
    FolderLock,
    check_locks,
    disk_errors,
    link_or_copy,
    make_folders,
    remove_empty,
    remove_tree,
    sync_folder,
    try_lock,
    write_durably,
)
from tinsmith.checkpoints.local_reading import LockedReading, Pieces, StagedFolder, StagingArea
from tinsmith.checkpoints.manifest import (
    MANIFEST,
    Manifest,
    already_there,
    check_sizes,
    check_version,
    checked_range,
    not_found,
)
from tinsmith.checkpoints.paths import CheckpointPath, places
from tinsmith.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointUnavailableError,
    ValidationError,
)

LOCK_WAIT_S = 30.0
"""How long to wait for a process that is changing names in the store."""
LOCK_POLL_S = 0.005
_STAGING = "staging"
_TARGET = "target"
_FILES = "files"


class FolderStore(CheckpointStore):
    """A store in a folder, which is made if it is missing, unless it `must_exist`.

    Its lock file tells the folder from one that a disk is mounted on later, or was until now: what
    is not in such a folder is not gone.
    """

    def __init__(self, root: Path, *, must_exist: bool = False) -> None:
        self.root = root.absolute()
        self._lock_file = self.root / "lock"
        with disk_errors(f"cannot store checkpoints in {root}"):
            if must_exist and not self._lock_file.exists():
                raise CheckpointUnavailableError(
                    f"{self.root} has no checkpoints, but the ledger lists some",
                    remedy="check that its disk is mounted and that it is the right folder; if you "
                    f"deleted the checkpoints on purpose, create an empty file {self._lock_file}",
                )
            self._staging = StagingArea(self.root / _STAGING)
            check_locks(self._staging.folder)
            self._lock_file.touch(mode=0o600)

    def begin(self, path: CheckpointPath, *, origin: str = "") -> FolderStaging:
        """`CheckpointStore.begin`."""
        with disk_errors(f"cannot start saving {path}"):
            return FolderStaging(self, self._change(path), origin)

    def info(self, path: CheckpointPath) -> Manifest:
        """`CheckpointStore.info`."""
        with disk_errors(f"{path} cannot be read"):
            found = self.manifest_at(path)
        if found is None:
            raise not_found(path)
        return found

    def open(self, path: CheckpointPath) -> LockedReading:
        """`CheckpointStore.open`."""
        with disk_errors(f"{path} cannot be opened"):
            while True:
                manifest = self.info(path)
                folder = self.place(path) / manifest.version
                reading = LockedReading.try_open(manifest, folder)
                if reading is not None:
                    break
                # Overwritten or deleted since the manifest was read; if not, it is damaged.
                if not folder.exists() and self.manifest_at(path) == manifest:
                    raise CheckpointDamagedError(
                        f"the files of {path} are missing", remedy="restore them from a backup"
                    )
            with contextlib.ExitStack() as undo:
                undo.callback(reading.close)
                check_sizes(path, folder, manifest)
                undo.pop_all()
            return reading

    def read(
        self,
        path: CheckpointPath,
        file: str,
        start: int = 0,
        stop: int | None = None,
        *,
        version: str | None = None,
    ) -> Iterator[bytes]:
        """`CheckpointStore.read`."""
        reading = self.open(path)
        with contextlib.ExitStack() as undo:
            undo.callback(reading.close)
            check_version(path, reading.manifest, version)
            stop = checked_range(path, reading.manifest, file, start, stop)
            undo.pop_all()
        return Pieces(reading, file, start, stop)

    def delete(self, path: CheckpointPath) -> bool:
        """`CheckpointStore.delete`."""
        with disk_errors(f"{path} cannot be deleted"):
            place = self.place(path)
            try:
                if self.manifest_at(path) is None:
                    return False
            except CheckpointDamagedError:
                pass  # all the more
            with self._change_to_delete(path) as change, self.locked():
                try:
                    (place / MANIFEST).unlink()
                except FileNotFoundError:
                    return False
                sync_folder(place)
                change.clear()
            return True

    def copy(self, source: CheckpointPath, target: CheckpointPath, *, origin: str = "") -> Manifest:
        """`CheckpointStore.copy`."""
        with self.open(source) as reading, self.begin(target, origin=origin) as staging:
            with disk_errors(f"{source} cannot be copied to {target}"):
                for file in reading.manifest.files:
                    link_or_copy(reading.folder / file.name, staging.folder / file.name)
            return staging.commit()

    def paths(self, run_id: str | None = None) -> Iterator[CheckpointPath]:
        """`CheckpointStore.paths`."""
        with disk_errors("checkpoints cannot be listed"):
            for place in places(run_id):
                for found in self.root.glob(f"{place}/{MANIFEST}"):
                    path = CheckpointPath.from_parts(found.parent.relative_to(self.root).parts)
                    if path is not None:
                        yield path

    def sweep(self) -> int:
        """`CheckpointStore.sweep`."""
        with disk_errors(f"cannot clean up {self.root}"):
            removed = 0
            for staged in self._staging.left_behind():
                with _Change(self, staged, _target_of(staged)) as change:
                    with self.locked():
                        change.clear()
                    removed += change.is_cleared
            return removed

    def check(self, *, writes: bool = False) -> None:
        """`CheckpointStore.check`."""
        with disk_errors(f"{self.root} cannot be used"):
            self._lock_file.stat()
            if writes:
                self._staging.make().remove()

    def free_bytes(self) -> int:
        """`CheckpointStore.free_bytes`."""
        with disk_errors(f"cannot measure the size of {self.root}"):
            return shutil.disk_usage(self.root).free

    def close(self) -> None:
        """`CheckpointStore.close`."""

    def place(self, path: CheckpointPath) -> Path:
        """The folder of a checkpoint."""
        return self.root.joinpath(*path.parts)

    def manifest_at(self, path: CheckpointPath) -> Manifest | None:
        """The current manifest, if there is one; raises `OSError` if the disk is unavailable."""
        try:
            with (self.place(path) / MANIFEST).open("rb") as file:
                content = file.read(manifests.MANIFEST_BYTES_MAX)
        except (FileNotFoundError, NotADirectoryError):
            self._lock_file.stat()
            return None
        return manifests.decode(content, path)

    def locked(self) -> FolderLock:
        """Wait for the lock under which names in this store are changed.

        Raises:
            CheckpointUnavailableError: Another process has held it for `LOCK_WAIT_S`. It is held
                for a few file operations, so that process is paused, or its disk hangs.
        """
        deadline = time.monotonic() + LOCK_WAIT_S
        while (found := try_lock(self._lock_file)) is None:
            if time.monotonic() > deadline:
                raise CheckpointUnavailableError(
                    f"another process has kept {self._lock_file} locked for {LOCK_WAIT_S:g} s",
                    reason="another process keeps it locked",
                    remedy="resume or end that process; `lslocks` names it",
                )
            time.sleep(LOCK_POLL_S)
        return found

    def _change(self, path: CheckpointPath) -> _Change:
        staged = self._staging.make()
        with contextlib.ExitStack() as undo:
            undo.callback(staged.remove)
            (staged.folder / _TARGET).write_text(str(path), encoding="utf-8")
            undo.pop_all()
        return _Change(self, staged, path)

    def _change_to_delete(self, path: CheckpointPath) -> _Change:
        try:
            change = self._change(path)
        except OSError:
            # A full disk must not keep anybody from making room on it. A crash before the files
            # are gone leaves them to nobody, which is the smaller harm.
            return _Change(self, None, path)
        change.make_durable()
        return change


def _target_of(staged: StagedFolder) -> CheckpointPath | None:
    try:
        return CheckpointPath.parse((staged.folder / _TARGET).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the crash was before the target was written whole
        return None


class _Change:
    """A change to one checkpoint, by a folder in `staging/` that names it.

    A context manager: on exit the folder is deleted, unless a reader still uses an old version.
    """

    def __init__(
        self, store: FolderStore, staged: StagedFolder | None, path: CheckpointPath | None
    ) -> None:
        self.path = path
        self.is_cleared = True
        self._store = store
        self._staged = staged

    @property
    def folder(self) -> Path:
        """The folder in `staging/`."""
        assert self._staged is not None
        return self._staged.folder

    def make_durable(self) -> None:
        """From here on names of the target change: a sweep after a power failure must find this."""
        with (self.folder / _TARGET).open("rb") as file:
            os.fsync(file.fileno())
        sync_folder(self.folder)
        sync_folder(self.folder.parent)

    def clear(self) -> None:
        """Delete versions that are not the checkpoint's, if nobody reads them.

        To be called with the store's lock. What a reader holds stays, and so does this folder, for
        a later sweep.
        """
        try:
            if self.path is not None:
                self._clear(self._store.place(self.path))
        except (OSError, CheckpointError):
            # The change itself is made, or was refused for a reason of its own.
            self.is_cleared = False

    def _clear(self, place: Path) -> None:
        assert self.path is not None
        current = self._store.manifest_at(self.path)
        if not place.is_dir() or (current is None and (place / MANIFEST).exists()):
            return  # nothing is there, or another whose name differs in case
        for version in list(place.iterdir()):
            if version.name == MANIFEST or (current and version.name == current.version):
                continue
            held = try_lock(version)
            if held is None:
                self.is_cleared = False
                continue
            with held:
                remove_tree(version)
        remove_empty(place, up_to=self._store.root)

    def end(self) -> None:
        """Remove the folder, or leave of it what a later sweep needs."""
        if self._staged is None:
            return
        if self.is_cleared:
            self._staged.remove()
        else:
            remove_tree(self.folder / _FILES)
            self._staged.leave()

    def __enter__(self) -> _Change:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class FolderStaging(Staging):
    """A checkpoint that is being written into `staging/`."""

    def __init__(self, store: FolderStore, change: _Change, origin: str) -> None:
        assert change.path is not None
        self.path = change.path
        self.folder = change.folder / _FILES
        self._store = store
        self._change = change
        self._origin = origin
        self._is_over = False
        with contextlib.ExitStack() as undo:
            undo.callback(change.end)
            self.folder.mkdir(mode=0o700)
            undo.pop_all()

    def commit(self, *, overwrite: bool = False) -> Manifest:
        """`Staging.commit`."""
        if self._is_over:
            raise ValidationError(f"{self.path}: this staging was committed or discarded")
        try:
            with disk_errors(f"{self.path} cannot be saved"):
                files = manifests.survey(self.folder, sync=True)
                manifest = Manifest.new(self.path, self._origin, files)
                sync_folder(self.folder)
                write_durably(self._change.folder / MANIFEST, manifest.encode())
                self._change.make_durable()
                with self._store.locked():
                    in_place = self._in_place(overwrite=overwrite)
                    if in_place is None:
                        self._put_in_place(manifest)
                return in_place or manifest
        finally:
            self.discard()

    def _in_place(self, *, overwrite: bool) -> Manifest | None:
        """The checkpoint that is there, if this commit need not write it; None if it must."""
        place = self._store.place(self.path)
        try:
            current = self._store.manifest_at(self.path)
        except CheckpointDamagedError:
            if overwrite:
                return None
            raise
        if current is None and (place / MANIFEST).exists():
            raise CheckpointExistsError(
                f"{self.path}: another checkpoint's name differs only in case, "
                "which this file system does not distinguish",
                remedy="save under another name",
            )
        there = already_there(self.path, current, self._origin, overwrite=overwrite)
        if there is not None:
            sync_folder(place)  # the first commit may have failed at just this
        return there

    def _put_in_place(self, manifest: Manifest) -> None:
        place = self._store.place(self.path)
        with contextlib.ExitStack() as undo:
            undo.callback(self._change.clear)  # of the new version
            make_folders(place)
            self.folder.rename(place / manifest.version)
            sync_folder(place)
            (self._change.folder / MANIFEST).replace(place / MANIFEST)
            undo.pop_all()
        self._change.is_cleared = False  # if this fails, a power cut may bring back the old one
        sync_folder(place)
        self._change.is_cleared = True
        self._change.clear()  # of the old version

    def discard(self) -> None:
        """`Staging.discard`."""
        if not self._is_over:
            self._is_over = True
            self._change.end()
