"""Cuts the power before each single step that a folder store makes on the disk, and after the last.

Run as `python power_cuts.py FOLDER`. The disk is simulated: `SimulatedDisk` watches what is done in
a folder and knows what a real disk may have kept of it. Of a file that is what it held when it was
last synced, of a folder the names that it had when it was last synced. Each later change of a name
may have reached the disk or not, whatever became of the others. For each of these states a folder
is written as it would be found after the cut. The store there must hold what was there before or
what was to be, whole, and what was to be once the operation has returned. If all later changes
arrived, or none, a sweep leaves nothing else; if they arrived out of order, files may stay behind
that nobody needs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.integration.checkpoints.crash_points import OPERATIONS, check_tidy, found
from tinsmith.checkpoints.folder_store import FolderStore

_STEPS = {"os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "open"}

Names = dict[str, int]
"""What a folder holds: inodes by name."""
Change = tuple[int, str]
"""A name in a folder that differs from what was synced."""


class SimulatedDisk:
    """What is durable of a folder. Replaces `os.fsync` while the program runs."""

    def __init__(self, root: Path, before_each_step: Callable[[], None]) -> None:
        self.root = root
        self._before_each_step = before_each_step
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, Names] = {}
        self._is_folder: dict[int, bool] = {}
        self._pinned: set[int] = set()
        self._is_paused = False
        os.fsync = self._fsync  # type: ignore[assignment]
        sys.addaudithook(self._hook)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Take no notice of what is done in here."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def states_after_a_cut(self) -> Iterator[tuple[set[Change], bool]]:
        """What may be found: changes that arrived though not synced, and whether in order."""
        live = self._scan()
        changes = {
            (folder, name)
            for folder in live.keys() | self._folders.keys()
            for name in live.get(folder, {}).keys() | self._folders.get(folder, {}).keys()
            if live.get(folder, {}).get(name) != self._folders.get(folder, {}).get(name)
        }
        yield from ((set(), True), (changes, True))
        for change in changes:
            yield from (({change}, False), (changes - {change}, False))

    def write(self, arrived: set[Change], target: Path) -> str:
        """Write a folder as the disk would give it back; returns what tells it from others."""
        told: list[str] = []
        self._write(self._scan(), self.root.stat().st_ino, arrived, target, told)
        return "\n".join(told)

    def _write(
        self,
        live: dict[int, Names],
        inode: int,
        arrived: set[Change],
        target: Path,
        told: list[str],
    ) -> None:
        if not self._is_folder[inode]:
            content = self._files.get(inode, b"")
            target.write_bytes(content)
            told.append(f"{target.name} {inode} {len(content)}")
            return
        target.mkdir()
        names = dict(self._folders.get(inode, {}))
        for name in [name for folder, name in arrived if folder == inode]:
            names.pop(name, None)
            if name in live.get(inode, {}):
                names[name] = live[inode][name]
        told.append(f"{target.name} {inode} {sorted(names)}")
        for name, entry in sorted(names.items()):
            self._write(live, entry, arrived, target / name, told)

    def _scan(self) -> dict[int, Names]:
        """All folders there are now."""
        found: dict[int, Names] = {}
        waiting = [self.root]
        while waiting:
            folder = waiting.pop()
            inode = self._pin(folder)
            found[inode] = {}
            for path in folder.iterdir():
                found[inode][path.name] = self._pin(path)
                if path.is_dir():
                    waiting.append(path)
        return found

    def _pin(self, path: Path) -> int:
        """The inode, which is held open so that no other file is given its number."""
        status = path.stat()
        if status.st_ino not in self._pinned:
            self._pinned.add(status.st_ino)
            os.open(path, os.O_PATH)
            self._is_folder[status.st_ino] = stat.S_ISDIR(status.st_mode)
        return status.st_ino

    def _fsync(self, descriptor: int) -> None:
        if self._is_paused:
            return
        self._step()
        status = os.fstat(descriptor)
        with self.paused():
            live = self._scan()
            if stat.S_ISDIR(status.st_mode):
                self._folders[status.st_ino] = live.get(status.st_ino, {})
            else:
                # Opened anew, since it may be open for writing alone.
                self._files[status.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:  # noqa: ARG002
        if event in _STEPS and not self._is_paused:
            self._step()

    def _step(self) -> None:
        with self.paused():
            self._before_each_step()


class Trial:
    """One operation, looked at after each possible cut."""

    def __init__(self, name: str, folder: Path) -> None:
        self.prepare, self.act, self.path, self.old, self.new = OPERATIONS[name]
        self.name = name
        self.here = folder / name
        self.here.mkdir()
        self.after_cut = folder / f"{name}-after-cut"
        self.cuts = 0
        self.is_begun = False
        self.seen: set[tuple[str, bool]] = set()
        self.disk: SimulatedDisk | None = None

    def run(self) -> int:
        """Do it; returns how many different states a cut could leave."""
        self.disk = SimulatedDisk(self.here, self.check)
        store = FolderStore(self.here / "store")
        self.prepare(store)
        self.is_begun = True
        self.act(store)
        with self.disk.paused():
            self.seen.clear()  # from now on less is allowed
            self.check(is_done=True)
        return self.cuts

    def check(self, *, is_done: bool = False) -> None:
        """Cut the power now."""
        if self.disk is None or not self.is_begun:
            return
        for arrived, is_in_order in self.disk.states_after_a_cut():
            shutil.rmtree(self.after_cut, ignore_errors=True)
            state = (self.disk.write(arrived, self.after_cut), is_in_order)
            if state not in self.seen:
                self.seen.add(state)
                self.cuts += 1
                self._check_one(is_done=is_done, is_in_order=is_in_order)

    def _check_one(self, *, is_done: bool, is_in_order: bool) -> None:
        store = FolderStore(self.after_cut / "store")
        content = found(store, self.path)
        allowed = {self.new} if is_done else {self.old, self.new}
        assert content in allowed, f"{self.name}: {content!r:.20} is there after a cut"
        if is_in_order:
            check_tidy(store, self.after_cut)
        store.sweep()
        assert found(store, self.path) == content, "the sweep changed it"


if __name__ == "__main__":
    for operation in OPERATIONS:
        child = os.fork()  # an audit hook cannot be taken away again
        if child == 0:
            trial = Trial(operation, Path(sys.argv[1]))
            sys.stdout.write(f"{operation} {trial.run()}\n")
            sys.stdout.flush()
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(1)
