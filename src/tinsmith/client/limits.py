"""When the next sample may be sent: pauses that the server asked for, seen by every sender at once.

A 429 pauses all samples of its key, whichever client object or thread sends them; a queue state of
`paused_…` seen while polling holds back new samples and lets polls go on. `Limiter.wait` is what
each sender awaits before it sends.

While 429s come in a row, and no sample is taken in between, short pauses grow, so that a server
that asks for none gets one. `refused_s` says how long that has lasted, for those who give up.

One `Limiter` stands for a service and a key, and every client of the process that uses both shares
it (`shared_limiter`): staging and production never do. It is kept as long as a client holds it.

**After a pause** the waiters do not all send at once. The k-th to leave waits `RAMP_STEP_S` ·
log2(1 + k / `RAMP_SENDS`) after the pause's end: `RAMP_SENDS` leave in the first step, twice as
many in the next, so that a server that is still full says so to a few and not to all. A fixed gap
between sends would make a long queue wait for ever; a random delay has no bound on the first
sends.

Times are those of a monotonic clock, so that a jump of the wall clock changes nothing. Knows
nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

import msgspec

from tinsmith.client import events
from tinsmith.client.base_url import base_url_parts
from tinsmith.client.forking import in_child
from tinsmith.client.retry import DEFAULT_BUDGET, RetryBudget
from tinsmith.client.settings import EMBEDDED, Secret

RAMP_SENDS = 10
RAMP_STEP_S = 0.1
_RAMP_STEPS = 40
"""After so many steps the ramp is over."""
_SHORTEST_SLEEP_S = 0.001
DEFAULT_QUEUE_PAUSE_S = 1.0
"""How long a paused queue holds back samples where the server does not say."""

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[object]]
PauseState = Literal["open", "rate_limited", "queue_paused"]


class Pause(msgspec.Struct, frozen=True):
    """Whether samples may be sent, until when not, and why not."""

    state: PauseState
    until: float
    """On the limiter's clock; in the past if the state is `open`."""
    reason: str


class _Deadlines(msgspec.Struct, frozen=True):
    """All that a limiter knows, replaced as a whole so that readers need no lock."""

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
        """What holds samples back now. Any thread may ask; nothing is waited for."""
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
        """A sample was refused with 429: none may be sent for `delay_s` from now.

        Only time ends this pause. Of several, the latest end counts.

        Args:
            delay_s: What the server asked for, or what is usual.
            reason: What it said why.
            sent_at: When the sample was sent; if that was before the last 429 came it says nothing
                new, and does not count as one more in a row.
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

    # Neither ends a pause; senders look at `refusals` first, which is nearly always 0.

    def sample_taken(self) -> None:
        """The server took a sample: the next 429 is the first of its row."""
        self.refusals = 0

    def sample_drawn(self) -> None:
        """A sample came back: there will be room, and so it is worth waiting for."""
        self._refused_since = self._clock()

    def refused_s(self) -> float:
        """For how long samples have been refused, and nothing has moved."""
        return self._clock() - self._refused_since if self.refusals else 0.0

    def queue_paused(self, delay_s: float | None, reason: str = "") -> None:
        """A poll said that the queue is paused: hold new samples back for so long.

        Args:
            delay_s: What the server asked for; None for a default.
            reason: What it said why.
        """
        now = self._clock()
        until = now + max(0.0, DEFAULT_QUEUE_PAUSE_S if delay_s is None else delay_s)
        with self._lock:
            if until > self._deadlines.queue_paused_until:
                self._replace(queue_paused_until=until, queue_reason=reason, queue_paused_at=now)
        if events.listeners:
            self._tell_begun("queue_paused", until - now, reason)

    def queue_active(self, asked_at: float) -> None:
        """A poll said that the queue moves, or brought a result: its pause is over.

        Args:
            asked_at: When that poll was sent; one sent before the pause was seen says nothing of
                it.
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
        """Return once a sample may be sent, at once if nothing holds it back.

        Whoever was asleep looks again when it wakes, for the pause may have grown meanwhile. Slots
        and bytes should be taken after this, so that nobody holds any while asleep.

        Args:
            late_s: Leave no sooner than so long after a pause.

        Returns:
            The limiter's time at which leave was given.
        """
        while True:
            now = self._clock()
            leave_at = self._deadlines.until
            if now >= leave_at:
                leave_at = self._take_turn(now, late_s)
                if now >= leave_at:
                    return now
                await self._sleep(leave_at - now)
                if self._deadlines.until <= self._clock():
                    return self._clock()
            else:
                await self._sleep_until_changed(leave_at - now)

    def leave(self, most: int, *, late_s: float = 0.0) -> int:
        """How many of `most` samples may be sent now; they count as sent.

        For whoever sends many. Nothing is waited for: where it gives 0, await `wait_leave`.

        Args:
            most: How many there are.
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
        """So many that were given leave have not been sent after all."""
        with self._lock:
            self._left_since_pause = max(0, self._left_since_pause - count)

    async def wait_leave(self, *, late_s: float = 0.0) -> None:
        """Sleep until `leave` may give leave to one more, or the pause has changed."""
        now = self._clock()
        with self._lock:
            ended_at, left = self._deadlines.until, self._left_since_pause
        if now < ended_at:
            await self._sleep_until_changed(ended_at - now)
        elif ended_at > -math.inf:
            leave_at = ended_at + max(late_s, RAMP_STEP_S * math.log2(1 + left / RAMP_SENDS))
            await self._sleep(max(_SHORTEST_SLEEP_S, leave_at - now))

    def _take_turn(self, now: float, late_s: float) -> float:
        """When this sender may leave, as one of those that a pause held up."""
        with self._lock:
            ended_at = self._deadlines.until
            if ended_at == -math.inf:
                return now
            turn = self._left_since_pause
            self._left_since_pause += 1
        if self._is_pause_told:
            self._is_pause_told = False
            events.tell(events.PauseEnded())
        return ended_at + max(late_s, RAMP_STEP_S * math.log2(1 + turn / RAMP_SENDS))

    async def _sleep_until_changed(self, delay_s: float) -> None:
        """Sleep, or less if the pause ends early."""
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
"""An address, the socket it is reached through, and the digest of a key."""


class _Shared:
    """The limiters that clients of this process share."""

    def __init__(self) -> None:
        self.begin_anew()
        in_child(self.begin_anew)

    def begin_anew(self) -> None:
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
    """The one limiter for this service and key in the process, made if there is none.

    The address counts with scheme, host, port and path, and with the socket if there is one, since
    then it says only what the service is called; of the key a digest alone is kept.
    """
    # Python's own digest of 64 bits, salted by the process unless PYTHONHASHSEED is set, and told
    # to nobody: hashlib is a megabyte.
    digest = hash("" if api_key is None else api_key.reveal())
    return _shared.get((_address(base_url), unix_socket, digest))


def _address(base_url: str) -> str:
    if base_url == EMBEDDED:
        return base_url
    parts = base_url_parts(base_url)
    return f"{parts.scheme}://{parts.host}:{parts.port}{parts.path}"
