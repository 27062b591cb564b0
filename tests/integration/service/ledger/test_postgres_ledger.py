"""What several servers see of one PostgreSQL ledger, and what they do while it is away."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import asyncpg
import pytest

from tests.contract.ledgers import MODEL, SAMPLER, ended, raised, sampling, training
from tests.contract.postgres_server import new_database, server
from tinsmith.errors import (
    CommandConflictError,
    LeaseHeldError,
    LeaseLostError,
    LedgerUnavailableError,
    LedgerVersionError,
)
from tinsmith.service.ledger import postgres
from tinsmith.service.ledger.postgres import PostgresLedger
from tinsmith.service.ledger.records import QueueId
from tinsmith.service.ledger.registry import open_ledger
from tinsmith.service.ledger.statements import queries

LONG_S = 60.0


async def two(dsn: str) -> tuple[PostgresLedger, PostgresLedger]:
    """Two servers' ledgers, opened at the same moment on an empty database."""
    first, second = await asyncio.gather(PostgresLedger.open(dsn), PostgresLedger.open(dsn))
    return first, second


def test_servers_share_identity_claims_and_results() -> None:
    dsn = new_database()

    async def tell() -> None:
        one, other = await two(dsn)
        async with one, other:
            told = await asyncio.gather(
                *(ledger.append(training(n)) for n in range(20) for ledger in (one, other))
            )
            assert [answer.is_new for answer in told].count(True) == 20
            await raised(other.append(training(3, b"else")), CommandConflictError)
            taken = await asyncio.gather(
                *(ledger.claim("s", limit=3) for _ in range(5) for ledger in (one, other))
            )
            numbers = [command.seq_id for some in taken for command in some]
            assert sorted(numbers) == list(range(20))
            ends = await asyncio.gather(
                one.settle([ended(f"{MODEL}:1", b"a")]), other.settle([ended(f"{MODEL}:1", b"b")])
            )
            assert sorted(map(len, ends)) == [0, 1]
            results = [await ledger.result(f"{MODEL}:1") for ledger in (one, other)]
            assert results[0] == results[1]

    asyncio.run(tell())


def test_only_one_server_at_a_time_holds_the_lease() -> None:
    """The next one has it when the first lets go of it, or no longer renews it."""
    dsn = new_database()

    async def tell() -> None:
        one, other = await two(dsn)
        async with one, other:
            first = await one.acquire_lease("first", lease_s=LONG_S)
            held = await raised(other.acquire_lease("second", wait_s=0.5), LeaseHeldError)
            assert "another server is using this database: first" in held
            await one.release_lease(first)
            second = await other.acquire_lease("second", lease_s=1.0)
            third = await one.acquire_lease("third", wait_s=LONG_S)
            assert [lease.epoch for lease in (first, second, third)] == [1, 2, 3]
            await raised(other.renew_lease(second), LeaseLostError)
            await other.release_lease(second)  # it is another's by now, and stays so
            await raised(other.acquire_lease("second"), LeaseHeldError)

    asyncio.run(tell())


def test_a_renewed_lease_survives_dropped_connections() -> None:
    dsn = new_database()

    async def tell() -> None:
        one, other = await two(dsn)
        async with one, other:
            lease = await one.acquire_lease("first", lease_s=2.0)
            for _ in range(10):
                await drop_connections(dsn)
                with contextlib.suppress(LedgerUnavailableError):
                    await one.renew_lease(lease)  # its connection was dropped
                await one.renew_lease(lease)
                await raised(other.acquire_lease("second", wait_s=0.3), LeaseHeldError)
                assert lease.is_held

    asyncio.run(tell())


def test_a_write_that_waited_during_a_takeover_is_fenced_off() -> None:
    """Also where the database's default would show it the lease as it was before the wait."""
    dsn = f"{new_database()}&default_transaction_isolation=repeatable%20read"

    async def tell() -> None:
        operator = await asyncpg.connect(dsn)
        async with await PostgresLedger.open(dsn) as ledger:
            await ledger.append(training(0))
            lease = await ledger.acquire_lease("first", lease_s=LONG_S)
            async with operator.transaction(isolation="read_committed"):
                await operator.execute(f"SELECT pg_advisory_xact_lock({postgres.TURN})")
                passing = asyncio.create_task(ledger.pass_over(MODEL, 1, epoch=lease.epoch))
                await _wait_for_lock(operator, "advisory")
                await operator.execute("UPDATE lease SET epoch = epoch + 1, owner = 'second'")
            await raised(passing, LeaseLostError)
        await operator.close()

    asyncio.run(tell())


def test_a_claim_during_a_takeover_is_fenced_off() -> None:
    dsn = new_database()

    async def tell() -> None:
        operator = await asyncpg.connect(dsn)
        async with await PostgresLedger.open(dsn) as ledger:
            await ledger.append(training(0))
            lease = await ledger.acquire_lease("first", lease_s=LONG_S)
            async with operator.transaction():
                await operator.execute("UPDATE lease SET epoch = epoch + 1, owner = 'second'")
                claiming = asyncio.create_task(ledger.claim("s", limit=1, epoch=lease.epoch))
                await _wait_for_lock(operator, "transactionid")
            await raised(claiming, LeaseLostError)
            assert (await ledger.command(f"{MODEL}:0")).claimed_by is None
        await operator.close()

    asyncio.run(tell())


async def _wait_for_lock(operator: Any, kind: str) -> None:
    """Return when somebody waits for a lock of this kind."""
    async with asyncio.timeout(LONG_S):
        while not await operator.fetchval(  # noqa: ASYNC110 - told by nobody
            "SELECT count(*) FROM pg_locks WHERE locktype = $1 AND NOT granted", kind
        ):
            await asyncio.sleep(0.01)


def test_acquiring_a_lease_without_a_free_connection_raises_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that has lost its lease then tries again; any other error would end its work."""
    dsn = new_database()

    async def refused(*_: object, **__: object) -> None:
        raise asyncpg.TooManyConnectionsError("sorry, too many clients already")

    async def tell() -> None:
        async with await PostgresLedger.open(dsn) as ledger:
            with monkeypatch.context() as patch:
                patch.setattr(asyncpg, "connect", refused)
                await raised(ledger.acquire_lease("first"), LedgerUnavailableError)
            assert (await ledger.acquire_lease("first")).is_held

    asyncio.run(tell())


def test_a_server_of_a_release_without_leases_holds_the_lease() -> None:
    """It holds an advisory lock on a connection of its own."""
    dsn = new_database()

    async def tell() -> None:
        async with await PostgresLedger.open(dsn) as ledger:
            older = await asyncpg.connect(dsn)
            assert await older.fetchval(f"SELECT pg_try_advisory_lock({postgres.WORK})")
            held = await raised(ledger.acquire_lease("newer"), LeaseHeldError)
            assert "older release" in held
            await older.close()
            await ledger.acquire_lease("newer", wait_s=LONG_S)

    asyncio.run(tell())


def test_a_writer_paused_in_its_transaction_does_not_block_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(postgres, "STALLED_S", 0.5)
    dsn = new_database()

    async def tell() -> None:
        one, other = await two(dsn)
        async with one, other:
            await one.append(training(1))
            stalled = one._connection.transaction()
            await stalled.start()
            await one._connection.execute(postgres._TAKE_TURN)

            async with asyncio.timeout(LONG_S):
                await other.append(training(2))  # which waits for nobody
                await other.spend(MODEL, 9)

            await one.spend(MODEL, 10)

    asyncio.run(tell())


def test_servers_that_append_the_same_at_the_same_moment_append_it_once() -> None:
    """Retries of a client that changes servers: each gets the first answer, and none fails."""
    dsn = new_database()

    async def tell() -> None:
        one, other = await two(dsn)
        async with one, other:
            numbers = [*range(300), *reversed(range(300))]
            found = await asyncio.gather(
                *(one.append(training(number)) for number in numbers),
                *(other.append(training(number)) for number in reversed(numbers)),
            )

            assert sum(appended.is_new for appended in found) == 300
            assert {appended.request_id for appended in found} == {
                f"{MODEL}:{n}" for n in range(300)
            }
            assert [command.seq_id for command in await one.replay(MODEL)] == list(range(300))

    asyncio.run(tell())


def test_a_claim_misses_no_command_that_servers_append_at_the_same_time() -> None:
    dsn = new_database()

    async def tell() -> None:
        one, other = await two(dsn)
        async with one, other, await PostgresLedger.open(dsn) as scheduler:
            appending = [
                asyncio.create_task(_append_slowly(ledger, start))
                for start, ledger in ((0, one), (1000, other))
            ]
            claimed: list[int] = []
            async with asyncio.timeout(LONG_S):
                while len(claimed) < 400:
                    found = await scheduler.wait_claim("s", limit=3, timeout_s=0.2)
                    claimed += [command.seq_id for command in found]
            await asyncio.gather(*appending)

            assert sorted(claimed) == [*range(200), *range(1000, 1200)]
            assert await scheduler.claim("s", limit=3) == []

    asyncio.run(tell())


def test_what_one_server_does_alone_no_other_does_meanwhile() -> None:
    dsn = new_database()

    async def tell() -> None:
        one, other = await two(dsn)
        order: list[str] = []

        async def enter(ledger: PostgresLedger, what: str, name: str) -> None:
            async with ledger.alone(what):
                order.append(name)

        async with one, other:
            async with one.alone("quota"):
                await enter(other, "something else", "else")
                waiting = asyncio.create_task(enter(other, "quota", "other"))
                operator = await asyncpg.connect(dsn)
                await _wait_for_lock(operator, "advisory")
                await operator.close()
                order.append("one")
            await waiting

        assert order == ["else", "one", "other"]

    asyncio.run(tell())


async def _append_slowly(ledger: PostgresLedger, start: int) -> None:
    for number in range(start, start + 200, 4):
        await asyncio.gather(*(ledger.append(training(number + n)) for n in range(4)))


async def drop_connections(dsn: str) -> None:
    """Drop all connections to the database but this one."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )
    await connection.close()


def test_notifications_reach_other_servers() -> None:
    dsn = new_database()

    async def tell() -> None:
        one, other = await two(dsn)
        async with one, other:
            work = asyncio.create_task(other.wait_for_commands("s", timeout_s=LONG_S))
            feed = asyncio.create_task(one.wait_completions(SAMPLER, 0, after=0, timeout_s=LONG_S))
            await asyncio.sleep(0.1)
            request = (await one.append(sampling(1))).request_id
            end = asyncio.create_task(one.wait_settled(request, timeout_s=LONG_S))
            async with asyncio.timeout(LONG_S / 2):
                assert await work
                await other.claim("s", limit=1)
                await other.settle([ended(request)])
                assert (await end).is_settled
                assert [one.request_id for one in await feed] == [request]

    asyncio.run(tell())


def test_a_queue_whose_id_contains_a_newline_still_wakes_waiters() -> None:
    dsn = new_database()

    async def tell() -> None:
        one, other = await two(dsn)
        async with one, other:
            request = (await one.append(training(1, queue_id=QueueId("new\nline")))).request_id
            end = asyncio.create_task(one.wait_settled(request, timeout_s=LONG_S))
            await asyncio.sleep(0.1)
            await other.settle([ended(request)])
            async with asyncio.timeout(LONG_S / 2):
                assert (await end).is_settled

    asyncio.run(tell())


def test_many_topics_are_split_into_several_notifications() -> None:
    topics = [f"settled {'m' * 100}:{number}" for number in range(500)]

    notices = postgres._notices([*topics, topics[0]])

    assert [topic for notice in notices for topic in notice.split("\n")] == topics
    assert max(len(notice) for notice in notices) <= postgres.LONGEST_NOTICE
    assert postgres._notices([]) == []
    assert postgres._notices(["fine", "new\nline"]) == [postgres.EVERYBODY]


def test_a_database_restart_loses_and_repeats_nothing() -> None:
    """Appends and settlements go on through two restarts; waits are woken after them."""
    dsn = new_database()

    async def tell() -> None:
        async with await PostgresLedger.open(dsn) as ledger:
            done = asyncio.Event()
            appended: list[int] = []

            async def caller(start: int) -> None:
                number = start
                while not done.is_set():
                    await ledger.append(training(number))
                    appended.append(number)
                    await ledger.settle([ended(f"{MODEL}:{number}")])
                    number += 8

            callers = [asyncio.create_task(caller(start)) for start in range(8)]
            last = (await ledger.append(sampling(1))).request_id
            wait = asyncio.create_task(ledger.wait_settled(last, timeout_s=LONG_S))
            for _ in range(2):
                await asyncio.to_thread(server().stop)
                await asyncio.to_thread(server().start)
                await asyncio.sleep(0.5)
            done.set()
            await asyncio.gather(*callers)
            await ledger.settle([ended(last)])
            assert (await wait).is_settled
            found = await ledger.replay(MODEL)
            numbers = [command.seq_id for command in found]
            assert sorted(numbers) == sorted(appended)
            assert all(command.is_settled for command in found)

    asyncio.run(tell())


class Unconfirmed:
    """A connection that is lost when its query has been answered."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def fetch(self, *values: Any) -> None:
        await self._connection.fetch(*values)
        raise ConnectionResetError

    def terminate(self) -> None:
        self._connection.terminate()


@pytest.mark.parametrize("patience_s", [0.0, LONG_S], ids=["the call fails", "it is made again"])
def test_a_claim_with_an_unconfirmed_commit_is_returned_to_its_claimer(
    patience_s: float,
) -> None:
    """As soon as it asks again, and not at the next start; what it was given is not given twice."""
    dsn = new_database()

    async def tell() -> None:
        async with await PostgresLedger.open(dsn, patience_s=patience_s) as ledger:
            for number in range(6):
                await ledger.append(training(number))
            given = await ledger.claim("s", limit=2)
            ledger._claim_connection = Unconfirmed(ledger._claim_connection)
            with contextlib.suppress(LedgerUnavailableError):
                given += await ledger.claim("s", limit=2)
            async with asyncio.timeout(LONG_S / 2):
                while len(given) < 6:
                    given += await ledger.wait_claim("s", limit=2, timeout_s=LONG_S)
            assert [command.seq_id for command in given] == list(range(6))
            assert await ledger.claim("s", limit=2) == []

    asyncio.run(tell())


def test_released_claims_are_claimed_again_after_an_unconfirmed_commit() -> None:
    dsn = new_database()

    async def tell() -> None:
        async with await PostgresLedger.open(dsn) as ledger:
            for number in range(3):
                await ledger.append(training(number))
            await ledger.claim("s", limit=3)
            await ledger.release_claims("s")
            ledger._unconfirmed += 1

            given = await ledger.claim("s", limit=3)

            assert [command.seq_id for command in given] == [0, 1, 2]

    asyncio.run(tell())


def test_a_database_that_stays_unavailable_is_an_error() -> None:
    dsn = new_database()

    async def tell() -> None:
        async with await PostgresLedger.open(dsn, patience_s=0.5) as ledger:
            await ledger.append(training(1))
            await asyncio.to_thread(server().stop)
            try:
                message = await raised(ledger.append(training(2)), LedgerUnavailableError)
                assert "PostgreSQL" in message
                await raised(ledger.command(f"{MODEL}:1"), LedgerUnavailableError)
                await raised(PostgresLedger.open(dsn), LedgerUnavailableError)
            finally:
                await asyncio.to_thread(server().start)
            assert (await ledger.append(training(2))).is_new

    asyncio.run(tell())


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("INSERT INTO migrations VALUES (99, '0099_future', 'x')", "newer version"),
        ("DELETE FROM migrations", "half-migrated"),
        ("UPDATE migrations SET digest = 'x'", "migrated by a different"),
    ],
)
def test_a_newer_or_half_migrated_schema_is_rejected(sql: str, message: str) -> None:
    dsn = new_database()

    async def tell() -> None:
        await (await open_ledger(dsn)).close()
        connection = await asyncpg.connect(dsn)
        await connection.execute(sql)
        await connection.close()
        assert message in await raised(PostgresLedger.open(dsn), LedgerVersionError)

    asyncio.run(tell())


@pytest.mark.parametrize("name", ["unsettled_totals", "kept_totals"])
def test_statistics_queries_can_use_indexes(name: str) -> None:
    """Tables as small as these are scanned all the same, unless that is switched off."""
    dsn = new_database()

    async def tell() -> str:
        await (await open_ledger(dsn)).close()
        connection = await asyncpg.connect(dsn)
        try:
            await connection.execute("SET enable_seqscan = off")
            rows = await connection.fetch(f"EXPLAIN {queries()[name]}")
        finally:
            await connection.close()
        return "\n".join(row[0] for row in rows)

    assert "Seq Scan" not in asyncio.run(tell())
