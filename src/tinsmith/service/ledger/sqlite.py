"""The ledger in one SQLite file, for one process.

One connection writes, on a thread of its own (`group_commit.py`); others read. The file is in WAL
mode with `synchronous=FULL`: a commit is on the disk when it returns. Large payloads are files in a
folder beside it. A lock file keeps a second process out; only one that looks up and changes
entries, such as a command that makes a key, may open the same file meanwhile (`open_beside`).

    <folder>/ledger.sqlite3     commands, results, entries, usage
    <folder>/ledger.lock        held while the ledger is open
    <folder>/ledger.position    which commit is known to be durable (`position.py`)
    <folder>/payloads/          large payloads and results, one file each
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Self, TypeVar

from tinsmith.errors import LedgerDamagedError, LedgerUnavailableError, LedgerVersionError
from tinsmith.observe.disk_faults import fault_of
from tinsmith.service.ledger import entry_steps, statements, steps
from tinsmith.service.ledger.group_commit import GroupWriter, unavailable
from tinsmith.service.ledger.payloads import INLINE_BYTES, Kept, PayloadFiles, Remembered
from tinsmith.service.ledger.position import PositionFile, transaction
from tinsmith.service.ledger.records import Command, Retention, Swept
from tinsmith.service.ledger.scheduler_lease import LEASE_S, Lease, SteadyClock
from tinsmith.service.ledger.sql_ledger import SqlLedger
from tinsmith.service.ledger.statements import migrations as known_migrations
from tinsmith.service.ledger.statements import sqlite_queries
from tinsmith.service.ledger.steps import Effects, Operation, Row, Values, fenced, run_steps
from tinsmith.service.ledger.wakeups import NEW_WORK

_log = logging.getLogger(__name__)

T = TypeVar("T")

FILE = "ledger.sqlite3"
APPLICATION_ID = 0x54494E53
"""Tells our files from those of other programs."""
OLDEST_SQLITE = (3, 37, 0)
"""The first with STRICT tables."""
READERS = 2
BUSY_S = 5.0
"""How long another program may hold the file before a write gives up."""
PAGE_BYTES = 4096
"""A commit writes every page that it touched, and an append touches one of each index: for a lone
caller small pages are a sixth faster. Many callers with payloads of tens of kilobytes would gain as
much from pages twice as large."""
LARGEST_LOG_PAGES = 8000
"""Under steady load the log is moved into the database at this length."""
LOCK_WAIT_S = 1.0
"""How long the lock is waited for: its owner may be just about to end."""
MAKING_TRIES = 10
"""How often the lock is waited for while another process makes a ledger."""
CACHE_KIB = 64 * 1024
"""What the writer keeps of the database in memory, so that it reads no index from the log."""


class SqliteLedger(SqlLedger):
    """A ledger in a folder."""

    def __init__(
        self, folder: Path, retention: Retention, clock: SteadyClock, inline_bytes: int
    ) -> None:
        super().__init__(retention, clock)
        self._inline_bytes = inline_bytes
        self._path = folder / FILE
        self._lock_path = folder / "ledger.lock"
        self._lock: IO[str] | None = None
        self._files = PayloadFiles(folder / "payloads")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="tinsmith-ledger-read")
        self._connections = threading.local()
        self._looking: sqlite3.Connection | None = None
        self._opened: list[sqlite3.Connection] = []
        self._position = PositionFile(self._path)
        self._writer = GroupWriter(self._connect_writer, self._follow, self._position, folder)
        self._claimed: Remembered[Command] = Remembered()
        self._is_open = False
        self._is_closed = False
        self._is_beside = False
        self._accepts_loss = False

    @classmethod
    async def open(
        cls,
        folder: Path,
        *,
        retention: Retention | None = None,
        clock: SteadyClock | None = None,
        inline_bytes: int = INLINE_BYTES,
        accept_loss: bool = False,
    ) -> Self:
        """Open the ledger in a folder, or make one there.

        Args:
            accept_loss: Whether to continue with the commits that remain if some are missing.
                What was lost is logged.

        Raises:
            LedgerUnavailableError: Another process has it open, or the folder cannot be written.
            LedgerVersionError: The file is no ledger, or not one that this version can use.
            LedgerDamagedError: Commits that were durable are missing, or the file is damaged.
        """
        ledger = cls(folder, retention or Retention(), clock or SteadyClock(), inline_bytes)
        ledger._accepts_loss = accept_loss
        await ledger._open()
        return ledger

    @classmethod
    async def open_beside(cls, folder: Path) -> Self:
        """Open a ledger that another process may have open, for its entries alone.

        SQLite lets several processes write one after another. Claiming commands and sweeping files
        are for one process only, so neither may be done here. A folder without a ledger of this
        version is opened as by `open`, exclusively.

        Raises:
            LedgerUnavailableError: The folder cannot be used.
            LedgerVersionError: The file is no ledger, or not one that this version can use.
            LedgerDamagedError: Commits that were durable are missing, or the file is damaged.
        """
        tries = MAKING_TRIES
        while True:
            ledger = cls(folder, Retention(), SteadyClock(), INLINE_BYTES)
            ledger._is_beside = await asyncio.to_thread(ledger._is_up_to_date)
            try:
                await ledger._open()
            except LedgerUnavailableError:
                tries -= 1
                # Whoever has the lock may be making the ledger just now.
                if ledger._is_beside or not tries:
                    raise
            else:
                return ledger

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a folder has a ledger."""
        return (folder / FILE).exists()

    async def _open(self) -> None:
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            await asyncio.to_thread(self._prepare)
            await self._writer.start()
            self._clock.start_after(await self._read(entry_steps.latest_time))
            self._is_open = True
            undo.pop_all()

    async def close(self) -> None:
        """`Ledger.close`."""
        await self._wait_large()
        await self._appending.wait_done()
        await self._writer.close()
        if self._is_closed:
            return
        self._is_closed = True
        self._claimed.forget_all()  # or a poll for one of them would report that it is running
        self._wakeups.tell_all()
        await asyncio.to_thread(self._readers.shutdown)
        for connection in self._opened:
            connection.close()
        if self._is_open and not self._is_beside:
            await asyncio.to_thread(self._merge_log)
        if self._lock is not None:
            self._lock.close()

    def _merge_log(self) -> None:
        """Move the log into the database, for backups that copy only the database file."""
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(self._path, timeout=BUSY_S)) as last,
        ):
            last.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    # The lease: the ledger is open in this process only, so the lease is always free

    async def acquire_lease(
        self, owner: str, *, lease_s: float = LEASE_S, wait_s: float = 0.0
    ) -> Lease:
        """`Ledger.acquire_lease`."""
        del wait_s  # nobody else can hold it
        epoch = await self._write(partial(steps.next_epoch, owner=owner))
        return Lease(owner, epoch, lease_s, math.inf)

    async def renew_lease(self, lease: Lease) -> None:
        """`Ledger.renew_lease`."""
        await self._look(fenced(steps.nothing, lease.epoch))

    async def release_lease(self, lease: Lease) -> None:
        """`Ledger.release_lease`. `close` releases the lock on the folder."""

    # Writing and reading

    async def _write(self, operation: Operation[T], *, is_soft: bool = False) -> T:
        return await self._writer.write(operation, is_soft=is_soft)

    async def _read(self, operation: Operation[T]) -> T:
        return await self._on_reader(self._run_read, operation)

    async def _look(self, operation: Operation[T]) -> T:
        """On the event loop's own thread: handing a look to another takes ten times as long.

        No writer keeps a reader of SQLite waiting, but for moments in which the log begins anew;
        such a look is left to a thread.
        """
        if self._is_closed:
            raise LedgerUnavailableError("the ledger is closed")
        try:
            if self._looking is None:
                self._looking = self._connect_reader(timeout_s=0.0)
            return run_steps(operation(Effects()), partial(_ask, self._looking))
        except sqlite3.Error:
            return await self._read(operation)

    async def wait_claim(
        self, claimer: str, *, limit: int, timeout_s: float, epoch: int | None = None
    ) -> list[Command]:
        """`Ledger.wait_claim`, in the transaction that brings the work: a commit less for each."""
        operation = self._claiming(claimer, limit, epoch)
        with self._writer.standing_by(NEW_WORK, operation) as standing:
            try:
                has_work = await self._look(partial(steps.has_work, claimer=claimer))
            except LedgerUnavailableError:
                has_work = (
                    True  # perhaps: the claim finds out, and keeps what was claimed meanwhile
                )
            if not has_work:
                await asyncio.wait([standing.future], timeout=timeout_s)
        if standing.is_taken:
            return await standing.future
        # Of what was there, or the time is up.
        return await self.claim(claimer, limit=limit, epoch=epoch)

    async def _on_reader(self, work: Callable[..., T], *values: object) -> T:
        if self._is_closed:
            raise LedgerUnavailableError("the ledger is closed")
        return await asyncio.get_running_loop().run_in_executor(self._readers, work, *values)

    def _run_read(self, operation: Operation[T]) -> T:
        try:
            connection = self._reading_connection()
            connection.execute("BEGIN")  # one view of the database for all its queries
            try:
                return run_steps(operation(Effects()), partial(_ask, connection))
            finally:
                connection.execute("ROLLBACK")
        except sqlite3.Error as exc:
            raise unavailable(exc, self._path.parent) from exc

    def _reading_connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._connections, "mine", None)
        if connection is None:
            connection = self._connections.mine = self._connect_reader(timeout_s=BUSY_S)
        return connection

    def _connect_reader(self, timeout_s: float) -> sqlite3.Connection:
        uri = f"{self._path.resolve().as_uri()}?mode=ro"
        # Closed by another thread, when this one has ended.
        connection = sqlite3.connect(
            uri, uri=True, isolation_level=None, check_same_thread=False, timeout=timeout_s
        )
        self._opened.append(connection)
        return connection

    async def command(self, request_id: str) -> Command:
        """`Ledger.command`. Nobody else can change what this process has claimed."""
        return self._claimed.see(request_id) or await super().command(request_id)

    async def release_claims(self, claimer: str, *, epoch: int | None = None) -> int:
        """`Ledger.release_claims`."""
        try:
            return await super().release_claims(claimer, epoch=epoch)
        finally:
            self._claimed.forget_all()

    async def sweep(self) -> Swept:
        """`Ledger.sweep`."""
        self._claimed.forget_all()
        return await super().sweep()

    def _follow(self, effects: Effects) -> None:
        for command in effects.claimed:
            self._claimed.keep(command.request_id, command)
        for ended in effects.ended:
            self._claimed.take(ended.request_id)
        self._tell(effects)
        if effects.files and not self._is_closed:
            self._readers.submit(self._files.delete, effects.files)

    # Payload files

    async def _keep_file(self, payload: bytes) -> Kept:
        return await asyncio.to_thread(self._files.write, payload)

    async def _discard(self, kept: Sequence[Kept], *, is_named: bool) -> None:
        names = [one.file for one in kept if one.file is not None]
        if not is_named:
            await asyncio.to_thread(self._files.delete, names)
        for name in names:
            self._files.written(name)

    async def _fetch_file(self, kept: Kept) -> bytes:
        return await asyncio.to_thread(self._files.read, kept)

    async def _sweep_files(self) -> int:
        names = await asyncio.to_thread(lambda: list(self._files.settled_names()))
        removed = 0
        for start in range(0, len(names), entry_steps.SWEPT_AT_ONCE):
            some = names[start : start + entry_steps.SWEPT_AT_ONCE]
            orphans = await self._read(partial(entry_steps.unnamed, files=some))
            await asyncio.to_thread(self._files.delete, orphans)
            removed += len(orphans)
        return removed

    async def _stored_bytes(self) -> int:
        return _size(self._path) + _size(self._path.with_name(f"{self._path.name}-wal"))

    def _written(self) -> tuple[int, int]:
        return self._writer.commits, self._writer.writes

    # Opening

    def _prepare(self) -> None:
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            raise LedgerVersionError(
                f"this Python has SQLite {sqlite3.sqlite_version}, which is too old",
                remedy="use a Python with SQLite 3.37 or newer",
            )
        if self._is_beside:
            return
        try:
            _make_private(self._path.parent)
            self._take_lock()
            self._files.prepare()
        except OSError as exc:
            raise self._disk_error(exc) from exc

    def _disk_error(self, exc: OSError) -> LedgerUnavailableError:
        fault = fault_of(exc)
        return LedgerUnavailableError(
            f"{self._path.parent} cannot be used: {exc}", reason=fault.reason, remedy=fault.remedy
        )

    def _take_lock(self) -> None:
        lock = self._lock_path.open("a+", encoding="utf-8")
        deadline = time.monotonic() + LOCK_WAIT_S
        while not _try_lock(lock):
            if time.monotonic() < deadline:
                time.sleep(LOCK_WAIT_S / 20)
                continue
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            lock.close()
            raise LedgerUnavailableError(
                f"{self._path} is in use by process {owner}",
                remedy="stop that process, or use another data folder",
            )
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock
        _held_locks.add(lock)

    def _is_up_to_date(self) -> bool:
        """Whether there is a ledger that needs no change before it is used."""
        if not self._path.exists():
            return False
        try:
            connection = sqlite3.connect(
                f"{self._path.resolve().as_uri()}?mode=ro", uri=True, timeout=BUSY_S
            )
            with contextlib.closing(connection):
                applied = list(connection.execute(statements.READ))
        except sqlite3.Error:
            return False  # whatever it is, opening it in full will tell
        return not statements.missing(known_migrations("sqlite"), applied, str(self._path))

    def _connect_writer(self) -> sqlite3.Connection:
        try:
            self._check_position()
            connection = sqlite3.connect(
                self._path, isolation_level=None, timeout=BUSY_S, cached_statements=256
            )
            with contextlib.ExitStack() as undo:
                undo.callback(connection.close)
                self._bring_up(connection)
                undo.pop_all()
        except OSError as exc:
            raise self._disk_error(exc) from exc
        except sqlite3.OperationalError as exc:
            raise unavailable(exc, self._path.parent) from exc
        except sqlite3.DatabaseError as exc:
            if exc.sqlite_errorname.startswith("SQLITE_CORRUPT"):
                raise LedgerDamagedError(
                    f"{self._path} is damaged: {exc}",
                    remedy="restore it from a backup, or start with a new data folder",
                ) from exc
            raise LedgerVersionError(
                f"{self._path} is not a ledger: {exc}",
                remedy="restore it from a backup, or start with a new data folder",
            ) from exc
        return connection

    def _check_position(self) -> None:
        if self._accepts_loss:
            lost = self._position.accept_loss()
            if lost is not None:
                _log.warning("the loss is accepted: %s", lost)
        self._position.check()
        if not self._is_beside:
            self._position.check_structure()

    def _bring_up(self, connection: sqlite3.Connection) -> None:
        """Check the file before anything of it is changed, then bring its schema up to date."""
        known = known_migrations("sqlite")
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
        [(application,)] = connection.execute("PRAGMA application_id")
        if application != APPLICATION_ID and (application or tables):
            raise LedgerVersionError(
                f"{self._path} is a database of another program",
                remedy="start with a new data folder",
            )
        applied = list(connection.execute(statements.READ)) if "migrations" in tables else []
        if tables and not applied:
            raise LedgerVersionError(
                f"{self._path} is half-migrated: it has tables and no list of changes",
                remedy="restore it from a backup, or start with a new data folder",
            )
        needed = statements.missing(known, applied, str(self._path))
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")  # of a new file
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {LARGEST_LOG_PAGES}")
        for migration in needed:
            with transaction(connection):
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(statements.CREATE_TABLE)
                for statement in _statements(migration.sql):
                    connection.execute(statement)
                connection.execute(
                    "INSERT INTO migrations VALUES (?, ?, ?)",
                    (migration.number, migration.name, migration.digest),
                )
        self._position.begin(connection)


_SQL = sqlite_queries()


def _ask(connection: sqlite3.Connection, name: str, values: Values) -> Sequence[Row]:
    return connection.execute(_SQL[name], values).fetchall()


def _make_private(folder: Path) -> None:
    """Create a folder and its missing parents, readable by the owner only."""
    if not folder.is_dir():
        _make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _statements(sql: str) -> list[str]:
    """The statements of a file: `executescript` would commit the transaction first."""
    found, current = [], ""
    for queue_id in sql.splitlines(keepends=True):
        current += queue_id
        if sqlite3.complete_statement(current):
            found.append(current)
            current = ""
    assert not current.strip(), "a migration ends with a semicolon"
    return found


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_held_locks: weakref.WeakSet[IO[str]] = weakref.WeakSet()


def _leave_locks_to_parent() -> None:
    """In a forked child: a lock that it inherited would outlive the process that has the ledger."""
    for lock in list(_held_locks):
        lock.close()
    _held_locks.clear()


os.register_at_fork(after_in_child=_leave_locks_to_parent)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
