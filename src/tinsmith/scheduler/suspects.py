"""Which command ends the engine, where one does so again and again.

An engine that is lost takes down whatever was in it, and all of that is run again. What was in it
at two losses is suspected: until it has ended, whatever enters the engine enters alone. Whoever is
then in it alone at another loss is to blame, and fails instead of being run once more; everybody
else goes on. An engine that is lost for other reasons, such as by the hand of its operator, gives
up nobody's command for that, unless it is the same one that is caught in it three times.

It outlives schedulers, each of which ends with a loss. Knows nothing of engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from tinsmith.errors import InternalServerError
from tinsmith.ledger.records import RequestId

SUSPECTED_AT = 2
"""At so many losses must a command have been in the engine to be tried alone."""
SUSPECTED_S = 600.0
"""For so long from when the engine works again are suspects tried alone, if they do not end
before."""


class Suspects:
    """What is in the engine, and what was when it was lost. For one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._inside: set[RequestId] = set()
        self._losses: dict[RequestId, int] = {}
        self._suspected: set[RequestId] = set()
        self._until = 0.0
        self._given_up: dict[RequestId, tuple[int, str]] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self.losses_in_a_row = 0
        """Since the engine last came back from training or sampling."""

    @property
    def are_apart(self) -> bool:
        """Whether the engine is given one command at a time for now."""
        return bool(self._suspected) and self._clock() < self._until

    def clear(self) -> None:
        """Nothing is in the engine any more: it was opened anew, or what it does is given up."""
        self._inside.clear()
        self._wake()

    @property
    def must_wait(self) -> bool:
        """Whether nothing may enter the engine before what is in it has left."""
        return bool(self._inside) and self.are_apart

    async def wait_alone(self) -> None:
        """Return when something may enter the engine; it has to before anything else is awaited."""
        while self.must_wait:
            loop = asyncio.get_running_loop()
            waiting = loop.create_future()
            self._waiting.append(waiting)
            # What is in the engine may stay there for longer than suspects are tried alone.
            timer = loop.call_later(self._until - self._clock(), self._wake)
            try:
                await waiting
            finally:
                timer.cancel()

    def enter(self, request_ids: Iterable[RequestId]) -> None:
        """These are given to the engine now."""
        self._inside.update(request_ids)

    def leave(self, request_ids: Iterable[RequestId]) -> None:
        """These have ended, in the engine or before they came to it: they are not to blame."""
        for request_id in request_ids:
            self._inside.discard(request_id)
            self._given_up.pop(request_id, None)  # it may have ended well, and be replayed
            if self._losses:
                self._losses.pop(request_id, None)
                self._suspected.discard(request_id)
        self._wake()

    def put_back(self, request_ids: Iterable[RequestId]) -> None:
        """These were not given to the engine after all, and are given to it later."""
        self._inside.difference_update(request_ids)
        self._wake()

    def note_return(self) -> None:
        """The engine has come back from training or sampling: it does not end with each command."""
        self.losses_in_a_row = 0

    def note_opened(self) -> None:
        """The engine works again: how long it was away says nothing of who is suspected."""
        self._until = self._clock() + SUSPECTED_S

    def note_loss(self, why: str) -> RequestId | None:
        """The engine was lost with all that is in it; returns who is to blame, if that is known."""
        self.losses_in_a_row += 1
        inside, self._inside = self._inside, set()
        if self._clock() >= self._until:
            self._losses.clear()  # too long ago to have the same reason
        self._until = self._clock() + SUSPECTED_S
        for request_id in inside:
            self._losses[request_id] = self._losses.get(request_id, 0) + 1
        before = self._suspected & self._losses.keys()
        self._suspected = {one for one, count in self._losses.items() if count >= SUSPECTED_AT}
        if len(inside) != 1 or not inside <= before:
            return None
        [to_blame] = inside
        self._suspected.discard(to_blame)
        self._given_up[to_blame] = self._losses.pop(to_blame), why
        return to_blame

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)

    def check(self, request_id: RequestId) -> None:
        """Raise `InternalServerError` for a command that is not to be run again."""
        given_up = self._given_up.get(request_id)
        if given_up is not None:
            losses, why = given_up
            raise InternalServerError(
                f"the engine was lost {losses} times while it ran {request_id}, the last time with "
                f"nothing else in it ({why}); the request is given up",
                remedy="ask for less at once, or look for the reason in the service's log",
            )
