"""Checkpoints whose process is killed, whose disk is full: whole or not at all."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.checkpoints import writer
from tinsmith.checkpoints.folder_store import FolderStore
from tinsmith.checkpoints.paths import CheckpointPath

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
KILLS = 20


@pytest.mark.parametrize("fault", ["kill", "full"])
@pytest.mark.parametrize("store", ["folder", "url"])
def test_a_crash_or_a_full_disk_at_any_step_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, store: str, fault: str
) -> None:
    """Every step on the disk of saving, overwriting, deleting and copying, one by one."""
    command = [sys.executable, str(HERE / "crash_points.py"), str(tmp_path), store, fault]

    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)

    assert done.returncode == 0, done.stderr
    steps = {name: int(count) for name, count in map(str.split, done.stdout.splitlines())}
    assert steps.keys() == {"save", "overwrite", "delete", "copy"}
    assert steps["save"] >= 8, "the hook counts nothing"
    if (store, fault) == ("folder", "full"):
        assert steps["delete"] == 0, "a full disk must not keep anybody from making room"


@pytest.mark.skipif(sys.platform != "linux", reason="files are held open by O_PATH and /proc")
def test_a_power_cut_at_any_step_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    """On a disk that keeps what was synced, and of the rest what is worst."""
    command = [sys.executable, str(HERE / "power_cuts.py"), str(tmp_path)]

    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)

    assert done.returncode == 0, done.stderr
    cuts = {name: int(count) for name, count in map(str.split, done.stdout.splitlines())}
    assert cuts.keys() == {"save", "overwrite", "delete", "copy"}
    assert all(count > 20 for count in cuts.values()), "too little of the disk is looked at"


def write_until_killed(folder: Path, first: int, lines: int) -> list[int]:
    """The numbers that a writer said were saved before it was killed, at any moment."""
    command = [sys.executable, str(HERE / "writer.py"), str(folder), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT, text=True) as running:
        assert running.stdout is not None
        said: list[str] = []
        while len(said) < lines and (line := running.stdout.readline()):
            said.append(line)
        running.send_signal(signal.SIGKILL)
        said += running.stdout.readlines()
    assert running.returncode == -signal.SIGKILL
    return [int(line) for line in said if line.strip().isdigit()]


def content(store: FolderStore, path: CheckpointPath) -> int:
    store.open_whole(path).close()
    with store.open(path) as reading:
        contents = {(reading.folder / name).read_bytes() for name in writer.FILES}
    assert len(contents) == 1
    number = int.from_bytes(next(iter(contents))[:8], "little")
    assert contents == {number.to_bytes(8, "little") * (writer.SIZE_BYTES // 8)}
    return number


def test_kill_9_at_random_moments_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    chance = random.Random(3)
    store = FolderStore(tmp_path)
    next_number = 0
    there: int | None = None
    saved: list[int] = []
    for _ in range(KILLS):
        said = write_until_killed(tmp_path, next_number, chance.randrange(1, 8))
        saved += said

        # The one being written when it was killed, be it the writer's first, is there or not.
        sure, unsaid = (said[-1], said[-1] + 1) if said else (there, next_number)
        there = content(store, writer.LAST) if store.exists(writer.LAST) else None
        assert there in (sure, unsaid)
        next_number = unsaid + 1

    store.sweep()
    assert len(saved) > KILLS
    for number in saved:
        path = writer.named(number)
        assert store.exists(path) == (number % 3 != 0)
        assert number % 3 == 0 or content(store, path) == number
    assert list((tmp_path / "staging").iterdir()) == []
    manifests = len(list(tmp_path.rglob("checkpoint.json")))
    versions = len(list((tmp_path / "runs").glob("*/*/*/*/")))
    assert manifests == versions == len(list(store.paths()))
