"""What the SQLite ledger does when its file, its disk or its schema is not as it should be."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.contract.ledgers import INLINE_BYTES, MODEL, ended, raised, training
from tinsmith.errors import (
    LedgerDamagedError,
    LedgerUnavailableError,
    LedgerVersionError,
    ValidationError,
)
from tinsmith.service.ledger import group_commit, sqlite
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.records import Appended, request_id
from tinsmith.service.ledger.registry import open_ledger
from tinsmith.service.ledger.sqlite import SqliteLedger
from tinsmith.service.ledger.statements import migrations, queries, sqlite_queries
from tinsmith.service.ledger.steps import Effects, Steps

ROOT = Path(__file__).parents[4]
LARGE = b"x" * (INLINE_BYTES * 3)


async def opened(folder: Path) -> SqliteLedger:
    return await SqliteLedger.open(folder, inline_bytes=INLINE_BYTES)


def made(folder: Path) -> Path:
    """A ledger's database file."""

    async def make() -> None:
        async with await opened(folder) as ledger:
            await ledger.append(training(1))

    asyncio.run(make())
    return folder / "ledger.sqlite3"


def change(file: Path, sql: str) -> None:
    with sqlite3.connect(file) as connection:
        connection.executescript(sql)
    connection.close()


# Schema


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("INSERT INTO migrations VALUES (99, '0099_future', 'x')", "newer version.*0099_future"),
        ("DELETE FROM migrations", "half-migrated"),
        ("UPDATE migrations SET number = number - 1", "half-migrated"),
        ("UPDATE migrations SET digest = 'other'", "migrated by a different 0001_create_ledger"),
        ("PRAGMA application_id = 7", "another program"),
    ],
)
def test_a_foreign_newer_or_half_migrated_file_is_rejected_with_a_remedy(
    tmp_path: Path, sql: str, message: str
) -> None:
    file = made(tmp_path)
    change(file, sql)
    before = file.read_bytes()

    with pytest.raises(LedgerVersionError, match=message) as caught:
        asyncio.run(opened(tmp_path))

    assert caught.value.remedy
    assert file.read_bytes() == before


def test_a_file_that_is_not_a_database_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite3").write_bytes(b"not a database, whatever it is" * 100)

    with pytest.raises(LedgerVersionError, match="is not a ledger"):
        asyncio.run(opened(tmp_path))


def test_a_database_of_another_program_is_rejected(tmp_path: Path) -> None:
    change(tmp_path / "ledger.sqlite3", "CREATE TABLE theirs (x)")

    with pytest.raises(LedgerVersionError, match="another program"):
        asyncio.run(opened(tmp_path))


def test_a_failed_migration_leaves_the_file_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = made(tmp_path)
    known = migrations("sqlite")
    broken = type(known[0])(9, "0009_break", "CREATE TABLE fine (x);\nCREATE TABLE commands (y);\n")
    with monkeypatch.context() as patch:
        patch.setattr(sqlite, "known_migrations", lambda _: (*known, broken))
        with pytest.raises(LedgerUnavailableError, match="already exists"):
            asyncio.run(opened(tmp_path))

    connection = sqlite3.connect(file)
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
    connection.close()
    assert "fine" not in tables
    assert made(tmp_path) == file


def test_a_file_of_the_first_version_is_migrated_with_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        first, *_ = migrations("sqlite")
        patch.setattr(sqlite, "known_migrations", lambda _: (first,))
        made(tmp_path)

    async def look() -> None:
        async with await opened(tmp_path) as ledger:
            assert not (await ledger.append(training(1))).is_new
            found = await ledger.command(request_id(MODEL, 1))
            assert (found.started_at, found.batch) == (None, None)

    asyncio.run(look())


def test_a_new_migration_is_applied_to_an_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path)
    known = migrations("sqlite")
    added = type(known[0])(9, "0009_add_notes", "CREATE TABLE notes (x TEXT) STRICT;\n")
    monkeypatch.setattr(sqlite, "known_migrations", lambda _: (*known, added))

    async def look() -> None:
        async with await opened(tmp_path) as ledger:
            assert not (await ledger.append(training(1))).is_new

    asyncio.run(look())
    connection = sqlite3.connect(tmp_path / "ledger.sqlite3")
    assert connection.execute("SELECT name FROM migrations ORDER BY number").fetchall() == [
        ("0001_create_ledger",),
        ("0002_add_batch_to_results",),
        ("0003_index_sizes",),
        ("0004_add_lease",),
        ("0009_add_notes",),
    ]
    connection.close()


def test_both_databases_share_their_migrations_and_every_query_is_used() -> None:
    """PostgreSQL may have more of them: what only several servers need."""
    names = [[one.name for one in migrations(database)] for database in ("sqlite", "postgres")]
    folder = ROOT / "src" / "tinsmith" / "service" / "ledger"
    code = "".join(path.read_text() for path in folder.glob("*.py"))

    assert names[1][: len(names[0])] == names[0]
    assert [name for name in queries() if f'"{name}"' not in code] == []


@pytest.mark.parametrize("name", ["unsettled_totals", "kept_totals"])
def test_statistics_queries_use_indexes(tmp_path: Path, name: str) -> None:
    """They are read every few seconds, and a ledger has hundreds of thousands of commands."""
    with contextlib.closing(sqlite3.connect(made(tmp_path))) as connection:
        rows = connection.execute(f"EXPLAIN QUERY PLAN {sqlite_queries()[name]}").fetchall()

    looks = [text for *_, text in rows if text.startswith(("SCAN", "SEARCH"))]
    assert [look for look in looks if "INDEX" not in look] == ["SCAN CONSTANT ROW"]


def test_durable_sync_is_enabled(tmp_path: Path) -> None:
    """A commit is synced before it is answered: WAL with `synchronous` at FULL, which is 2."""

    async def look() -> list[tuple[object]]:
        async with await opened(tmp_path) as ledger:
            connection = ledger._writer._connection

            def pragmas(_: Effects) -> Steps[list[tuple[object]]]:
                yield from ()
                return [
                    connection.execute(f"PRAGMA {name}").fetchone()
                    for name in ("journal_mode", "synchronous")
                ]

            return await ledger._write(pragmas)

    assert asyncio.run(look()) == [("wal",), (2,)]


# The file in other hands


def test_a_locked_file_is_an_error_until_it_is_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_S", 0.05)

    async def tell() -> None:
        async with await opened(tmp_path) as ledger:
            await ledger.append(training(1))
            other = sqlite3.connect(tmp_path / "ledger.sqlite3", isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            message = await raised(ledger.append(training(2)), LedgerUnavailableError)
            assert "locked" in message
            assert (await ledger.command(f"{MODEL}:1")).seq_id == 1
            other.execute("ROLLBACK")
            other.close()
            assert (await ledger.append(training(2))).is_new

    asyncio.run(tell())


def test_a_full_disk_rejects_new_writes_and_loses_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    program = Path(__file__).with_name("full_disk.py")

    finished = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )

    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("accepted ")


# Payload files


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_a_damaged_payload_is_reported(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    async def tell() -> None:
        async with await opened(tmp_path) as ledger:
            request = (await ledger.append(training(1, LARGE))).request_id
            [file] = [path for path in (tmp_path / "payloads").rglob("*") if path.is_file()]
            damage(file)
            message = await raised(ledger.payload(request), LedgerDamagedError)
            assert file.name in message

    asyncio.run(tell())


def test_large_payloads_are_files_and_deleted_when_unneeded(tmp_path: Path) -> None:
    def files() -> int:
        return sum(path.is_file() for path in (tmp_path / "payloads").rglob("*"))

    async def tell() -> None:
        async with await opened(tmp_path) as ledger:
            request = (await ledger.append(training(1, LARGE))).request_id
            await ledger.append(training(1, LARGE))
            assert files() == 1
            await ledger.settle([ended(request, LARGE)])
            await ledger.settle([ended(request, LARGE)])
            assert files() in (2, 3)  # the second result is deleted behind the answer
            await ledger.acknowledge([request])
            await ledger.record_snapshot(MODEL, 2, None)
        assert files() == 0

    asyncio.run(tell())


def test_the_payload_file_of_a_sample_is_deleted_when_it_is_settled(tmp_path: Path) -> None:
    """It is never replayed."""

    def files() -> int:
        return sum(path.is_file() for path in (tmp_path / "payloads").rglob("*"))

    async def tell() -> None:
        async with await opened(tmp_path) as ledger:
            sample = msgspec.structs.replace(training(1, LARGE), is_ordered=False)
            request = (await ledger.append(sample)).request_id
            assert files() == 1
            await ledger.settle([ended(request, b"J{}")])
        assert files() == 0

    asyncio.run(tell())


def test_only_files_that_no_row_references_are_swept(tmp_path: Path) -> None:
    async def tell() -> None:
        async with await opened(tmp_path) as ledger:
            request = (await ledger.append(training(1, LARGE))).request_id
            folder = tmp_path / "payloads" / "ab"
            folder.mkdir(exist_ok=True)
            for name in ("abandoned", "abandoned.partial"):
                (folder / name).write_bytes(b"left by a crash")

            assert (await ledger.sweep()).files == 2
            assert await ledger.payload(request) == LARGE

    asyncio.run(tell())


def test_a_sweep_during_appends_deletes_nothing_in_use(tmp_path: Path) -> None:
    async def tell() -> None:
        async with await opened(tmp_path) as ledger:
            done = asyncio.Event()

            async def sweep() -> None:
                while not done.is_set():
                    assert (await ledger.sweep()).files == 0

            sweeping = asyncio.create_task(sweep())
            for start in range(0, 60, 20):
                await asyncio.gather(
                    *(ledger.append(training(start + n, LARGE)) for n in range(20))
                )
            done.set()
            await sweeping
            for number in range(60):
                assert await ledger.payload(f"{MODEL}:{number}") == LARGE

    asyncio.run(tell())


# Group commit


def test_concurrent_writes_share_commits(tmp_path: Path) -> None:
    async def tell() -> None:
        async with await opened(tmp_path) as ledger:
            await asyncio.gather(*(ledger.append(training(number)) for number in range(500)))
            seen = await ledger.statistics()
            assert seen.writes == 500
            assert seen.commits <= 500 / 10

    asyncio.run(tell())


def test_one_failed_write_does_not_fail_its_group(tmp_path: Path) -> None:
    """Even an error that ends the transaction reaches only the write that caused it."""

    def broken(_: Effects) -> Steps[None]:
        yield ("add_use", ("tenant", 1, "kind", "s", "l", "m", 1.0))
        yield ("add_use", (None,) * 7)  # refused by the database after a change

    async def tell() -> None:
        async with await opened(tmp_path) as ledger:
            appends = [ledger.append(training(number)) for number in range(20)]
            told = await asyncio.gather(
                *appends[:10],
                ledger._write(broken),
                *appends[10:],
                return_exceptions=True,
            )
            assert isinstance(told.pop(10), LedgerUnavailableError)
            assert [type(one) for one in told] == [Appended] * 20
            assert len(await ledger.claim("s", limit=50)) == 20

    asyncio.run(tell())


def test_a_waiting_claim_joins_the_commit_that_adds_its_command(tmp_path: Path) -> None:
    """It costs no commit of its own."""

    async def tell() -> None:
        async with await opened(tmp_path) as ledger:
            await ledger.append(training(0))
            await ledger.claim("s", limit=2)  # one that gets all it may wakes those who wait
            before = (await ledger.statistics()).commits
            waiting = asyncio.create_task(ledger.wait_claim("s", limit=5, timeout_s=60))
            await asyncio.sleep(0)
            await ledger.append(training(1))
            assert [command.seq_id for command in await waiting] == [1]
            assert (await ledger.statistics()).commits == before + 1

    asyncio.run(tell())


def test_a_waiting_claim_survives_the_failure_of_the_commit_that_it_joined(tmp_path: Path) -> None:
    """The write that failed is told so; the claim has what the others brought."""

    def broken(_: Effects) -> Steps[None]:
        yield ("add_use", ("tenant", 1, "kind", "s", "l", "m", 1.0))
        yield ("add_use", (None,) * 7)

    async def tell() -> None:
        async with await opened(tmp_path) as ledger:
            waiting = asyncio.create_task(ledger.wait_claim("s", limit=50, timeout_s=60))
            await asyncio.sleep(0)
            told = await asyncio.gather(
                ledger.append(training(0)), ledger._write(broken), return_exceptions=True
            )
            assert isinstance(told[1], LedgerUnavailableError)
            assert [command.seq_id for command in await waiting] == [0]

    asyncio.run(tell())


def test_a_claim_whose_query_fails_keeps_what_arrived_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claimed and told to nobody it would lie until the next start."""

    async def tell() -> None:
        async with await opened(tmp_path) as ledger:

            async def fail(_: object) -> None:
                await ledger.append(training(0))
                raise LedgerUnavailableError("the disk is away")

            monkeypatch.setattr(ledger, "_look", fail)
            claimed = await ledger.wait_claim("s", limit=5, timeout_s=60)
            assert [command.seq_id for command in claimed] == [0]

    asyncio.run(tell())


def test_closing_a_ledger_ends_waiting_claims(tmp_path: Path) -> None:
    async def tell() -> None:
        ledger = await opened(tmp_path)
        waiting = asyncio.create_task(ledger.wait_claim("s", limit=5, timeout_s=60))
        await asyncio.sleep(0)
        await ledger.close()
        with pytest.raises(LedgerUnavailableError):
            await asyncio.wait_for(waiting, 30)

    asyncio.run(tell())


def test_the_wal_is_checkpointed_when_the_ledger_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "MOVED_AT_WRITES", 20)

    async def tell() -> None:
        async with await opened(tmp_path) as ledger:
            await asyncio.gather(*(ledger.append(training(number)) for number in range(100)))
            file = tmp_path / "ledger.sqlite3"
            small = file.stat().st_size
            for _ in range(600):
                if file.stat().st_size > small:
                    return
                await asyncio.sleep(group_commit.QUIET_S)
            pytest.fail("the log was not moved")

    asyncio.run(tell())


@pytest.mark.parametrize("can_shrink", [True, False])
def test_freed_pages_are_returned_to_the_disk_when_the_ledger_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_shrink: bool
) -> None:
    """Some of it stays for what comes. A file that cannot shrink is left as it is."""
    monkeypatch.setattr(group_commit, "MOVED_AT_WRITES", 1)
    monkeypatch.setattr(group_commit, "KEPT_FREE_PAGES", 300)
    monkeypatch.setattr(group_commit, "GIVEN_BACK_PAGES", 100)
    file = made(tmp_path)
    if not can_shrink:
        change(file, "PRAGMA auto_vacuum = NONE; VACUUM")

    async def tell() -> None:
        async with await SqliteLedger.open(tmp_path) as ledger:
            numbers = range(2, 102)
            for number in numbers:
                await ledger.append(training(number, b"x" * 60_000))
            full = (await ledger.statistics()).stored_bytes
            await ledger.settle([ended(request_id(MODEL, number)) for number in numbers])
            await ledger.record_snapshot(MODEL, numbers.stop, None)
            for _ in range(600):
                if ledger._writer._moved_at == ledger._writer.writes:
                    break
                await asyncio.sleep(group_commit.QUIET_S)

        assert file.stat().st_size > 300 * sqlite.PAGE_BYTES
        assert (file.stat().st_size < full / 2) == can_shrink

    asyncio.run(asyncio.wait_for(tell(), 120))


# Addresses


def test_open_ledger_chooses_the_ledger_by_its_url(tmp_path: Path) -> None:
    async def tell() -> None:
        async with await open_ledger("memory:") as memory:
            assert isinstance(memory, MemoryLedger)
        folder = tmp_path / "with space"
        async with await open_ledger(f"sqlite://{folder}".replace(" ", "%20")) as ledger:
            assert isinstance(ledger, SqliteLedger)
        assert (folder / "ledger.sqlite3").exists()
        for wrong in ("", "mysql://host/db", "sqlite:", "sqlite://host/path", "plain/path"):
            await raised(open_ledger(wrong), ValidationError)

    asyncio.run(tell())


def test_a_closed_ledger_is_a_single_file(tmp_path: Path) -> None:
    """Whoever copies the database then, and not its log, has everything."""

    async def fill() -> None:
        ledger = await opened(tmp_path)
        for number in range(50):
            await ledger.append(training(number))
        await ledger.close()

    asyncio.run(fill())

    log = tmp_path / "ledger.sqlite3-wal"
    assert not log.exists() or log.stat().st_size == 0
