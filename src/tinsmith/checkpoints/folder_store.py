"""Checkpoints in a folder of a local disk, or of one that several machines mount.

    <root>/runs/<run>/<kind>/<name>/checkpoint.json      the manifest, which names the version
    <root>/runs/<run>/<kind>/<name>/<version>/…          the files
    <root>/snapshots/<model>/<position>/…                the same, for snapshots of the scheduler
    <root>/samplers/<sampler>/weights/…                  the same, for weights without a name
    <root>/staging/<token>/target                        which checkpoint is being changed
    <root>/staging/<token>/files/…                       what is being written
    <root>/staging/<token>/trash/…                       what is being deleted
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
from collections.abc import Iterator
from pathlib import Path

from tinsmith.checkpoints import manifest as manifests
from tinsmith.checkpoints.base import PIECE_BYTES, CheckpointStore, Reading, Staging
from tinsmith.checkpoints.disk import (
    FolderLock,
    disk_errors,
    link_or_copy,
    lock,
    make_folders,
    new_token,
    remove_empty,
    remove_tree,
    sync_folder,
    try_lock,
    write_durably,
)
from tinsmith.checkpoints.manifest import MANIFEST, FileEntry, Manifest
from tinsmith.checkpoints.paths import PLACES, CheckpointPath
from tinsmith.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ValidationError,
)

_STAGING = "staging"
_TARGET = "target"
_FILES = "files"
_TRASH = "trash"


class FolderStore(CheckpointStore):
    """A store in a folder, which is made if it is missing."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        with disk_errors(f"checkpoints cannot be kept in {root}"):
            make_folders(self.root / _STAGING)
            (self.root / "lock").touch(mode=0o600)

    def begin(self, path: CheckpointPath, *, origin: str = "") -> FolderStaging:
        """`CheckpointStore.begin`."""
        with disk_errors(f"{path} cannot be begun"):
            change = _Change(self, path)
            return FolderStaging(self, change, origin)

    def info(self, path: CheckpointPath) -> Manifest:
        """`CheckpointStore.info`."""
        with disk_errors(f"{path} cannot be read"):
            found = self.manifest_at(path)
        if found is None:
            raise not_found(path)
        return found

    def open(self, path: CheckpointPath) -> FolderReading:
        """`CheckpointStore.open`."""
        with disk_errors(f"{path} cannot be opened"):
            while True:
                manifest = self.info(path)
                folder = self.place(path) / manifest.version
                try:
                    held = try_lock(folder, is_shared=True)
                except FileNotFoundError:
                    held = None
                if held is not None and held.is_of(folder):
                    break
                if held is not None:
                    held.release()
                # Overwritten or deleted since the manifest was read; if not, it is damaged.
                if not folder.exists() and self.manifest_at(path) == manifest:
                    raise CheckpointDamagedError(
                        f"{path}: its files are missing", remedy="restore them from a backup"
                    )
            try:
                check_sizes(path, folder, manifest)
            except BaseException:
                held.release()
                raise
            return FolderReading(manifest, folder, held)

    def read(
        self, path: CheckpointPath, file: str, start: int = 0, stop: int | None = None
    ) -> Iterator[bytes]:
        """`CheckpointStore.read`."""
        reading = self.open(path)
        try:
            stop = checked_range(path, reading.manifest, file, start, stop)
        except BaseException:
            reading.close()
            raise
        return _Pieces(reading, file, start, stop)

    def delete(self, path: CheckpointPath) -> bool:
        """`CheckpointStore.delete`."""
        with disk_errors(f"{path} cannot be deleted"):
            place = self.place(path)
            try:
                if self.manifest_at(path) is None:
                    return False
            except CheckpointDamagedError:
                pass  # all the more
            with _Change(self, path) as change, self.locked():
                change.make_durable()
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

    def verify(self, path: CheckpointPath) -> Manifest:
        """`CheckpointStore.verify`."""
        with self.open(path) as reading, disk_errors(f"{path} cannot be read"):
            check_digests(path, reading.folder, reading.manifest)
            return reading.manifest

    def paths(self, run_id: str | None = None) -> Iterator[CheckpointPath]:
        """`CheckpointStore.paths`."""
        with disk_errors("checkpoints cannot be listed"):
            for pattern in PLACES:
                for found in self.root.glob(f"{pattern}/{MANIFEST}"):
                    path = CheckpointPath.from_parts(found.parent.relative_to(self.root).parts)
                    if path is not None and run_id in (None, path.run_id):
                        yield path

    def sweep(self) -> int:
        """`CheckpointStore.sweep`."""
        with disk_errors(f"{self.root} cannot be swept"):
            removed = 0
            for folder in list((self.root / _STAGING).iterdir()):
                with self.locked():  # so that nobody makes a folder that we find without its lock
                    change = _Change.left_behind(self, folder)
                if change is not None:
                    with change:
                        with self.locked():
                            change.clear()
                        removed += change.is_cleared
            return removed

    def close(self) -> None:
        """`CheckpointStore.close`."""

    def place(self, path: CheckpointPath) -> Path:
        """The folder of a checkpoint."""
        return self.root.joinpath(*path.parts)

    def manifest_at(self, path: CheckpointPath) -> Manifest | None:
        """What is there now, if anything is."""
        try:
            with (self.place(path) / MANIFEST).open("rb") as file:
                content = file.read(manifests.MANIFEST_BYTES_MAX)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return manifests.decode(content, path)

    def locked(self) -> FolderLock:
        """Wait until nobody else changes names in this store."""
        return lock(self.root / "lock")


class _Change:
    """A change to one checkpoint: a folder in `staging/` that names it, and the lock on that.

    A context manager: at the end the folder goes, unless a reader holds on to an old version.
    """

    def __init__(self, store: FolderStore, path: CheckpointPath) -> None:
        self.path: CheckpointPath | None = path
        self.folder = store.root / _STAGING / new_token()
        self._store = store
        self.is_cleared = True
        with store.locked():
            self.folder.mkdir(mode=0o700)
            self._held = lock(self.folder)
        try:
            (self.folder / _TARGET).write_text(str(path), encoding="utf-8")
        except BaseException:
            self.end()
            raise

    @classmethod
    def left_behind(cls, store: FolderStore, folder: Path) -> _Change | None:
        """What a crash left in this folder; None if its maker is at work."""
        try:
            held = try_lock(folder)
        except FileNotFoundError:  # finished meanwhile
            return None
        if held is None:
            return None
        change = cls.__new__(cls)
        change.folder, change._store, change._held = folder, store, held
        change.is_cleared = True
        try:
            text = (folder / _TARGET).read_text(encoding="utf-8")
            change.path = CheckpointPath.parse(text)
        except (OSError, ValueError):  # the crash was before the target was written whole
            change.path = None
        return change

    def make_durable(self) -> None:
        """From here on names of the target change: a sweep after a power cut must find this."""
        with (self.folder / _TARGET).open("rb") as file:
            os.fsync(file.fileno())
        sync_folder(self.folder)
        sync_folder(self.folder.parent)

    def clear(self) -> None:
        """Move versions that are not the checkpoint's out of its folder, if nobody reads them.

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
        trash = self.folder / _TRASH
        trash.mkdir(exist_ok=True)
        for version in list(place.iterdir()):
            if version.name == MANIFEST or (current and version.name == current.version):
                continue
            held = try_lock(version)
            if held is None:
                self.is_cleared = False
                continue
            with held:
                version.rename(trash / new_token())
        remove_empty(place, up_to=self._store.root)

    def end(self) -> None:
        """Remove the folder and let go of it."""
        if self.is_cleared:
            remove_tree(self.folder)
        else:
            remove_tree(self.folder / _TRASH)
            remove_tree(self.folder / _FILES)
        self._held.release()

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
        try:
            self.folder.mkdir(mode=0o700)
        except BaseException:
            change.end()
            raise

    def commit(self, *, overwrite: bool = False) -> Manifest:
        """`Staging.commit`."""
        if self._is_over:
            raise ValidationError(f"{self.path}: this staging was committed or discarded")
        with disk_errors(f"{self.path} cannot be saved"):
            manifest = self._manifest(manifests.survey(self.folder, sync=True))
            sync_folder(self.folder)
            write_durably(self._change.folder / MANIFEST, manifest.encode())
            self._change.make_durable()
            with self._store.locked():
                in_place = self._in_place(overwrite=overwrite)
                if in_place is None:
                    self._put_in_place(manifest)
        self.discard()
        return in_place or manifest

    def _manifest(self, files: tuple[FileEntry, ...]) -> Manifest:
        return Manifest(
            format_version=manifests.FORMAT_VERSION,
            path=str(self.path),
            version=new_token(),
            origin=self._origin,
            files=files,
        )

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
                f"{self.path}: there is one whose name differs in case only, "
                "and this file system does not tell them apart",
                remedy="save under another name",
            )
        there = already_there(self.path, current, self._origin, overwrite=overwrite)
        if there is not None:
            sync_folder(place)  # the first commit may have failed at just this
        return there

    def _put_in_place(self, manifest: Manifest) -> None:
        place = self._store.place(self.path)
        try:
            make_folders(place)
            self.folder.rename(place / manifest.version)
            sync_folder(place)
            (self._change.folder / MANIFEST).replace(place / MANIFEST)
            sync_folder(place)
        finally:
            self._change.clear()  # the old version, or after a failure the new one

    def discard(self) -> None:
        """`Staging.discard`."""
        if not self._is_over:
            self._is_over = True
            self._change.end()


class FolderReading(Reading):
    """A version that is held by a lock."""

    def __init__(self, manifest: Manifest, folder: Path, held: FolderLock) -> None:
        self.manifest = manifest
        self.folder = folder
        self._held = held

    def close(self) -> None:
        """`Reading.close`."""
        self._held.release()


class _Pieces(Iterator[bytes]):
    """Part of a file, piece by piece. Its reading ends with it, also if it is never begun."""

    def __init__(self, reading: Reading, file: str, start: int, stop: int) -> None:
        self._reading = reading
        self._left = stop - start
        self._name = f"{reading.manifest.path}, file {file}"
        try:
            with disk_errors(f"{self._name} cannot be opened"):
                self._file = (reading.folder / file).open("rb")
            self._file.seek(start)
        except BaseException:
            reading.close()
            raise

    def __next__(self) -> bytes:
        if self._left <= 0:
            self.close()
            raise StopIteration
        with disk_errors(f"{self._name} cannot be read"):
            piece = self._file.read(min(self._left, PIECE_BYTES))
        if not piece:
            self.close()
            raise CheckpointDamagedError(f"{self._name} is shorter than it was")
        self._left -= len(piece)
        return piece

    def close(self) -> None:
        """Let go of the file; called by the end and by whoever gives up."""
        self._left = 0
        self._file.close()
        self._reading.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it was never opened
            self.close()


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
    found = {file.name: file for file in manifests.survey(folder, sync=False)}
    for file in manifest.files:
        if found.get(file.name) != file:
            raise CheckpointDamagedError(
                f"{path}: file {file.name} is not the one that was written",
                remedy="check the disk, and restore the file from a backup",
            )
