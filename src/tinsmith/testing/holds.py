"""Handles that keep replies or work back until a test lets them go.

A `Hold` keeps whatever meets it, counts it, and lets it go when released, from any thread. A
`Reversal` gathers a few commands and lets them go last first.

Know nothing of what they keep.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Self

from tinsmith.testing.received import WAIT_TIMEOUT_S
from tinsmith.types.futures import QueueStateName

_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Hold:
    """Keeps back what meets it until `release`. In a `with` block, released at its end.

    For a pause, the queue state and its reason are what polls are told meanwhile.
    """

    def __init__(
        self,
        *,
        queue_state: QueueStateName = "active",
        reason: str | None = None,
        retry_after_ms: float | None = None,
        polls: int | None = None,
        poll_after_s: float | None = None,
        poll_status: int = 408,
    ) -> None:
        self.queue_state = queue_state
        self.reason = reason
        self.retry_after_ms = retry_after_ms
        self.poll_after_s = poll_after_s
        self.poll_status = poll_status
        self._polls_left = polls
        self._waiters: list[_Waiter] = []
        self._changed = threading.Condition()
        self._is_released = False
        self._most_held = 0

    @property
    def held(self) -> int:
        """How many are kept back now."""
        with self._changed:
            return len(self._waiters)

    @property
    def most_held(self) -> int:
        """How many were ever kept back at once."""
        return self._most_held

    @property
    def is_released(self) -> bool:
        """Whether it keeps nothing back any more."""
        return self._is_released

    def release(self, count: int | None = None) -> None:
        """Let go of all, now and to come; or of the `count` that came first."""
        with self._changed:
            if count is None:
                self._is_released = True
            let_go = self._waiters[:count]
            del self._waiters[:count]
            self._changed.notify_all()
        for loop, waiter in let_go:
            loop.call_soon_threadsafe(_let_go, waiter)

    def wait_held(self, count: int, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Block until `count` are kept back at once.

        Raises:
            TimeoutError: Fewer were, in that time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._waiters) >= count, timeout_s):
                raise TimeoutError(
                    f"{len(self._waiters)} of {count} were held within {timeout_s:g} s"
                )

    async def wait_held_async(self, count: int, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """As `wait_held`, without blocking the loop."""
        await asyncio.to_thread(self.wait_held, count, timeout_s)

    async def wait_released(self) -> None:
        """For the service: be kept back."""
        loop = asyncio.get_running_loop()
        entry: _Waiter = (loop, loop.create_future())
        with self._changed:
            if self._is_released:
                return
            self._waiters.append(entry)
            self._most_held = max(self._most_held, len(self._waiters))
            self._changed.notify_all()
        try:
            await entry[1]
        finally:
            with self._changed:
                if entry in self._waiters:
                    self._waiters.remove(entry)

    def note_poll(self) -> None:
        """For the service: a poll was told of this pause; after the last of them it ends."""
        if self._polls_left is not None:
            self._polls_left -= 1
            if self._polls_left <= 0:
                self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _let_go(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():  # its client may have left meanwhile
        waiter.set_result(None)


class Reversal:
    """Lets `count` commands finish in the reverse of the order in which they came."""

    def __init__(self, count: int, *, apart_s: float = 0.0) -> None:
        self._count = count
        self._apart_s = apart_s
        self._waiters: list[asyncio.Future[None]] = []

    async def wait_turn(self) -> None:
        """Wait until all have come, and then for those that came later."""
        mine = asyncio.get_running_loop().create_future()
        self._waiters.append(mine)
        place = len(self._waiters)
        if place == self._count:
            for waiter in self._waiters:
                _let_go(waiter)
        await mine
        # Those let go wake in the order they came; the pauses turn it around.
        for _ in range(self._count - place):
            await asyncio.sleep(self._apart_s)
