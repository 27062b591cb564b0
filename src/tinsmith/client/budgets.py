"""How much may be under way at once: slots for calls, bytes for bodies.

Whoever waits is served in the order of arrival, one wake-up each. A body larger than the whole
budget goes alone, when nothing else is under way; no other ever overshoots.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib

from tinsmith.errors import ValidationError


class Budget:
    """An amount that calls take from and give back. For one event loop."""

    def __init__(self, total: int) -> None:
        if total <= 0:
            raise ValidationError(f"a budget must be above 0, not {total}")
        self.total = total
        self._used = 0
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    @property
    def used(self) -> int:
        """How much is taken."""
        return self._used

    def taken(self, amount: int = 1) -> Taken:
        """Hold an amount while the block lasts, waiting for it if need be."""
        return Taken(self, amount)

    async def take(self, amount: int) -> None:
        """Wait for an amount; whoever takes it gives it back."""
        if self.take_nowait(amount):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (amount, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(amount)  # it was given to us as we were cancelled
            else:
                with contextlib.suppress(ValueError):  # passed over already, as one that has left
                    self._waiting.remove(entry)
                self._serve()
            raise

    def take_nowait(self, amount: int) -> bool:
        """Take an amount if it is there and nobody waits for any."""
        is_there = not self._waiting and self._fits(amount)
        self._used += amount if is_there else 0
        return is_there

    def _fits(self, amount: int) -> bool:
        return self._used == 0 or self._used + amount <= self.total

    def give_back(self, amount: int) -> None:
        """Let others have it."""
        self._used -= amount
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            amount, turn = self._waiting.popleft()
            if not turn.done():
                self._used += amount
                turn.set_result(None)


class Taken:
    """An amount that is held while a block lasts."""

    __slots__ = ("_amount", "_budget")

    def __init__(self, budget: Budget, amount: int) -> None:
        self._budget = budget
        self._amount = amount

    async def __aenter__(self) -> None:
        await self._budget.take(self._amount)

    async def __aexit__(self, *_: object) -> None:
        self._budget.give_back(self._amount)
