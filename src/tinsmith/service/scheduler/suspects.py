"""Commands that crash the engine repeatedly, and engine calls that take too long.

An engine that is lost takes everything in it down, and all of that runs again. A command that was
in the engine at two losses is a suspect: until the suspects have ended, commands enter the engine
one at a time. The command that is alone in it at another loss is to blame, and fails instead of
running once more; all others continue. An engine that is lost for other reasons, such as an
operator's kill, fails no command, unless the same one is caught in it three times.

Replicas of an engine are lost separately: each has suspects of its own (`of`), and the commands of
other replicas neither wait nor are blamed.

It outlives schedulers, each of which ends with a loss. Knows nothing of engines.

`EngineWatchdog` reports calls that take too long. Nothing is stopped. An engine may be slow for
good reasons, and only the operator knows what is too long (`engine_silence_s`); the log, `/readyz`
and a metric report it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator

from tinsmith.errors import InternalServerError
from tinsmith.service.ledger.records import RequestId

SUSPECTED_AT = 2
"""At how many losses a command must have been in the engine to be a suspect."""
SUSPECTED_S = 600.0
"""How long suspects run alone at most, from when the engine runs again."""


class Suspects:
    """What is in the engine, and what was in it when it was lost. For one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._inside: set[RequestId] = set()
        self._losses: dict[RequestId, int] = {}
        self._suspected: set[RequestId] = set()
        self._until = 0.0
        self._given_up: dict[RequestId, tuple[int, str]] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._replicas: dict[str, Suspects] = {}
        self.losses_in_a_row = 0
        """Since the engine last returned from training or sampling."""

    def of(self, replica: str) -> Suspects:
        """Those of one replica. A replica without a name is the whole engine.

        `leave`, `put_back`, `clear` and `check` of the whole engine cover all replicas.
        """
        if not replica:
            return self
        found = self._replicas.get(replica)
        if found is None:
            found = self._replicas[replica] = Suspects(self._clock)
        return found

    @property
    def are_apart(self) -> bool:
        """Whether commands enter the engine one at a time for now."""
        return bool(self._suspected) and self._clock() < self._until

    def clear(self) -> None:
        """Nothing is in the engine any more: it was reopened, or its work is abandoned."""
        self._inside.clear()
        self._wake()
        for one in self._replicas.values():
            one.clear()

    @property
    def must_wait(self) -> bool:
        """Whether a command has to wait until the one in the engine has left."""
        return bool(self._inside) and self.are_apart

    async def wait_alone(self) -> None:
        """Return when a command may enter the engine; call `enter` before the next await."""
        while self.must_wait:
            loop = asyncio.get_running_loop()
            waiting = loop.create_future()
            self._waiting.append(waiting)
            # What is in the engine may stay there for longer than suspects run alone.
            timer = loop.call_later(self._until - self._clock(), self._wake)
            try:
                await waiting
            finally:
                timer.cancel()

    def enter(self, request_ids: Iterable[RequestId]) -> None:
        """These commands enter the engine now."""
        self._inside.update(request_ids)

    def leave(self, request_ids: Iterable[RequestId]) -> None:
        """These commands have ended, in the engine or before: they are not to blame."""
        request_ids = list(request_ids)
        for one in self._replicas.values():
            one.leave(request_ids)
        for request_id in request_ids:
            self._inside.discard(request_id)
            self._given_up.pop(request_id, None)  # it may have succeeded, and be replayed
            if self._losses:
                self._losses.pop(request_id, None)
                self._suspected.discard(request_id)
        self._wake()

    def put_back(self, request_ids: Iterable[RequestId]) -> None:
        """These commands did not enter the engine after all, and will later."""
        request_ids = list(request_ids)
        for one in self._replicas.values():
            one.put_back(request_ids)
        self._inside.difference_update(request_ids)
        self._wake()

    def note_return(self) -> None:
        """The engine has returned from training or sampling: it does not crash each time."""
        self.losses_in_a_row = 0

    def note_drawn(self, request_id: RequestId) -> None:
        """A sample has ended: whichever replica it was in does not crash each time."""
        if request_id in self._inside:
            self.note_return()
        for one in self._replicas.values():
            one.note_drawn(request_id)

    def note_opened(self) -> None:
        """The engine runs again: the time of suspicion starts only now."""
        self._until = self._clock() + SUSPECTED_S

    def note_loss(self, why: str) -> RequestId | None:
        """The engine was lost; returns the command that is to blame, if that is known."""
        self.losses_in_a_row += 1
        inside, self._inside = self._inside, set()
        if self._clock() >= self._until:
            self._losses.clear()  # too long ago to have the same cause
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
        """Raise `InternalServerError` for a command that must not run again."""
        for one in self._replicas.values():
            one.check(request_id)
        given_up = self._given_up.get(request_id)
        if given_up is not None:
            losses, why = given_up
            raise InternalServerError(
                f"the engine crashed {losses} times while it ran {request_id}, the last time with "
                f"nothing else in it ({why}); the request is not run again",
                remedy="send smaller requests, or look for the cause in the service's log",
            )


_log = logging.getLogger(__name__)


class EngineWatchdog:
    """The engine calls that are running. For one event loop.

    Args:
        most_s: How long a call may take before it is reported; 0 for no limit.
        clock: Seconds that only run forward.
    """

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s = most_s
        self._clock = clock
        self._numbers = itertools.count()
        self._calls: dict[int, tuple[float, str]] = {}
        self._reported: int | None = None

    @contextlib.contextmanager
    def call(self, what: str) -> Iterator[None]:
        """Watch an engine call while the block runs; `what` names it in reports."""
        number = next(self._numbers)
        self._calls[number] = self._clock(), what
        try:
            yield
        finally:
            del self._calls[number]

    def longest_s(self) -> float:
        """How long the oldest running call has taken so far; 0 if none is running."""
        since = min((since for since, _ in self._calls.values()), default=None)
        return 0.0 if since is None else self._clock() - since

    def problem(self) -> str | None:
        """What to report if a call takes too long; each such call is logged once."""
        if not self._most_s or self.longest_s() < self._most_s:
            return None
        number, (since, what) = min(self._calls.items(), key=lambda item: item[1][0])
        if self._reported != number:
            self._reported = number
            _log.error("the engine has not returned for %g s from %s", self._most_s, what)
        return f"the engine has not returned for {self._clock() - since:.0f} s from {what}"
