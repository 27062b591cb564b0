"""In which order a model's calls leave, and which numbers they carry.

A call takes its **place** in the model's line when it is made, on the caller's thread: calls made
in order leave in order. It takes its **numbers** when its turn comes, just before it is sent: a
call that is cancelled while it waits has none, so that no number is missing on the wire. The turn
passes on when the service has acknowledged the call, or the call has failed; results are awaited
apart.

A place may also be held for a call that is not ready yet, such as the second half of a custom loss:
whoever stands behind it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

from tinsmith.client.waits import say

FIRST_NUMBER = 1
"""Number 0 is the creation of the model."""


class Place:
    """A call's position in its line."""

    __slots__ = ("_line", "ticket")

    def __init__(self, line: Line, ticket: int) -> None:
        self._line = line
        self.ticket = ticket

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[Line]:
        """Wait for the turn, and pass it on when the block ends, however it ends."""
        try:
            await self._line.wait_for_turn(self.ticket)
            yield self._line
        finally:
            self.leave()

    def leave(self) -> None:
        """Give the place up; whoever is next need not wait for it. On the line's event loop."""
        self._line.leave(self.ticket)


class Line:
    """The calls of one model that have not left yet.

    Places are taken on any thread; all the rest happens on one event loop.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_ticket = 0
        self._serving = 0
        self._left: set[int] = set()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._next_number = FIRST_NUMBER

    def take_place(self) -> Place:
        """The next place; call it on the thread and at the moment whose order counts."""
        return self.take_places(1)[0]

    def take_places(self, count: int) -> list[Place]:
        """Places directly behind each other."""
        with self._lock:
            first = self._next_ticket
            self._next_ticket += count
        return [Place(self, first + index) for index in range(count)]

    async def wait_for_turn(self, ticket: int) -> None:
        """Return when all before this ticket have left."""
        if self._serving == ticket:
            return
        ahead = ticket - self._serving
        say(f"queued behind {ahead} call{'s' if ahead > 1 else ''}")
        turn = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            await turn
        finally:
            self._waiting.pop(ticket, None)
        say("")

    def leave(self, ticket: int) -> None:
        """Mark a ticket as gone and let the next one in. Doing it again changes nothing."""
        if ticket < self._serving:
            return
        self._left.add(ticket)
        while self._serving in self._left:
            self._left.discard(self._serving)
            self._serving += 1
        turn = self._waiting.get(self._serving)
        if turn is not None and not turn.done():
            turn.set_result(None)

    def take_numbers(self, count: int) -> range:
        """The next numbers of the model, without a gap; for whoever's turn it is."""
        first = self._next_number
        self._next_number += count
        return range(first, self._next_number)

    def give_back_numbers(self, first: int) -> None:
        """Take numbers from `first` on as never given out; for whoever's turn it is."""
        self._next_number = first

    @property
    def length(self) -> int:
        """How many places have not left."""
        return self._next_ticket - self._serving - len(self._left)
