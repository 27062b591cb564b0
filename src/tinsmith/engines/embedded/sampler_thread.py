"""The thread that samples: what the event loop asks goes in, in order, and events come back.

Between two steps of the sampler it does what was asked since: admits, cancels, adds and drops
weights. The event loop never waits for a step, and a step never waits for the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping

import torch

from tinsmith.engines.base import SampleEvent, SampleOutcome, SampleWork
from tinsmith.engines.embedded.sampler import Sampler
from tinsmith.errors import ClosedError

_log = logging.getLogger(__name__)

LONGEST_WAIT_S = 0.25
"""After so long without news `events` returns with nothing, so that its caller can look around."""
STAY_S = 1.0
"""So long after its last sample an owner still counts as one that others share with."""


class SamplerThread:
    """See the top of the module. Its methods are for the event loop that it was started on.

    Args:
        samplers: By every name of their base models; those with several names come once for each.
        threads: How many each computation may use.
    """

    def __init__(self, samplers: Mapping[str, Sampler], threads: int) -> None:
        self._samplers = dict(samplers)
        self._stepped = {id(one): one for one in samplers.values()}
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._asked: list[Callable[[], None]] = []
        self._has_asked = threading.Condition()
        self._is_closing = False
        self._running: dict[str, tuple[int, Sampler]] = {}
        """The number of the admission that each sample is of, and who draws it; for the thread."""
        self._admitted: dict[str, int] = {}
        """The numbers as the event loop knows them. What does not agree was cancelled."""
        self._seen: dict[str, float] = {}
        """When each owner last had a sample; for the thread."""
        self._admissions = 0
        self._events: list[tuple[int, SampleEvent]] = []
        self._news = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="tinsmith-sampler", daemon=True)
        self._thread.start()

    @property
    def samples(self) -> int:
        """How many are admitted."""
        return len(self._admitted)

    def is_admitted(self, work_id: str) -> bool:
        """Whether this one is."""
        return work_id in self._admitted

    def admit(self, work: SampleWork) -> None:
        """Let a sample join; one whose id is admitted already is not admitted twice."""
        if work.work_id in self._admitted:
            return
        self._admissions += 1
        ticket = self._admitted[work.work_id] = self._admissions
        self.ask(lambda: self._admit(work, ticket))

    def cancel(self, work_id: str) -> None:
        """Drop a sample; no event of it follows."""
        if self._admitted.pop(work_id, None) is not None:
            self.ask(lambda: self._cancel(work_id))
            self._news.set()  # whoever waits for events may wait for nothing now

    def ask(self, do: Callable[[], None]) -> None:
        """Have something done on the thread, after all that was asked before. It must not fail."""
        with self._has_asked:
            self._asked.append(do)
            self._has_asked.notify()

    async def events(self) -> list[SampleEvent]:
        """What came since the last call; waits a while for something, if samples are admitted."""
        if self._admitted and not self._events:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), LONGEST_WAIT_S)
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
        """End the thread after the step that it is at. What is admitted ends without an event."""
        with self._has_asked:
            self._is_closing = True
            self._has_asked.notify()
        self._admitted.clear()
        self._news.set()
        await asyncio.to_thread(self._thread.join)

    # On the thread

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # it holds for the thread that says it
        while True:
            with self._has_asked:
                while not (self._asked or self._running or self._is_closing):
                    self._has_asked.wait()
                asked, self._asked = self._asked, []
                if self._is_closing:
                    return
            for do in asked:
                do()
            owners = self._recent_owners()
            for sampler in self._stepped.values():
                if sampler.samples:
                    self._tell(self._step(sampler, owners))

    def _recent_owners(self) -> set[str]:
        """Who has samples, or had some a moment ago: its next ones find short steps."""
        now = time.monotonic()
        for sampler in self._stepped.values():
            self._seen.update(dict.fromkeys(sampler.owners, now))
        self._seen = {owner: at for owner, at in self._seen.items() if now - at < STAY_S}
        return set(self._seen)

    def _step(self, sampler: Sampler, owners: set[str]) -> list[SampleEvent]:
        try:
            return sampler.step(owners)
        except Exception as exc:  # noqa: BLE001 - told as the outcome of all
            # Which sample it was cannot be told: none of them would ever end.
            _log.exception("a step of the sampler failed with %d samples", sampler.samples)
            lost = [one for one, (_, drawn_by) in self._running.items() if drawn_by is sampler]
            with contextlib.suppress(Exception):  # whatever state it is in, they are told
                sampler.fail_all(exc)
            return [SampleOutcome(work_id=work_id, error=exc) for work_id in lost]

    def _admit(self, work: SampleWork, ticket: int) -> None:
        sampler = self._samplers[work.base_model]
        self._running[work.work_id] = ticket, sampler
        try:
            sampler.admit(work)
        except Exception as exc:  # noqa: BLE001 - of this sample and of no other
            self._tell([SampleOutcome(work_id=work.work_id, error=exc)])

    def _cancel(self, work_id: str) -> None:
        running = self._running.pop(work_id, None)
        if running is not None:
            running[1].cancel(work_id)

    def _tell(self, events: list[SampleEvent]) -> None:
        told: list[tuple[int, SampleEvent]] = []
        for event in events:
            running = self._running.get(event.work_id)
            if running is None:
                continue
            told.append((running[0], event))
            if isinstance(event, SampleOutcome):
                del self._running[event.work_id]
        if told:
            try:
                self._loop.call_soon_threadsafe(self._take, told)
            except RuntimeError:  # the event loop has ended without closing the engine
                self._is_closing = True

    def _take(self, told: list[tuple[int, SampleEvent]]) -> None:
        self._events += told
        self._news.set()


def closed() -> ClosedError:
    """What is raised by an engine that is not open."""
    return ClosedError("the engine is closed")
