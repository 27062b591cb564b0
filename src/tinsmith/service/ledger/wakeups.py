"""Wakes those who wait for a change in the ledger, without polling.

A topic is a string, such as the end of one command; a wakeup reaches only those who wait for its
topic. A waiter takes a ticket before it looks at the ledger, so that a change between the look and
the wait is not missed.

Knows nothing of what the topics mean. For one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Self, TypeVar

T = TypeVar("T")

NEW_WORK = "work"
"""A command may be claimed, or was cancelled, or claims were released."""


def settled_topic(request_id: str) -> str:
    """The topic of one command's end."""
    return f"settled {request_id}"


def feed_topic(queue_id: str, clone: int) -> str:
    """The topic of a feed."""
    return f"feed {clone} {queue_id}"


class WakeupTicket:
    """One wait for a topic, for as long as its `with` block runs."""

    __slots__ = ("_is_told", "_tickets", "_topic", "_waiting")

    def __init__(self, tickets: dict[str, set[WakeupTicket]], topic: str) -> None:
        self._tickets = tickets
        self._topic = topic
        self._is_told = False
        self._waiting: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        self._tickets.setdefault(self._topic, set()).add(self)
        return self

    def __exit__(self, *_: object) -> None:
        tickets = self._tickets[self._topic]
        tickets.discard(self)
        if not tickets:
            del self._tickets[self._topic]

    def tell(self) -> None:
        """Wake this waiter."""
        self._is_told = True
        self._wake()

    async def wait(self, timeout_s: float) -> bool:
        """Whether the topic was told within the time."""
        if not self._is_told and timeout_s > 0:
            loop = asyncio.get_running_loop()
            self._waiting = loop.create_future()
            timer = loop.call_later(timeout_s, self._wake)
            try:
                await self._waiting
            finally:
                timer.cancel()
        return self._is_told

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class Wakeups:
    """All waiters, by topic."""

    def __init__(self) -> None:
        self._tickets: dict[str, set[WakeupTicket]] = {}

    def ticket(self, topic: str) -> WakeupTicket:
        """A ticket for a topic, to be used as a context manager."""
        return WakeupTicket(self._tickets, topic)

    async def wait_until(
        self,
        topic: str,
        look: Callable[[], Awaitable[T]],
        is_enough: Callable[[T], bool],
        timeout_s: float,
    ) -> T:
        """What `look` returns, as soon as that is enough, or when the time is up.

        It is called at the start and after each wakeup of the topic, and at no other time.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while True:
            with self.ticket(topic) as ticket:
                seen = await look()
                if is_enough(seen) or not await ticket.wait(deadline - clock()):
                    return seen

    def is_waited_for(self, topic: str) -> bool:
        """Whether anybody waits for it."""
        return topic in self._tickets

    def tell(self, topics: Iterable[str]) -> None:
        """Wake all who wait for one of these."""
        for topic in topics:
            for ticket in self._tickets.get(topic, ()):
                ticket.tell()

    def tell_all(self) -> None:
        """Wake everybody, so that each looks again."""
        self.tell(list(self._tickets))

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(map(len, self._tickets.values()))
