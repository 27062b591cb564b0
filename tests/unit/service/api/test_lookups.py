"""Things are found within their tenant, and what was changed is seen."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tinsmith.errors import BadRequestError, NotFoundError
from tinsmith.service.api.lookups import REMEMBERED_S, Lookups
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.records import CheckpointEntry, SessionEntry, TenantId
from tinsmith.service.ledger.scheduler_lease import SteadyClock

ALICE, BOB = TenantId("alice"), TenantId("bob")


def a_session(**changes: float) -> SessionEntry:
    session = SessionEntry(
        id="s", tenant_id=ALICE, created_at=0.0, project_id="p", heartbeat_at=0.0
    )
    return msgspec.structs.replace(session, **changes)


def a_checkpoint(**changes: object) -> CheckpointEntry:
    entry = CheckpointEntry(
        id="tinker://r/weights/c",
        tenant_id=ALICE,
        created_at=0.0,
        run_id="r",
        checkpoint_id="weights/c",
    )
    return msgspec.structs.replace(entry, **changes)


def test_the_error_for_another_tenant_s_session_is_the_same_as_for_an_unknown_one() -> None:
    """Also while it is remembered for its own tenant."""

    async def work() -> None:
        ledger = MemoryLedger()
        lookups = Lookups(ledger)
        with pytest.raises(NotFoundError) as unknown:
            await lookups.session(BOB, "s")
        await ledger.entries(SessionEntry).add(a_session())
        await lookups.session(ALICE, "s")

        with pytest.raises(NotFoundError) as hidden:
            await lookups.session(BOB, "s")

        assert str(hidden.value) == str(unknown.value)

    asyncio.run(work())


def test_a_change_is_seen_immediately_if_announced_and_soon_if_not() -> None:
    """Another server over the same database tells nothing."""
    time = [1000.0]

    async def work() -> None:
        ledger = MemoryLedger(clock=SteadyClock(lambda: time[0], lambda: time[0]))
        lookups = Lookups(ledger)
        await ledger.entries(SessionEntry).add(a_session())
        await lookups.open_session(ALICE, "s")

        await ledger.entries(SessionEntry).put(a_session(ended_at=5.0))
        await lookups.open_session(ALICE, "s")
        time[0] += REMEMBERED_S + 0.1
        with pytest.raises(BadRequestError, match="has ended"):
            await lookups.open_session(ALICE, "s")

        await ledger.entries(SessionEntry).put(a_session())
        lookups.forget(a_session())
        await lookups.open_session(ALICE, "s")

    asyncio.run(work())


@pytest.mark.parametrize(
    ("entry", "also_of", "is_readable"),
    [
        (a_checkpoint(), None, False),
        (a_checkpoint(is_published=True), None, True),
        (a_checkpoint(), ALICE, True),
        (a_checkpoint(), TenantId("carol"), False),
        (a_checkpoint(is_published=True, expires_at=1.0), None, False),
        (a_checkpoint(tenant_id=BOB, expires_at=1.0), None, False),
        (a_checkpoint(tenant_id=BOB), None, True),
    ],
)
def test_a_tenant_can_read_own_published_and_token_granted_checkpoints(
    entry: CheckpointEntry, also_of: TenantId | None, is_readable: bool
) -> None:
    """His own, published ones, and those of whoever gave him a token, until they expire."""

    async def work() -> bool:
        ledger = MemoryLedger()
        await ledger.entries(CheckpointEntry).add(entry)
        try:
            await Lookups(ledger).readable_checkpoint(BOB, entry.id, also_of=also_of)
        except NotFoundError:
            return False
        return True

    assert asyncio.run(work()) == is_readable
