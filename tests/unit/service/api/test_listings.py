"""Walks over entries while others are added."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tinsmith.service.api import listings
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.records import CheckpointEntry, TenantId

ALICE = TenantId("alice")
RUN = "s:train:0"


def an_entry(number: int) -> CheckpointEntry:
    return CheckpointEntry(
        id=f"tinker://{RUN}/weights/{number}",
        tenant_id=ALICE,
        created_at=float(number),
        run_id=RUN,
        checkpoint_id=f"weights/{number}",
        size_bytes=1,
    )


@pytest.mark.parametrize("walk", ["of_tenant", "of_parent"])
@pytest.mark.parametrize("count", [1, 4, 5])
def test_entries_added_while_paging_neither_extend_nor_repeat_the_listing(
    monkeypatch: pytest.MonkeyPatch, walk: str, count: int
) -> None:
    monkeypatch.setattr(listings, "PAGE", 2)

    async def walked() -> list[str]:
        entries = MemoryLedger().entries(CheckpointEntry)
        for number in range(count):
            await entries.add(an_entry(number))
        page_of = getattr(entries, walk)
        added = iter(range(100, 200))

        async def and_one_more(*args: Any, **page: Any) -> Any:
            found = await page_of(*args, **page)
            await entries.add(an_entry(next(added)))
            return found

        monkeypatch.setattr(entries, walk, and_one_more)
        if walk == "of_tenant":
            return [entry.id async for entry in listings.of_tenant(entries, ALICE)]
        return [entry.id for entry in await listings.of_parent(entries, RUN, ALICE)]

    found = asyncio.run(walked())

    assert len(found) == len(set(found))
    assert set(found) >= {an_entry(number).id for number in range(count)}
