"""Fair shares between tenants, and between training and sampling."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.ledger.records import TenantId
from tinsmith.scheduler.fairness import EngineTurns, Kind, Shares

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")


def test_a_newcomer_is_next() -> None:
    """However much another has been given before."""
    shares = Shares()
    for _ in range(100):
        shares.give(shares.next([A]), 10)

    assert shares.next([A, B]) == B


def test_a_pause_is_not_saved_up() -> None:
    """Who comes back has its share from then on, and no more."""
    shares = Shares()
    shares.give(shares.next([A, B]), 1)
    for _ in range(1000):
        shares.give(shares.next([A]), 1)
    given = Counter[TenantId]()
    for _ in range(100):
        tenant = shares.next([A, B])
        shares.give(tenant, 1)
        given[tenant] += 1

    assert abs(given[A] - given[B]) <= 2


@given(st.lists(st.integers(1, 50), min_size=3, max_size=3))
def test_shares_are_equal_whatever_the_size_of_the_commands(sizes: list[int]) -> None:
    """By amount, not by count: to within the largest commands."""
    shares, given = Shares(), Counter[TenantId]()
    size_of = dict(zip((A, B, C), sizes, strict=True))
    for _ in range(600):
        tenant = shares.next(size_of)
        shares.give(tenant, size_of[tenant])
        given[tenant] += size_of[tenant]

    assert max(given.values()) - min(given.values()) <= 2 * max(sizes)


def test_training_and_sampling_have_equal_time() -> None:
    """Though a batch takes fifty times as long as a step of the sampler."""
    costs: dict[Kind, float] = {"training": 1.0, "sampling": 0.02}
    now, ran = 0.0, Counter[Kind]()

    async def run() -> dict[Kind, float]:
        engine = EngineTurns(clock=lambda: now)

        async def work(kind: Kind) -> None:
            nonlocal now
            await engine.set_active(kind, True)
            while sum(ran.values()) < 520:
                async with engine.turn(kind):
                    now += costs[kind]
                    ran[kind] += 1
                await asyncio.sleep(0)  # as settling does, with the turn given back
            await engine.set_active(kind, False)

        await asyncio.gather(work("training"), work("sampling"))
        return engine.used_s

    used_s = asyncio.run(run())

    assert 30 <= ran["sampling"] / ran["training"] <= 60
    assert abs(used_s["training"] - used_s["sampling"]) <= 2.1


def test_who_is_alone_is_not_held_up() -> None:
    """An idle kind is not waited for, and its idleness is not saved up."""

    async def run() -> None:
        now = 0.0
        engine = EngineTurns(clock=lambda: now)
        await engine.set_active("training", True)
        for _ in range(10):
            async with asyncio.timeout(60), engine.turn("training"):
                now += 1.0
        await engine.set_active("sampling", True)

        assert engine.used_s["sampling"] == engine.used_s["training"] == 10.0

    asyncio.run(run())


def test_an_engine_that_does_both_at_once_is_not_divided() -> None:
    """Nobody waits for a turn there."""

    async def run() -> None:
        engine = EngineTurns(is_shared=False)
        await engine.set_active("training", True)
        await engine.set_active("sampling", True)
        async with asyncio.timeout(60), engine.turn("training"), engine.turn("sampling"):
            pass

    asyncio.run(run())


def test_a_turn_that_fails_is_given_back() -> None:
    """The next one has it."""

    async def run() -> None:
        engine = EngineTurns()
        with pytest.raises(RuntimeError):
            async with engine.turn("training"):
                raise RuntimeError
        async with asyncio.timeout(60), engine.turn("sampling"):
            pass

    asyncio.run(run())


def test_time_that_one_had_alone_is_not_owed_to_the_other() -> None:
    now = 0.0

    async def run() -> int:
        nonlocal now
        turns = EngineTurns(clock=lambda: now)
        await turns.set_active("training", True)
        async with turns.turn("training"):
            now += 1000.0
        await turns.set_active("training", False)
        await turns.set_active("sampling", True)
        await turns.set_active("training", True)
        training = asyncio.create_task(_trained(turns))
        steps = 0
        while not training.done() and steps < 100:
            async with turns.turn("sampling"):
                now += 0.01
            steps += 1
            await asyncio.sleep(0)
        await training
        return steps

    assert asyncio.run(run()) < 10


async def _trained(turns: EngineTurns) -> None:
    async with turns.turn("training"):
        pass
