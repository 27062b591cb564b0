"""Which commits are synced: all but those whose loss in a power cut does no harm."""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

from tinsmith.ledger.group_commit import GroupWriter
from tinsmith.ledger.steps import Effects, Steps

FULL, NORMAL = 2, 1


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
