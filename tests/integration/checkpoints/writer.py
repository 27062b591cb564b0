"""Saves checkpoints until it is killed, and says so after each.

Run as `python writer.py FOLDER FIRST`. Each number is saved over `weights/last` and under a name of
its own, some are deleted again, and the number is printed when all of it is done.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from tinsmith.checkpoints.base import CheckpointStore
from tinsmith.checkpoints.folder_store import FolderStore
from tinsmith.checkpoints.paths import CheckpointPath

LAST = CheckpointPath.parse("tinker://run/weights/last")
FILES = ("a.safetensors", "b.safetensors")
SIZE_BYTES = 50_000


def named(number: int) -> CheckpointPath:
    return CheckpointPath("run", "weights", str(number))


def save(store: CheckpointStore, path: CheckpointPath, number: int) -> None:
    """Every eight bytes of both files are the number."""
    with store.begin(path) as staging:
        for name in FILES:
            (staging.folder / name).write_bytes(number.to_bytes(8, "little") * (SIZE_BYTES // 8))
        staging.commit(overwrite=path == LAST)


def main(folder: Path, first: int) -> None:
    store = FolderStore(folder)
    store.sweep()
    sys.stdout.write("started\n")
    for number in itertools.count(first):
        save(store, LAST, number)
        save(store, named(number), number)
        if number % 3 == 0:
            store.delete(named(number))
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
