"""The ledger in PostgreSQL, which several processes may use at once; one of them runs commands.

Writers take turns: every transaction begins with one advisory lock, so changes happen one after
another whichever server makes them, and the steps mean what they mean in SQLite. Within a server,
whatever was asked for while the last transaction ran goes into the next one. News cross processes
by NOTIFY, sent with the commit. All payloads are in the database: servers need no folder in common.

Whose scheduler runs commands, the row in the table `lease` says. It is taken over in a transaction
that takes its turn like any other, and a scheduler's writes look at its epoch in theirs: whatever
comes after the takeover is refused, and whatever came before is seen by the new one. Renewals only
touch the row, on a connection of their own, so that they do not wait behind writes. A process that
is paused in the midst of a transaction would keep all others from their turn; the database ends
such a transaction after `STALLED_S`.

If the database goes away, calls wait for it to come back, for as long as `patience_s`. A change
whose commit was not confirmed is then made again, which most operations allow: what was claimed by
such a commit is looked for by the next claim, and uses may be counted twice.

The only module that imports asyncpg.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Self, TypeVar

import asyncpg

from tinsmith.errors import LedgerUnavailableError, LedgerVersionError, TinkerError, without_frames
from tinsmith.ledger import command_steps, keeping_steps, migrations
from tinsmith.ledger.clock import SteadyClock
from tinsmith.ledger.lease import LEASE_S, Lease, lease_held, lease_lost
from tinsmith.ledger.payloads import Kept
from tinsmith.ledger.records import LARGEST_NUMBER, Command, Retention
from tinsmith.ledger.sql_ledger import SqlLedger
from tinsmith.ledger.statements import migrations as known_migrations
from tinsmith.ledger.statements import queries
from tinsmith.ledger.steps import Effects, Operation, Steps

T = TypeVar("T")

_log = logging.getLogger(__name__)

LARGEST_GROUP = 256
READERS = 4
RETRY_S = 0.2
"""Between two tries to reach the database."""
OPENING_TRIES = 5
"""How often the database is tried to be reached at the start, where nobody waits with patience."""
PATIENCE_S = 30.0
ANSWER_S = 10.0
"""How long the database may take to answer before its connection is given up for a new one."""
CHANNEL = "tinsmith_ledger"
TURN = 0x74696E73
"""The advisory lock of those who write."""
WORK = 0x74696E74
"""The advisory lock that a server of a release before the lease holds while it runs commands."""
STALLED_S = 5.0
"""How long a transaction may wait for its process before the database ends it."""
LONGEST_NOTICE = 7000
"""In bytes; PostgreSQL allows 8,000."""
EVERYBODY = "*"
"""The notice that wakes all, where a topic cannot be sent."""

_TAKE_TURN = f"SELECT pg_advisory_xact_lock({TURN})"
_IS_WORK_FREE = f"SELECT pg_try_advisory_xact_lock({WORK})"
_LEASE = "SELECT owner, expires_at > clock_timestamp() FROM lease FOR UPDATE"
_TAKE_LEASE = (
    "UPDATE lease SET epoch = epoch + 1, owner = $1, "
    "expires_at = clock_timestamp() + make_interval(secs => $2) RETURNING epoch"
)
_RENEW_LEASE = (
    "UPDATE lease SET expires_at = clock_timestamp() + make_interval(secs => $2) "
    "WHERE epoch = $1 RETURNING epoch"
)
_RELEASE_LEASE = "UPDATE lease SET expires_at = '-infinity' WHERE epoch = $1"
_EPOCH = "SELECT epoch FROM lease"
_NOTIFY = f"SELECT pg_notify('{CHANNEL}', $1)"
_SIZE = "SELECT pg_database_size(current_database())"
_LOST = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # what a connection raises that was cut in the midst of a query
)
_SQL = queries()


class _Write:
    __slots__ = ("effects", "error", "future", "operation", "value")

    def __init__(self, operation: Operation[Any], future: asyncio.Future[Any]) -> None:
        self.operation = operation
        self.future = future
        self.value: Any = None
        self.error: Exception | None = None
        self.effects = Effects()


class PostgresLedger(SqlLedger):
    """A ledger in a database that others may share."""

    def __init__(
        self, dsn: str, retention: Retention, clock: SteadyClock, patience_s: float
    ) -> None:
        super().__init__(retention, clock)
        self._dsn = dsn
        self._patience_s = patience_s
        self._inline_bytes = LARGEST_NUMBER  # no files
        self._queue: deque[_Write] = deque()
        self._queued = asyncio.Event()
        self._is_closed = False
        self._connection: Any = None
        self._listener: Any = None
        self._pool: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._lease_connection: Any = None
        self._lease_turn = asyncio.Lock()
        self._commits = 0
        self._writes = 0
        self._unconfirmed = 0
        """How many commits may or may not have been made."""
        self._looked_after = 0
        """So many of them when it was last looked for what they claimed."""
        self._handed_out = 0
        """The ordinal of the last claimed command that its claimer was given."""

    @classmethod
    async def open(
        cls,
        dsn: str,
        *,
        retention: Retention | None = None,
        clock: SteadyClock | None = None,
        patience_s: float = PATIENCE_S,
    ) -> Self:
        """Open the ledger in a database, or make it there.

        Raises:
            LedgerUnavailableError: The database cannot be reached.
            LedgerVersionError: What is there is not a ledger that this version can use.
        """
        tries = OPENING_TRIES
        while True:
            ledger = cls(dsn, retention or Retention(), clock or SteadyClock(), patience_s)
            try:
                await ledger._start()
            except (*_LOST, asyncpg.PostgresError) as exc:
                await ledger.close()
                tries -= 1
                if not tries or not isinstance(exc, _LOST):
                    raise _unavailable(exc) from exc
                await asyncio.sleep(RETRY_S)
            except BaseException:
                await ledger.close()
                raise
            else:
                return ledger

    async def _start(self) -> None:
        self._connection = await self._connect()
        await self._migrate()
        self._pool = await asyncpg.create_pool(
            self._dsn, min_size=1, max_size=READERS, command_timeout=ANSWER_S
        )
        await self._listen()
        self._clock.start_after(await self._read(keeping_steps.latest_time))
        self._tasks = [
            asyncio.create_task(self._write_groups()),
            asyncio.create_task(self._keep_listening()),
        ]

    async def close(self) -> None:
        """`Ledger.close`."""
        if self._is_closed:
            return
        if self._tasks:
            await self._appending.wait_done()
        self._is_closed = True
        self._queued.set()
        if self._tasks:
            await self._tasks[0]  # writes what is queued
            self._tasks[1].cancel()
            await asyncio.wait(self._tasks)
        self._wakeups.tell_all()
        for connection in (self._connection, self._listener, self._lease_connection):
            if connection is not None:
                with contextlib.suppress(*_LOST, asyncpg.PostgresError):
                    await connection.close(timeout=5)
        if self._pool is not None:
            try:
                await asyncio.wait_for(self._pool.close(), ANSWER_S)
            except (*_LOST, asyncpg.PostgresError):
                self._pool.terminate()

    # Writing

    async def _write(self, operation: Operation[T], *, is_soft: bool = False) -> T:
        del is_soft  # the round trip that would say so costs what it saves
        if self._is_closed:
            raise LedgerUnavailableError("the ledger is closed")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.append(_Write(operation, future))
        self._queued.set()
        return await future

    async def _write_groups(self) -> None:
        while self._queue or not self._is_closed:
            if not self._queue:
                self._queued.clear()
                await self._queued.wait()
                continue
            group = [self._queue.popleft() for _ in range(min(len(self._queue), LARGEST_GROUP))]
            await self._commit(group)
            for write in group:
                self._tell(write.effects)
                if write.future.done():
                    continue  # its caller was cancelled; the write stands
                if write.error is None:
                    write.future.set_result(write.value)
                else:
                    write.future.set_exception(write.error)

    async def _commit(self, group: list[_Write]) -> None:
        try:
            await self._patiently(lambda: self._transaction(group))
        except Exception as exc:  # noqa: BLE001 - it reaches the caller whose write it was
            if len(group) == 1 or isinstance(exc, LedgerUnavailableError):
                error = _unavailable(exc) if isinstance(exc, asyncpg.PostgresError) else exc
                for write in group:
                    write.value, write.error = None, without_frames(error)
                    write.effects = Effects()
                return
            for write in group:
                await self._commit([write])

    async def _transaction(self, group: list[_Write]) -> None:
        if self._connection is None:
            self._connection = await self._connect()
        try:
            await self._run_group(self._connection, group)
        except _LOST:
            self._connection.terminate()
            self._connection = None
            self._unconfirmed += 1
            raise
        self._commits += 1
        self._writes += sum(write.effects.writes for write in group)

    async def _run_group(self, connection: Any, group: list[_Write]) -> None:
        async with connection.transaction():
            await connection.execute(_TAKE_TURN)
            for write in group:
                write.effects, write.error = Effects(), None
                try:
                    write.value = await _run(write.operation(write.effects), connection)
                except TinkerError as exc:  # it refused, and has changed nothing
                    write.effects, write.error = Effects(), without_frames(exc)
            for notice in _notices(topic for write in group for topic in write.effects.topics):
                await connection.execute(_NOTIFY, notice)

    # Claims whose commit was not confirmed

    async def claim(self, claimer: str, *, limit: int, epoch: int | None = None) -> list[Command]:
        """`Ledger.claim`, with what its claimer holds already and was never given.

        Commands are claimed in the order of their ordinals, so that is all above the last one.
        """
        claimed = await super().claim(claimer, limit=limit, epoch=epoch)
        unconfirmed = self._unconfirmed
        if unconfirmed > self._looked_after:
            after = self._handed_out
            claimed = await self._read(
                lambda effects: command_steps.claimed_after(effects, claimer, after, limit)
            )
            if len(claimed) < limit:
                self._looked_after = unconfirmed
        if claimed:
            self._handed_out = claimed[-1].ordinal
        return claimed

    async def wait_for_commands(self, claimer: str, *, timeout_s: float) -> bool:
        """`Ledger.wait_for_commands`."""
        if self._unconfirmed > self._looked_after:
            return True
        return await super().wait_for_commands(claimer, timeout_s=timeout_s)

    async def release_claims(self, claimer: str, *, epoch: int | None = None) -> int:
        """`Ledger.release_claims`."""
        released = await super().release_claims(claimer, epoch=epoch)
        self._handed_out = 0
        return released

    # Reading

    async def _read(self, operation: Operation[T]) -> T:
        if self._is_closed:
            raise LedgerUnavailableError("the ledger is closed")

        async def once() -> T:
            async with self._pool.acquire(timeout=ANSWER_S) as connection:
                try:
                    return await _run(operation(Effects()), connection)
                except _LOST:
                    connection.terminate()
                    raise

        try:
            return await self._patiently(once)
        except asyncpg.PostgresError as exc:
            raise _unavailable(exc) from exc

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do work, again and again while the database is away, for as long as allowed."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._patience_s
        while True:
            try:
                return await work()
            except asyncpg.DataError:
                raise  # an InterfaceError by descent; the values are wrong, not the connection
            except _LOST as exc:
                if self._is_closed or clock() > deadline:
                    raise _unavailable(exc) from exc
                _log.warning("the ledger's database is away: %s", exc)
                await asyncio.sleep(RETRY_S)

    async def _connect(self) -> Any:
        settings = {
            "application_name": "tinsmith",
            "synchronous_commit": "on",
            # A transaction must see what was committed while it waited for its turn: the lease.
            "default_transaction_isolation": "read committed",
            "idle_in_transaction_session_timeout": str(int(STALLED_S * 1000)),
        }
        return await asyncpg.connect(
            self._dsn, server_settings=settings, command_timeout=ANSWER_S, timeout=ANSWER_S
        )

    # The lease

    async def acquire_lease(
        self, owner: str, *, lease_s: float = LEASE_S, wait_s: float = 0.0
    ) -> Lease:
        """`Ledger.acquire_lease`."""
        give_up_at = time.monotonic() + wait_s
        while True:
            asked_at = time.monotonic()
            try:
                taken = await self._patiently(lambda: self._try_lease(owner, lease_s))
            except asyncpg.PostgresError as exc:
                raise _unavailable(exc) from exc
            if isinstance(taken, int):
                return Lease(owner, taken, lease_s, asked_at + lease_s)
            if time.monotonic() >= give_up_at:
                raise lease_held(taken)
            await asyncio.sleep(RETRY_S)

    async def _try_lease(self, owner: str, lease_s: float) -> int | str:
        """The new epoch, or who holds the lease."""

        async def take(connection: Any) -> int | str:
            async with connection.transaction():
                # In its turn: no write of the last holder is under way.
                await connection.execute(_TAKE_TURN)
                if not await connection.fetchval(_IS_WORK_FREE):
                    return "it runs an older release"
                holder, is_held = await connection.fetchrow(_LEASE)
                if is_held:
                    return str(holder)
                return int(await connection.fetchval(_TAKE_LEASE, owner, lease_s))

        return await self._with_lease_connection(take)

    async def renew_lease(self, lease: Lease) -> None:
        """`Ledger.renew_lease`."""

        async def renew(connection: Any) -> None:
            asked_at = time.monotonic()
            if await connection.fetchval(_RENEW_LEASE, lease.epoch, lease.lease_s) is None:
                raise lease_lost(lease.epoch, await connection.fetchval(_EPOCH))
            lease.ends_at = asked_at + lease.lease_s

        try:
            await self._with_lease_connection(renew)
        except (*_LOST, asyncpg.PostgresError) as exc:
            raise _unavailable(exc) from exc

    async def release_lease(self, lease: Lease) -> None:
        """`Ledger.release_lease`."""
        try:
            await self._with_lease_connection(
                lambda connection: connection.execute(_RELEASE_LEASE, lease.epoch)
            )
        except (*_LOST, asyncpg.PostgresError) as exc:
            raise _unavailable(exc) from exc

    async def _with_lease_connection(self, use: Callable[[Any], Awaitable[T]]) -> T:
        async with self._lease_turn:
            if self._is_closed:
                raise LedgerUnavailableError("the ledger is closed")
            if self._lease_connection is None:
                self._lease_connection = await self._connect()
            try:
                return await use(self._lease_connection)
            except BaseException:
                # Also when whoever waits gives up: its answer may still come.
                self._lease_connection.terminate()
                self._lease_connection = None
                raise

    # News from other processes

    async def _listen(self) -> None:
        self._listener = await self._connect()
        await self._listener.add_listener(CHANNEL, self._hear)

    def _hear(self, _connection: object, _process: int, _channel: str, notice: object) -> None:
        if notice == EVERYBODY:
            self._wakeups.tell_all()
        else:
            self._wakeups.tell(str(notice).split("\n"))

    async def _keep_listening(self) -> None:
        """Listen anew whenever the connection is lost; what came meanwhile is looked for."""
        while True:
            lost = asyncio.Event()
            self._listener.add_termination_listener(lambda _, lost=lost: lost.set())
            if not self._listener.is_closed():
                await lost.wait()
            while True:
                try:
                    await self._listen()
                    break
                except (*_LOST, asyncpg.PostgresError):  # after its restart it may be full at first
                    await asyncio.sleep(RETRY_S)
            self._wakeups.tell_all()

    # Payloads are in the database

    async def _keep_file(self, payload: bytes) -> Kept:
        raise NotImplementedError

    async def _discard(self, kept: Sequence[Kept], *, is_named: bool) -> None:
        raise NotImplementedError

    async def _fetch_file(self, kept: Kept) -> bytes:
        raise NotImplementedError

    async def _sweep_files(self) -> int:
        return 0

    async def _stored_bytes(self) -> int:
        if self._is_closed:
            raise LedgerUnavailableError("the ledger is closed")
        return int(await self._patiently(lambda: self._pool.fetchval(_SIZE)))

    def _written(self) -> tuple[int, int]:
        return self._commits, self._writes

    async def _migrate(self) -> None:
        """Bring the schema up to date; of several servers that start together, one does."""
        where = "the database"
        async with self._connection.transaction():
            await self._connection.execute(_TAKE_TURN)
            has_tables, has_list = await self._connection.fetchrow(
                "SELECT to_regclass('commands') IS NOT NULL, to_regclass('migrations') IS NOT NULL"
            )
            rows = await self._connection.fetch(migrations.READ) if has_list else []
            if has_tables and not rows:
                raise LedgerVersionError(
                    f"{where} is half-migrated: it has a table of commands and no list of changes",
                    remedy="use an empty database, or restore this one from a backup",
                )
            applied = [(number, name, digest) for number, name, digest in rows]
            for migration in migrations.missing(known_migrations("postgres"), applied, where):
                await self._connection.execute(migrations.CREATE_TABLE)
                await self._connection.execute(migration.sql)
                await self._connection.execute(
                    "INSERT INTO migrations VALUES ($1, $2, $3)",
                    migration.number,
                    migration.name,
                    migration.digest,
                )


async def _run(steps: Steps[T], connection: Any) -> T:
    """Run an operation to its end, as `run_steps` does, on a connection."""
    try:
        name, values = next(steps)
        while True:
            if isinstance(values, list):
                await connection.executemany(_SQL[name], values)
                name, values = steps.send(())
            else:
                name, values = steps.send(await connection.fetch(_SQL[name], *values))
    except StopIteration as end:
        result: T = end.value
        return result


def _notices(topics: Iterable[str]) -> list[str]:
    """Topics as notices, as many in each as it holds."""
    notices: list[str] = []
    current, size = list[str](), 0
    for topic in dict.fromkeys(topics):
        length = len(topic.encode()) + 1
        if "\n" in topic or length > LONGEST_NOTICE:
            return [EVERYBODY]
        if size + length > LONGEST_NOTICE:
            notices.append("\n".join(current))
            current, size = [], 0
        current.append(topic)
        size += length
    return [*notices, "\n".join(current)] if current else notices


def _unavailable(exc: BaseException) -> LedgerUnavailableError:
    error = LedgerUnavailableError(
        f"the ledger's database could not be used: {type(exc).__name__}: {exc}",
        remedy="see that PostgreSQL runs and can be reached, and try again",
    )
    error.__cause__ = exc
    return error
