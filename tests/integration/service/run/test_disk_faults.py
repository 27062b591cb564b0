"""A full disk, a read-only one and one that is not ours each have a message and a remedy."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.ledgers import training
from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.checkpoints.registry import open_store
from tinsmith.errors import LedgerUnavailableError, StorageFullError, TinkerError
from tinsmith.service.ledger.registry import open_ledger
from tinsmith.wire.failures import failed_from_error, reply_from_error

ROOT = Path(__file__).parents[4]
CAUSES = [
    (errno.ENOSPC, "free disk space", "its disk is full"),
    (errno.EDQUOT, "free disk space", "its disk is full"),
    (errno.EROFS, "remount the file system read-write", "its disk is read-only"),
    (errno.EACCES, "chown", "it may not write to its folder"),
    (errno.EIO, "dmesg", "its disk reports errors"),
    (errno.EMFILE, "ulimit -n", "it has no file descriptor left"),
]


@pytest.mark.parametrize(("number", "remedy", "reason"), CAUSES)
def test_an_unwritable_store_is_reported_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str, reason: str
) -> None:
    store = open_store(tmp_path / "store")
    monkeypatch.setattr(Path, "mkdir", failing(number))

    with pytest.raises(TinkerError) as refused:
        store.begin(CheckpointPath("run", "weights", "one"))

    assert remedy in str(refused.value)
    assert isinstance(refused.value, StorageFullError) == (reason == "its disk is full")
    told = failed_from_error(refused.value).error
    assert told == f"the checkpoint store is unavailable: {reason}; retry later"


@pytest.mark.parametrize(("number", "remedy", "reason"), CAUSES)
def test_an_unwritable_payload_is_reported_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str, reason: str
) -> None:
    async def run() -> None:
        async with await open_ledger(f"sqlite://{tmp_path / 'ledger'}") as ledger:
            with monkeypatch.context() as broken:
                broken.setattr(os, "fsync", failing(number))
                await ledger.append(training(1, bytes(1_000_000)))

    with pytest.raises(LedgerUnavailableError) as refused:
        asyncio.run(run())

    assert remedy in str(refused.value)
    reply = reply_from_error(refused.value)
    told = json.loads(b"".join(bytes(part) for part in reply.parts))["detail"]
    assert told == f"the service cannot use its ledger: {reason}; retry later"


@pytest.mark.parametrize(("number", "remedy", "reason"), CAUSES)
def test_an_unwritable_database_is_reported_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str, reason: str
) -> None:
    """SQLite says "disk I/O error" whatever it is."""
    is_broken = False

    class Broken(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            if is_broken and sql == "COMMIT":
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
                raise error
            return super().execute(sql, *values)

    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda *args, **more: connect(*args, **{"factory": Broken, **more})
    )

    async def run() -> None:
        nonlocal is_broken
        async with await open_ledger(f"sqlite://{tmp_path / 'ledger'}") as ledger:
            with monkeypatch.context() as broken:
                broken.setattr(os, "fsync", failing(number))
                is_broken = True
                try:
                    await ledger.append(training(1))
                finally:
                    is_broken = False

    with pytest.raises(LedgerUnavailableError) as refused:
        asyncio.run(run())

    assert remedy in str(refused.value)
    assert refused.value.reason == reason
    assert [path.name for path in (tmp_path / "ledger").glob(".probe*")] == []


def failing(number: int) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_disk_remounted_read_only_is_reported(tmp_path: Path) -> None:
    own = ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*own, "true"], check=False).returncode:
        pytest.skip("this machine lets nobody mount anything")
    folder = tmp_path / "disk"
    folder.mkdir()

    ran = subprocess.run(
        [*own, sys.executable, str(Path(__file__).with_name("read_only_disk.py")), str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    told = {line["what"]: line for line in map(json.loads, ran.stdout.splitlines())}
    assert set(told) == {"full", "store", "ledger"}
    assert "free disk space" in told["full"]["operator"]
    assert "its disk is full" in told["full"]["client"]
    for what in ("store", "ledger"):
        assert "remount the file system read-write" in told[what]["operator"]
        assert "free disk space" not in told[what]["operator"]
        assert "its disk is read-only" in told[what]["client"]
