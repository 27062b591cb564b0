"""How much may be under way: order, bounds, and what a cancelled waiter leaves behind."""

from __future__ import annotations

import asyncio

import pytest

from tinsmith.client.budgets import Budget
from tinsmith.errors import ValidationError


def test_what_fits_is_taken_at_once_and_given_back() -> None:
    async def scenario() -> tuple[int, int]:
        budget = Budget(10)
        async with budget.taken(4), budget.taken(6):
            inside = budget.used
        return inside, budget.used

    assert asyncio.run(scenario()) == (10, 0)


def test_waiters_are_served_in_the_order_they_came() -> None:
    served: list[int] = []

    async def take(budget: Budget, number: int, amount: int) -> None:
        async with budget.taken(amount):
            served.append(number)
            await asyncio.sleep(0)

    async def scenario() -> None:
        budget = Budget(3)
        await asyncio.gather(*(take(budget, n, 3 if n == 2 else 1) for n in range(6)))

    asyncio.run(scenario())

    assert served == [0, 1, 2, 3, 4, 5]


def test_the_budget_is_never_overshot_but_by_one_that_goes_alone() -> None:
    seen: list[int] = []

    async def take(budget: Budget, amount: int) -> None:
        async with budget.taken(amount):
            seen.append(budget.used)
            await asyncio.sleep(0)

    async def scenario() -> None:
        budget = Budget(10)
        await asyncio.gather(*(take(budget, amount) for amount in (4, 4, 4, 25, 4, 4)))

    asyncio.run(scenario())

    assert max(amount for amount in seen if amount != 25) <= 10
    assert seen.count(25) == 1


def test_a_cancelled_waiter_leaves_nothing_taken_and_lets_others_pass() -> None:
    async def scenario() -> int:
        budget = Budget(1)
        async with budget.taken():
            waiting = [asyncio.create_task(_take(budget)) for _ in range(3)]
            await asyncio.sleep(0)
            waiting[0].cancel()
            await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*waiting[1:]), timeout=60)
        return budget.used

    assert asyncio.run(scenario()) == 0


def test_one_cancelled_just_as_it_is_served_gives_its_share_back() -> None:
    async def scenario() -> int:
        budget = Budget(1)
        holder = asyncio.Event()

        async def hold() -> None:
            async with budget.taken():
                await holder.wait()

        holding = asyncio.create_task(hold())
        await asyncio.sleep(0)
        waiting = asyncio.create_task(_take(budget))
        await asyncio.sleep(0)
        holder.set()
        await holding  # the share is handed to the waiter here
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.wait_for(_take(budget), timeout=60)
        return budget.used

    assert asyncio.run(scenario()) == 0


def test_one_cancelled_just_before_it_would_be_served_is_passed_over() -> None:
    async def scenario() -> list[type]:
        budget = Budget(1)
        await budget.take(1)
        waiting = [asyncio.create_task(_take(budget)) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        budget.give_back(1)  # before the cancelled one has run
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert budget.used == 0
        return [type(end) for end in ends]

    assert asyncio.run(scenario()) == [asyncio.CancelledError, type(None)]


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValidationError):
        Budget(0)


async def _take(budget: Budget) -> None:
    async with budget.taken():
        await asyncio.sleep(0)
