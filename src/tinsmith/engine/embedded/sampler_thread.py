"""The sampling thread: calls from the event loop go in, in order, and events come back.

Between two steps it runs the calls made since the last one: admit, cancel, add and drop weights.
The event loop never waits for a step, and a step never waits for the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping

import torch

from tinsmith.engine.base import SampleEvent, SampleOutcome, SampleWork
from tinsmith.engine.embedded.batched_sampler import BatchedSampler
from tinsmith.errors import ClosedError

_log = logging.getLogger(__name__)

LONGEST_WAIT_S = 0.25
"""`events` returns an empty list after this time, so that its caller can do other work."""
OWNER_GRACE_S = 1.0
"""How long an owner still counts for fair sharing after its last sample."""


class SamplerThread:
    """Steps the samplers. Its methods are for the event loop that it was created on.

    Args:
        samplers: By base model name, aliases included.
        threads: Threads per computation.
    """

    def __init__(self, samplers: Mapping[str, BatchedSampler], threads: int) -> None:
        self._samplers = dict(samplers)
        self._stepped = {id(one): one for one in samplers.values()}
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._calls: list[Callable[[], None]] = []
        self._wakeup = threading.Condition()
        self._is_closing = False
        self._running: dict[str, tuple[int, BatchedSampler]] = {}
        """By work id, the admission number and the sampler; used by the thread."""
        self._admitted: dict[str, int] = {}
        """By work id, the admission number; used by the loop. Other events are of cancelled
        works."""
        self._seen: dict[str, float] = {}
        """When each owner last had a sample; used by the thread."""
        self._admissions = 0
        self._events: list[tuple[int, SampleEvent]] = []
        self._has_events = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="tinsmith-sampler", daemon=True)
        self._thread.start()

    @property
    def samples(self) -> int:
        """Number of admitted samples."""
        return len(self._admitted)

    def is_admitted(self, work_id: str) -> bool:
        """Whether the work is admitted."""
        return work_id in self._admitted

    def admit(self, work: SampleWork) -> None:
        """Admit a sample; no effect if its id is already admitted."""
        if work.work_id in self._admitted:
            return
        self._admissions += 1
        ticket = self._admitted[work.work_id] = self._admissions
        self.call(lambda: self._admit(work, ticket))

    def cancel(self, work_id: str) -> None:
        """Drop a sample; no events of it follow."""
        if self._admitted.pop(work_id, None) is not None:
            self.call(lambda: self._cancel(work_id))
            self._has_events.set()  # there may be nothing left to wait for

    def call(self, do: Callable[[], None]) -> None:
        """Run a function on the thread after all earlier ones. It must not raise."""
        with self._wakeup:
            self._calls.append(do)
            self._wakeup.notify()

    async def events(self) -> list[SampleEvent]:
        """The events since the last call; waits briefly for one if samples are admitted."""
        if self._admitted and not self._events:
            self._has_events.clear()
            try:
                await asyncio.wait_for(self._has_events.wait(), LONGEST_WAIT_S)
            except TimeoutError:
                return []
        events: list[SampleEvent] = []
        for ticket, event in self._events:
            if self._admitted.get(event.work_id) == ticket:
                events.append(event)
                if isinstance(event, SampleOutcome):
                    del self._admitted[event.work_id]
        self._events.clear()
        return events

    async def close(self) -> None:
        """Stop the thread after its current step. Admitted samples end without an event."""
        with self._wakeup:
            self._is_closing = True
            self._wakeup.notify()
        self._admitted.clear()
        self._has_events.set()
        await asyncio.to_thread(self._thread.join)

    # On the thread

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # per thread
        while True:
            with self._wakeup:
                while not (self._calls or self._running or self._is_closing):
                    self._wakeup.wait()
                calls, self._calls = self._calls, []
                if self._is_closing:
                    return
            for do in calls:
                do()
            owners = self._recent_owners()
            for sampler in self._stepped.values():
                if sampler.samples:
                    self._publish(self._step(sampler, owners))

    def _recent_owners(self) -> set[str]:
        """Owners that have samples, or had some a moment ago and may send more."""
        now = time.monotonic()
        for sampler in self._stepped.values():
            self._seen.update(dict.fromkeys(sampler.owners, now))
        self._seen = {owner: at for owner, at in self._seen.items() if now - at < OWNER_GRACE_S}
        return set(self._seen)

    def _step(self, sampler: BatchedSampler, owners: set[str]) -> list[SampleEvent]:
        try:
            return sampler.step(owners)
        except Exception as exc:  # noqa: BLE001 - the outcome of all samples
            # The culprit is unknown, and none of the samples would ever end.
            _log.exception("a step of the sampler failed with %d samples", sampler.samples)
            lost = [one for one, (_, drawn_by) in self._running.items() if drawn_by is sampler]
            with contextlib.suppress(Exception):  # its state may be inconsistent
                sampler.fail_all(exc)
            return [SampleOutcome(work_id=work_id, error=exc) for work_id in lost]

    def _admit(self, work: SampleWork, ticket: int) -> None:
        sampler = self._samplers[work.base_model]
        self._running[work.work_id] = ticket, sampler
        try:
            sampler.admit(work)
        except Exception as exc:  # noqa: BLE001 - this sample fails alone
            self._publish([SampleOutcome(work_id=work.work_id, error=exc)])

    def _cancel(self, work_id: str) -> None:
        running = self._running.pop(work_id, None)
        if running is not None:
            running[1].cancel(work_id)

    def _publish(self, events: list[SampleEvent]) -> None:
        published: list[tuple[int, SampleEvent]] = []
        for event in events:
            running = self._running.get(event.work_id)
            if running is None:
                continue
            published.append((running[0], event))
            if isinstance(event, SampleOutcome):
                del self._running[event.work_id]
        if published:
            try:
                self._loop.call_soon_threadsafe(self._receive, published)
            except RuntimeError:  # the event loop ended without closing the engine
                self._is_closing = True

    def _receive(self, published: list[tuple[int, SampleEvent]]) -> None:
        self._events += published
        self._has_events.set()


def closed() -> ClosedError:
    """The error of an engine that is not open."""
    return ClosedError("the engine is closed")
