"""The ledger in PostgreSQL, which several processes may use at once; one of them runs commands.

*Changes* take turns: every transaction begins with one advisory lock, so changes happen one after
another whichever server makes them, and the steps mean what they mean in SQLite. Within a server,
whatever was asked for while the last transaction ran goes into the next one. News cross processes
by NOTIFY, sent with the commit. All payloads are in the database: servers need no folder in common.

*New commands* take no lock, so that servers which accept them wait neither for each other nor for
the scheduler. Those that came while the last ones were written are inserted by one statement, with
ordinals from a sequence. What it leaves out, such as a command that is known already, is appended
as a change is. Two things can happen that cannot in SQLite. Commands of different servers may
become visible in another order than that of their ordinals. And a queue
may pass over a number while it is being appended; the command is then accepted, and the scheduler
refuses to run it.

*Claims* are one statement too. It locks the row of the lease against a takeover, and the commands
against a cancellation.

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
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import asyncpg
import msgspec

from tinsmith.errors import (
    LeaseLostError,
    LedgerUnavailableError,
    LedgerVersionError,
    TinkerError,
    ValidationError,
    without_frames,
)
from tinsmith.service.ledger import entry_steps, server_versions, statements, steps
from tinsmith.service.ledger.appending import AppendBatch, Appending, Waiting, Write
from tinsmith.service.ledger.board import Board
from tinsmith.service.ledger.payloads import SMALL_BYTES, Kept
from tinsmith.service.ledger.postgres_board import PostgresBoard
from tinsmith.service.ledger.records import (
    LARGEST_NUMBER,
    Appended,
    Command,
    CommandState,
    RequestId,
    Retention,
    request_id,
)
from tinsmith.service.ledger.scheduler_lease import (
    LEASE_S,
    LEASE_TOPIC,
    Lease,
    SteadyClock,
    lease_held,
    lease_lost,
)
from tinsmith.service.ledger.server_versions import RunningServer
from tinsmith.service.ledger.sql_ledger import SqlLedger
from tinsmith.service.ledger.statements import migrations as known_migrations
from tinsmith.service.ledger.statements import queries
from tinsmith.service.ledger.steps import Each, Effects, Operation, Row, Steps, Value
from tinsmith.service.ledger.wakeups import NEW_WORK

T = TypeVar("T")

_log = logging.getLogger(__name__)

LARGEST_GROUP = 256
CLASHES = 3
"""How often a transaction is tried again that appends what another server has just appended."""
READERS = 4
RETRY_S = 0.2
"""Between two tries to reach the database."""
SOON_S = 0.02
"""How long after a lease expires it is asked for."""
OPENING_TRIES = 5
"""How often the database is tried to be reached at the start, where nobody waits with patience."""
PATIENCE_S = 30.0
ANSWER_S = 10.0
"""How long the database may take to answer before its connection is given up for a new one."""
CHANNEL = "tinsmith_ledger"
WORK_CHANNEL = "tinsmith_ledger_work"
"""For news of commands that can be claimed: servers that claim none need not wake for it."""
BOARD_CHANNEL = "tinsmith_board"
TURN = 0x74696E73
"""The advisory lock of those who change anything."""
WORK = 0x74696E74
"""The advisory lock that a server of a release before the lease holds while it runs commands."""
STALLED_S = 2.0
"""How long a transaction may wait for its process before the database ends it."""
LONGEST_NOTICE = 7000
"""In bytes; PostgreSQL allows 8,000."""
EVERYBODY = "*"
"""The notice that wakes all, where a topic cannot be sent."""

_TAKE_TURN = f"SELECT pg_advisory_xact_lock({TURN})"
_BEGIN_IN_TURN = f"BEGIN; {_TAKE_TURN}"
_ALONE = "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))"
_IS_WORK_FREE = f"SELECT pg_try_advisory_xact_lock({WORK})"
_LEASE = (
    "SELECT owner, CASE WHEN expires_at > clock_timestamp() "
    "THEN extract(epoch FROM expires_at - clock_timestamp())::float8 ELSE 0.0 END FROM lease"
)
_TAKE_LEASE = (
    "UPDATE lease SET epoch = epoch + 1, owner = $1, "
    "expires_at = clock_timestamp() + make_interval(secs => $2) RETURNING epoch"
)
_RENEW_LEASE = (
    "UPDATE lease SET expires_at = clock_timestamp() + make_interval(secs => $2) "
    "WHERE epoch = $1 RETURNING epoch"
)
_RELEASE_LEASE = (
    "WITH released AS (UPDATE lease SET expires_at = '-infinity' WHERE epoch = $1 RETURNING epoch) "
    "SELECT pg_notify($2, $3) FROM released"
)
_EPOCH = "SELECT epoch FROM lease"
_NOTIFY_CHANNEL = "SELECT pg_notify($1, $2)"
_APPEND_NEW = """
WITH given AS (
    SELECT * FROM unnest(
        $1::text[], $2::int8[], $3::text[], $4::text[], $5::text[], $6::int8[], $7::int8[],
        $8::bytea[], $9::int8[], $10::float8[], $11::bytea[], $12::bytea[]
    ) WITH ORDINALITY AS given (
        line, seq_id, kind, tenant_id, session_id, clone, is_ordered,
        fingerprint, payload_bytes, created_at, digest, content, number
    )
), fresh AS (
    SELECT nextval('command_ordinals') AS ordinal, intime.* FROM (
        SELECT given.* FROM given LEFT JOIN lines ON lines.line = given.line
        WHERE given.is_ordered = 0 OR given.seq_id >= coalesce(lines.position, 0)
        ORDER BY given.number
    ) AS intime
), added AS (
    INSERT INTO commands (
        ordinal, line, seq_id, kind, tenant_id, session_id, clone, is_ordered, fingerprint,
        payload_bytes, created_at
    ) SELECT ordinal, line, seq_id, kind, tenant_id, session_id, clone, is_ordered, fingerprint,
        payload_bytes, created_at FROM fresh
    ON CONFLICT (line, seq_id) DO NOTHING
    RETURNING ordinal
), kept AS (
    INSERT INTO payloads (command, size_bytes, digest, content)
    SELECT ordinal, payload_bytes, digest, content FROM fresh JOIN added USING (ordinal)
), told AS (
    SELECT pg_notify($13, $14) WHERE EXISTS (SELECT 1 FROM added)
)
SELECT number, (SELECT count(*) FROM told) FROM fresh JOIN added USING (ordinal)
"""
_CLAIM = """
WITH held AS (
    SELECT epoch FROM lease WHERE $4::int8 IS NULL OR epoch = $4 FOR SHARE
), oldest AS (
    SELECT ordinal FROM commands WHERE state = 0 AND EXISTS (SELECT 1 FROM held)
    ORDER BY ordinal LIMIT $1 FOR UPDATE SKIP LOCKED
), taken AS (
    UPDATE commands SET state = 1, claimed_by = $2, claimed_at = $3, claimed_epoch = $4
    WHERE ordinal IN (SELECT ordinal FROM oldest)
    RETURNING ordinal
)
SELECT command_states.*, held.epoch
FROM lease LEFT JOIN held ON true LEFT JOIN (taken JOIN command_states USING (ordinal)) ON true
ORDER BY ordinal
"""
_RUNNING = "SELECT body FROM entries WHERE kind = $1 AND due_at >= $2"
_BACKEND = "SELECT pg_backend_pid()"
_PARAMETER = "unsupported startup parameter"
"""What pgbouncer says to a setting that it does not know."""
_SIZE = "SELECT pg_database_size(current_database())"
_LOST = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # what a connection raises that was cut in the midst of a query
)
_CLASHED = (asyncpg.UniqueViolationError, asyncpg.DeadlockDetectedError)
_SETTINGS = {
    "application_name": "tinsmith",
    "synchronous_commit": "on",
    "standard_conforming_strings": "on",  # notices are quoted
    # A transaction must see what was committed while it waited for its turn: the lease.
    "default_transaction_isolation": "read committed",
    "idle_in_transaction_session_timeout": "",
}
_QUERIES = queries()
_SQL = {
    **_QUERIES,
    "last_ordinal": "SELECT nextval('command_ordinals') - 1",
    "to_settle": f"{_QUERIES['to_settle']} FOR UPDATE OF c",  # against a claim
}


class _Write:
    __slots__ = ("effects", "error", "future", "operation", "value")

    def __init__(self, operation: Operation[Any], future: asyncio.Future[Any]) -> None:
        self.operation = operation
        self.future = future
        self.value: Any = None
        self.error: Exception | None = None
        self.effects = Effects()


class _NewOnes(Appending):
    """Appends what is new in one statement, and all else as `appending.py` does."""

    def __init__(
        self, write: Write, insert: Callable[[Sequence[Waiting]], Awaitable[set[int]]]
    ) -> None:
        super().__init__(write)
        self._insert = insert
        self._turn = asyncio.Lock()

    async def _run(self, batch: AppendBatch) -> None:
        async with self._turn:  # meanwhile the next batch gathers
            batch.close()
            try:
                added = await self._insert(batch.members)
            except Exception as exc:  # noqa: BLE001 - it reaches the callers
                for one in batch.members:
                    if not one.future.done():
                        one.future.set_exception(without_frames(exc))
                return
        rest = AppendBatch()
        for number, one in enumerate(batch.members):
            if number not in added:
                rest.try_add(one)
            elif not one.future.done():  # else its caller was cancelled; the command stands
                seq_id = one.submission.seq_id
                assert seq_id is not None
                one.future.set_result(
                    Appended(request_id=_request_id(one), seq_id=seq_id, is_new=True)
                )
        if rest.members:
            await super()._run(rest)


def _request_id(one: Waiting) -> RequestId:
    assert one.submission.seq_id is not None
    return request_id(one.submission.queue_id, one.submission.seq_id)


def _new_row(one: Waiting) -> tuple[Value, ...]:
    """The parameters of `_APPEND_NEW`."""
    given, kept = one.submission, one.kept
    return (
        *(given.queue_id, given.seq_id, given.kind, given.tenant_id, given.session_id),
        *(given.clone, int(given.is_ordered), given.fingerprint, kept.size_bytes, one.now),
        *(kept.digest, kept.content),
    )


class _Held(NamedTuple):
    """A lease that another server holds."""

    owner: str
    left_s: float
    """Until it expires, if it is not renewed."""


class PostgresLedger(SqlLedger):
    """A ledger in a database that others may share."""

    is_shared = True

    def __init__(
        self, dsn: str, retention: Retention, clock: SteadyClock, patience_s: float
    ) -> None:
        super().__init__(retention, clock)
        self._dsn = dsn
        self._patience_s = patience_s
        self._inline_bytes = LARGEST_NUMBER  # no files
        self._queue: deque[_Write] = deque()
        self._queued = asyncio.Event()
        self._connection: Any = None
        self._lock_waited_s = 0.0
        self._lock_held_s = 0.0
        self._append_connection: Any = None
        self._claim_connection: Any = None
        self._alone_connection: Any = None
        self._alone_turn = asyncio.Lock()
        self._claim_turn = asyncio.Lock()
        self._appending = _NewOnes(self._write, self._insert_new)
        self._is_closed = False
        self._board: PostgresBoard | None = None
        self._board_connection: Any = None
        self._listener: Any = None
        self._is_claimer = False
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
        self._handed_out = 0.0
        """When the last command was claimed that its claimer was given."""

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
            ValidationError: The address is that of a pooler that cannot be used.
            LedgerVersionError: What is there is not a ledger that this version can use.
        """
        tries = OPENING_TRIES
        while True:
            ledger = cls(dsn, retention or Retention(), clock or SteadyClock(), patience_s)
            try:
                await ledger._start()
            except (*_LOST, asyncpg.PostgresError) as exc:
                await ledger.close()
                if _PARAMETER in str(exc):
                    raise _pooled("which refuses the settings of its connections") from exc
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
        self._connection = connection = await self._connect()
        await self._check_pooling(connection)
        await self._migrate(connection)
        # Several ledgers may be in one database, in schemas of their own.
        number = await connection.fetchval("SELECT 'commands'::regclass::oid::bigint")
        self._board = PostgresBoard(self._send_notices, f"{BOARD_CHANNEL}_{number}")
        self._pool = await asyncpg.create_pool(
            self._dsn,
            min_size=1,
            max_size=READERS,
            command_timeout=ANSWER_S,
            reset=_leave_as_it_is,
        )
        await self._listen()
        self._clock.start_after(await self._read(entry_steps.latest_time))
        self._tasks = [
            asyncio.create_task(self._write_groups()),
            asyncio.create_task(self._keep_listening()),
        ]

    async def _check_pooling(self, connection: Any) -> None:
        """Refuse a pooler that gives each transaction another session.

        Raises:
            ValidationError: There is one. Notices, prepared statements and the settings of a
                connection would be lost between transactions.
        """
        async with connection.transaction():
            backend = await connection.fetchval(_BACKEND)
        if backend == connection.get_server_pid():
            return
        other = await self._connect()
        try:
            async with other.transaction():
                if await other.fetchval(_BACKEND) == backend:
                    raise _pooled("which shares one session between several connections")
        finally:
            other.terminate()

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
        if self._board is not None:
            await self._board.close()
        writing = (self._connection, self._append_connection, self._claim_connection)
        others = (self._alone_connection, self._lease_connection, self._board_connection)
        for connection in (*writing, *others, self._listener):
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

    async def _commit(self, group: list[_Write], tries: int = CLASHES) -> None:
        try:
            await self._patiently(lambda: self._transaction(group))
        except Exception as exc:  # noqa: BLE001 - it reaches the caller whose write it was
            if tries and isinstance(exc, _CLASHED):
                await self._commit(group, tries - 1)
                return
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
        asked_at = time.monotonic()
        try:
            await connection.execute(_BEGIN_IN_TURN)
            taken_at = time.monotonic()
            for write in group:
                write.effects, write.error = Effects(), None
                try:
                    write.value = await _run(write.operation(write.effects), connection)
                except TinkerError as exc:  # it refused, and has changed nothing
                    write.effects, write.error = Effects(), without_frames(exc)
            topics = [topic for write in group for topic in write.effects.topics]
            await connection.execute(_commit_with(topics))
        except _LOST:
            raise  # the connection is given up
        except BaseException:
            if not connection.is_closed() and connection.is_in_transaction():
                await connection.execute("ROLLBACK")
            raise
        self._lock_waited_s += taken_at - asked_at
        self._lock_held_s += time.monotonic() - taken_at

    async def _insert_new(self, members: Sequence[Waiting]) -> set[int]:
        """Append those that are new and not too late; returns their numbers in `members`."""
        first: dict[tuple[str, int], int] = {}
        for number, one in enumerate(members):
            if one.submission.seq_id is not None:
                first.setdefault((one.submission.queue_id, one.submission.seq_id), number)
        numbers = list(first.values())
        rows = [_new_row(members[number]) for number in numbers]
        if self._is_closed or not rows:
            return set()
        columns = [list(column) for column in zip(*rows, strict=True)]

        async def insert() -> list[Row]:
            if self._append_connection is None:
                self._append_connection = await self._connect()
            try:
                found: list[Row] = await self._append_connection.fetch(
                    _APPEND_NEW, *columns, WORK_CHANNEL, NEW_WORK
                )
            except _LOST:
                self._append_connection.terminate()
                self._append_connection = None
                raise
            return found

        try:
            added = {numbers[number - 1] for number, _ in await self._patiently(insert)}
        except asyncpg.PostgresError as exc:
            _log.debug("appending commands one by one: %s", exc)
            return set()
        effects = Effects()
        for number in sorted(added):
            one = members[number]
            if one.kept.content is not None and one.kept.size_bytes <= SMALL_BYTES:
                effects.appended.append((_request_id(one), one.kept.content))
        if added:
            effects.topics.append(NEW_WORK)
            self._commits += 1
            self._writes += len(added)
        self._tell(effects)
        return added

    # Claims whose commit was not confirmed

    async def claim(self, claimer: str, *, limit: int, epoch: int | None = None) -> list[Command]:
        """`Ledger.claim`, with what its claimer holds already and was never given.

        Claims of one server are made one after the other, so that is all that was claimed later.
        """
        claimed = await self._claim(claimer, limit, epoch)
        unconfirmed = self._unconfirmed
        if unconfirmed > self._looked_after:
            after = self._handed_out
            claimed = await self._read(lambda effects: steps.claimed_after(effects, claimer, after))
            self._looked_after = unconfirmed
        for command in claimed:
            self._handed_out = max(self._handed_out, command.claimed_at or 0.0)
        return claimed

    async def _claim(self, claimer: str, limit: int, epoch: int | None) -> list[Command]:
        if self._is_closed:
            raise LedgerUnavailableError("the ledger is closed")

        async def claim() -> list[Command]:
            async with self._claim_turn:
                if self._claim_connection is None:
                    self._claim_connection = await self._connect()
                now = self.now()
                try:
                    rows = await self._claim_connection.fetch(_CLAIM, limit, claimer, now, epoch)
                    if rows[0][-1] is None:
                        assert epoch is not None
                        raise lease_lost(epoch, await self._claim_connection.fetchval(_EPOCH))
                except LeaseLostError:
                    raise
                except BaseException as exc:
                    self._claim_connection.terminate()
                    self._claim_connection = None
                    self._unconfirmed += isinstance(exc, _LOST)
                    raise
                found = [steps.command_of(row[:-1]) for row in rows if row[0] is not None]
                self._commits += 1
                self._writes += 1
                return [
                    msgspec.structs.replace(
                        one, state=CommandState.CLAIMED, claimed_by=claimer, claimed_at=now
                    )
                    for one in found
                ]

        try:
            return await self._patiently(claim)
        except asyncpg.PostgresError as exc:
            raise _unavailable(exc) from exc

    async def wait_claim(
        self, claimer: str, *, limit: int, timeout_s: float, epoch: int | None = None
    ) -> list[Command]:
        """`Ledger.wait_claim`, without a look beforehand while there is always something."""
        claimed = await self.claim(claimer, limit=limit, epoch=epoch)
        if claimed:
            return claimed
        return await super().wait_claim(claimer, limit=limit, timeout_s=timeout_s, epoch=epoch)

    async def wait_for_commands(self, claimer: str, *, timeout_s: float) -> bool:
        """`Ledger.wait_for_commands`."""
        await self._listen_for_work()
        if self._unconfirmed > self._looked_after:
            return True
        return await super().wait_for_commands(claimer, timeout_s=timeout_s)

    async def release_claims(self, claimer: str, *, epoch: int | None = None) -> int:
        """`Ledger.release_claims`."""
        released = await super().release_claims(claimer, epoch=epoch)
        self._handed_out = 0.0
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
                _log.warning("lost the connection to the ledger's database, reconnecting: %s", exc)
                await asyncio.sleep(RETRY_S)

    async def _connect(self, *, synchronous_commit: str = "on") -> Any:
        settings = {
            **_SETTINGS,
            "synchronous_commit": synchronous_commit,
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
            with self._wakeups.ticket(LEASE_TOPIC) as released:
                asked_at = time.monotonic()
                try:
                    taken = await self._patiently(lambda: self._try_lease(owner, lease_s))
                except asyncpg.PostgresError as exc:
                    raise _unavailable(exc) from exc
                if isinstance(taken, int):
                    return Lease(owner, taken, lease_s, asked_at + lease_s)
                left_s = give_up_at - time.monotonic()
                if left_s <= 0:
                    raise lease_held(taken.owner)
                await released.wait(min(left_s, taken.left_s + SOON_S))
                if self._is_closed:
                    raise LedgerUnavailableError("the ledger is closed")

    async def _try_lease(self, owner: str, lease_s: float) -> int | _Held:
        """The new epoch, or who holds the lease."""

        async def take(connection: Any) -> int | _Held:
            # Without waiting for a turn: standbys look often, and mostly in vain.
            held = _Held(*await connection.fetchrow(_LEASE))
            if held.left_s > 0:
                return held
            async with connection.transaction():
                # In its turn: no write of the last holder is under way.
                await connection.execute(_TAKE_TURN)
                if not await connection.fetchval(_IS_WORK_FREE):
                    return _Held("it runs an older release", RETRY_S)
                held = _Held(*await connection.fetchrow(f"{_LEASE} FOR UPDATE"))
                if held.left_s > 0:
                    return held
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
                lambda connection: connection.execute(
                    _RELEASE_LEASE, lease.epoch, CHANNEL, LEASE_TOPIC
                )
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

    @property
    def board(self) -> Board:
        """`Ledger.board`, which all servers of this ledger share."""
        assert self._board is not None, "the ledger is open"
        return self._board

    async def _send_notices(self, notices: Sequence[tuple[str, str]]) -> None:
        if self._board_connection is None:
            self._board_connection = await self._connect(synchronous_commit="off")
        try:
            await self._board_connection.executemany(_NOTIFY_CHANNEL, notices)
        except BaseException:
            self._board_connection.terminate()
            self._board_connection = None
            raise

    async def _listen(self) -> None:
        assert self._board is not None
        self._listener = await self._connect()
        await self._listener.add_listener(CHANNEL, self._hear)
        if self._is_claimer:
            await self._listener.add_listener(WORK_CHANNEL, self._hear)
        for channel in self._board.channels:
            await self._listener.add_listener(channel, self._hear_board)

    async def _listen_for_work(self) -> None:
        if not self._is_claimer:
            self._is_claimer = True
            # If the connection is lost, whoever keeps listening listens for this too.
            with contextlib.suppress(*_LOST):
                await self._listener.add_listener(WORK_CHANNEL, self._hear)

    def _hear_board(
        self, _connection: object, _process: int, _channel: str, notice: object
    ) -> None:
        assert self._board is not None
        self._board.hear(str(notice))

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
            if self._board is not None:
                self._board.reconnected()

    # Payloads are in the database

    async def _keep_file(self, payload: bytes) -> Kept:
        raise NotImplementedError

    async def _discard(self, kept: Sequence[Kept], *, is_named: bool) -> None:
        raise NotImplementedError

    async def _fetch_file(self, kept: Kept) -> bytes:
        raise NotImplementedError

    async def _sweep_files(self) -> int:
        return 0

    @contextlib.asynccontextmanager
    async def alone(self, what: str) -> AsyncIterator[None]:
        """`Ledger.alone`. A server that is paused meanwhile excludes others for `STALLED_S`."""
        async with self._alone_turn:
            if self._is_closed:
                raise LedgerUnavailableError("the ledger is closed")
            try:
                if self._alone_connection is None:
                    self._alone_connection = await self._connect()
                async with self._alone_connection.transaction():
                    await self._alone_connection.execute(_ALONE, what)
                    yield
            except (*_LOST, asyncpg.PostgresError) as exc:
                if self._alone_connection is not None:
                    self._alone_connection.terminate()
                    self._alone_connection = None
                raise _unavailable(exc) from exc

    async def _stored_bytes(self) -> int:
        if self._is_closed:
            raise LedgerUnavailableError("the ledger is closed")
        return int(await self._patiently(lambda: self._pool.fetchval(_SIZE)))

    def _written(self) -> tuple[int, int]:
        return self._commits, self._writes

    def _lock_seconds(self) -> tuple[float, float]:
        return self._lock_waited_s, self._lock_held_s

    async def _migrate(self, connection: Any) -> None:
        """Bring the schema up to date; of several servers that start together, one does."""
        where = "the database"
        async with connection.transaction():
            await connection.execute(_TAKE_TURN)
            has_tables, has_list = await connection.fetchrow(
                "SELECT to_regclass('commands') IS NOT NULL, to_regclass('migrations') IS NOT NULL"
            )
            rows = await connection.fetch(statements.READ) if has_list else []
            if has_tables and not rows:
                raise LedgerVersionError(
                    f"{where} is half-migrated: it has a table of commands and no list of changes",
                    remedy="use an empty database, or restore this one from a backup",
                )
            if has_tables:
                since = self.now() - server_versions.GONE_S
                running = await connection.fetch(_RUNNING, RunningServer.kind, since)
                server_versions.check_versions(body for (body,) in running)
            applied = [(number, name, digest) for number, name, digest in rows]
            for migration in statements.missing(known_migrations("postgres"), applied, where):
                await connection.execute(statements.CREATE_TABLE)
                await connection.execute(migration.sql)
                await connection.execute(
                    "INSERT INTO migrations VALUES ($1, $2, $3)",
                    migration.number,
                    migration.name,
                    migration.digest,
                )


async def _leave_as_it_is(_: Any) -> None:
    """Return a connection to the pool: reads change nothing of it that needs a round trip."""


async def _run(steps: Steps[T], connection: Any) -> T:
    """Run an operation to its end, as `run_steps` does, on a connection."""
    try:
        name, values = next(steps)
        while True:
            if isinstance(values, Each):
                name, values = steps.send(await _fetch_each(connection, name, values))
            elif isinstance(values, list):
                await connection.executemany(_SQL[name], values)
                name, values = steps.send(())
            else:
                name, values = steps.send(await connection.fetch(_SQL[name], *values))
    except StopIteration as end:
        result: T = end.value
        return result


async def _fetch_each(connection: Any, name: str, values: Each) -> list[list[Row]]:
    """The rows of a query for each of its parameters, in one round trip."""
    found: list[list[Row]] = [[] for _ in values]
    if not values:
        return found
    if len(values) == 1:
        return [await connection.fetch(_SQL[name], *values[0])]
    if name not in _EACH_SQL:
        prepared = await connection.prepare(_SQL[name])
        _EACH_SQL[name] = each_sql(_SQL[name], [one.name for one in prepared.get_parameters()])
    columns = map(list, zip(*values, strict=True))
    for number, *row in await connection.fetch(_EACH_SQL[name], *columns):
        found[number - 1].append(row)
    return found


_EACH_SQL: dict[str, str] = {}
"""The queries that are run for each of several parameters, as one."""


def each_sql(sql: str, types: Sequence[str]) -> str:
    """A query that takes arrays, and gives each row with the number of its parameters, from 1."""
    arrays = ", ".join(f"${n}::{name}[]" for n, name in enumerate(types, 1))
    names = ", ".join(f"p{n}" for n in range(1, len(types) + 1))
    inner = re.sub(r"\$(\d+)", r"given.p\1", sql)
    return (
        f"SELECT given.number, found.* FROM unnest({arrays}) "  # noqa: S608 - of our own queries
        f"WITH ORDINALITY AS given({names}, number) CROSS JOIN LATERAL ({inner}) AS found"
    )


def _commit_with(topics: Sequence[str]) -> str:
    """A commit that tells topics: in one round trip, since other writers may wait for it."""
    told = [(CHANNEL, notice) for notice in _notices(one for one in topics if one != NEW_WORK)]
    if NEW_WORK in topics:
        told.append((WORK_CHANNEL, NEW_WORK))
    quoted = ((channel, notice.replace("'", "''")) for channel, notice in told)
    sent = "".join(f"SELECT pg_notify('{channel}', '{text}'); " for channel, text in quoted)
    return f"{sent}COMMIT"


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


def _pooled(why: str) -> ValidationError:
    """The error for a pooler that cannot be used."""
    names = ",".join(_SETTINGS)
    return ValidationError(
        f"the database's address is that of a pooler such as pgbouncer, {why}",
        remedy="give the address of PostgreSQL itself; a server needs about ten connections. "
        "pgbouncer works with pool_mode = session and ignore_startup_parameters = "
        f"{names}",
    )


def _unavailable(exc: BaseException) -> LedgerUnavailableError:
    error = LedgerUnavailableError(
        f"the ledger's database could not be used: {type(exc).__name__}: {exc}",
        remedy="check that PostgreSQL is running and reachable",
    )
    error.__cause__ = exc
    return error
