"""The queues: each model's commands, waiting samples, and which of them may run next.

The commands of one model run in the order in which their client numbered them, in whatever order
they arrive; commands of different models are independent. While a command of a queue runs, nothing
else of that queue does. `batching.py` picks from the heads of the queues.

A missing number blocks its queue. Once it has been waited for long enough, or is known to be
refused, `skip_to` moves on; the ledger has to record that first.

Three events say that there is something to do, so that each loop wakes only for its own work. A
loop clears its event before it looks. Time is a parameter. Knows nothing of engines, HTTP or
databases.

**Fair shares**: between tenants by what they use, between training and sampling by time. Tenants:
each has a count of what it was given, and the one with the lowest count is next. A tenant that
comes back after a pause starts level with the lowest active one, so that a pause is neither saved
up nor held against it. This is start-time fair queueing with equal weights: each of n active
tenants gets 1/n, whatever the number and size of their commands, and a tenant with a single command
is served next.

Training and sampling: on an engine that does one thing at a time, a batch may take seconds and a
sampler step milliseconds. Alternating would leave the sampler one part in a hundred; instead both
get equal time while both have work.

**Samples** wait in a `SampleQueue` to be admitted to the engine. Samples of one tenant are admitted
in the order in which they arrived, tenants by fair shares. How much a sample will draw is unknown
before it is read, so it is charged for its size plus a fixed amount.

No tenant may fill the engine. Each may hold `SLOTS_PER_FREE` times as many of its slots as stay
free, and the last free slot goes to a tenant that holds none. So a tenant alone gets eight ninths
of the slots, each gets fewer the more tenants there are, and a newcomer always finds a slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from typing import Literal

import msgspec

from tinsmith.service.ledger.records import Command, QueueId, RequestId, TenantId

PASSES = frozenset({"forward", "forward_backward"})
STEPS = frozenset({"optim_step"})
TRAINING = PASSES | STEPS
"""Kinds that the engine runs in batches."""


class SequenceGap(msgspec.Struct, frozen=True):
    """A queue whose next number has not arrived."""

    queue_id: QueueId
    missing: int
    """The first number that is missing."""
    found: int
    """The lowest number that is waiting."""
    since: float
    """When the queue began to wait."""


class CommandQueues:
    """All queues.

    Attributes:
        training_ready: Set when the head of a queue is a training command that may run.
        other_ready: Set when the head of a queue is any other command that may run.
        gap_found: Set when a queue begins to wait for a missing number.
    """

    def __init__(self) -> None:
        self.training_ready = asyncio.Event()
        self.other_ready = asyncio.Event()
        self.gap_found = asyncio.Event()
        self._queues: dict[QueueId, _Queue] = {}
        self._ready: dict[QueueId, None] = {}  # in the order in which they became so
        self._gaps: set[QueueId] = set()
        self._count = 0

    def __len__(self) -> int:
        """How many commands are waiting or running."""
        return self._count

    def knows(self, queue_id: QueueId) -> bool:
        """Whether a queue is open."""
        return queue_id in self._queues

    def begin(self, queue_id: QueueId, position: int, done: Iterable[int] = ()) -> None:
        """Open a queue at its next number; `done` are later numbers that have ended already."""
        if queue_id not in self._queues:
            self._queues[queue_id] = made = _Queue(position)
            made.done.update(number for number in done if number >= position)
            made.advance()

    def add(self, command: Command, now: float) -> bool:
        """Add a command to its open queue; False if its number is done or taken."""
        queue_id = self._queues[command.queue_id]
        number = command.seq_id
        if number < queue_id.next or number in queue_id.waiting or number in queue_id.done:
            return False
        queue_id.waiting[number] = command
        heapq.heappush(queue_id.numbers, number)
        self._count += 1
        self._look(command.queue_id, now)
        return True

    def ready(self) -> list[QueueId]:
        """The queues whose next command may run; those that have been ready longest come first."""
        return list(self._ready)

    def head(self, queue_id: QueueId) -> Command:
        """The next command of a ready queue."""
        one = self._queues[queue_id]
        return one.waiting[one.next]

    def run_of(self, queue_id: QueueId, kinds: frozenset[str]) -> list[Command]:
        """The next commands of a ready queue, up to the first of another kind."""
        one, found = self._queues[queue_id], list[Command]()
        while (command := one.waiting.get(one.next + len(found))) and command.kind in kinds:
            found.append(command)
        return found

    def start(self, queue_id: QueueId) -> None:
        """Mark a queue as busy: one of its commands, or a snapshot, is running."""
        self._queues[queue_id].is_busy = True
        self._ready.pop(queue_id, None)

    def hold(self, queue_id: QueueId) -> None:
        """Let no command of a queue start until `release`; one that runs is not stopped."""
        one = self._queues.get(queue_id)
        if one is not None:
            one.is_held = True
            self._ready.pop(queue_id, None)

    def release(self, queue_id: QueueId, now: float) -> None:
        """Let the commands of a queue start again."""
        one = self._queues.get(queue_id)
        if one is not None and one.is_held:
            one.is_held = False
            self._look(queue_id, now)

    async def wait_idle(self, queue_id: QueueId) -> None:
        """Return when nothing of a queue is running. Hold it before, or it may run again."""
        while self.is_busy(queue_id):
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queues[queue_id].idle.append(waiting)
            await waiting

    def finish(self, queue_id: QueueId, commands: Iterable[Command], now: float) -> None:
        """Mark a queue as idle again, and these commands as done."""
        one = self._queues.get(queue_id)
        if one is None:
            return
        for command in commands:
            self._count -= one.take(command.seq_id)
        one.is_busy = False
        one.advance()
        one.tell_idle()
        self._look(queue_id, now)

    def drop(self, queue_id: QueueId, number: int, now: float) -> bool:
        """Remove a command that ended before it ran; False if it is not waiting or is running."""
        one = self._queues.get(queue_id)
        if one is None or number not in one.waiting or (one.is_busy and number == one.next):
            return False
        self._count -= one.take(number)
        one.advance()
        self._look(queue_id, now)
        return True

    def gaps(self) -> list[SequenceGap]:
        """The queues that wait for a missing number."""
        found = []
        for queue_id in self._gaps:
            one = self._queues[queue_id]
            lowest = one.lowest()
            if lowest is not None:
                found.append(SequenceGap(queue_id, one.next, lowest, one.gap_since))
        return found

    def skip_to(self, queue_id: QueueId, position: int, now: float) -> None:
        """Continue with a number; missing ones below it count as done."""
        one = self._queues.get(queue_id)
        if one is not None and not one.is_busy and position > one.next:
            one.next = position
            one.advance()
            self._look(queue_id, now)

    def position(self, queue_id: QueueId) -> int:
        """The next number of a queue: all below are done."""
        return self._queues[queue_id].next

    def is_busy(self, queue_id: QueueId) -> bool:
        """Whether a command of a queue, or its snapshot, is running."""
        return queue_id in self._queues and self._queues[queue_id].is_busy

    def waiting(self, queue_id: QueueId) -> list[Command]:
        """The commands of a queue, by number."""
        one = self._queues.get(queue_id)
        return [] if one is None else [one.waiting[number] for number in sorted(one.waiting)]

    def forget(self, queue_id: QueueId) -> None:
        """Close a queue and drop its waiting commands."""
        one = self._queues.pop(queue_id, None)
        self._ready.pop(queue_id, None)
        self._gaps.discard(queue_id)
        if one is not None:
            self._count -= len(one.waiting)
            one.tell_idle()

    def count(self) -> int:
        """How many queues are open."""
        return len(self._queues)

    def _look(self, queue_id: QueueId, now: float) -> None:
        """Note whether a queue is ready or has a gap, and wake the loop that is concerned."""
        one = self._queues[queue_id]
        is_there = one.next in one.waiting
        if is_there and not one.is_busy and not one.is_held:
            self._ready.setdefault(queue_id)
            is_training = one.waiting[one.next].kind in TRAINING
            (self.training_ready if is_training else self.other_ready).set()
        else:
            self._ready.pop(queue_id, None)
        if is_there or one.is_busy or one.is_held or not one.waiting:
            self._gaps.discard(queue_id)
        elif queue_id not in self._gaps:
            self._gaps.add(queue_id)
            one.gap_since = now
            self.gap_found.set()


class _Queue:
    """One queue."""

    __slots__ = ("done", "gap_since", "idle", "is_busy", "is_held", "next", "numbers", "waiting")

    def __init__(self, position: int) -> None:
        self.next = position
        self.waiting: dict[int, Command] = {}
        self.numbers: list[int] = []  # a heap of the waiting ones, and of some that were removed
        self.done: set[int] = set()
        self.is_busy = False
        self.is_held = False
        self.idle: list[asyncio.Future[None]] = []
        self.gap_since = 0.0

    def tell_idle(self) -> None:
        """Wake whoever waits until nothing runs."""
        idle, self.idle = self.idle, []
        for one in idle:
            if not one.done():
                one.set_result(None)

    def take(self, number: int) -> int:
        """Mark a number as done; returns how many waiting commands that removes."""
        self.done.add(number)
        return 1 if self.waiting.pop(number, None) is not None else 0

    def advance(self) -> None:
        """Move past the numbers that are done."""
        while self.next in self.done:
            self.done.discard(self.next)
            self.next += 1
        self.done = {number for number in self.done if number > self.next} if self.done else set()

    def lowest(self) -> int | None:
        """The lowest waiting number."""
        while self.numbers and self.numbers[0] not in self.waiting:
            heapq.heappop(self.numbers)
        return self.numbers[0] if self.numbers else None


Kind = Literal["training", "sampling"]
_OTHER: dict[Kind, Kind] = {"training": "sampling", "sampling": "training"}


class TenantShares:
    """What each tenant was given of one resource."""

    def __init__(self) -> None:
        self._given: dict[TenantId, float] = {}
        self._level = 0.0

    def given(self, tenant: TenantId) -> float:
        """What counts as given to a tenant: the one with the least is next."""
        return max(self._given.get(tenant, 0.0), self._level)

    def next(self, waiting: Collection[TenantId]) -> TenantId:
        """The waiting tenant that was given least; of equals, the first."""
        return min(waiting, key=self.given)

    def charge(self, tenant: TenantId, amount: float) -> None:
        """Count what a tenant got.

        Only this raises the level: a tenant that was next and got nothing keeps what it is owed.
        """
        self._level = self.given(tenant)
        self._given[tenant] = self._level + amount


class EngineArbiter:
    """Divides an engine that does one thing at a time. For one event loop.

    Args:
        is_shared: False if the engine samples beside training; then nobody waits.
        clock: Seconds that only run forward.
    """

    def __init__(self, *, is_shared: bool = True, clock: Callable[[], float] = time.monotonic):
        self._is_shared = is_shared
        self._clock = clock
        self._used_s: dict[Kind, float] = {"training": 0.0, "sampling": 0.0}
        self._active: set[Kind] = set()
        self._running: Kind | None = None
        self._changed = asyncio.Condition()

    @property
    def used_s(self) -> dict[Kind, float]:
        """How much engine time each kind has had."""
        return dict(self._used_s)

    async def set_active(self, kind: Kind, is_active: bool) -> None:
        """Say whether there is work of a kind. A kind without work is not waited for."""
        if (kind in self._active) == is_active:
            return
        async with self._changed:
            if is_active:
                self._active.add(kind)
                other = _OTHER[kind]
                if other in self._active:
                    # Time that one kind had alone is not owed to the other.
                    level = max(self._used_s.values())
                    self._used_s[kind] = self._used_s[other] = level
            else:
                self._active.discard(kind)
            self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def reserve(self, kind: Kind) -> AsyncIterator[None]:
        """Wait for the engine, keep it for the block, and count the time."""
        if not self._is_shared:
            yield
            return
        async with self._changed:
            await self._changed.wait_for(lambda: self._may_run(kind))
            self._running = kind
        started = self._clock()
        try:
            yield
        finally:
            self._used_s[kind] += self._clock() - started
            self._running = None
            async with self._changed:
                self._changed.notify_all()

    def _may_run(self, kind: Kind) -> bool:
        if self._running is not None:
            return False
        other = _OTHER[kind]
        return other not in self._active or self._used_s[kind] <= self._used_s[other]


SAMPLE_TOKENS = 256
"""What a sample is charged beside its prompt, whatever it draws."""
BYTES_PER_TOKEN = 5
"""Of a prompt that is written as JSON."""
SLOTS_PER_FREE = 8
"""How many slots of the engine a tenant may hold for each that is free."""


class SampleQueue:
    """Waiting samples, by tenant.

    Attributes:
        changed: Set when a sample was added. The loop that admits samples clears it, and sets it
            when the engine has room again.
    """

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self._tenants: dict[TenantId, OrderedDict[RequestId, Command]] = {}
        self._tenant_of: dict[RequestId, TenantId] = {}
        self._shares = TenantShares()

    def __len__(self) -> int:
        return len(self._tenant_of)

    def add(self, command: Command) -> None:
        """Add a sample, unless it is waiting already."""
        request_id = command.request_id
        if request_id not in self._tenant_of:
            self._tenants.setdefault(command.tenant_id, OrderedDict())[request_id] = command
            self._tenant_of[request_id] = command.tenant_id
            self.changed.set()

    def drop(self, request_id: RequestId) -> bool:
        """Remove a cancelled sample; False if it is not waiting."""
        tenant = self._tenant_of.get(request_id)
        if tenant is None:
            return False
        self._take(tenant, request_id)
        return True

    def take(self, most: int, *, slots: int, held: Counter[TenantId]) -> list[Command]:
        """Remove the next samples, at most `most`, and return them.

        Args:
            most: How many samples to take.
            slots: How many samples the engine holds.
            held: How many of those each tenant has.
        """
        chosen: list[Command] = []
        held = held.copy()
        while len(chosen) < most and (free := slots - held.total()) > 0:
            waiting = [one for one in self._tenants if held[one] <= SLOTS_PER_FREE * (free - 1)]
            if not waiting:
                break
            tenant = self._shares.next(waiting)
            command = self._take(tenant, next(iter(self._tenants[tenant])))
            self._shares.charge(tenant, SAMPLE_TOKENS + command.payload_bytes / BYTES_PER_TOKEN)
            held[tenant] += 1
            chosen.append(command)
        return chosen

    def waiting_since(self, before: float) -> set[QueueId]:
        """The samplers with samples that arrived before a moment and are still waiting."""
        return {
            command.queue_id
            for waiting in self._tenants.values()
            for command in waiting.values()
            if command.created_at < before
        }

    def _take(self, tenant: TenantId, request_id: RequestId) -> Command:
        command = self._tenants[tenant].pop(request_id)
        del self._tenant_of[request_id]
        if not self._tenants[tenant]:
            del self._tenants[tenant]
        return command
