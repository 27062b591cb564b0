"""The samples of a fleet: which replica draws each, and which have its weights.

Sampler weights are loaded on one replica at first, and on more as their samples keep those busy,
from a cache of their files. Each replica that has samples is stepped by a task of its own; events
of all are handed out together. A sample of a lost replica has an outcome that says so, after which
its owner admits it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tinsmith.engine.base import (
    BaseModel,
    SampleEvent,
    SampleOutcome,
    SampleTokens,
    SampleWork,
    WeightsId,
)
from tinsmith.engine.files.adapter_files import known_model
from tinsmith.engine.fleet.placement import place_sample, spread_weights
from tinsmith.engine.fleet.replica import Replica
from tinsmith.engine.fleet.replica_pool import ReplicaPool, lost_with
from tinsmith.engine.fleet.weights_cache import WeightsCache
from tinsmith.errors import (
    AdapterLostError,
    ClosedError,
    EngineLostError,
    NotFoundError,
    TinkerError,
    ValidationError,
)
from tinsmith.types.inputs import EncodedTextChunk

_log = logging.getLogger(__name__)

PREFIX_TOKENS = 128
"""Prompts that begin with the same tokens are drawn on the same replica: one chunk of prefill."""
MOST_PREFIXES = 65_536
CACHE_BYTES = 16 * 1024**3
"""Of the files of sampler weights that are kept for further replicas."""
LONGEST_WAIT_S = 1.0
"""How long `step` waits for an event."""


class FleetSamples:
    """All samples and sampler weights. For one event loop.

    Args:
        pool: The replicas.
        models: Gives the base models of the fleet by name.
    """

    def __init__(self, pool: ReplicaPool, models: Callable[[], Mapping[str, BaseModel]]) -> None:
        self._pool = pool
        self._models = models
        self._files: WeightsCache | None = None
        self._weights: dict[WeightsId, str] = {}
        """Sampler weights that are to be held, and their base models."""
        self._prefixes: OrderedDict[tuple[object, ...], str] = OrderedDict()
        self._samples: dict[str, tuple[SampleWork, Replica | None]] = {}
        """The admitted samples, and who draws them; None while nobody can."""
        self._events: list[SampleEvent] = []
        self._has_events = asyncio.Event()
        self._pumps: dict[str, asyncio.Task[None]] = {}
        self._spreading: set[tuple[WeightsId, str]] = set()

    def __len__(self) -> int:
        return len(self._samples)

    async def open(self, folder: Path) -> None:
        """Keep files of weights in a folder from now on."""
        self._files = await asyncio.to_thread(WeightsCache, folder, CACHE_BYTES)

    def clear(self) -> None:
        """Forget all; the fleet is closed."""
        self._weights.clear()
        self._samples.clear()
        self._events.clear()
        self._pumps.clear()
        self._has_events.set()

    def replica_for(self, sample: SampleWork) -> str:
        """The name of the replica that would draw a sample now; empty if none can."""
        holders = None if sample.weights_id is None else self._holders(sample.weights_id)
        if not holders and sample.weights_id is not None:
            return self._sampler_for_weights(sample.base_model) or ""
        last = self._prefixes.get(_prefix(sample))
        views = self._pool.views()
        return place_sample(views, sample.base_model, holders=holders, last=last) or ""

    def note_lost(self, replica: Replica, work_ids: Iterable[str]) -> None:
        """These were drawn by a replica that was lost."""
        for work_id in work_ids:
            self._fail_sample(work_id, lost_with(replica))

    # Sampler weights

    def _holders(self, weights_id: WeightsId) -> set[str]:
        return {
            one.name for one in self._pool.all if weights_id in one.weights and one.is_open_to_new
        }

    def _sampler_for_weights(self, base_model: str) -> str | None:
        """The replica on which weights that nobody has are loaded."""
        return place_sample(self._pool.views(), base_model)

    async def load_weights(self, weights_id: WeightsId, base_model: str, folder: Path) -> None:
        """Load sampler weights on one replica; others get them when that is busy.

        Waits while no replica that samples from the base model is running.
        """
        self._pool.check_open()
        known_model(self._models(), base_model)
        files = self._files
        assert files is not None
        if not any(one.spec.draws and base_model in one.serves for one in self._pool.all):
            raise ValidationError(f"no replica samples from {base_model}")
        while True:
            name = self._sampler_for_weights(base_model)
            if name is not None:
                break
            await self._pool.wait_change()
        replica = self._pool[name]
        await self._pool.call(
            replica, lambda: replica.engine.load_weights(weights_id, base_model, folder)
        )
        replica.weights.add(weights_id)
        self._weights[weights_id] = base_model
        try:
            await asyncio.to_thread(files.keep, weights_id, folder)
        except OSError as exc:
            _log.warning("the files of %s are not kept for other replicas: %s", weights_id, exc)

    async def drop_weights(self, weights_id: WeightsId) -> None:
        """Unload sampler weights everywhere; unknown ids are ignored."""
        if not self._pool.is_open:
            return
        self._weights.pop(weights_id, None)
        for replica in self._pool.all:
            if weights_id in replica.weights:
                replica.weights.discard(weights_id)
                with contextlib.suppress(AdapterLostError):
                    await self._pool.call(replica, lambda: replica.engine.drop_weights(weights_id))  # noqa: B023
        if self._files is not None:
            await asyncio.to_thread(self._files.drop, weights_id)

    def has_weights(self, weights_id: WeightsId) -> bool:
        """Whether a replica that takes samples has the weights."""
        return bool(self._holders(weights_id))

    def _consider_spreading(self, weights_id: WeightsId, base_model: str) -> None:
        target = spread_weights(self._pool.views(), base_model, self._holders(weights_id))
        if target is not None and (weights_id, target) not in self._spreading:
            self._spreading.add((weights_id, target))
            _ = self._pool.start(self._spread(weights_id, base_model, self._pool[target]))

    async def _spread(self, weights_id: WeightsId, base_model: str, target: Replica) -> None:
        """Load weights on another replica, from the cached files."""
        assert self._files is not None
        try:
            folder = await asyncio.to_thread(self._files.find, weights_id)
            if folder is None or weights_id not in self._weights:
                return
            await self._pool.call(
                target, lambda: target.engine.load_weights(weights_id, base_model, folder)
            )
            target.weights.add(weights_id)
            if weights_id not in self._weights:  # dropped meanwhile
                await self.drop_weights(weights_id)
        except (AdapterLostError, TinkerError, OSError) as exc:
            _log.warning("could not load %s on replica %s: %s", weights_id, target.name, exc)
        finally:
            self._spreading.discard((weights_id, target.name))

    async def empty(self, replica: Replica) -> None:
        """Give the weights of a replica to another, if nobody else has them."""
        for weights_id in list(replica.weights):
            if self._holders(weights_id):
                continue
            base_model = self._weights.get(weights_id, "")
            target = self._sampler_for_weights(base_model)
            if target is not None:
                await self._spread(weights_id, base_model, self._pool[target])

    # Samples

    def admit(self, sample: SampleWork) -> None:
        """Add a sample to a replica; it waits if none that could draw it is running."""
        self._pool.check_open()
        if sample.work_id in self._samples:
            return
        known_model(self._models(), sample.base_model)
        weights_id = sample.weights_id
        if weights_id is not None and weights_id not in self._weights:
            raise NotFoundError(f"weights {weights_id} are not loaded")
        self._admit(sample)

    def _admit(self, sample: SampleWork) -> None:
        weights_id, base_model = sample.weights_id, sample.base_model
        if weights_id is not None and not self._holders(weights_id):
            self._samples[sample.work_id] = sample, None
            self._fail_sample(sample.work_id, AdapterLostError(f"{weights_id} is not loaded"))
            return
        name = self.replica_for(sample)
        if not name:
            self._samples[sample.work_id] = sample, None
            return
        replica = self._pool[name]
        try:
            replica.engine.admit(sample)
        except EngineLostError as exc:
            self._pool.note_lost(replica, exc)
            self._admit(sample)
            return
        replica.samples.add(sample.work_id)
        self._samples[sample.work_id] = sample, replica
        prefix = _prefix(sample)
        self._prefixes[prefix] = name
        self._prefixes.move_to_end(prefix)
        if len(self._prefixes) > MOST_PREFIXES:
            self._prefixes.popitem(last=False)
        if weights_id is not None:
            self._consider_spreading(weights_id, base_model)
        if name not in self._pumps:
            self._pumps[name] = self._pool.start(self._pump(replica))

    def admit_waiting(self) -> None:
        """Hand out the samples for which there was no replica."""
        for sample, replica in list(self._samples.values()):
            if replica is None:
                with contextlib.suppress(ClosedError):  # lost again: it waits on
                    self._admit(sample)

    def cancel(self, work_id: str) -> None:
        """Drop a sample; unknown ids are ignored."""
        _, replica = self._samples.pop(work_id, (None, None))
        if replica is not None:
            replica.samples.discard(work_id)
            replica.engine.cancel(work_id)
        if any(event.work_id == work_id for event in self._events):
            self._events = [event for event in self._events if event.work_id != work_id]
        self._has_events.set()  # there may be nothing left to wait for

    async def step(self) -> list[SampleEvent]:
        """The new events of all replicas; waits for one if samples are admitted."""
        if self._samples and not self._events and self._pool.is_open:
            self._has_events.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_events.wait(), LONGEST_WAIT_S)
        events, self._events = self._events, []
        for event in events:
            if isinstance(event, SampleOutcome):
                self._samples.pop(event.work_id, None)
        return events

    async def _pump(self, replica: Replica) -> None:
        """Step one replica's sampler while it has samples."""
        try:
            while replica.samples:
                await self._step_one(replica)
                await asyncio.sleep(0)
        finally:
            self._pumps.pop(replica.name, None)

    async def _step_one(self, replica: Replica) -> None:
        try:
            events = await self._pool.call(replica, replica.engine.step_sampler, is_work=True)
        except AdapterLostError:
            return  # its samples were told
        except ClosedError:
            replica.samples.clear()
            return
        except Exception as exc:  # noqa: BLE001 - its samples fail, those of others continue
            _log.exception("the sampler of replica %s failed", replica.name)
            for work_id in sorted(replica.samples):
                replica.engine.cancel(work_id)
                self._fail_sample(work_id, exc)
            replica.samples.clear()
            return
        for event in events:
            _, admitted = self._samples.get(event.work_id, (None, None))
            if admitted is not replica:
                continue  # cancelled
            if isinstance(event, SampleTokens) or event.work_id in replica.samples:
                self._events.append(event)
            if isinstance(event, SampleOutcome):
                replica.samples.discard(event.work_id)
        if self._events:
            self._has_events.set()
        self._wake_drains()

    def _wake_drains(self) -> None:
        if any(one.is_draining for one in self._pool.all):
            self._pool.wake()

    def _fail_sample(self, work_id: str, error: BaseException) -> None:
        if work_id in self._samples:
            self._events.append(SampleOutcome(work_id=work_id, error=error))
            self._has_events.set()


def _prefix(sample: SampleWork) -> tuple[object, ...]:
    """What samples have in common that can share cached keys and values."""
    chunks = sample.request.prompt.chunks
    first = chunks[0] if chunks else None
    tokens = b""
    if isinstance(first, EncodedTextChunk):
        tokens = bytes(first.numbers.slice(0, min(PREFIX_TOKENS, first.length)).memory)
    return sample.base_model, sample.weights_id, tokens
