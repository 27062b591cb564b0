"""Callers that wait on event loops of their own: woken in bursts, and let run where that helps.

A result that is settled on the background loop wakes the coroutine that waits for it on a loop of
the user's, in another thread. Those that are settled in one turn share a wake-up.

The background thread keeps the interpreter's lock, the GIL, for as long as it has something to do,
and so callers run only when all results that came together are delivered. `let_callers_run` wakes
them at once and gives the lock up until they have had their turn. A thread that computes may take
it instead, and then keeps it for a switch interval, 5 ms; so where callers did not come soon, they
are waited for seldom.

Knows nothing of futures.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import threading
import time
import weakref

from tinsmith.client.forking import in_child

_log = logging.getLogger(__name__)

TURN_S = 0.002
"""How long callers may take for their turn before we go on beside them."""
LATE_S = 0.003
"""A loop that begins later than so long after it was woken was held up by another thread."""
FIRST_REST_S, LONGEST_REST_S = 0.1, 2.0
"""For how long a loop that came late is not waited for: the first time, and at most, in a row."""


class _Here(threading.local):
    """What a thread has settled."""

    def __init__(self) -> None:
        self.due: list[Inbox] = []
        """Those to be woken, each once."""


_here = _Here()


def let_callers_run() -> None:
    """Wake those whose results were settled in this turn of this thread's loop, and let them run.

    Blocks until they have had a turn of their loops, for `TURN_S` at most.
    """
    for inbox in _taken_due():
        inbox.wake(gives_turn=True)


def _wake_callers() -> None:
    for inbox in _taken_due():
        inbox.wake()


def _taken_due() -> list[Inbox]:
    due, _here.due = _here.due, []
    return due


class Inbox:
    """Waiters of one event loop that can go on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._ready: collections.deque[asyncio.Future[None]] = collections.deque()
        self._is_woken = False
        # Held, but for the moment between the end of a turn and its being seen.
        self._turn = threading.Lock()
        self._turn.acquire()
        self._is_awaited = False
        self._came_at = 0.0
        self._rest_s = FIRST_REST_S
        self._rests_until = 0.0

    def put(self, waiter: asyncio.Future[None], _: object = None) -> None:
        """Let a waiter go on; the future that was settled may be given too."""
        # Append, then look at the flag; the loop clears the flag, then drains: nothing is missed.
        self._ready.append(waiter)
        if self._is_woken:
            return
        self._is_woken = True
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            self.wake()
        else:
            _here.due.append(self)
            here.call_soon(_wake_callers)  # whatever else is settled in this turn goes along

    def wake(self, *, gives_turn: bool = False) -> None:
        """Wake the loop; with `gives_turn`, wait until those who can go on have done so."""
        loop = self._loop()
        woken_at = time.monotonic()
        is_elsewhere = loop is not None and gives_turn and loop is not asyncio.get_running_loop()
        self._is_awaited = is_elsewhere and woken_at >= self._rests_until
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._drain)
        except RuntimeError:  # the loop is closed, and so nobody waits
            _log.debug("a result came for an event loop that is closed")
            self._is_woken = False  # nor is the next one kept
            self._ready.clear()  # waiters hold their loop, which would be kept for ever
        else:
            if self._is_awaited:
                self._await_turn(woken_at)

    def _await_turn(self, woken_at: float) -> None:
        self._turn.acquire(timeout=TURN_S)  # the wait is what gives the lock up
        self._is_awaited = False
        if 0 <= self._came_at - woken_at <= LATE_S:
            self._rest_s = FIRST_REST_S
        else:
            self._rests_until = time.monotonic() + self._rest_s
            self._rest_s = min(self._rest_s * 2, LONGEST_REST_S)

    def _drain(self) -> None:
        self._is_woken = False
        while self._ready:
            waiter = self._ready.popleft()
            if not waiter.done():
                waiter.set_result(None)
        if self._is_awaited:
            self._came_at = time.monotonic()
            asyncio.get_running_loop().call_soon(self._end_turn)  # behind those just let go on

    def _end_turn(self) -> None:
        # Nobody else releases it, so that it is still held below.
        if self._is_awaited and self._turn.locked():
            self._turn.release()


class _Inboxes:
    """The inbox of each event loop that waits for results."""

    def __init__(self) -> None:
        self.begin_anew()
        in_child(self.begin_anew)

    def begin_anew(self) -> None:
        self._of: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Inbox] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()

    def of(self, loop: asyncio.AbstractEventLoop) -> Inbox:
        with self._lock:
            inbox = self._of.get(loop)
            if inbox is None:
                inbox = self._of[loop] = Inbox(loop)
            return inbox


_inboxes = _Inboxes()


def inbox_of(loop: asyncio.AbstractEventLoop) -> Inbox:
    """The inbox of an event loop. From any thread."""
    return _inboxes.of(loop)
