"""One thread that writes to SQLite, and many writes that share one sync of the disk.

Writes that are requested while a commit runs share the next one. No write waits for others to
gather, so a single caller is as fast as the disk, and many callers cost little more than one. The
figures are in docs/benchmarks.md.

Each write is an operation (`steps.py`). One that is refused does not affect the others. If a whole
transaction fails, its writes are retried one by one, so that the error reaches the one that caused
it.

A write may also wait for a topic that other writes publish, and then joins their transaction. A
scheduler that waits for commands claims them in this way.

A *soft* write, such as a claim, may be lost in a power failure and does not wait for the disk. A
group of soft writes is committed without a sync; it becomes durable with the next sync, and
survives the end of the process in any case.

Knows nothing of what is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from tinsmith.errors import LedgerUnavailableError, TinkerError, without_frames
from tinsmith.observe.disk_faults import FULL, DiskFault, probe
from tinsmith.service.ledger.position import PositionFile, transaction
from tinsmith.service.ledger.statements import sqlite_queries
from tinsmith.service.ledger.steps import Effects, Operation, Row, Values, run_steps

T = TypeVar("T")

LARGEST_GROUP = 256
QUIET_S = 0.05
"""After so long without a write the log is moved into the database."""
MOVED_AT_WRITES = 500
"""A shorter log waits for more."""
KEPT_FREE_PAGES = 4096
"""So many pages of what was removed stay in the file for what comes, and a quarter of the file."""
GIVEN_BACK_PAGES = 1000
"""At a quiet moment: whoever writes then waits for some milliseconds."""

Connect = Callable[[], sqlite3.Connection]


class _Write:
    __slots__ = ("effects", "error", "future", "is_soft", "operation", "value")

    def __init__(
        self, operation: Operation[Any], future: asyncio.Future[Any], *, is_soft: bool
    ) -> None:
        self.operation = operation
        self.is_soft = is_soft
        self.future = future
        self.value: Any = None
        self.error: BaseException | None = None
        self.effects = Effects()


class _StandBy(_Write, Generic[T]):
    """A write that waits for news of a topic."""

    __slots__ = ("is_taken", "topic")
    future: asyncio.Future[T]

    def __init__(
        self, operation: Operation[T], future: asyncio.Future[T], topic: str, *, is_soft: bool
    ) -> None:
        super().__init__(operation, future, is_soft=is_soft)
        self.topic = topic
        self.is_taken = False


class GroupWriter:
    """The only writer of a database; it owns its connection and its thread."""

    def __init__(
        self,
        connect: Connect,
        on_effects: Callable[[Effects], None],
        position: PositionFile | None = None,
        folder: Path | None = None,
    ) -> None:
        self._connect = connect
        self._folder = folder
        self._position = position
        self._on_effects = on_effects
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._is_closed = False
        self._started = self._loop.create_future()
        self._ended = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="tinsmith-ledger", daemon=True)
        self._standing: list[_StandBy[Any]] = []
        self._moved_at = 0
        self._is_soft = False
        self.commits = 0
        self.writes = 0

    async def start(self) -> None:
        """Connect; raises what the connection raises."""
        self._thread.start()
        await self._started

    async def write(self, operation: Operation[T], *, is_soft: bool = False) -> T:
        """Run an operation in the next transaction; returns when that is on the disk.

        Args:
            operation: What is written.
            is_soft: Whether a power failure may undo it.
        """
        if self._is_closed:
            raise LedgerUnavailableError("the ledger is closed")
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put(_Write(operation, future, is_soft=is_soft))
        return await future

    @contextlib.contextmanager
    def standing_by(self, topic: str, operation: Operation[T]) -> Iterator[_StandBy[T]]:
        """Have an operation run at the end of the next transaction that has news of a topic.

        After the block it is not run any more, and `is_taken` says whether it was.
        """
        if self._is_closed:
            raise LedgerUnavailableError("the ledger is closed")
        future: asyncio.Future[T] = self._loop.create_future()
        standing = _StandBy(operation, future, topic, is_soft=True)
        self._standing.append(standing)
        try:
            yield standing
        finally:
            try:
                self._standing.remove(standing)
            except ValueError:  # the thread was quicker
                standing.is_taken = True

    async def close(self) -> None:
        """Write what is queued, and end. May be called again."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)
            for standing in self._standing:
                _set_error(standing.future, LedgerUnavailableError("the ledger is closed"))
                standing.future.exception()  # it counts as seen: who stands by may be gone
        if self._thread.ident is not None:
            await asyncio.shield(self._ended)
            self._thread.join()

    # On the thread

    def _run(self) -> None:
        try:
            self._connection = self._connect()
        except BaseException as exc:  # noqa: BLE001 - whoever opens the ledger raises it
            self._tell(_set_error, self._started, without_frames(exc))
            self._tell(_set_value, self._ended, None)
            return
        self._tell(_set_value, self._started, None)
        try:
            while (group := self._next_group()) is not None:
                self._commit(group)
                self._tell(self._deliver, group)
                # Whoever began to stand by during the commit has looked too early to see it.
                late: list[_Write] = [*self._take_standing(group)]
                if late:
                    self._commit(late)
                    self._tell(self._deliver, late)
        finally:
            if self._position is not None:
                self._position.close()
            self._connection.close()
            self._tell(_set_value, self._ended, None)

    def _next_group(self) -> list[_Write] | None:
        """What is queued, at least one; None at the end."""
        first = self._wait_first()
        if first is None:
            return None
        group = [first]
        while len(group) < LARGEST_GROUP:
            try:
                write = self._queue.get_nowait()
            except queue.Empty:
                break
            if write is None:
                self._queue.put(None)  # for the next round
                break
            group.append(write)
        return group

    def _wait_first(self) -> _Write | None:
        position = self._position
        while True:
            is_long = self.writes >= self._moved_at + MOVED_AT_WRITES
            is_behind = position is not None and position.is_behind
            if not is_long and not is_behind:
                return self._queue.get()
            try:
                return self._queue.get(timeout=QUIET_S)
            except queue.Empty:
                if position is not None:
                    position.catch_up()
                if is_long:
                    self._tidy()

    def _tidy(self) -> None:
        """Return free pages to the disk or, if there are few, move the log into the database.

        No caller waits for this. The log keeps its length and is overwritten from its start:
        syncing a file that does not grow is several times faster.
        """
        # With a reader in the way, or the disk full, both can wait: the log is durable.
        with contextlib.suppress(sqlite3.Error):
            if self._give_back():
                return
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        self._moved_at = self.writes

    def _give_back(self) -> bool:
        """Shrink the file by some of its free pages; False if it has few, or cannot be shrunk."""
        free, pages = self._pages()
        if free < max(KEPT_FREE_PAGES, pages // 4) + GIVEN_BACK_PAGES:
            return False
        if self._position is not None:
            self._position.advance(self._connection)  # every commit is counted
            self._position.note_committed(self._connection, is_durable=False)
        # Of a statement that gives no columns `execute` runs one step, which is one page.
        self._connection.executescript(f"PRAGMA incremental_vacuum({GIVEN_BACK_PAGES})")
        return self._pages()[1] < pages

    def _pages(self) -> tuple[int, int]:
        """How many pages of the file are free, and how many there are."""
        [(free,)] = self._connection.execute("PRAGMA freelist_count")
        [(pages,)] = self._connection.execute("PRAGMA page_count")
        return free, pages

    def _commit(self, group: list[_Write]) -> None:
        try:
            self._transaction(group)
        except Exception as exc:  # noqa: BLE001 - it reaches the caller whose write it was
            if len(group) == 1:
                group[0].value = None
                group[0].effects = Effects()
                error: Exception = exc
                if isinstance(exc, sqlite3.Error):
                    error = unavailable(exc, self._folder)
                group[0].error = without_frames(error)
                return
            for write in list(group):
                alone = [write]
                self._commit(alone)
                group += alone[1:]  # what stood by for it

    def _transaction(self, group: list[_Write]) -> None:
        is_soft = all(write.is_soft for write in group)
        self._set_sync(is_soft=is_soft)
        with transaction(self._connection):
            for write in self._joined_by_standing(group):
                write.effects, write.error = Effects(), None
                try:
                    write.value = run_steps(write.operation(write.effects), self._ask)
                except TinkerError as exc:  # it refused, and has changed nothing
                    write.effects, write.error = Effects(), without_frames(exc)
            if self._position is not None:
                self._position.advance(self._connection)
        if self._position is not None:
            self._position.note_committed(self._connection, is_durable=not is_soft)
        self.commits += 1
        self.writes += sum(write.effects.writes for write in group)

    def _joined_by_standing(self, group: list[_Write]) -> Iterator[_Write]:
        """The writes of a group, followed by those that waited for a topic of the group."""
        yield from list(group)
        for standing in self._take_standing(group):
            group.append(standing)
            yield standing

    def _take_standing(self, group: list[_Write]) -> list[_StandBy[Any]]:
        """Remove and return the writes that wait for a topic of the group."""
        topics = {topic for write in group for topic in write.effects.topics}
        taken = []
        for standing in [one for one in self._standing if one.topic in topics]:
            # Whoever removes it has it: this thread, or the caller that takes it back.
            with contextlib.suppress(ValueError):
                self._standing.remove(standing)
                taken.append(standing)
        return taken

    def _set_sync(self, *, is_soft: bool) -> None:
        """Choose whether commits are synced from now on; only possible between transactions."""
        if is_soft != self._is_soft:
            level = "NORMAL" if is_soft else "FULL"
            self._connection.execute(f"PRAGMA synchronous = {level}")
            self._is_soft = is_soft

    def _ask(self, name: str, values: Values) -> Sequence[Row]:
        if isinstance(values, list):
            self._connection.executemany(_SQL[name], values)
            return ()
        return self._connection.execute(_SQL[name], values).fetchall()

    def _tell(self, what: Callable[..., None], *values: Any) -> None:
        # The event loop may be gone, and with it whoever waited.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(what, *values)

    # On the event loop again

    def _deliver(self, group: list[_Write]) -> None:
        for write in group:
            self._on_effects(write.effects)
            if write.future.done():
                continue  # its caller was cancelled; the write stands
            if write.error is None:
                write.future.set_result(write.value)
            else:
                write.future.set_exception(write.error)


_SQL = sqlite_queries()


def unavailable(exc: sqlite3.Error, folder: Path | None) -> LedgerUnavailableError:
    """SQLite's failure as ours.

    Args:
        exc: What SQLite raised, which lacks the operating system's error.
        folder: The folder of the database, which is probed for the cause.
    """
    kind = _primary_code(exc)
    if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        fault = _LOCKED
    elif kind == sqlite3.SQLITE_FULL:
        fault = FULL
    elif kind in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        fault = _DAMAGED
    elif kind in _OF_THE_DISK:
        # A disk without room for much may have some for a small file.
        fault = (None if folder is None else probe(folder)) or _NO_ROOM_PERHAPS
    else:
        fault = _UNKNOWN
    error = LedgerUnavailableError(
        f"the ledger could not be written or read: {exc}", reason=fault.reason, remedy=fault.remedy
    )
    error.__cause__ = exc
    return error


def _primary_code(exc: sqlite3.Error) -> int:
    # One that Python raised itself, such as for a closed connection, has no code.
    return int(getattr(exc, "sqlite_errorcode", 0)) & 0xFF


_OF_THE_DISK = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
_LOCKED = DiskFault(
    "its database is locked", "another program holds the database file; end it and try again"
)
_DAMAGED = DiskFault(
    "its database is damaged",
    "stop the service and restore its data folder from a backup; see that the disk is sound",
)
_NO_ROOM_PERHAPS = DiskFault(
    "its disk refuses to write",
    "make room on the disk and try again; if there is room, look into the system's log (dmesg)",
)
_UNKNOWN = DiskFault("its database fails", "see the cause; nothing was written")


def _set_value(future: asyncio.Future[None], value: None) -> None:
    if not future.done():
        future.set_result(value)


def _set_error(future: asyncio.Future[None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
