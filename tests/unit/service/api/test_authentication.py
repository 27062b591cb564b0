from __future__ import annotations

import asyncio

import pytest

from tinsmith.client.auth import claims_of
from tinsmith.errors import AuthenticationError, PermissionDeniedError
from tinsmith.service.api.authentication import TOKEN_LIFETIME_S, Authenticator, check_local
from tinsmith.service.api.keys import add_tenant, create_key, revoke_key
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.scheduler_lease import SteadyClock


def test_a_token_is_valid_as_long_as_its_key() -> None:
    async def work() -> None:
        ledger = MemoryLedger()
        entry, key = await create_key(ledger, await add_tenant(ledger, "a"), "")
        credentials = Authenticator(ledger, b"secret")
        token = credentials.token(await credentials.holder(key))

        assert (await credentials.holder(token)).tenant.id == "a"
        await revoke_key(ledger, entry.id)
        credentials.forget()

        for credential in (token, key):
            with pytest.raises(AuthenticationError):
                await credentials.holder(credential)

    asyncio.run(work())


@pytest.mark.parametrize("wrong", ["eyJ", "eyJ.a.b", "eyJé.é.é", "eyJ\ud800..", "eyJ" + "a" * 9999])
def test_a_token_that_is_not_ours_is_rejected(wrong: str) -> None:
    async def work() -> None:
        ledger = MemoryLedger()
        _, key = await create_key(ledger, await add_tenant(ledger, "a"), "")
        credentials = Authenticator(ledger, b"secret")
        holder = await credentials.holder(key)
        token = credentials.token(holder)
        foreign = Authenticator(ledger, b"other").token(holder)

        for credential in (wrong, token[:-2], f"{token}é", foreign):
            with pytest.raises(AuthenticationError):
                await credentials.holder(credential)

    asyncio.run(work())


def test_a_token_issued_before_the_first_key_is_invalid_after_it() -> None:
    async def work() -> None:
        ledger = MemoryLedger()
        credentials = Authenticator(ledger, b"secret")
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


def test_a_token_s_expiry_is_wall_clock_time() -> None:
    """Its client looks at that: an official one asks for the next without a pause if it is over."""

    async def work() -> None:
        clocks = Clocks()
        ledger = MemoryLedger(clock=SteadyClock(lambda: clocks.wall, lambda: clocks.steady))
        credentials = Authenticator(ledger, b"secret", wall=lambda: clocks.wall)
        clocks.wall += 10 * TOKEN_LIFETIME_S  # the machine slept, or its clock was put right

        told = claims_of(credentials.token(await credentials.holder(None)))

        assert told["exp"] == clocks.wall + TOKEN_LIFETIME_S

    asyncio.run(work())


@pytest.mark.parametrize("is_set", ["wall", "steady"])
def test_a_token_s_lifetime_does_not_depend_on_clock_changes(is_set: str) -> None:
    """The ledger's is, in a way, when the service is started anew."""

    async def work() -> None:
        clocks = Clocks()
        ledger = MemoryLedger(clock=SteadyClock(lambda: 0.0, lambda: clocks.steady))
        _, key = await create_key(ledger, await add_tenant(ledger, "a"), "")
        credentials = Authenticator(ledger, b"secret", wall=lambda: clocks.wall)
        token = credentials.token(await credentials.holder(key))
        setattr(clocks, is_set, getattr(clocks, is_set) + 10 * TOKEN_LIFETIME_S)

        assert (await credentials.holder(token)).tenant.id == "a"
        clocks.wall += TOKEN_LIFETIME_S
        clocks.steady += TOKEN_LIFETIME_S

        with pytest.raises(AuthenticationError):
            await credentials.holder(token)

    asyncio.run(work())


def test_a_given_key_is_checked_even_if_none_is_required() -> None:
    """A wrong one is refused, and a right one is its tenant's."""

    async def work() -> None:
        ledger = MemoryLedger()
        _, key = await create_key(ledger, await add_tenant(ledger, "a"), "")
        credentials = Authenticator(ledger, b"secret", trusts_keyless=True)

        assert (await credentials.holder(None)).tenant.id == "default"
        assert (await credentials.holder(key)).tenant.id == "a"
        with pytest.raises(AuthenticationError):
            await credentials.holder("tml-wrong")

    asyncio.run(work())


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "a.localhost", "127.0.0.1:80", "127.9.8.7", "[::1]:8000", None],
)
def test_local_programs_are_answered(host: str | None) -> None:
    check_local({} if host is None else {"host": host})


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "localhost:80@evil.example",
        "",
        "192.168.1.2",
        "[::2]",
        "localhost\n",
    ],
)
def test_a_foreign_host_name_is_rejected(host: str) -> None:
    with pytest.raises(PermissionDeniedError, match="tinsmith key create"):
        check_local({"host": host})


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost:8000", "null", ""])
def test_requests_from_a_web_page_are_rejected(origin: str) -> None:
    with pytest.raises(PermissionDeniedError, match="refuses requests from web pages"):
        check_local({"host": "localhost", "origin": origin})
