"""One model's line of commands: they run one at a time, in the order their client numbered them.

Whatever order they arrive in, a command waits for all numbers before its own. A number that was
refused counts as done. A number that never comes is passed over when a later command has waited
for it as long as the service allows; should it come after that, it is refused.

Knows nothing of what the commands do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tinsmith.errors import BadRequestError

Work = Callable[[], Awaitable[None]]


class CommandLine:
    """Runs the commands of one model, from number 0, its creation."""

    def __init__(self, gap_wait_s: float) -> None:
        self._gap_wait_s = gap_wait_s
        self._waiting: dict[int, Work] = {}
        self._spent: set[int] = set()
        self._next = 0
        self._newest = -1
        self._arrived = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    def place(self, seq_id: int | None) -> int:
        """The number of a command: its own, or the next one where a client gives none.

        Raises:
            BadRequestError: Its turn is over.
        """
        number = seq_id or self._newest + 1
        if number < self._next or number in self._waiting:
            raise BadRequestError(
                f"seq_id {number} is not free: the model has reached {self._next}; "
                "a number that does not come in time is passed over"
            )
        return number

    def add(self, number: int, work: Work) -> None:
        """Run this when its turn comes."""
        self._waiting[number] = work
        self._spent.discard(number)  # refused before, and sent again with another body
        self._newest = max(self._newest, number)
        self._wake()

    def spend(self, number: int) -> None:
        """Count a refused number as done."""
        if number >= self._next and number not in self._waiting:
            self._spent.add(number)
            self._newest = max(self._newest, number)
            self._wake()

    async def close(self) -> None:
        """Stop; commands that have not run never will."""
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)

    def _wake(self) -> None:
        self._arrived.set()
        if self._runner is None or self._runner.done():
            self._runner = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self._waiting or self._next in self._spent:
            if self._next in self._spent:
                self._spent.remove(self._next)
            elif (work := self._waiting.get(self._next)) is not None:
                await work()
                del self._waiting[self._next]
            elif await self._is_missing():
                self._next = min([*self._waiting, *self._spent])
                continue
            else:
                continue
            self._next += 1

    async def _is_missing(self) -> bool:
        """Whether the next number did not come while a later one waited for it."""
        deadline = asyncio.get_running_loop().time() + self._gap_wait_s
        while self._next not in self._waiting and self._next not in self._spent:
            self._arrived.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._arrived.wait()
            except TimeoutError:
                return True
        return False
