"""Servers of different versions share a database if both can; else the one that starts says why."""

from __future__ import annotations

import asyncio

import pytest

from tests.contract.postgres_server import new_database
from tinsmith.errors import LedgerVersionError
from tinsmith.service.ledger.postgres import PostgresLedger
from tinsmith.service.ledger.records import TenantId
from tinsmith.service.ledger.server_versions import GONE_S, PROTOCOL, RunningServer


async def _beside(dsn: str, protocol: int, oldest: int, *, noted_before_s: float = 0.0) -> None:
    async with await PostgresLedger.open(dsn) as ledger:
        now = ledger.now() - noted_before_s
        await ledger.entries(RunningServer).put(
            RunningServer(
                id="other",
                tenant_id=TenantId(""),
                created_at=now,
                role="api",
                where="process 7 on elsewhere",
                noted_at=now,
                version="9.9",
                protocol=protocol,
                oldest=oldest,
            )
        )
    await (await PostgresLedger.open(dsn)).close()


@pytest.mark.parametrize("oldest", [PROTOCOL, PROTOCOL - 1])
def test_a_server_starts_beside_a_neighbouring_version(oldest: int) -> None:
    asyncio.run(_beside(new_database(), PROTOCOL + 1, oldest))


@pytest.mark.parametrize(
    ("protocol", "oldest"), [(PROTOCOL + 2, PROTOCOL + 1), (PROTOCOL - 1, PROTOCOL - 1)]
)
def test_a_server_that_cannot_work_with_those_that_run_says_why(protocol: int, oldest: int) -> None:
    with pytest.raises(LedgerVersionError, match=r"tinsmith 9.9, which runs as api in process 7"):
        asyncio.run(_beside(new_database(), protocol, oldest))


def test_a_server_that_is_gone_keeps_nobody_from_starting() -> None:
    asyncio.run(_beside(new_database(), PROTOCOL + 2, PROTOCOL + 1, noted_before_s=GONE_S + 5))
