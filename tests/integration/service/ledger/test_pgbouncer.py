"""A pooler that gives each transaction another session is refused, with the reason."""

from __future__ import annotations

import asyncio

import pytest

from tests.contract.ledgers import training
from tests.contract.pgbouncer import pgbouncer
from tests.contract.postgres_server import server
from tinsmith.errors import ValidationError
from tinsmith.service.ledger.postgres import _SETTINGS, PostgresLedger

IGNORED = f"ignore_startup_parameters = {','.join(_SETTINGS)},search_path"


@pytest.mark.parametrize("settings", [(), (IGNORED,)], ids=["default", "parameters ignored"])
def test_pgbouncer_in_transaction_mode_is_refused(settings: tuple[str, ...]) -> None:
    with (
        pgbouncer(server().get_uri(), "transaction", *settings) as address,
        pytest.raises(ValidationError, match="pgbouncer") as refused,
    ):
        asyncio.run(PostgresLedger.open(address))

    assert "pool_mode = session" in str(refused.value.remedy)


def test_pgbouncer_in_session_mode_works_if_it_is_told_to() -> None:
    async def tell(address: str) -> None:
        opened = PostgresLedger.open(address), PostgresLedger.open(address)
        async with await opened[0] as one, await opened[1] as other:
            waiting = asyncio.create_task(one.wait_claim("s", limit=1, timeout_s=30))
            await asyncio.sleep(0.2)
            appended = await other.append(training(None))
            [claimed] = await waiting

            assert claimed.request_id == appended.request_id

    with pgbouncer(server().get_uri(), "session", IGNORED) as address:
        asyncio.run(tell(address))
