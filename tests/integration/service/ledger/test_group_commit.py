"""Which commits are synced, and who is told of them."""

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import Any

from tinsmith.service.ledger.group_commit import GroupWriter
from tinsmith.service.ledger.steps import Effects, Steps

FULL, NORMAL = 2, 1
WAIT_S = 60.0


def news(effects: Effects) -> Steps[None]:
    """A write that tells of something."""
    effects.topics.append("topic")
    yield from ()


def claim(_: Effects) -> Steps[str]:
    """What stands by for it."""
    yield from ()
    return "claimed"


def test_a_commit_is_synced_if_one_of_its_writes_is(tmp_path: Path) -> None:
    levels: list[int] = []

    class Watched(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            if sql == "COMMIT":
                [(level,)] = super().execute("PRAGMA synchronous").fetchall()
                levels.append(level)
            return super().execute(sql, *values)

    def connect() -> sqlite3.Connection:
        made = sqlite3.connect(tmp_path / "db", isolation_level=None, factory=Watched)
        made.execute("PRAGMA journal_mode = WAL")
        made.execute("PRAGMA synchronous = FULL")
        return made

    def nothing(_: Effects) -> Steps[None]:
        yield from ()

    async def write() -> None:
        writer = GroupWriter(connect, lambda _: None)
        claim = writer.write(nothing, is_soft=True)
        queued = [asyncio.create_task(claim), asyncio.create_task(writer.write(nothing))]
        await asyncio.sleep(0)  # both are in the queue before the thread is there
        await writer.start()
        await asyncio.gather(*queued)
        await writer.write(nothing, is_soft=True)
        await writer.write(nothing)
        await writer.write(nothing, is_soft=True)
        await writer.close()

    asyncio.run(write())
    assert levels == [FULL, NORMAL, FULL, NORMAL]


def test_a_waiter_registered_during_a_commit_is_woken(tmp_path: Path) -> None:
    """It looked before they could be seen, and nobody would tell it again."""
    commits, goes_on = threading.Event(), threading.Event()

    class Slow(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            if sql == "COMMIT":
                commits.set()
                assert goes_on.wait(WAIT_S)
            return super().execute(sql, *values)

    async def test() -> str:
        path = tmp_path / "db"
        writer = GroupWriter(
            lambda: sqlite3.connect(path, isolation_level=None, factory=Slow), lambda _: None
        )
        await writer.start()
        writing = asyncio.create_task(writer.write(news))
        assert await asyncio.to_thread(commits.wait, WAIT_S)
        with writer.standing_by("topic", claim) as standing:
            goes_on.set()
            await writing
            async with asyncio.timeout(WAIT_S):
                told = await standing.future
        await writer.close()
        return told

    assert asyncio.run(test()) == "claimed"


def test_a_write_that_is_being_taken_cannot_be_withdrawn(tmp_path: Path) -> None:
    """Its caller stops to wait just then, and must not think that it never runs."""
    is_being_taken, goes_on = threading.Event(), threading.Event()

    class Slow(list[Any]):
        def remove(self, one: Any) -> None:
            super().remove(one)
            if threading.current_thread() is not threading.main_thread():
                is_being_taken.set()
                assert goes_on.wait(WAIT_S)

    async def test() -> str:
        path = tmp_path / "db"
        writer = GroupWriter(lambda: sqlite3.connect(path, isolation_level=None), lambda _: None)
        writer._standing = Slow()
        await writer.start()
        with writer.standing_by("topic", claim) as standing:
            writing = asyncio.create_task(writer.write(news))
            assert await asyncio.to_thread(is_being_taken.wait, WAIT_S)
        is_taken = standing.is_taken
        goes_on.set()
        await writing
        await writer.close()
        assert is_taken
        return await standing.future

    assert asyncio.run(test()) == "claimed"


def test_closing_a_writer_flushes_its_queued_writes(tmp_path: Path) -> None:
    is_busy, goes_on = threading.Event(), threading.Event()

    def slow(_: Effects) -> Steps[None]:
        is_busy.set()
        assert goes_on.wait(WAIT_S)
        yield from ()

    async def test() -> list[str]:
        path = tmp_path / "db"
        writer = GroupWriter(lambda: sqlite3.connect(path, isolation_level=None), lambda _: None)
        await writer.start()
        first = asyncio.create_task(writer.write(slow))
        assert await asyncio.to_thread(is_busy.wait, WAIT_S)
        queued = [asyncio.create_task(writer.write(claim)) for _ in range(3)]
        await asyncio.sleep(0)
        closing = asyncio.create_task(writer.close())
        await asyncio.sleep(0)
        goes_on.set()
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(first, closing)
        return await asyncio.gather(*queued)

    assert asyncio.run(test()) == ["claimed"] * 3
