"""What each sampler samples from, and which weights are loaded for it.

A sampler is looked up once and remembered. Weights are loaded for the first sample that needs them,
once however many wait for them; the least recently used are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict

import msgspec

from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.engine.base import Engine, WeightsId
from tinsmith.errors import BadRequestError
from tinsmith.service.ledger.fenced import FencedLedger
from tinsmith.service.ledger.records import CheckpointEntry, Command, SamplerEntry
from tinsmith.service.scheduler.model_files import ModelFiles, weights_gone
from tinsmith.service.scheduler.status import SchedulerStatus
from tinsmith.service.scheduler.suspects import EngineWatchdog

MOST_REMEMBERED = 4096


class SampleSource(msgspec.Struct, frozen=True):
    """The base model and weights that a sampler draws from."""

    base_model: str
    path: CheckpointPath | None
    weights_id: WeightsId | None


class WeightsLoader:
    """Loads and drops the weights of samplers. For one event loop."""

    def __init__(
        self,
        ledger: FencedLedger,
        engine: Engine,
        files: ModelFiles,
        *,
        most_loaded: int,
        status: SchedulerStatus,
        watchdog: EngineWatchdog,
    ) -> None:
        self._ledger = ledger
        self._engine = engine
        self._files = files
        self._most_loaded = most_loaded
        self._status = status
        self._watchdog = watchdog
        self._sources: OrderedDict[str, SampleSource] = OrderedDict()
        self._loading: dict[WeightsId, asyncio.Task[None]] = {}
        self._dropping: dict[WeightsId, asyncio.Task[None]] = {}
        self._recent: OrderedDict[WeightsId, None] = OrderedDict()
        self._users: Counter[WeightsId] = Counter()

    async def source(self, command: Command) -> SampleSource:
        """What a sample is drawn from.

        Raises:
            BadRequestError: There is no such sampler, or its weights were deleted.
        """
        sampler_id = command.queue_id
        if sampler_id not in self._sources:
            sampler = await self._ledger.entries(SamplerEntry).get(sampler_id)
            if sampler is None:
                raise BadRequestError(f"there is no sampler {sampler_id}")
            if sampler.dropped_at is not None:
                raise weights_gone(sampler.id)
            self._sources[sampler_id] = await self._find(sampler)
            if len(self._sources) > MOST_REMEMBERED:
                self._sources.popitem(last=False)
        return self._sources[sampler_id]

    async def _find(self, sampler: SamplerEntry) -> SampleSource:
        base_model, model_path = sampler.base_model or "", sampler.model_path
        if model_path is None:
            return SampleSource(base_model, None, None)
        entry = await self._ledger.entries(CheckpointEntry).get(model_path)
        details = {} if entry is None else entry.details
        # An overwritten checkpoint has other weights under the same name.
        version = details.get("version", "")
        weights_id = WeightsId(f"{model_path}@{version}" if version else model_path)
        path = CheckpointPath.parse(model_path)
        return SampleSource(details.get("base_model") or base_model, path, weights_id)

    async def acquire(self, source: SampleSource) -> None:
        """Load the weights, and keep them loaded until `release`."""
        weights_id = source.weights_id
        if weights_id is None or source.path is None:
            return
        self._users[weights_id] += 1
        with contextlib.ExitStack() as undo:
            undo.callback(self.release, source)
            await self._load(source.base_model, source.path, weights_id)
            self._recent[weights_id] = None
            self._recent.move_to_end(weights_id)
            await self._drop_old()
            undo.pop_all()

    def release(self, source: SampleSource) -> None:
        """Note that a sample no longer uses the weights."""
        if source.weights_id is not None:
            self._users[source.weights_id] -= 1
            if self._users[source.weights_id] <= 0:
                del self._users[source.weights_id]

    async def stop(self) -> None:
        """Abandon the loads and drops that are running."""
        tasks = [*self._loading.values(), *self._dropping.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, base_model: str, path: CheckpointPath, weights_id: WeightsId) -> None:
        dropping = self._dropping.get(weights_id)
        if dropping is not None:
            await asyncio.wait([dropping])
        if self._engine.has_weights(weights_id):
            return
        task = self._loading.get(weights_id)
        if task is None:
            task = asyncio.create_task(self._read(base_model, path, weights_id))
            self._loading[weights_id] = task
            task.add_done_callback(lambda _: self._loading.pop(weights_id, None))
        # Shielded: a cancelled sample must not stop the load that others wait for.
        await asyncio.shield(task)

    async def _read(self, base_model: str, path: CheckpointPath, weights_id: WeightsId) -> None:
        async with self._files.open(path) as folder:
            await self._engine.load_weights(weights_id, base_model, folder)
        self._status.count("loaded_weights")

    async def _drop_old(self) -> None:
        # Looked up anew each time: others acquire and drop weights while the engine drops these.
        while len(self._recent) > self._most_loaded:
            weights_id = next((one for one in self._recent if one not in self._users), None)
            if weights_id is None:
                return
            del self._recent[weights_id]
            task = self._dropping[weights_id] = asyncio.create_task(self._drop(weights_id))
            await asyncio.shield(task)

    async def _drop(self, weights_id: WeightsId) -> None:
        try:
            with self._watchdog.call(f"unloading {weights_id}"):
                await self._engine.drop_weights(weights_id)
        finally:
            del self._dropping[weights_id]
