"""Many replicas as one engine.

Each adapter lives on one replica that trains, and its works run there; works for different replicas
run concurrently. Sampler weights are on as many replicas as their samples keep busy.

    replica_pool.py     the replicas: opened, kept running, called
    fleet_adapters.py   where adapters are, and their moves
    fleet_samples.py    who draws which sample, and who has its weights
    placement.py        what goes where, as pure functions

If a replica is lost, only what it held is: works on its adapters fail with `AdapterLostError`, and
so do its samples, which are then admitted again.

It knows nothing of tenants, the ledger, or how a replica's process is started.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from tinsmith.engine.base import (
    AdapterId,
    AdapterParts,
    AdapterSpec,
    BaseModel,
    Engine,
    EngineCapacity,
    ReplicaChange,
    ReplicaReport,
    SampleEvent,
    SampleWork,
    TrainingOutcome,
    TrainingWork,
    WeightsId,
)
from tinsmith.engine.fleet.fleet_adapters import FleetAdapters
from tinsmith.engine.fleet.fleet_samples import FleetSamples
from tinsmith.engine.fleet.replica import Replica, ReplicaSpec
from tinsmith.engine.fleet.replica_pool import ReplicaPool
from tinsmith.engine.process.engine_spec import EngineSpec
from tinsmith.engine.process.process_engine import NOTHING, ProcessEngine
from tinsmith.errors import NotFoundError, ValidationError

_log = logging.getLogger(__name__)

DRAIN_LOOK_S = 0.2
"""How often a replica that is being drained is looked at, besides after changes."""

MOVES = "moves"
"""The folder for files of adapters on the move, inside that of the fleet."""


class FleetEngine(Engine):
    """An engine of replicas. For one event loop.

    Args:
        specs: The replicas.
        make: Makes the engine of a replica, not opened yet.
        folder: For cached files and moves; None for a temporary folder.
        silence_s: How long a call to a replica may take before it is killed; 0 for no limit.
        pause: Sleeps for so many seconds before a replica is restarted.
    """

    name = "fleet"
    samples_concurrently = True

    def __init__(
        self,
        specs: Sequence[ReplicaSpec],
        *,
        make: Callable[[EngineSpec], ProcessEngine] = ProcessEngine,
        folder: Path | None = None,
        silence_s: float = 0.0,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._pool = pool = ReplicaPool(
            Replica(spec, make(spec.engine), silence_s=silence_s, pause=pause) for spec in specs
        )
        pool.on_lost, pool.on_running = self._note_lost, self._note_running
        self._given_folder = folder
        self._folder = Path()
        self._models: dict[str, BaseModel] = {}
        self._adapters = FleetAdapters(pool, lambda: self._models, lambda: self._folder / MOVES)
        self._samples = FleetSamples(pool, lambda: self._models)
        self._drains: dict[str, asyncio.Task[None]] = {}
        self._tell: Callable[[ReplicaChange], None] = lambda _: None

    async def open(self) -> None:
        """Start all replicas; the first error of one ends them all."""
        given = self._given_folder
        self._folder = Path(tempfile.mkdtemp(prefix="tinsmith-fleet-")) if given is None else given
        await asyncio.to_thread(_make_empty, self._folder / MOVES)
        await self._samples.open(self._folder / "weights")
        try:
            await self._pool.open()
        except BaseException:
            await self.close()
            raise
        for replica in self._pool.all:
            for model in replica.engine.base_models():
                self._models.setdefault(model.name, model)

    async def close(self) -> None:
        """End all replicas; running calls fail."""
        await self._pool.close()
        self._adapters.clear()
        self._samples.clear()
        if self._given_folder is None and self._folder != Path():
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def base_models(self) -> tuple[BaseModel, ...]:
        """The models of all replicas."""
        return tuple(self._models.values())

    def capacity(self) -> EngineCapacity:
        """The sums of the replicas, without those that are being drained."""
        used = [(one, one.capacity) for one in self._pool.used]
        known = [capacity for _, capacity in used if capacity is not NOTHING]
        return EngineCapacity(
            most_adapters=sum(had.most_adapters for one, had in used if one.spec.trains),
            adapters=len(self._adapters),
            most_samples=sum(
                had.most_samples for one, had in used if one.spec.draws and one.is_running
            ),
            samples=len(self._samples),
            batch_tokens=min((capacity.batch_tokens for capacity in known), default=1),
        )

    # Replicas

    def replica_of(self, adapter_id: AdapterId) -> str:
        """The replica of an adapter."""
        return self._adapters.replica_of(adapter_id)

    def replica_for(self, sample: SampleWork) -> str:
        """The replica that would draw a sample now; empty if none can."""
        return self._samples.replica_for(sample)

    def watch_replicas(self, tell: Callable[[ReplicaChange], None]) -> None:
        """Have losses and returns of replicas told."""
        self._tell = tell

    def replicas(self) -> tuple[ReplicaReport, ...]:
        """All replicas, in the order of the settings."""
        return self._pool.reports()

    def _note_lost(
        self, replica: Replica, adapters: frozenset[AdapterId], samples: Sequence[str]
    ) -> None:
        self._adapters.note_lost(replica, adapters)
        self._tell(ReplicaChange(replica=replica.name, lost=replica.last_loss, adapters=adapters))
        self._samples.note_lost(replica, samples)

    def _note_running(self, replica: Replica) -> None:
        self._tell(ReplicaChange(replica=replica.name))
        self._samples.admit_waiting()
        _ = self._pool.start(self._adapters.balance(replica))

    # Draining

    def drain(self, replica: str, *, is_drained: bool = True) -> None:
        """Empty a replica and close it, or use it again."""
        one = self._pool.get(replica)
        if one is None:
            known = ", ".join(found.name for found in self._pool.all)
            raise NotFoundError(f"there is no replica {replica!r}", remedy=f"there are {known}")
        if is_drained == one.is_draining:
            return
        if is_drained:
            self._check_replaceable(one)
            one.is_draining = True
            self._drains[one.name] = self._pool.start(self._drain(one))
        else:
            one.is_draining = False
            _ = self._pool.start(self._resume(one))

    def _check_replaceable(self, one: Replica) -> None:
        others = [other for other in self._pool.used if other is not one]
        for model in one.serves:
            trained = any(other.spec.trains and model in other.serves for other in others)
            drawn = any(other.spec.draws and model in other.serves for other in others)
            if (one.spec.trains and not trained) or (one.spec.draws and not drawn):
                what = "trains" if one.spec.trains and not trained else "samples from"
                raise ValidationError(
                    f"replica {one.name} is the only one that {what} {model}",
                    remedy="add a replica that does, and restart the service",
                )

    async def _drain(self, replica: Replica) -> None:
        """Move everything away as there is room elsewhere, then close the replica."""
        while replica.is_draining:
            await self._adapters.empty(replica)
            await self._samples.empty(replica)
            if replica.is_running and not (replica.adapters or replica.samples or replica.reserved):
                await self._pool.close_one(replica)
                _log.info("replica %s is drained and closed", replica.name)
                return
            await self._pool.wait_change(DRAIN_LOOK_S)

    async def _resume(self, replica: Replica) -> None:
        drain = self._drains.pop(replica.name, None)
        if drain is not None:
            await asyncio.wait([drain])
        if replica.state == "drained":
            try:
                await replica.open()
            except Exception as exc:  # noqa: BLE001 - it can be tried again
                _log.error("replica %s could not be started: %s", replica.name, exc)
                replica.last_loss = f"it could not be started: {exc}"
                replica.is_draining = True
                await replica.close()
                return
            self._pool.keep_running(replica)
        self._pool.note_running(replica)

    # Adapters

    async def create_adapter(self, spec: AdapterSpec) -> None:
        """Create an adapter on the replica that suits it best."""
        await self._adapters.create(spec)

    async def load_adapter(self, spec: AdapterSpec, folder: Path, parts: AdapterParts) -> None:
        """Create or replace an adapter from saved files."""
        await self._adapters.load(spec, folder, parts)

    async def save_adapter(self, adapter_id: AdapterId, folder: Path, parts: AdapterParts) -> None:
        """Have the adapter's replica write its files."""
        await self._adapters.save(adapter_id, folder, parts)

    async def drop_adapter(self, adapter_id: AdapterId) -> None:
        """Unload an adapter; no error if it is not loaded, or lost."""
        await self._adapters.drop(adapter_id)

    def has_adapter(self, adapter_id: AdapterId) -> bool:
        """Whether a replica holds the adapter."""
        return self._adapters.has(adapter_id)

    async def train(self, batch: Sequence[TrainingWork]) -> list[TrainingOutcome]:
        """Run the works of each replica there, all replicas concurrently."""
        return await self._adapters.train(batch)

    # Samples

    async def load_weights(self, weights_id: WeightsId, base_model: str, folder: Path) -> None:
        """Load sampler weights on one replica; others get them when that is busy."""
        await self._samples.load_weights(weights_id, base_model, folder)

    async def drop_weights(self, weights_id: WeightsId) -> None:
        """Unload sampler weights everywhere; unknown ids are ignored."""
        await self._samples.drop_weights(weights_id)

    def has_weights(self, weights_id: WeightsId) -> bool:
        """Whether a replica that takes samples has the weights."""
        return self._samples.has_weights(weights_id)

    def admit(self, sample: SampleWork) -> None:
        """Add a sample to a replica; it waits if none that could draw it is running."""
        self._samples.admit(sample)

    def cancel(self, work_id: str) -> None:
        """Drop a sample; unknown ids are ignored."""
        self._samples.cancel(work_id)

    async def step_sampler(self) -> list[SampleEvent]:
        """The new events of all replicas; waits for one if samples are admitted."""
        return await self._samples.step()


def _make_empty(folder: Path) -> None:
    """Make a folder, without what an earlier process left there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
