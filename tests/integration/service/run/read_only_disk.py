"""Run under `unshare --map-root-user --mount`: a service meets a file system that is read-only.

`python read_only_disk.py FOLDER` mounts a disk of its own on the folder, which goes with the
process. It prints one JSON object a line.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.checkpoints.registry import open_store
from tinsmith.errors import TinkerError
from tinsmith.service.ledger.registry import open_ledger
from tinsmith.wire.failures import failed_from_error


def mount(folder: Path, *options: str) -> None:
    """Mount a disk in memory, or mount it anew."""
    command = ["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)]
    subprocess.run(command, check=True)


def tell(what: str, error: TinkerError) -> None:
    """What the operator reads, and what a client is told."""
    client = failed_from_error(error).error
    print(json.dumps({"what": what, "operator": str(error), "client": client}), flush=True)


def main(folder: Path) -> None:
    """Fill the disk, then make it read-only."""
    mount(folder, "-o", "size=2m")
    asyncio.run(make_ledger(folder))
    store = open_store(folder / "store")
    path = CheckpointPath("run", "weights", "one")
    try:
        with store.begin(path) as staging:
            (staging.folder / "state.json").write_bytes(bytes(1000))
            (folder / "rest").write_bytes(bytes(8))
            fill(folder / "rest")
            staging.commit()
    except TinkerError as exc:
        tell("full", exc)
    (folder / "rest").unlink()
    mount(folder, "-o", "remount,ro")
    try:
        store.begin(path)
    except TinkerError as exc:
        tell("store", exc)
    try:
        asyncio.run(make_ledger(folder))
    except TinkerError as exc:
        tell("ledger", exc)


async def make_ledger(folder: Path) -> None:
    """Open a ledger and close it."""
    async with await open_ledger(f"sqlite://{folder / 'ledger'}"):
        pass


def fill(file: Path) -> None:
    """Write until there is no room."""
    try:
        with file.open("ab", buffering=0) as out:
            while True:
                out.write(bytes(4096))
    except OSError:
        pass


if __name__ == "__main__":
    main(Path(sys.argv[1]))
