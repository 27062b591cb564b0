"""Checkpoints at a URL that fsspec can write to: S3, Google Cloud Storage, Azure and the like.

    <url>/runs/<run>/<kind>/<name>/checkpoint.json       as in `folder_store.py`
    <url>/runs/<run>/<kind>/<name>/<version>/…
    <work>/staging/<token>/target.json                   local: which versions may have to go
    <work>/staging/<token>/files/…                       local: what is being written
    <work>/fetched/<version>/…                           local: what was fetched, for the next time

Files are uploaded under a new version, then the manifest, whose arrival is the commit: object
stores replace one object in one step. Three things differ from a folder:

- Readers elsewhere cannot be seen, so an overwritten or deleted version is removed by the first
  `sweep` after `GRACE_S`. A reader that takes longer for one checkpoint may find it gone.
- If two processes commit to one path at the same moment without `overwrite`, the later one stays
  and neither notices. The service has one writer for each path.
- Only the machine that crashed knows what it left behind. If its `work` folder is lost, some
  unreferenced objects stay at the URL.

On S3, large files are uploaded in parts. Parts of an upload that failed are deleted at once where
that is possible, and by a later `sweep` otherwise. Buckets are never created.

Files that are kept beside a checkpoint are in the folder of its version, and go with it.

fsspec is loaded when a store is opened.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from tinsmith.checkpoints import manifest as manifests
from tinsmith.checkpoints.base import PIECE_BYTES, CheckpointStore, Reading, Staging
from tinsmith.checkpoints.disk import (
    make_folders,
    remove_tree,
    try_lock,
)
from tinsmith.checkpoints.local_reading import LockedReading, StagedFolder, StagingArea
from tinsmith.checkpoints.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    already_there,
    check_digests,
    check_sizes,
    check_version,
    checked_range,
    not_found,
)
from tinsmith.checkpoints.paths import CheckpointPath, folders
from tinsmith.checkpoints.url_faults import is_missing_bucket, unavailable
from tinsmith.errors import (
    CheckpointDamagedError,
    TinkerError,
    ValidationError,
)

_log = logging.getLogger(__name__)

GRACE_S = 3600.0
"""How long a version that is no checkpoint's any more can still be read."""
CACHE_BYTES = 50 << 30
"""The default size of the cache of fetched files. Files that are being read stay."""
CALL_S = 20.0
"""How long an S3 endpoint has for an answer, retries included."""
PART_BYTES = 16 << 20
"""The size of a part of a file on S3; files below twice this size are uploaded in one request."""
MOST_PARTS = 4
"""How many parts of a file are in memory, and on their way to S3, at a time."""
LISTING_S = 300.0
"""... for the names of all checkpoints."""
SLOWEST_BYTES_S = 250_000.0
"""... and for a large file: what is slower counts as away."""
_RANGE_BYTES = 8 << 20  # of one request for part of a file
_PROBE = "probe"
_PROBE_TEXT = b"Written by tinsmith to see that it can write here. It may be deleted.\n"
_TARGET = "target.json"
_FILES = "files"


Upload = Callable[[FileEntry, str], None]
"""Puts a file at an address."""


class _Target(msgspec.Struct):
    """What a change may leave behind at the URL."""

    path: str
    versions: list[str]


R = TypeVar("R", bound=Reading)


class UrlStore(CheckpointStore):
    """A store at a URL.

    Args:
        url: The folder at which it is, in fsspec's form.
        work: A local folder of its own, the same after a restart.
        cache_bytes: The size of the cache of fetched files.
        grace_s: See `GRACE_S`.
    """

    def __init__(
        self,
        url: str,
        work: Path,
        *,
        cache_bytes: int = CACHE_BYTES,
        grace_s: float = GRACE_S,
    ) -> None:
        self.url = url
        self._is_s3 = url.startswith(("s3://", "s3a://"))
        self._fs, self._root = _open_url(url, is_s3=self._is_s3)
        self._in_parts: dict[str, Any] = {}
        if self._is_s3:
            self._in_parts = {"chunksize": PART_BYTES, "max_concurrency": MOST_PARTS}
        self._cache_bytes = cache_bytes
        self._grace_s = grace_s
        self._fetching: dict[str, threading.Lock] = {}
        with self.errors(f"{work} cannot be used"):
            self._staging = StagingArea(work.absolute() / "staging")
            self._fetched = work.absolute() / "fetched"
            make_folders(self._fetched)

    def begin(self, path: CheckpointPath, *, origin: str = "") -> UrlStaging:
        """`CheckpointStore.begin`."""
        with self.errors(f"cannot start saving {path}"):
            return UrlStaging(self, path, origin, self._staging.make())

    def info(self, path: CheckpointPath) -> Manifest:
        """`CheckpointStore.info`."""
        with self.errors(f"{path} cannot be read"):
            found = self.manifest_at(path)
        if found is None:
            raise not_found(path)
        return found

    def open(self, path: CheckpointPath) -> LockedReading:
        """`CheckpointStore.open`."""
        return self._or_fetched_again(self._open, path)

    def open_whole(self, path: CheckpointPath) -> Reading:
        """`CheckpointStore.open_whole`."""
        return self._or_fetched_again(super().open_whole, path)

    def _or_fetched_again(self, open_it: Callable[[CheckpointPath], R], path: CheckpointPath) -> R:
        """What was fetched may be half deleted, or the disk has damaged it."""
        try:
            return open_it(path)
        except CheckpointDamagedError:
            if not self._forget(self._fetched / self.info(path).version):
                raise
            return open_it(path)

    def _open(self, path: CheckpointPath) -> LockedReading:
        with self.errors(f"{path} cannot be opened"):
            manifest = self.info(path)
            folder = self._fetched / manifest.version
            while (reading := LockedReading.try_open(manifest, folder)) is None:
                # One of all threads that want it fetches it; the others wait and find it there.
                with self._fetching.setdefault(manifest.version, threading.Lock()):
                    if not folder.exists():
                        self._fetch(path, manifest, folder)
                self._fetching.pop(manifest.version, None)
            os.utime(folder)  # the one unused for longest goes first
            with contextlib.ExitStack() as undo:
                undo.callback(reading.close)
                check_sizes(path, folder, manifest)
                undo.pop_all()
            self._make_room()
            return reading

    def _fetch(self, path: CheckpointPath, manifest: Manifest, folder: Path) -> None:
        staged = self._staging.make()
        try:
            files = staged.folder / _FILES
            files.mkdir()
            for file in manifest.files:
                source = self.address(path, manifest.version, file.name)
                try:
                    self._ask(
                        "get_file",
                        source,
                        str(files / file.name),
                        size_bytes=file.size_bytes,
                        **self._in_parts,
                    )
                except FileNotFoundError as exc:
                    raise CheckpointDamagedError(f"{path}: the file {source} is missing") from exc
            check_digests(path, files, manifest)
            try:
                files.rename(folder)
            except OSError as exc:
                if exc.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                # Somebody else has fetched it too.
        finally:
            staged.remove()

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
        manifest = self.info(path)
        check_version(path, manifest, version)
        stop = checked_range(path, manifest, file, start, stop)
        return self._pieces(self.address(path, manifest.version, file), start, stop)

    def _pieces(self, address: str, start: int, stop: int) -> Iterator[bytes]:
        while start < stop:
            with self.errors(f"{address} cannot be read"):
                content = self._part(address, start, min(start + _RANGE_BYTES, stop))
            if not content:
                raise CheckpointDamagedError(f"{address} was truncated")
            for place in range(0, len(content), PIECE_BYTES):
                yield content[place : place + PIECE_BYTES]
            start += len(content)

    def keep_beside(
        self,
        path: CheckpointPath,
        name: str,
        content: Callable[[], Iterator[bytes]],
        *,
        version: str,
    ) -> bool:
        """`CheckpointStore.keep_beside`, on S3."""
        if not self._is_s3:
            return False
        address = self.address(path, version, name)
        with self.errors(f"{name} of {path} cannot be stored"):
            # One of all threads that want it makes it; the others wait and find it there.
            with self._fetching.setdefault(address, threading.Lock()):
                try:
                    self._ask("info", address)
                except FileNotFoundError:
                    self._put_beside(path, version, content, address)
            self._fetching.pop(address, None)
        return True

    def _put_beside(
        self,
        path: CheckpointPath,
        version: str,
        content: Callable[[], Iterator[bytes]],
        address: str,
    ) -> None:
        staged = self._staging.make()
        is_note_needed = False
        try:
            local = staged.folder / _FILES / "beside"
            local.parent.mkdir()
            with local.open("wb") as out:
                out.writelines(content())
            self.note(staged, path, [version])
            is_note_needed = True
            self.put_file(local, address)
            # If the checkpoint was deleted meanwhile, its sweep may have come before this.
            current = self.manifest_at(path)
            is_note_needed = current is None or current.version != version
        finally:
            remove_tree(staged.folder / _FILES)
            (staged.leave if is_note_needed else staged.remove)()

    def signed_url(
        self, path: CheckpointPath, file: str, *, version: str, lifetime_s: int, shown_as: str = ""
    ) -> str | None:
        """`CheckpointStore.signed_url`, on S3. Signing is done here; S3 is not asked."""
        if not self._is_s3:
            return None
        name = quote(shown_as or file, safe="")
        with self.errors(f"{path} cannot be signed"):
            url: str = self._ask(
                "url",
                self.address(path, version, file),
                expires=lifetime_s,
                ResponseContentType="application/octet-stream",
                ResponseContentDisposition=f"attachment; filename*=UTF-8''{name}",
            )
            return url

    def delete(self, path: CheckpointPath) -> bool:
        """`CheckpointStore.delete`."""
        with self.errors(f"{path} cannot be deleted"):
            version = None
            with contextlib.suppress(CheckpointDamagedError):
                manifest = self.manifest_at(path)
                if manifest is None:
                    return False
                version = manifest.version
            if version is not None:
                self.note(self._staging.make(), path, [version]).leave()
            try:
                self._ask("rm_file", self.address(path, MANIFEST))
            except FileNotFoundError:
                return False
            if version is not None:
                self._forget(self._fetched / version)
            return True

    def copy(self, source: CheckpointPath, target: CheckpointPath, *, origin: str = "") -> Manifest:
        """`CheckpointStore.copy`."""
        with self.errors(f"{source} cannot be copied to {target}"):
            from_ = self.info(source)
            staged = self._staging.make()
            with UrlStaging(self, target, origin, staged) as staging:

                def upload(file: FileEntry, address: str) -> None:
                    old = self.address(source, from_.version, file.name)
                    self._ask("cp_file", old, address, size_bytes=file.size_bytes)

                return staging.put(from_.files, upload, overwrite=False)

    def paths(self, run_id: str | None = None) -> Iterator[CheckpointPath]:
        """`CheckpointStore.paths`."""
        with self.errors("checkpoints cannot be listed"):
            self._fs.invalidate_cache()
            for folder in folders(run_id):
                # All objects below a folder: on S3 that is one request for a thousand of them,
                # where a pattern would be one for each folder.
                for found in self._ask("find", f"{self._root}/{folder}", least_s=LISTING_S):
                    *parts, name = found.removeprefix(self._root).strip("/").split("/")
                    path = CheckpointPath.from_parts(tuple(parts)) if name == MANIFEST else None
                    if path is not None:
                        yield path

    def sweep(self) -> int:
        """`CheckpointStore.sweep`."""
        with self.errors(f"cannot clean up {self.url}"):
            self._fs.invalidate_cache()
            removed = 0
            for staged in self._staging.left_behind():
                age_s = time.time() - staged.folder.stat().st_mtime
                target = _read_target(staged)
                if target is None or age_s >= self._grace_s:
                    if target is not None:
                        self._remove_versions(target)
                    staged.remove()
                    removed += 1
                else:
                    remove_tree(staged.folder / _FILES)
                    os.utime(staged.folder, (time.time() - age_s,) * 2)  # its age is as before
                    staged.leave()
            return removed

    def _remove_versions(self, target: _Target) -> None:
        path = CheckpointPath.parse(target.path)
        current = self.manifest_at(path)
        for version in target.versions:
            address = self.address(path, version)
            self._abort_uploads(address)  # also of a file beside a checkpoint that stays
            if current is None or version != current.version:
                with contextlib.suppress(FileNotFoundError):
                    self._ask("rm", address, recursive=True)

    def _abort_uploads(self, address: str) -> None:
        """Delete the parts of uploads that were not completed, which no listing shows."""
        if not self._is_s3:
            return
        bucket, key, _ = self._fs.split_path(address)
        try:
            found = self._ask("call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/")
            for upload in found.get("Uploads", ()):
                named = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                with contextlib.suppress(FileNotFoundError):
                    self._ask("call_s3", "abort_multipart_upload", Bucket=bucket, **named)
        except OSError as exc:  # not permitted, or unknown to this server
            _log.debug("parts of uploads to %s are left to the bucket's rules: %s", address, exc)

    def check(self, *, writes: bool = False) -> None:
        """`CheckpointStore.check`. Of what it writes, one small object stays at the URL."""
        place = f"{self._root}/{_PROBE}"
        with self.errors(f"{self._root} cannot be used"):
            if not writes:
                with contextlib.suppress(FileNotFoundError):  # somebody cleaned up
                    self._part(place, 0, 1)
                    return
            self.make_folder(self._root)  # as the first save would
            self._ask("pipe_file", place, _PROBE_TEXT)

    def close(self) -> None:
        """`CheckpointStore.close`."""

    @contextlib.contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Turn errors of the disk and of the other side into ours; `what` was being done."""
        try:
            yield
        except TinkerError:
            raise
        except Exception as exc:  # each of fsspec's file systems has its own
            raise unavailable(what, exc, bucket=self._root.partition("/")[0]) from exc

    def address(self, path: CheckpointPath, *more: str) -> str:
        """Where something of a checkpoint is, as the file system calls it."""
        return "/".join([self._root, *path.parts, *more])

    def manifest_at(self, path: CheckpointPath) -> Manifest | None:
        """What is there now, if anything is."""
        try:
            content = self._part(self.address(path, MANIFEST), 0, manifests.MANIFEST_BYTES_MAX)
        except FileNotFoundError as exc:
            if is_missing_bucket(exc):
                raise  # nobody knows what was in it
            return None
        return manifests.decode(content, path)

    def make_folder(self, address: str) -> None:
        """Make a folder where the other side has such a thing. On S3 it would make a bucket."""
        if not self._is_s3:
            self._ask("makedirs", address, exist_ok=True)

    def _ask(
        self,
        method: str,
        *arguments: Any,
        size_bytes: int = 0,
        least_s: float | None = None,
        **named: Any,
    ) -> Any:
        """Call a method of the file system, for no longer than moving so many bytes may take.

        The timeouts of S3's libraries do not count while a request is sent: an endpoint that
        accepts a connection and never replies would block forever.
        """
        if self._is_s3:
            least_s = CALL_S if least_s is None else least_s
            named["timeout"] = least_s + size_bytes / SLOWEST_BYTES_S
        return getattr(self._fs, method)(*arguments, **named)

    def _part(self, address: str, start: int, stop: int) -> bytes:
        # By name: in s3fs the second position is another argument.
        content: bytes = self._ask(
            "cat_file", address, start=start, end=stop, size_bytes=min(stop - start, _RANGE_BYTES)
        )
        return content

    def put_file(self, local: Path, address: str) -> None:
        """Upload a file."""
        size_bytes = local.stat().st_size
        self._ask("put_file", str(local), address, size_bytes=size_bytes, **self._in_parts)

    def put_manifest(self, manifest: Manifest, path: CheckpointPath) -> None:
        """Make it the one that is there, in one step."""
        self._ask("pipe_file", self.address(path, MANIFEST), manifest.encode())

    def note(self, staged: StagedFolder, path: CheckpointPath, versions: list[str]) -> StagedFolder:
        """Write down which versions a later sweep has to look at."""
        new = staged.folder / f"{_TARGET}.new"
        new.write_bytes(msgspec.json.encode(_Target(str(path), versions)))
        new.replace(staged.folder / _TARGET)
        return staged

    def _make_room(self) -> None:
        """Evict the least recently used of the fetched files, down to the limit."""
        folders = []
        for folder in self._fetched.iterdir():
            with contextlib.suppress(FileNotFoundError):
                size_bytes = sum(file.stat().st_size for file in folder.iterdir())
                folders.append((folder.stat().st_mtime, size_bytes, folder))
        total = sum(size_bytes for _, size_bytes, _ in folders)
        for _, size_bytes, folder in sorted(folders):
            if total <= self._cache_bytes:
                return
            if self._forget(folder):
                total -= size_bytes

    def _forget(self, folder: Path) -> bool:
        """Delete what was fetched, unless somebody reads it."""
        with contextlib.suppress(FileNotFoundError):
            held = try_lock(folder)
            if held is not None:
                with held:
                    remove_tree(folder)
                return True
        return False


class UrlStaging(Staging):
    """A checkpoint that is being written into `<work>/staging/`."""

    def __init__(
        self, store: UrlStore, path: CheckpointPath, origin: str, staged: StagedFolder
    ) -> None:
        self.path = path
        self.folder = staged.folder / _FILES
        self._store = store
        self._origin = origin
        self._staged = staged
        self._is_over = False
        with contextlib.ExitStack() as undo:
            undo.callback(staged.remove)
            self.folder.mkdir(mode=0o700)
            undo.pop_all()

    def commit(self, *, overwrite: bool = False) -> Manifest:
        """`Staging.commit`."""
        if self._is_over:
            raise ValidationError(f"{self.path}: this staging was committed or discarded")

        def upload(file: FileEntry, address: str) -> None:
            self._store.put_file(self.folder / file.name, address)

        with self._store.errors(f"{self.path} cannot be saved"):
            try:
                files = manifests.survey(self.folder, sync=False)
                return self.put(files, upload, overwrite=overwrite)
            finally:
                self.discard()

    def put(self, files: tuple[FileEntry, ...], upload: Upload, *, overwrite: bool) -> Manifest:
        """Upload the files, then the manifest."""
        store, path = self._store, self.path
        current = self._current(overwrite=overwrite)
        there = already_there(path, current, self._origin, overwrite=overwrite)
        if there is not None:
            return there
        manifest = Manifest.new(path, self._origin, files)
        old = [current.version] if current else []
        store.note(self._staged, path, [manifest.version, *old])
        # If this fails, or there was an old version, the note stays for a sweep.
        self._is_over = True
        is_note_needed = True
        try:
            store.make_folder(store.address(path, manifest.version))
            for file in files:
                upload(file, store.address(path, manifest.version, file.name))
            store.put_manifest(manifest, path)
            is_note_needed = bool(old)
        finally:
            remove_tree(self.folder)
            (self._staged.leave if is_note_needed else self._staged.remove)()
        return manifest

    def _current(self, *, overwrite: bool) -> Manifest | None:
        try:
            return self._store.manifest_at(self.path)
        except CheckpointDamagedError:
            if overwrite:
                return None
            raise

    def discard(self) -> None:
        """`Staging.discard`."""
        if not self._is_over:
            self._is_over = True
            self._staged.remove()


def _read_target(staged: StagedFolder) -> _Target | None:
    try:
        return msgspec.json.decode((staged.folder / _TARGET).read_bytes(), type=_Target)
    except (OSError, msgspec.MsgspecError):  # it got no further than to files
        return None


def _open_url(url: str, *, is_s3: bool) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError as exc:
        raise ValidationError(
            f"{url} requires the package fsspec", remedy="run `pip install 'tinsmith[s3]'`"
        ) from exc
    try:
        fs, root = fsspec.core.url_to_fs(url, **(_S3_OPTIONS if is_s3 else {}))
    except (ImportError, ValueError) as exc:
        raise ValidationError(
            f"{url} cannot be used for checkpoints: {exc}",
            remedy="install the package that fsspec asks for, or use a local folder",
        ) from exc
    if is_s3:
        fs.retries = 2  # for replies that break off, which botocore does not retry
    return fs, root.rstrip("/")


_S3_OPTIONS = {
    "skip_instance_cache": True,  # another store may have been opened with another environment
    "use_listings_cache": False,  # other processes change what is there
    "config_kwargs": {
        "connect_timeout": 5,
        "read_timeout": 10,
        "retries": {"total_max_attempts": 3, "mode": "standard"},
        "signature_version": "s3v4",  # of signed URLs too
    },
}
"""By default an endpoint that takes connections and does not answer is asked 25 times, for 15 s
each. Whoever saves tries again for a while by itself."""
