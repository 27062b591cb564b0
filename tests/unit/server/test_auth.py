from __future__ import annotations

import asyncio

import pytest

from tinsmith.errors import AuthenticationError
from tinsmith.ledger.memory import MemoryLedger
from tinsmith.server.auth import Credentials
from tinsmith.server.keys import add_tenant, create_key, revoke_key


def test_a_token_stands_for_its_key_and_ends_with_it() -> None:
    async def work() -> None:
        ledger = MemoryLedger()
        entry, key = await create_key(ledger, await add_tenant(ledger, "a"), "")
        credentials = Credentials(ledger, b"secret")
        token = credentials.token(await credentials.holder(key))

        assert (await credentials.holder(token)).tenant.id == "a"
        await revoke_key(ledger, entry.id)
        credentials.forget()

        for credential in (token, key):
            with pytest.raises(AuthenticationError):
                await credentials.holder(credential)

    asyncio.run(work())


@pytest.mark.parametrize("wrong", ["eyJ", "eyJ.a.b", "eyJé.é.é", "eyJ\ud800..", "eyJ" + "a" * 9999])
def test_what_is_no_token_of_ours_is_refused(wrong: str) -> None:
    async def work() -> None:
        ledger = MemoryLedger()
        _, key = await create_key(ledger, await add_tenant(ledger, "a"), "")
        credentials = Credentials(ledger, b"secret")
        holder = await credentials.holder(key)
        token = credentials.token(holder)
        foreign = Credentials(ledger, b"other").token(holder)

        for credential in (wrong, token[:-2], f"{token}é", foreign):
            with pytest.raises(AuthenticationError):
                await credentials.holder(credential)

    asyncio.run(work())


def test_a_token_from_before_the_first_key_opens_nothing_after_it() -> None:
    async def work() -> None:
        ledger = MemoryLedger()
        credentials = Credentials(ledger, b"secret")
        token = credentials.token(await credentials.holder(None))
        assert (await credentials.holder(token)).tenant.id == "default"

        await create_key(ledger, await add_tenant(ledger, "default"), "")
        credentials.forget()

        with pytest.raises(AuthenticationError):
            await credentials.holder(token)

    asyncio.run(work())
