"""When the next request may be sent: pauses that the server asked for, and budgets in flight.

A 429 pauses all samples of its key, whichever client object or thread sends them. A queue state of
`paused_…` in the answer to a poll delays new samples, but not polls. A sender asks `Limiter.leave`
how many samples it may send now, or awaits `Limiter.wait` for one.

Short pauses grow while 429s come in a row and no sample is accepted in between, so that a server
that asks for no delay gets one. `refused_s` says how long that has lasted, for senders that give
up.

There is one `Limiter` per service and key, shared by every client of the process that uses both
(`shared_limiter`) and kept as long as one of them exists.

**After a pause** the waiting senders do not all send at once. The k-th sample leaves `RAMP_STEP_S`
· log2(1 + k / `RAMP_SENDS`) after the end of the pause: `RAMP_SENDS` in the first step, twice as
many in the next, so that a server that is still full refuses a few samples and not all of them. A
fixed gap between sends would delay a long queue without bound; with a random delay the number of
first sends would have none.

Times are those of a monotonic clock, so that a jump of the wall clock changes nothing. Knows
nothing of HTTP.

A `Budget` limits how many calls or bytes are in flight at once. Waiters are served in order, one
wake-up each. A body larger than the whole budget is sent alone, when nothing else is in flight;
nothing else ever exceeds the budget.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

import msgspec

from tinsmith.client import events
from tinsmith.client.forking import in_child
from tinsmith.client.retry import DEFAULT_BUDGET, RetryBudget
from tinsmith.client.settings import EMBEDDED, Secret, base_url_parts
from tinsmith.errors import ValidationError

RAMP_SENDS = 10
RAMP_STEP_S = 0.1
_RAMP_STEPS = 40
"""After so many steps the ramp is over."""
_SHORTEST_SLEEP_S = 0.001
DEFAULT_QUEUE_PAUSE_S = 1.0
"""How long a paused queue delays samples where the server does not say."""

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[object]]
PauseState = Literal["open", "rate_limited", "queue_paused"]


class Pause(msgspec.Struct, frozen=True):
    """Whether samples are paused, until when, and why."""

    state: PauseState
    until: float
    """On the limiter's clock; in the past if the state is `open`."""
    reason: str


class _Deadlines(msgspec.Struct, frozen=True):
    """The state of a limiter, replaced as a whole so that readers need no lock."""

    rate_limited_until: float = -math.inf
    rate_limit_reason: str = ""
    queue_paused_until: float = -math.inf
    queue_reason: str = ""
    queue_paused_at: float = -math.inf

    @property
    def until(self) -> float:
        return max(self.rate_limited_until, self.queue_paused_until)


class Limiter:
    """The pauses of one base URL and key, for senders on any thread and event loop."""

    def __init__(self, *, clock: Clock = time.monotonic, sleep: Sleep = asyncio.sleep) -> None:
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()  # held for a few assignments, never across a wait
        self._deadlines = _Deadlines()
        self._left_since_pause = 0
        self._is_pause_told = False
        self.refusals = 0
        """How many 429s came in a row; of those that were sent together one counts."""
        self._refused_since = -math.inf
        self._refused_at = -math.inf
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()

    def pause(self) -> Pause:
        """The current pause. From any thread; does not block."""
        known, now = self._deadlines, self._clock()
        if now < known.rate_limited_until and known.until == known.rate_limited_until:
            return Pause("rate_limited", known.rate_limited_until, known.rate_limit_reason)
        if now < known.queue_paused_until:
            return Pause("queue_paused", known.queue_paused_until, known.queue_reason)
        return Pause("open", known.until, "")

    def rate_limited(
        self,
        delay_s: float,
        reason: str = "",
        *,
        sent_at: float = math.inf,
        budget: RetryBudget = DEFAULT_BUDGET,
    ) -> None:
        """A sample was refused with 429: send none for `delay_s` from now.

        Only time ends this pause. Of several, the one that ends last counts.

        Args:
            delay_s: What the server asked for, or a default.
            reason: The server's reason.
            sent_at: When the sample was sent. If that was before the last 429 arrived, this one is
                not counted as another in a row.
            budget: Bounds the delay; see `RetryBudget.wait_s`.
        """
        now = self._clock()
        with self._lock:
            if not self.refusals:
                self._refused_since = now
            if not self.refusals or sent_at > self._refused_at:
                self.refusals += 1
                self._refused_at = now
            delay_s = budget.wait_s(self.refusals - 1, max(0.0, delay_s))
            until = now + delay_s
            if until > self._deadlines.rate_limited_until:
                self._replace(rate_limited_until=until, rate_limit_reason=reason)
        if events.listeners:
            self._tell_begun("rate_limited", delay_s, "429")

    # Neither ends a pause; senders check `refusals` first, which is nearly always 0.

    def sample_taken(self) -> None:
        """The server accepted a sample: the next 429 is the first in a row."""
        self.refusals = 0

    def sample_drawn(self) -> None:
        """A sample returned: the server makes progress, so waiting may help."""
        self._refused_since = self._clock()

    def refused_s(self) -> float:
        """How long samples have been refused without any progress."""
        return self._clock() - self._refused_since if self.refusals else 0.0

    def queue_paused(self, delay_s: float | None, reason: str = "") -> None:
        """A poll said that the queue is paused: send no new samples for so long.

        Args:
            delay_s: What the server asked for; None for a default.
            reason: The server's reason.
        """
        now = self._clock()
        until = now + max(0.0, DEFAULT_QUEUE_PAUSE_S if delay_s is None else delay_s)
        with self._lock:
            if until > self._deadlines.queue_paused_until:
                self._replace(queue_paused_until=until, queue_reason=reason, queue_paused_at=now)
        if events.listeners:
            self._tell_begun("queue_paused", until - now, reason)

    def queue_active(self, asked_at: float) -> None:
        """A poll said that the queue is active, or brought a result: end its pause.

        Args:
            asked_at: When that poll was sent; one sent before the pause was seen does not end it.
        """
        known = self._deadlines
        if known.queue_paused_until <= self._clock() or asked_at <= known.queue_paused_at:
            return
        with self._lock:
            if asked_at > self._deadlines.queue_paused_at:
                self._replace(queue_paused_until=self._clock())
        self._wake_waiters()

    def _tell_begun(
        self, state: Literal["rate_limited", "queue_paused"], for_s: float, reason: str
    ) -> None:
        if not self._is_pause_told:
            self._is_pause_told = True
            events.tell(events.PauseBegun(state=state, for_s=for_s, reason=reason))

    def _replace(self, **changes: float | str) -> None:
        self._deadlines = msgspec.structs.replace(self._deadlines, **changes)
        self._left_since_pause = 0

    async def wait(self, *, late_s: float = 0.0) -> float:
        """Wait until a sample may be sent, and count it as sent.

        Take slots and bytes after this, so that none are held during a pause.

        Args:
            late_s: Leave no sooner than so long after a pause.

        Returns:
            The limiter's time at which it may leave.
        """
        while not self.leave(1, late_s=late_s):
            await self.wait_leave(late_s=late_s)
        return self._clock()

    def leave(self, most: int, *, late_s: float = 0.0) -> int:
        """How many of `most` samples may be sent now; they count as sent.

        Does not wait: where it returns 0, await `wait_leave`.

        Args:
            most: How many are queued.
            late_s: None of them leaves sooner than so long after a pause.
        """
        if self._deadlines.until == -math.inf:
            return most
        now = self._clock()
        with self._lock:
            ended_at = self._deadlines.until
            if now < ended_at + late_s:
                return 0
            steps = min((now - ended_at) / RAMP_STEP_S, _RAMP_STEPS)
            allowed = int(RAMP_SENDS * (2**steps - 1)) + 1 - self._left_since_pause
            leaving = most if steps == _RAMP_STEPS else min(most, max(0, allowed))
            self._left_since_pause += leaving
        if leaving and self._is_pause_told:
            self._is_pause_told = False
            events.tell(events.PauseEnded())
        return leaving

    def unused(self, count: int) -> None:
        """Give back what `leave` allowed and was not sent after all."""
        with self._lock:
            self._left_since_pause = max(0, self._left_since_pause - count)

    async def wait_leave(self, *, late_s: float = 0.0) -> None:
        """Sleep until `leave` may allow one more, or the pause has changed."""
        now = self._clock()
        with self._lock:
            ended_at, left = self._deadlines.until, self._left_since_pause
        if now < ended_at:
            await self._sleep_until_changed(ended_at - now)
        elif ended_at > -math.inf:
            leave_at = ended_at + max(late_s, RAMP_STEP_S * math.log2(1 + left / RAMP_SENDS))
            await self._sleep(max(_SHORTEST_SLEEP_S, leave_at - now))

    async def _sleep_until_changed(self, delay_s: float) -> None:
        """Sleep until the pause ends, if it ends early."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        entry = (loop, ended)
        self._waiters.add(entry)
        asleep = asyncio.ensure_future(self._sleep(delay_s))
        try:
            await asyncio.wait({asleep, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiters.discard(entry)
            ended.cancel()
            asleep.cancel()

    def _wake_waiters(self) -> None:
        for loop, ended in list(self._waiters):
            if not loop.is_closed():
                loop.call_soon_threadsafe(_end, ended)


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_Key: TypeAlias = tuple[str, str | None, int]
"""Address, Unix socket, and the digest of a key."""


class _Shared:
    """The limiters of this process."""

    def __init__(self) -> None:
        self.reset()
        in_child(self.reset)

    def reset(self) -> None:
        self.limiters: weakref.WeakValueDictionary[_Key, Limiter] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def get(self, key: _Key) -> Limiter:
        with self._lock:
            limiter = self.limiters.get(key)
            if limiter is None:
                limiter = self.limiters[key] = Limiter()
            return limiter


_shared = _Shared()


def shared_limiter(
    base_url: str, api_key: Secret | None, unix_socket: str | None = None
) -> Limiter:
    """The limiter of this process for a service and key.

    The address counts with scheme, host, port and path, and with the Unix socket if there is one;
    of the key only a digest is kept.
    """
    # Python's own 64-bit hash, salted per process unless PYTHONHASHSEED is set: hashlib takes a
    # megabyte.
    digest = hash("" if api_key is None else api_key.reveal())
    return _shared.get((_address(base_url), unix_socket, digest))


def _address(base_url: str) -> str:
    if base_url == EMBEDDED:
        return base_url
    parts = base_url_parts(base_url)
    return f"{parts.scheme}://{parts.host}:{parts.port}{parts.path}"


class Budget:
    """An amount that calls take from and give back. For one event loop."""

    def __init__(self, total: int) -> None:
        if total <= 0:
            raise ValidationError(f"a budget must be positive, not {total}")
        self.total = total
        self._used = 0
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    @property
    def used(self) -> int:
        """How much is in use."""
        return self._used

    def taken(self, amount: int = 1) -> Taken:
        """Hold an amount while the block lasts, waiting for it if need be."""
        return Taken(self, amount)

    async def take(self, amount: int) -> None:
        """Wait for an amount; it must be given back."""
        if self.take_nowait(amount):
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (amount, waiter)
        self._waiting.append(entry)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give_back(amount)  # it was given to us as we were cancelled
            else:
                with contextlib.suppress(ValueError):  # it was already skipped
                    self._waiting.remove(entry)
                self._serve()
            raise

    def take_nowait(self, amount: int) -> bool:
        """Take an amount if it is available and there are no waiters."""
        is_there = not self._waiting and self._fits(amount)
        self._used += amount if is_there else 0
        return is_there

    def _fits(self, amount: int) -> bool:
        return self._used == 0 or self._used + amount <= self.total

    def give_back(self, amount: int) -> None:
        """Rewaiter an amount, and serve the waiters."""
        self._used -= amount
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            amount, waiter = self._waiting.popleft()
            if not waiter.done():
                self._used += amount
                waiter.set_result(None)


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
