from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from tinsmith.errors import (
    AuthenticationError,
    LedgerUnavailableError,
    UnknownEntryError,
    ValidationError,
)
from tinsmith.service.api.keys import (
    DEFAULT_TENANT,
    MOST_REMEMBERED,
    KeyRing,
    add_tenant,
    create_key,
    digest_of,
    key_id,
    list_keys,
    make_key,
    revoke_key,
)
from tinsmith.service.ledger.base import Entries
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.records import ApiKey, Entry, Tenant, TenantId

T = TypeVar("T")
E = TypeVar("E", bound=Entry)


class Ticks:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def test_keys_are_long_random_and_in_the_format_that_clients_accept() -> None:
    keys = {make_key() for _ in range(100)}

    assert len(keys) == 100
    assert all(key.startswith("tml-") and len(key) == 47 and key.isascii() for key in keys)


def test_only_the_digest_and_the_prefix_of_a_key_are_stored() -> None:
    async def work() -> None:
        ledger = MemoryLedger()
        tenant = await add_tenant(ledger, "acme")

        entry, key = await create_key(ledger, tenant, "ci")

        assert entry.id == hashlib.sha256(key.encode()).hexdigest()
        assert entry.shown == key[:8]
        kept = repr(await ledger.entries(ApiKey).all()) + repr(await ledger.entries(Tenant).all())
        assert key not in kept
        assert key[8:] not in kept

    run(work())


def test_a_key_resolves_to_its_own_tenant() -> None:
    async def work() -> None:
        ledger = MemoryLedger()
        ring = KeyRing(ledger)
        _, of_a = await create_key(ledger, await add_tenant(ledger, "a"), "")
        _, of_b = await create_key(ledger, await add_tenant(ledger, "b"), "")

        assert (await ring.holder(of_a)).tenant.id == "a"
        assert (await ring.holder(of_b)).tenant.id == "b"
        assert (await ring.holder_by_digest(digest_of(of_b))).tenant.id == "b"

    run(work())


@pytest.mark.parametrize(
    "credential",
    [None, "", "tml-", "tml-wrong", "tml-\ud800", "tml-\0", "x" * 100_000, "tml-" + "é" * 43],
)
def test_an_invalid_key_is_rejected_and_not_shown(credential: str | None) -> None:
    async def work() -> None:
        ledger = MemoryLedger()
        _, key = await create_key(ledger, await add_tenant(ledger, "a"), "")
        ring = KeyRing(ledger)

        for wrong in (credential, key[:-1], key + " ", key.upper(), digest_of(key)):
            with pytest.raises(AuthenticationError) as caught:
                await ring.holder(wrong)
            assert not wrong or wrong not in str(caught.value)

    run(work())


def test_without_any_key_everybody_is_the_default_tenant() -> None:
    async def work() -> None:
        ring = KeyRing(MemoryLedger())

        holders = [await ring.holder(text) for text in (None, "", "tml-anything")]

        assert {holder.tenant.id for holder in holders} == {DEFAULT_TENANT}
        assert {holder.key for holder in holders} == {None}

    run(work())


def test_the_first_key_takes_effect_within_the_recheck_interval() -> None:
    async def work() -> None:
        ledger, ticks = MemoryLedger(), Ticks()
        ring = KeyRing(ledger, recheck_s=1.0, clock=ticks)
        await ring.holder(None)
        _, key = await create_key(ledger, await add_tenant(ledger, "default"), "")

        ticks.now += 1.0

        with pytest.raises(AuthenticationError):
            await ring.holder(None)
        assert (await ring.holder(key)).tenant.id == DEFAULT_TENANT

    run(work())


def test_a_service_whose_last_key_is_revoked_still_requires_a_key() -> None:
    async def work() -> None:
        ledger = MemoryLedger()
        entry, key = await create_key(ledger, await add_tenant(ledger, "a"), "")
        await revoke_key(ledger, key_id(entry))

        for ring in (KeyRing(ledger), KeyRing(ledger)):
            for credential in (None, key, "tml-other"):
                with pytest.raises(AuthenticationError):
                    await ring.holder(credential)

    run(work())


def test_a_revocation_takes_effect_within_the_recheck_interval_or_immediately() -> None:
    async def work() -> None:
        ledger, ticks = MemoryLedger(), Ticks()
        entry, key = await create_key(ledger, await add_tenant(ledger, "a"), "")
        told = KeyRing(ledger, recheck_s=1.0, clock=ticks)
        untold = KeyRing(ledger, recheck_s=1.0, clock=ticks)
        for ring in (told, untold):
            await ring.holder(key)

        await revoke_key(ledger, key_id(entry))
        told.forget()

        with pytest.raises(AuthenticationError):
            await told.holder(key)
        assert (await untold.holder(key)).tenant.id == "a"
        ticks.now += 1.0
        with pytest.raises(AuthenticationError):
            await untold.holder(key)

    run(work())


def test_a_lookup_started_before_a_revocation_is_not_cached() -> None:
    class Slow(MemoryLedger):
        is_slow = False
        is_asked: asyncio.Event
        may_go_on: asyncio.Event

        def entries(self, kind: type[E], *, epoch: int | None = None) -> Entries[E]:
            entries = super().entries(kind, epoch=epoch)
            if kind is Tenant and self.is_slow:
                get = entries.get

                async def late_get(entry_id: str) -> E | None:
                    self.is_asked.set()
                    await self.may_go_on.wait()
                    return await get(entry_id)

                entries.get = late_get  # type: ignore[method-assign]
            return entries

    async def work() -> None:
        ledger = Slow()
        ledger.is_asked, ledger.may_go_on = asyncio.Event(), asyncio.Event()
        _, key = await create_key(ledger, await add_tenant(ledger, "acme"), "")
        ring = KeyRing(ledger)
        ledger.is_slow = True
        looking = asyncio.create_task(ring.holder(key))
        await ledger.is_asked.wait()

        await revoke_key(ledger, digest_of(key))
        ring.forget()
        ledger.may_go_on.set()
        await looking

        assert ring.remembered(key) is None
        with pytest.raises(AuthenticationError):
            await ring.holder(key)

    run(work())


def test_a_changed_quota_takes_effect_within_the_recheck_interval() -> None:
    async def work() -> None:
        ledger, ticks = MemoryLedger(), Ticks()
        _, key = await create_key(ledger, await add_tenant(ledger, "a", {"models": 1}), "")
        ring = KeyRing(ledger, clock=ticks)
        assert (await ring.holder(key)).tenant.quotas == {"models": 1}

        await add_tenant(ledger, "a", {"models": None, "storage_bytes": 7})
        ticks.now += 1.0

        assert (await ring.holder(key)).tenant.quotas == {"storage_bytes": 7}

    run(work())


def test_the_key_cache_is_bounded() -> None:
    async def work() -> None:
        ledger = MemoryLedger()
        tenant = await add_tenant(ledger, "a")
        ring = KeyRing(ledger)
        for _ in range(MOST_REMEMBERED + 10):
            _, key = await create_key(ledger, tenant, "")
            await ring.holder(key)

        assert len(ring._remembered) == MOST_REMEMBERED

    run(work())


def test_unknown_keys_are_not_cached() -> None:
    async def work() -> None:
        ledger = MemoryLedger()
        await create_key(ledger, await add_tenant(ledger, "a"), "")
        ring = KeyRing(ledger)
        for number in range(50):
            with pytest.raises(AuthenticationError):
                await ring.holder(f"tml-{number}")

        assert len(ring._remembered) == 0

    run(work())


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "a b", "-x", "a\n", "ä", "x" * 65, "a\0", "\x1b[2J"]
)
def test_a_hostile_tenant_name_is_rejected(name: str) -> None:
    with pytest.raises(ValidationError, match="tenant name") as caught:
        run(add_tenant(MemoryLedger(), name))

    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "x" * 101, "\ud800", "a\0"])
def test_a_hostile_key_name_is_rejected(name: str) -> None:
    async def work() -> None:
        ledger = MemoryLedger()
        await create_key(ledger, await add_tenant(ledger, "a"), name)

    with pytest.raises(ValidationError, match="key name"):
        run(work())


@pytest.mark.parametrize(
    "quotas", [{"modles": 1}, {"models": -1}, {"models": 2**63}, {"models": 1, "x": None}]
)
def test_an_invalid_quota_changes_nothing(quotas: dict[str, int | None]) -> None:
    async def work() -> None:
        ledger = MemoryLedger()
        await add_tenant(ledger, "a", {"models": 5})

        with pytest.raises(ValidationError, match="quota"):
            await add_tenant(ledger, "a", quotas)

        assert (await add_tenant(ledger, "a")).quotas == {"models": 5}

    run(work())


def test_a_key_is_revoked_by_an_unambiguous_prefix_of_its_id() -> None:
    async def work() -> None:
        ledger = MemoryLedger()
        tenant = await add_tenant(ledger, "a")
        alike = [
            ApiKey(
                id=f"abcdef{n}" + "0" * 57,
                tenant_id=tenant.tenant_id,
                created_at=0.0,
                name="",
                shown="",
            )
            for n in range(2)
        ]
        for key in alike:
            await ledger.entries(ApiKey).add(key)

        with pytest.raises(UnknownEntryError, match="several"):
            await revoke_key(ledger, "abcdef")
        with pytest.raises(UnknownEntryError, match="no key"):
            await revoke_key(ledger, "abcdee")
        first = await revoke_key(ledger, "abcdef1")
        again = await revoke_key(ledger, "abcdef1")

        assert first.id == alike[1].id
        assert again.revoked_at == first.revoked_at is not None
        assert {key.id: key.revoked_at for key in await list_keys(ledger)}[alike[0].id] is None

    run(work())


@pytest.mark.parametrize("named", ["", "abc", "ABCDEF", "tml-secret-of-mine", "%", "abcdef\n"])
def test_a_malformed_key_id_is_rejected_and_not_shown(named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        run(revoke_key(MemoryLedger(), named))

    assert "secret" not in str(caught.value)


def test_listings_span_pages_and_stay_within_a_tenant() -> None:
    async def work() -> None:
        ledger = MemoryLedger()
        a, b = await add_tenant(ledger, "a"), await add_tenant(ledger, "b")
        for number in range(1005):
            await create_key(ledger, a, str(number))
        await create_key(ledger, b, "b")

        assert len(await list_keys(ledger)) == 1006
        assert len(await list_keys(ledger, "a")) == 1005
        assert [key.name for key in await list_keys(ledger, "b")] == ["b"]
        assert await list_keys(ledger, "\0") == []

    run(work())


def test_concurrent_callers_share_one_lookup() -> None:
    class Counting(MemoryLedger):
        looks = 0

        def entries(self, kind: type[E], *, epoch: int | None = None) -> Entries[E]:
            self.looks += kind is ApiKey
            return super().entries(kind, epoch=epoch)

    async def work() -> None:
        ledger = Counting()
        ring = KeyRing(ledger)

        await asyncio.gather(*(ring.holder("tml-any") for _ in range(50)))

        assert ledger.looks == 1

    run(work())


def test_concurrent_callers_share_one_failure_while_the_ledger_is_unavailable() -> None:
    """A look may take half a minute to fail: the last in a row of them would wait for hours."""

    class Away(MemoryLedger):
        looks = 0

        def entries(self, kind: type[E], *, epoch: int | None = None) -> Entries[E]:
            del epoch
            self.looks += kind is ApiKey
            raise LedgerUnavailableError("it is away")

    async def work() -> None:
        ledger = Away()
        ring = KeyRing(ledger)

        asked = (ring.holder("tml-any") for _ in range(50))
        answers = await asyncio.gather(*asked, return_exceptions=True)

        assert {type(answer) for answer in answers} == {LedgerUnavailableError}
        assert ledger.looks == 1
        with pytest.raises(LedgerUnavailableError):
            await ring.holder("tml-any")
        assert ledger.looks == 2

    run(work())


def test_a_cancelled_caller_does_not_cancel_the_shared_lookup() -> None:
    class Slow(MemoryLedger):
        def __init__(self) -> None:
            super().__init__()
            self.may_go_on = asyncio.Event()

        def entries(self, kind: type[E], *, epoch: int | None = None) -> Entries[E]:
            entries = super().entries(kind, epoch=epoch)
            count = entries.count

            async def slow_count(*given: Any, **named: Any) -> int:
                await self.may_go_on.wait()
                return await count(*given, **named)

            entries.count = slow_count  # type: ignore[method-assign]
            return entries

    async def work() -> None:
        ledger = Slow()
        ring = KeyRing(ledger)
        asking = [asyncio.create_task(ring.holder(None)) for _ in range(3)]
        await asyncio.sleep(0)
        asking[0].cancel()
        await asyncio.gather(asking[0], return_exceptions=True)
        ledger.may_go_on.set()

        holders = await asyncio.gather(*asking[1:])

        assert {holder.tenant.id for holder in holders} == {DEFAULT_TENANT}

    run(work())


def test_cached_keys_are_returned_without_waiting_until_they_expire() -> None:
    async def work() -> None:
        ledger, ticks = MemoryLedger(), Ticks()
        ring = KeyRing(ledger, recheck_s=1.0, clock=ticks)
        assert ring.remembered(None) is None
        anybody = await ring.holder(None)
        assert ring.remembered("whatever") == anybody
        _, key = await create_key(ledger, await add_tenant(ledger, "default"), "")
        ticks.now += 1.0
        assert ring.remembered(None) is None

        holder = await ring.holder(key)

        assert ring.remembered(key) == holder
        assert ring.remembered(None) is None
        assert ring.remembered(key + "x") is None
        ticks.now += 1.0
        assert ring.remembered(key) is None

    run(work())


def test_a_key_whose_tenant_is_gone_is_invalid() -> None:
    async def work() -> None:
        ledger = MemoryLedger()
        nobody = Tenant(id="gone", tenant_id=TenantId("gone"), created_at=0.0, name="gone")
        _, key = await create_key(ledger, nobody, "")

        with pytest.raises(AuthenticationError):
            await KeyRing(ledger).holder(key)

    run(work())


def test_quotas_of_the_default_tenant_are_rechecked_without_keys() -> None:
    """Another process may have changed them."""

    async def work() -> None:
        ledger, clock = MemoryLedger(), Ticks()
        ring = KeyRing(ledger, recheck_s=1.0, clock=clock)
        assert (await ring.holder(None)).tenant.quotas == {}

        await add_tenant(ledger, DEFAULT_TENANT, {"models": 3})
        clock.now += 2.0

        assert (await ring.holder(None)).tenant.quotas == {"models": 3}

    run(work())


def test_changing_a_quota_keeps_the_others_and_none_removes_one() -> None:
    async def work() -> None:
        ledger = MemoryLedger()
        await add_tenant(ledger, "acme", {"models": 3, "sessions": 4})

        changed = await add_tenant(ledger, "acme", {"sessions": 5})
        less = await add_tenant(ledger, "acme", {"models": None})

        assert changed.quotas == {"models": 3, "sessions": 5}
        assert less.quotas == {"sessions": 5}

    run(work())
