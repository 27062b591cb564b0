"""Ends a process, or fills the disk, before each single step that a store makes on the disk.

Run as `python crash_points.py FOLDER STORE FAULT`. For each operation it counts up: a child does
the operation with a fault at its first step, the next at its second, and so on until one gets
through without meeting it. After each, the store is opened again and must hold what was there
before or what was to be, whole, and after a sweep nothing else.

Steps are those that Python tells to audit hooks, which may also raise: opening, making, renaming,
linking and removing.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tinsmith.checkpoints.base import CheckpointStore
from tinsmith.checkpoints.disk import disk_errors
from tinsmith.checkpoints.folder_store import FolderStore
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.checkpoints.url_store import UrlStore
from tinsmith.errors import CheckpointNotFoundError, StorageFullError

PATH = CheckpointPath.parse("tinker://run/weights/a")
COPY = CheckpointPath.parse("tinker://run/weights/copy")
FILES = ("adapter_config.json", "adapter_model.safetensors")
OLD, NEW = b"old" * 100, b"new" * 200
IS_FULL = 3  # exit status of a child that was told so
_CHANGES = {"os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "open", "fcntl.flock"}
_NEED_ROOM = {"os.mkdir", "os.rename", "os.link"}

Operation = Callable[[CheckpointStore], object]


def save(store: CheckpointStore, content: bytes = NEW) -> None:
    with store.begin(PATH, origin=content.decode()) as staging:
        with disk_errors("it cannot be written"):
            for name in FILES:
                (staging.folder / name).write_bytes(content)
        staging.commit(overwrite=True)


def before(store: CheckpointStore) -> None:
    save(store, OLD)


def nothing(store: CheckpointStore) -> None:
    """No checkpoint is there before."""


# What is there before, what is done, whose path is looked at, what may be found: before and after.
OPERATIONS: dict[str, tuple[Operation, Operation, CheckpointPath, bytes | None, bytes | None]] = {
    "save": (nothing, save, PATH, None, NEW),
    "overwrite": (before, save, PATH, OLD, NEW),
    "delete": (before, lambda store: store.delete(PATH), PATH, OLD, None),
    "copy": (before, lambda store: store.copy(PATH, COPY, origin="c"), COPY, None, OLD),
}


def open_store(kind: str, folder: Path) -> CheckpointStore:
    if kind == "folder":
        return FolderStore(folder / "store")
    return UrlStore(f"local://{folder}/store", folder / "work", grace_s=0.0)


def found(store: CheckpointStore, path: CheckpointPath) -> bytes | None:
    """The content that all files have; None if there is no checkpoint."""
    try:
        store.open_whole(path).close()
    except CheckpointNotFoundError:
        return None
    with store.open(path) as reading:
        contents = {(reading.folder / name).read_bytes() for name in FILES}
    assert len(contents) == 1, "files of two checkpoints are mixed"
    return contents.pop()


def check_tidy(store: CheckpointStore, folder: Path) -> None:
    """Nothing is on the disk that is not a checkpoint's."""
    store.sweep()
    for staging in ("store/staging", "work/staging"):
        if (folder / staging).exists():
            assert list((folder / staging).iterdir()) == [], "the sweep left something"
    for path in (PATH, COPY):
        place = (folder / "store").joinpath(*path.parts)
        there = {entry.name for entry in place.iterdir()} if place.exists() else set()
        expected = {"checkpoint.json", store.info(path).version} if store.exists(path) else set()
        assert there == expected, f"{path}: {there}, not {expected}"


def install(fault: str, step: int) -> None:
    """From now on, strike at the step with this number."""
    steps = itertools.count()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event not in _CHANGES:
            return
        if fault == "kill" and next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        needs_room = event in _NEED_ROOM or (event == "open" and is_writing(arguments))
        if fault == "full" and needs_room and next(steps) >= step:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sys.addaudithook(hook)


def is_writing(arguments: tuple[object, ...]) -> bool:
    flags = arguments[2]
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def run_child(store: CheckpointStore, act: Operation, fault: str, step: int) -> int:
    """The child's exit status, negative if it was killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            install(fault, step)
            act(store)
            status = 0
        except StorageFullError:
            status = IS_FULL
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def try_operation(name: str, kind: str, fault: str, folder: Path) -> int:
    """Strike at every step; returns how many there are."""
    prepare, act, path, old, new = OPERATIONS[name]
    for step in itertools.count():
        here = folder / f"{name}-{step}"
        here.mkdir()
        prepare(open_store(kind, here))
        status = run_child(open_store(kind, here), act, fault, step)
        store = open_store(kind, here)
        content = found(store, path)
        if status == 0:
            assert content == new, f"{name}, step {step}: done, and {content!r:.20} is there"
        elif fault == "kill":
            assert status == -signal.SIGKILL, f"{name}, step {step}: exit status {status}"
            assert content in (old, new), f"{name}, step {step}: {content!r:.20}"
        else:
            assert status == IS_FULL, f"{name}, step {step}: exit status {status}"
            assert content == old, f"{name}, step {step}: told of a full disk, and it was changed"
        check_tidy(store, here)
        assert found(store, path) == content, "the sweep changed it"
        act(store)
        assert found(store, path) == new, "it cannot be done again"
        if status == 0:
            return step
    raise AssertionError


if __name__ == "__main__":
    # What a process wrote outlives it without this; it would make hundreds of rounds slow.
    os.fsync = lambda fd: None  # noqa: ARG005
    for operation in OPERATIONS:
        steps = try_operation(operation, sys.argv[2], sys.argv[3], Path(sys.argv[1]))
        sys.stdout.write(f"{operation} {steps}\n")
