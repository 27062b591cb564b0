"""The folder of an unfinished download, `TARGET.partial`, and untrusted archives.

The folder contains the files under `files/`, the progress of each in `state.json`, and a lock
against other processes. When the download is complete, `place` renames it to its target.

Does no HTTP.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import tarfile
from typing import Any, Self

from tinsmith.cli.command_errors import CommandError
from tinsmith.observe.terminal import size_text

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_STATE = "state.json"
_LOCK = "lock"


class PartialDownload:
    """The folder of one download; a context manager that holds its lock.

    Args:
        target: The file or folder to create.
        resume: Whether to continue an earlier download, and to keep an unfinished one.
    """

    def __init__(self, target: pathlib.Path, *, resume: bool = True) -> None:
        self.target = target
        self.folder = target.with_name(f"{target.name}.partial")
        self.files = self.folder / "files"
        self._resume = resume
        self._lock: int | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        if not self._resume:
            self.clear()
        self.files.mkdir(exist_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        has_parts = any(path.is_file() for path in self.files.rglob("*"))
        if not self._resume or kind is None or not has_parts:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    def _take_lock(self) -> None:
        self._lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(self._lock)
            raise CommandError(
                f"another process is downloading to {self.target}",
                remedy="wait for it, or choose another folder with --output",
            ) from exc

    def clear(self) -> None:
        """Delete what an earlier download left."""
        shutil.rmtree(self.files, ignore_errors=True)
        (self.folder / _STATE).unlink(missing_ok=True)

    def path_of(self, name: str) -> pathlib.Path:
        """The path of a file of the download; its parent folders are created.

        Raises:
            CommandError: The name points outside of the download.
        """
        path = self.files.joinpath(*safe_parts(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def keep_only(self, names: list[str]) -> None:
        """Delete files of an earlier download that are not part of this one."""
        kept = {self.path_of(name) for name in names}
        for path in [path for path in self.files.rglob("*") if path.is_file()]:
            if path not in kept:
                path.unlink()

    def load(self) -> dict[str, Any]:
        """The saved state of an earlier download; empty if there is none."""
        try:
            noted = json.loads((self.folder / _STATE).read_text())
        except (OSError, ValueError):
            return {}
        return noted if isinstance(noted, dict) else {}

    def save(self, state: dict[str, Any]) -> None:
        """Save the state atomically. The bytes that it counts must be on disk already."""
        new = self.folder / f"{_STATE}.new"
        with contextlib.suppress(FileNotFoundError):  # the download was abandoned
            new.write_text(json.dumps(state))
            new.replace(self.folder / _STATE)

    def place(self, made: pathlib.Path, *, replace: bool = False) -> None:
        """Rename a finished file or folder to the target.

        Args:
            made: The file or folder.
            replace: Whether an existing folder is replaced; an existing file always is.

        Raises:
            CommandError: The target was created in the meantime.
        """
        if made.is_dir() and self.target.exists():
            if not replace:
                raise exists_already(self.target)
            # Moved into the download's folder, which is deleted at the end.
            self.target.rename(self.folder / "replaced")
        made.replace(self.target)


def exists_already(target: pathlib.Path) -> CommandError:
    """The error for a target that exists."""
    return CommandError(
        f"{target} already exists",
        remedy="use --force to replace it, or --output to choose another",
    )


def safe_parts(name: str) -> list[str]:
    """Split an untrusted relative path.

    Raises:
        CommandError: The path points outside of its folder, or is not a valid file name.
    """
    parts = [part for part in name.split("/") if part != "."]
    is_plain = name.isprintable() and "\\" not in name
    if not parts or not is_plain or any(part in ("", "..") for part in parts):
        raise CommandError(
            f"unsafe file name in the checkpoint: {name!r:.200}",
            remedy="nothing was written; tell the operator of the service",
        )
    return parts


def unpack(archive: pathlib.Path, folder: pathlib.Path) -> int:
    """Extract an untrusted tar archive, compressed or not, and return the size of its files.

    All names, types and sizes are checked before the first file is written.

    Raises:
        CommandError: The archive is malformed or truncated, is larger than the free disk space, or
            contains links or paths that point outside of the folder.
    """
    try:
        with tarfile.open(archive) as tar:
            members = [member for member in tar if not member.isdir()]
            places = _places(members, folder)
            total = sum(member.size for member in members)
            _check_room(total, folder)
            for member, place in zip(members, places, strict=True):
                place.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                assert content is not None  # a regular file
                # "x" refuses existing files, such as a name that occurs twice.
                with content, place.open("xb") as out:
                    shutil.copyfileobj(content, out)
            return total
    except (tarfile.TarError, EOFError, FileExistsError, NotADirectoryError) as exc:
        reason = str(exc).partition("\n")[0].rstrip(":")
        raise CommandError(
            f"cannot extract the archive: {reason}",
            remedy="run the command again with --no-resume",
        ) from exc


def _places(members: list[tarfile.TarInfo], folder: pathlib.Path) -> list[pathlib.Path]:
    for member in members:
        if not member.isreg():
            raise CommandError(
                f"unsafe archive: {member.name!r:.200} is neither a file nor a folder",
                remedy="nothing was written; tell the operator of the service",
            )
    return [folder.joinpath(*safe_parts(member.name)) for member in members]


def _check_room(total: int, folder: pathlib.Path) -> None:
    free = shutil.disk_usage(folder).free
    if total > free:
        raise CommandError(
            f"the archive needs {size_text(total)}, but the disk has only {size_text(free)} free",
            remedy="free disk space, or choose another folder with --output",
        )
