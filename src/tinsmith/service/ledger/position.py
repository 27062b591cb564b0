"""Notices that a SQLite ledger has lost commits: its log was deleted or damaged, or it is older.

SQLite reads its log up to the first damaged frame and takes that for the end; a log that is missing
is an empty one. It reports neither, and the commits after that point are lost silently. So every
commit counts itself in a table, and the number of the last durable one is also in a small file:

    <folder>/ledger.position    the number and the time of a durable commit

A database that ends before this number has lost something, and is refused until its operator
accepts that. The file is written after the commit, not synced, and a moment later under load: it
may lag behind the database, and never leads it. So it costs a commit no sync, a crash between the
two is no loss, and neither is a power cut that undoes the last writes of the file.

A file that is missing says nothing: the ledger is from before there was one, or was restored from
a copy of the database alone. The same goes for one that was cut short or cannot be read.

Knows nothing of the ledger's contents, or of who may write to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tinsmith.errors import LedgerDamagedError

_log = logging.getLogger(__name__)

FILE = "ledger.position"
WRITE_EVERY_S = 0.2
"""Under steady load the file is written so often."""
BUSY_S = 5.0
"""How long another program may hold the file before a look gives up."""
CHECKED_BYTES = 256 * 1024 * 1024
"""A larger database is not looked through at the start. This one takes 0.4 s."""
FILE_BYTES = 160
"""Always as long, and in one sector of a disk: it is overwritten in place, whole or not at all."""

_CREATE = (
    "CREATE TABLE IF NOT EXISTS durable_position (id INTEGER PRIMARY KEY CHECK (id = 1), "
    "commits INTEGER NOT NULL, committed_at REAL NOT NULL) STRICT"
)
_BEGIN = "INSERT OR IGNORE INTO durable_position VALUES (1, 0, 0.0)"
_ADVANCE = "UPDATE durable_position SET commits = commits + 1, committed_at = ? WHERE id = 1"
_READ = "SELECT commits, committed_at FROM durable_position"


class Position(msgspec.Struct, frozen=True):
    """How far a ledger is."""

    commits: int = 0
    committed_at: float = 0.0
    """The time of day; 0 if it is not known."""

    def __str__(self) -> str:
        if not self.committed_at:
            return f"commit {self.commits}"
        at = datetime.fromtimestamp(self.committed_at, UTC).isoformat(sep=" ", timespec="seconds")
        return f"commit {self.commits} ({at.removesuffix('+00:00')} UTC)"


class PositionFile:
    """The position of one database, in the database and beside it.

    `check` and `accept_loss` come before the database is opened for writing; everything else is
    for the thread that writes to it.
    """

    def __init__(self, database: Path) -> None:
        self._database = database
        self._path = database.with_name(FILE)
        self._descriptor: int | None = None
        self._commits = 0
        """How many there are. Another process may make some that are not counted here for a while:
        then the file lags."""
        self._durable = Position()
        self._written_at = 0.0
        self._is_behind = False
        """Whether the file is yet to be written."""

    # Before the database is opened

    def check(self) -> None:
        """Look whether the database has every commit that was known to be durable.

        It changes nothing: a connection that may write would move what is left of a damaged log
        into the database when it is closed.

        Raises:
            LedgerDamagedError: Commits are missing.
            sqlite3.OperationalError: It cannot be read now.
        """
        known = self._read_file()  # first: another process may be writing
        if known is None:
            return
        found = self._position_in(self._database)
        if found.commits >= known.commits:
            return
        raise LedgerDamagedError(
            f"{self._loss(found, known)}. {self._likely_cause()}",
            remedy=f"restore {self._database.parent} from a backup; or copy it, and continue "
            "without the lost commits by starting once with `tinsmith serve --accept-loss` "
            "(TINSMITH_SERVE_ACCEPT_LOSS=true in the environment of a program that runs the "
            "service itself)",
        )

    def accept_loss(self) -> str | None:
        """Continue with the commits that remain; returns what was lost, or None if nothing was.

        If the log is damaged and the database without it is newer, the log is renamed: SQLite would
        prefer its old pages to the new ones.

        Raises:
            LedgerDamagedError: What is there does not fit together.
            sqlite3.OperationalError: It cannot be read now.
        """
        known = self._read_file()
        if known is None:
            return None
        found = self._position_in(self._database)
        if found.commits >= known.commits:
            return None
        alone = self._position_in(self._database, without_log=True)
        if alone.commits > found.commits:
            self._put_log_aside()
            found = alone
        self._check_pages("integrity_check")
        self._path.unlink(missing_ok=True)
        if found.commits >= known.commits:
            return f"the log of {self._database} was damaged; it had nothing that was still needed"
        return self._loss(found, known)

    def _loss(self, found: Position, known: Position) -> str:
        lost = known.commits - found.commits
        return (
            f"{self._database} ends at {found if found.commits else 'its beginning'}, but "
            f"{known} was durable: at least {lost} commit{'s' if lost > 1 else ''} of commands, "
            "results, keys or checkpoints are lost"
        )

    def _likely_cause(self) -> str:
        if not self._database.exists():
            return f"{self._database.name} is missing"
        log = self._log_path()
        if (
            not log.exists() or not log.stat().st_size
        ):  # looking into the database makes an empty one
            return f"{log.name} is missing, or {self._database.name} is an older copy"
        return f"{log.name} is damaged, or {self._database.name} is an older copy"

    def _log_path(self) -> Path:
        return self._database.with_name(f"{self._database.name}-wal")

    def _position_in(self, database: Path, *, without_log: bool = False) -> Position:
        if not database.exists():
            return Position()
        try:
            with _read_only(database, without_log=without_log) as connection:
                rows = connection.execute(_READ).fetchall()
        except sqlite3.OperationalError as exc:
            if exc.sqlite_errorcode != sqlite3.SQLITE_ERROR:
                raise  # locked, or not to be read: that says nothing of what is in it
            return Position()  # no such table
        except sqlite3.DatabaseError:  # damaged, or no database; opening it will tell
            return Position()
        return Position(*rows[0]) if rows else Position()

    def _put_log_aside(self) -> None:
        log = self._log_path()
        aside = log.with_name(f"{log.name}.damaged")
        log.rename(aside)
        self._database.with_name(f"{self._database.name}-shm").unlink(missing_ok=True)
        _log.warning("the damaged log was put aside as %s", aside)

    def check_structure(self) -> None:
        """Look whether the pages of the database fit together, if it is small enough.

        SQLite's pages have no checksum, so the content of a row may still be wrong.

        Raises:
            LedgerDamagedError: They do not.
        """
        if self._database.exists() and self._database.stat().st_size <= CHECKED_BYTES:
            self._check_pages("quick_check")

    def _check_pages(self, pragma: str) -> None:
        if not self._database.exists():
            return
        try:
            with _read_only(self._database) as connection:
                [(told,), *_] = connection.execute(f"PRAGMA {pragma}(1)")
        except sqlite3.DatabaseError as exc:
            if not exc.sqlite_errorname.startswith("SQLITE_CORRUPT"):
                return  # locked, or no database at all: opening it will tell
            told = str(exc)
        if told != "ok":
            raise LedgerDamagedError(
                f"{self._database} is damaged: {told}",
                remedy="restore it from a backup, or start with a new data folder",
            )

    # The file

    def _read_file(self) -> Position | None:
        """What the file says; None if there is none that can be read."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as exc:
            _log.warning("%s cannot be read: %s; lost commits cannot be detected", FILE, exc)
            return None
        text, _, digest = content.rstrip().rpartition(b" ")
        try:
            if int(digest, 16) == zlib.crc32(text):
                return msgspec.json.decode(text, type=Position)
        except (ValueError, msgspec.MsgspecError):
            pass
        _log.warning("%s is damaged; lost commits cannot be detected; rewriting it", self._path)
        return None

    def _write(self) -> None:
        assert self._descriptor is not None
        text = msgspec.json.encode(self._durable)
        content = b"%s %08x" % (text, zlib.crc32(text))
        os.pwrite(self._descriptor, content.ljust(FILE_BYTES - 1) + b"\n", 0)
        self._written_at = time.monotonic()
        self._is_behind = False

    # On the thread that writes

    def begin(self, connection: sqlite3.Connection) -> None:
        """Make the table and the file where they are missing. To be called once, before commits."""
        is_new = self._read_file() is None
        with transaction(connection):
            connection.execute(_CREATE)
            connection.execute(_BEGIN)
            if is_new:
                # What is there may not be durable yet: a commit of our own makes it that.
                self.advance(connection)
        self._commits = self._durable_commits(connection)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if is_new:
            self._durable = Position(self._commits, time.time())
            self._write()
            os.ftruncate(self._descriptor, FILE_BYTES)
            os.fsync(self._descriptor)  # its length; from now on it is overwritten in place

    def advance(self, connection: sqlite3.Connection) -> None:
        """Count the commit of the transaction that is under way."""
        connection.execute(_ADVANCE, (time.time(),))

    def note_committed(self, connection: sqlite3.Connection, *, is_durable: bool) -> None:
        """The transaction that was counted last is committed; if synced, all before it are too."""
        self._commits += 1
        if not is_durable:
            return
        is_due = time.monotonic() - self._written_at >= WRITE_EVERY_S
        if is_due:
            with contextlib.suppress(sqlite3.Error):
                self._commits = self._durable_commits(connection)
        self._durable = Position(self._commits, time.time())
        self._is_behind = True
        if is_due:
            self.catch_up()

    @staticmethod
    def _durable_commits(connection: sqlite3.Connection) -> int:
        """How many there are, right after one of ours that was synced: others' always are."""
        [(commits, _)] = connection.execute(_READ)
        return int(commits)

    @property
    def is_behind(self) -> bool:
        """Whether `catch_up` has something to do."""
        return self._is_behind

    def catch_up(self) -> None:
        """Write the file. That it cannot be written costs no commit."""
        if self._is_behind and self._descriptor is not None:
            try:
                self._write()
            except OSError as exc:
                self._is_behind = False  # it lags, which it may
                _log.debug("%s cannot be written: %s", self._path, exc)

    def close(self) -> None:
        """Write the file for the last time."""
        self.catch_up()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """A write transaction: committed at the end of the block, rolled back if it fails."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@contextlib.contextmanager
def _read_only(database: Path, *, without_log: bool = False) -> Iterator[sqlite3.Connection]:
    """A connection that changes nothing, neither while it is open nor when it is closed."""
    mode = "immutable=1" if without_log else "mode=ro"
    connection = sqlite3.connect(f"{database.resolve().as_uri()}?{mode}", uri=True, timeout=BUSY_S)
    with contextlib.closing(connection):
        yield connection
