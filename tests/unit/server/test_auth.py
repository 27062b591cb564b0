from __future__ import annotations

import asyncio

import pytest

from tinsmith.client.auth import claims_of
from tinsmith.errors import AuthenticationError
from tinsmith.ledger.clock import SteadyClock
from tinsmith.ledger.memory import MemoryLedger
from tinsmith.server.auth import TOKEN_LIFETIME_S, Credentials
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


class Clocks:
    """The time of day, and the ledger's."""

    wall = 1_000_000.0
    steady = 1_000_000.0


def test_a_token_says_when_it_ends_by_the_time_of_day() -> None:
    """Its client looks at that: an official one asks for the next without a pause if it is over."""

    async def work() -> None:
        clocks = Clocks()
        ledger = MemoryLedger(clock=SteadyClock(lambda: clocks.wall, lambda: clocks.steady))
        credentials = Credentials(ledger, b"secret", wall=lambda: clocks.wall)
        clocks.wall += 10 * TOKEN_LIFETIME_S  # the machine slept, or its clock was put right

        told = claims_of(credentials.token(await credentials.holder(None)))

        assert told["exp"] == clocks.wall + TOKEN_LIFETIME_S

    asyncio.run(work())


@pytest.mark.parametrize("is_set", ["wall", "steady"])
def test_a_token_is_good_for_its_time_whichever_clock_is_set(is_set: str) -> None:
    """The ledger's is, in a way, when the service is started anew."""

    async def work() -> None:
        clocks = Clocks()
        ledger = MemoryLedger(clock=SteadyClock(lambda: 0.0, lambda: clocks.steady))
        _, key = await create_key(ledger, await add_tenant(ledger, "a"), "")
        credentials = Credentials(ledger, b"secret", wall=lambda: clocks.wall)
        token = credentials.token(await credentials.holder(key))
        setattr(clocks, is_set, getattr(clocks, is_set) + 10 * TOKEN_LIFETIME_S)

        assert (await credentials.holder(token)).tenant.id == "a"
        clocks.wall += TOKEN_LIFETIME_S
        clocks.steady += TOKEN_LIFETIME_S

        with pytest.raises(AuthenticationError):
            await credentials.holder(token)

    asyncio.run(work())


def test_where_nobody_needs_a_key_one_that_is_given_counts_all_the_same() -> None:
    """A wrong one is refused, and a right one is its tenant's."""

    async def work() -> None:
        ledger = MemoryLedger()
        _, key = await create_key(ledger, await add_tenant(ledger, "a"), "")
        credentials = Credentials(ledger, b"secret", trusts_keyless=True)

        assert (await credentials.holder(None)).tenant.id == "default"
        assert (await credentials.holder(key)).tenant.id == "a"
        with pytest.raises(AuthenticationError):
            await credentials.holder("tml-wrong")

    asyncio.run(work())
