"""A SQLite ledger that has lost what was durable is refused, and goes on where that is accepted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.ledgers import training
from tinsmith.errors import LedgerDamagedError, LedgerUnavailableError
from tinsmith.service.ledger import position
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.registry import open_ledger, open_ledger_beside

WAIT_S = 30.0
COMMANDS = 40
LEAF_OF_TABLE = 0x0D
"""The first byte of such a page in SQLite's file format."""


def database(folder: Path) -> Path:
    return folder / "ledger.sqlite3"


def log(folder: Path) -> Path:
    return folder / "ledger.sqlite3-wal"


def marker(folder: Path) -> Path:
    return folder / "ledger.position"


def address(folder: Path) -> str:
    return f"sqlite://{folder}"


def known(folder: Path) -> int:
    """The commit that the file says was durable."""
    return int(json.loads(marker(folder).read_bytes().rpartition(b"}")[0] + b"}")["commits"])


def reached(folder: Path) -> int:
    """The last commit in the database."""
    connection = sqlite3.connect(f"file:{database(folder)}?mode=ro", uri=True)
    with contextlib.closing(connection):
        [(commits,)] = connection.execute("SELECT commits FROM durable_position")
    return int(commits)


async def caught_up(folder: Path) -> None:
    """Wait until the file has the last commit."""
    deadline = time.monotonic() + WAIT_S
    while known(folder) < reached(folder):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def append(ledger: Ledger, start: int, stop: int) -> None:
    """One commit each."""
    for number in range(start, stop):
        await ledger.append(training(number, b"x" * 500))


def crashed(folder: Path, *, is_checkpointed: bool = False, commands: int = COMMANDS) -> Path:
    """The folder of a ledger whose process was killed, with most of what it wrote in its log."""

    async def run() -> Path:
        async with await open_ledger(address(folder / "alive")) as ledger:
            await append(ledger, 1, commands + 1)
            await caught_up(folder / "alive")
            if is_checkpointed:
                with contextlib.closing(sqlite3.connect(database(folder / "alive"))) as other:
                    other.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            # Nothing is being written: this is what a kill leaves behind.
            return Path(shutil.copytree(folder / "alive", folder / "crashed"))

    return asyncio.run(run())


def commands_in(folder: Path, *, accept_loss: bool = False) -> int:
    """Open the ledger, and say how many commands it has."""

    async def run() -> int:
        async with await open_ledger(address(folder), accept_loss=accept_loss) as ledger:
            return (await ledger.statistics()).pending

    return asyncio.run(run())


def content_of(folder: Path) -> list[bytes]:
    """Database and log; one that is missing is an empty one to SQLite, and may be made."""
    return [path.read_bytes() if path.exists() else b"" for path in (database(folder), log(folder))]


def flip_byte(file: Path, at: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(len(content) * at)] ^= 0x10
    file.write_bytes(content)


def delete_log(folder: Path) -> None:
    log(folder).unlink()


def flip_in_log(folder: Path) -> None:
    flip_byte(log(folder), 0.5)


def cut_log(folder: Path) -> None:
    os.truncate(log(folder), log(folder).stat().st_size // 2)


def delete_database(folder: Path) -> None:
    database(folder).unlink()
    log(folder).unlink()


@pytest.mark.parametrize("damage", [delete_log, flip_in_log, cut_log, delete_database])
def test_lost_commits_raise_with_a_fix_and_nothing_is_changed(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = crashed(tmp_path)
    assert commands_in(Path(shutil.copytree(folder, tmp_path / "sound"))) == COMMANDS
    damage(folder)
    before = content_of(folder)

    with pytest.raises(LedgerDamagedError, match=r"commits.* are lost") as refused:
        commands_in(folder)

    assert "tinsmith serve --accept-loss" in str(refused.value)
    assert "TINSMITH_SERVE_ACCEPT_LOSS" in str(refused.value)
    assert content_of(folder) == before


@pytest.mark.parametrize("damage", [delete_log, flip_in_log, cut_log, delete_database])
def test_an_accepted_loss_is_logged_once_and_the_ledger_continues(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    folder = crashed(tmp_path)
    damage(folder)

    with caplog.at_level(logging.WARNING):
        left = commands_in(folder, accept_loss=True)

    assert left < COMMANDS
    [told] = [record.getMessage() for record in caplog.records if "accepted" in record.message]
    assert "are lost" in told
    caplog.clear()
    assert commands_in(folder, accept_loss=True) == left
    assert commands_in(folder) == left
    assert not caplog.records


def test_a_damaged_wal_that_is_no_longer_needed_is_harmless(tmp_path: Path) -> None:
    """SQLite would put its old pages before the newer ones of the database."""
    folder = crashed(tmp_path, is_checkpointed=True)
    flip_in_log(folder)

    with pytest.raises(LedgerDamagedError):
        commands_in(folder)

    assert commands_in(folder, accept_loss=True) == COMMANDS
    assert commands_in(folder) == COMMANDS


def test_opening_the_ledger_beside_a_service_also_detects_a_loss(tmp_path: Path) -> None:
    folder = crashed(tmp_path)
    delete_log(folder)

    async def beside() -> None:
        async with await open_ledger_beside(address(folder)):
            pass

    with pytest.raises(LedgerDamagedError):
        asyncio.run(beside())


def test_the_durable_position_includes_commits_of_another_process(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"

    async def run() -> None:
        async with await open_ledger(address(folder)) as ledger:
            await append(ledger, 1, 3)
            async with await open_ledger_beside(address(folder)) as beside:
                await append(beside, 3, 10)
            # The file is written now and then, and what others did is looked up with that.
            await asyncio.sleep(2 * position.WRITE_EVERY_S)
            await append(ledger, 10, 11)
            assert reached(folder) >= 10
            await caught_up(folder)

    asyncio.run(run())


def test_an_older_copy_of_the_database_file_alone_is_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"

    async def write(start: int, stop: int) -> None:
        async with await open_ledger(address(folder)) as ledger:
            await append(ledger, start, stop)

    asyncio.run(write(1, 5))
    shutil.copytree(folder, tmp_path / "copy")
    asyncio.run(write(5, 10))
    shutil.copyfile(database(tmp_path / "copy"), database(folder))

    with pytest.raises(LedgerDamagedError, match="older copy"):
        commands_in(folder)
    assert commands_in(tmp_path / "copy") == 4, "a copy of the whole folder is sound"


@pytest.mark.parametrize("content", [None, b"", b"nonsense", b'{"commits":1}'])
def test_a_missing_position_file_is_not_a_loss_and_is_rewritten(
    tmp_path: Path, content: bytes | None
) -> None:
    """As in a copy of the database alone, and after a power cut at the first start."""
    folder = crashed(tmp_path)
    if content is None:
        marker(folder).unlink()
    else:
        marker(folder).write_bytes(content)

    assert commands_in(folder) == COMMANDS
    assert known(folder) == reached(folder)


def test_a_damaged_position_file_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = crashed(tmp_path)
    flip_byte(marker(folder), 0.05)

    assert commands_in(folder) == COMMANDS
    assert "ledger.position is damaged" in caplog.text


def test_an_older_ledger_without_a_position_opens_and_is_protected_from_then_on(
    tmp_path: Path,
) -> None:
    folder = crashed(tmp_path)
    with contextlib.closing(sqlite3.connect(database(folder))) as old:
        old.execute("DROP TABLE durable_position")
    marker(folder).unlink()
    assert commands_in(folder) == COMMANDS

    async def more() -> None:
        async with await open_ledger(address(folder)) as ledger:
            await append(ledger, 100, 110)
            await caught_up(folder)
            shutil.copytree(folder, tmp_path / "again")

    asyncio.run(more())
    delete_log(tmp_path / "again")
    with pytest.raises(LedgerDamagedError):
        commands_in(tmp_path / "again")


def test_deleting_the_wal_after_a_clean_close_is_not_a_loss(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"

    async def write() -> None:
        async with await open_ledger(address(folder)) as ledger:
            await append(ledger, 1, 10)

    asyncio.run(write())
    log(folder).unlink(missing_ok=True)

    assert known(folder) == reached(folder)
    assert commands_in(folder) == 9


def test_a_position_that_lags_is_not_a_loss(tmp_path: Path) -> None:
    """It is written after the commit, and a power cut may undo that."""
    folder = tmp_path / "ledger"

    async def write() -> bytes:
        async with await open_ledger(address(folder)) as ledger:
            await append(ledger, 1, 3)
            await caught_up(folder)
            old = marker(folder).read_bytes()
            await append(ledger, 3, 20)
            return old

    marker(folder).write_bytes(asyncio.run(write()))

    assert commands_in(folder) == 19


def test_the_position_excludes_commits_that_are_not_synced(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"

    async def run() -> int:
        async with await open_ledger(address(folder)) as ledger:
            await append(ledger, 1, 3)
            synced = reached(folder)
            await ledger.claim("scheduler", limit=1)
            return synced

    synced = asyncio.run(run())
    assert known(folder) == synced
    assert reached(folder) > known(folder)


def test_the_position_is_never_ahead_and_needs_no_extra_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "ledger"
    synced: list[int] = []

    async def watch() -> None:
        while True:
            known_first = known(folder)
            assert reached(folder) >= known_first
            await asyncio.sleep(0)

    async def run() -> None:
        async with await open_ledger(address(folder)) as ledger:
            monkeypatch.setattr(os, "fsync", synced.append)
            watching = asyncio.create_task(watch())
            for start in range(1, 400, 20):
                numbers = range(start, start + 20)
                await asyncio.gather(*(ledger.append(training(number)) for number in numbers))
                await ledger.claim("scheduler", limit=5)  # not synced, and so not in the file
            await ledger.append(training(1000))
            await caught_up(folder)
            assert not watching.done(), watching.exception()
            watching.cancel()
            monkeypatch.undo()

    asyncio.run(run())
    assert synced == []


def test_a_database_with_inconsistent_pages_is_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"

    async def write() -> None:
        async with await open_ledger(address(folder)) as ledger:
            await append(ledger, 1, 200)

    asyncio.run(write())
    content = bytearray(database(folder).read_bytes())
    pages = range(4096, len(content), 4096)
    leaves = [page for page in pages if content[page] == LEAF_OF_TABLE and content[page + 4]]
    # One that is not read when the ledger is opened. Where its first cell is:
    content[leaves[-2] + 8 : leaves[-2] + 10] = b"\xff\xff"
    database(folder).write_bytes(content)

    with pytest.raises(LedgerDamagedError, match="restore it from a backup"):
        commands_in(folder)


@pytest.mark.parametrize("accept_loss", [False, True])
def test_a_database_held_by_another_program_is_locked_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accept_loss: bool
) -> None:
    monkeypatch.setattr(position, "BUSY_S", 0.05)
    folder = crashed(tmp_path)
    holder = sqlite3.connect(database(folder), isolation_level=None)
    with contextlib.closing(holder):
        holder.execute("PRAGMA locking_mode = EXCLUSIVE")
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(LedgerUnavailableError, match="locked"):
            commands_in(folder, accept_loss=accept_loss)

    assert marker(folder).exists()
    assert commands_in(folder) == COMMANDS
