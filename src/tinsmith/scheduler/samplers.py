"""What samplers sample from, and which weights are loaded for them.

A sampler is looked up once and remembered. Weights are loaded for the first sample that needs them,
once however many wait, and those that were not used for longest are dropped.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict

import msgspec

from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.engines.base import WeightsId
from tinsmith.errors import BadRequestError
from tinsmith.ledger.records import CheckpointEntry, Command, Sampler
from tinsmith.scheduler import saves
from tinsmith.scheduler.parts import Parts

MOST_REMEMBERED = 4096


class Source(msgspec.Struct, frozen=True):
    """Where samples are drawn from."""

    base_model: str
    path: CheckpointPath | None
    weights_id: WeightsId | None


class Samplers:
    """See the top of the module. For one event loop."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._sources: OrderedDict[str, Source] = OrderedDict()
        self._loading: dict[WeightsId, asyncio.Task[None]] = {}
        self._dropping: dict[WeightsId, asyncio.Task[None]] = {}
        self._recent: OrderedDict[WeightsId, None] = OrderedDict()
        self._users: Counter[WeightsId] = Counter()

    async def source(self, command: Command) -> Source:
        """What a sample is to be drawn from; raises `BadRequestError` if there is no such thing."""
        if command.line not in self._sources:
            entries = self._parts.ledger.entries(Sampler)
            sampler = await self._parts.ask(lambda: entries.get(command.line))
            if sampler is None:
                raise BadRequestError(f"there is no sampler {command.line}")
            if sampler.dropped_at is not None:
                raise saves.weights_gone(sampler.id)
            made = await self._source(sampler.base_model, sampler.model_path)
            self._sources[command.line] = made
            if len(self._sources) > MOST_REMEMBERED:
                self._sources.popitem(last=False)
        return self._sources[command.line]

    async def _source(self, base_model: str | None, model_path: str | None) -> Source:
        if model_path is None:
            return Source(base_model or "", None, None)
        path = CheckpointPath.parse(model_path)
        entries = self._parts.ledger.entries(CheckpointEntry)
        entry = await self._parts.ask(lambda: entries.get(model_path))
        details = {} if entry is None else entry.details
        # An overwritten checkpoint has other weights under the same name.
        version = details.get("version", "")
        found = details.get("base_model") or base_model or ""
        return Source(found, path, WeightsId(f"{model_path}@{version}" if version else model_path))

    async def acquire(self, source: Source) -> None:
        """Have the weights loaded, and keep them so until `release`."""
        weights_id = source.weights_id
        if weights_id is None or source.path is None:
            return
        self._users[weights_id] += 1
        try:
            await self._load(source.base_model, source.path, weights_id)
            self._recent[weights_id] = None
            self._recent.move_to_end(weights_id)
            await self._drop_old()
        except BaseException:
            self.release(source)
            raise

    def release(self, source: Source) -> None:
        """A sample that used the weights has ended."""
        if source.weights_id is not None:
            self._users[source.weights_id] -= 1
            if self._users[source.weights_id] <= 0:
                del self._users[source.weights_id]

    async def stop(self) -> None:
        """Give up what is being loaded."""
        tasks = [*self._loading.values(), *self._dropping.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, base_model: str, path: CheckpointPath, weights_id: WeightsId) -> None:
        dropping = self._dropping.get(weights_id)
        if dropping is not None:
            await asyncio.wait([dropping])
        if self._parts.engine.has_weights(weights_id):
            return
        task = self._loading.get(weights_id)
        if task is None:
            task = asyncio.create_task(self._read(base_model, path, weights_id))
            self._loading[weights_id] = task
            task.add_done_callback(lambda _: self._loading.pop(weights_id, None))
        # Shielded: one who gives up must not take the weights from all the others.
        await asyncio.shield(task)

    async def _read(self, base_model: str, path: CheckpointPath, weights_id: WeightsId) -> None:
        async with saves.files_of(self._parts, path) as folder:
            await self._parts.engine.load_weights(weights_id, base_model, folder)
        self._parts.statistics.count("loaded_weights")

    async def _drop_old(self) -> None:
        # Looked for anew each time: others take and drop weights while the engine drops these.
        while len(self._recent) > self._parts.settings.most_sampler_weights:
            weights_id = next((one for one in self._recent if one not in self._users), None)
            if weights_id is None:
                return
            del self._recent[weights_id]
            task = self._dropping[weights_id] = asyncio.create_task(self._drop(weights_id))
            await asyncio.shield(task)

    async def _drop(self, weights_id: WeightsId) -> None:
        try:
            with self._parts.silence.call(f"the release of {weights_id}"):
                await self._parts.engine.drop_weights(weights_id)
        finally:
            del self._dropping[weights_id]
