"""The adapters of a fleet: where each is, and how it gets there.

Each adapter lives on one replica that trains, and its works run there. It moves between its works,
by save and load. One that was lost with its replica is known as lost until it is created or loaded
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path

import msgspec

from tinsmith.engine.base import (
    AdapterId,
    AdapterParts,
    AdapterSpec,
    BaseModel,
    TrainingOutcome,
    TrainingWork,
)
from tinsmith.engine.call_order import AdapterCallOrder
from tinsmith.engine.files.adapter_files import known_model
from tinsmith.engine.fleet.placement import place_adapter, training_bytes
from tinsmith.engine.fleet.replica import Replica
from tinsmith.engine.fleet.replica_pool import ReplicaPool, lost_with
from tinsmith.errors import (
    AdapterLostError,
    ClosedError,
    NoReplicaError,
    NotFoundError,
    TinkerError,
    ValidationError,
)

_log = logging.getLogger(__name__)


class _Home(msgspec.Struct):
    """Where an adapter is."""

    replica: Replica
    spec: AdapterSpec
    used_at: float


class FleetAdapters:
    """All adapters. For one event loop.

    Args:
        pool: The replicas.
        models: Gives the base models of the fleet by name.
        folder: Gives a folder for files of adapters on the move.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        models: Callable[[], Mapping[str, BaseModel]],
        folder: Callable[[], Path],
    ) -> None:
        self._pool = pool
        self._models = models
        self._folder = folder
        self._order = AdapterCallOrder()
        self._homes: dict[AdapterId, _Home] = {}
        self._lost: dict[AdapterId, Replica] = {}

    def __len__(self) -> int:
        return len(self._homes)

    def clear(self) -> None:
        """Forget all; the fleet is closed."""
        self._homes.clear()
        self._lost.clear()

    def replica_of(self, adapter_id: AdapterId) -> str:
        """The name of the replica that holds an adapter, or held it when it was lost."""
        home = self._homes.get(adapter_id)
        if home is not None:
            return home.replica.name
        lost = self._lost.get(adapter_id)
        return "" if lost is None else lost.name

    def note_lost(self, replica: Replica, adapters: Iterable[AdapterId]) -> None:
        """These were on a replica that was lost."""
        for adapter_id in adapters:
            self._homes.pop(adapter_id, None)
            self._lost[adapter_id] = replica

    # Creating, saving, dropping

    async def create(self, spec: AdapterSpec) -> None:
        """Create an adapter on the replica that suits it best."""
        await self._add(spec, lambda replica: replica.engine.create_adapter(spec))

    async def load(self, spec: AdapterSpec, folder: Path, parts: AdapterParts) -> None:
        """Create or replace an adapter from saved files."""
        await self._add(spec, lambda replica: replica.engine.load_adapter(spec, folder, parts))

    async def _add(self, spec: AdapterSpec, add: Callable[[Replica], Awaitable[None]]) -> None:
        self._pool.check_open()
        adapter_id = spec.adapter_id
        async with self._order.after_earlier_calls([adapter_id]):
            known_model(self._models(), spec.base_model)
            async with self._place_for(spec) as replica:
                try:
                    await self._pool.call(replica, lambda: add(replica))
                except AdapterLostError:
                    self._lost.setdefault(adapter_id, replica)  # try again where it was lost
                    raise
                self._settle_in(spec, replica)

    def _settle_in(self, spec: AdapterSpec, replica: Replica) -> None:
        self._lost.pop(spec.adapter_id, None)
        self._homes[spec.adapter_id] = _Home(replica, spec, time.monotonic())
        replica.adapters[spec.adapter_id] = self._size(spec)

    def _size(self, spec: AdapterSpec) -> int:
        return training_bytes(spec, known_model(self._models(), spec.base_model))

    @contextlib.asynccontextmanager
    async def _place_for(self, spec: AdapterSpec) -> AsyncIterator[Replica]:
        """The replica for an adapter, with a place kept while the block runs.

        Raises:
            NoReplicaError: None has room now.
            ValidationError: None trains the base model, or none has so much memory.
        """
        home = self._homes.get(spec.adapter_id)
        if home is not None and spec.base_model in home.replica.serves:
            yield home.replica
            return
        replica = self._placed(spec) or await self._make_room(spec)
        if replica is None:
            raise NoReplicaError(
                f"no replica that trains {spec.base_model} is running and has room",
                remedy="`tinsmith fleet` shows them",
            )
        with replica.reserving(spec.adapter_id, self._size(spec)):
            yield replica

    def _placed(self, spec: AdapterSpec) -> Replica | None:
        base_model = spec.base_model
        trainers = [
            one
            for one in self._pool.all
            if one.spec.trains and base_model in one.serves and not one.is_draining
        ]
        if not trainers:
            raise ValidationError(f"no replica trains {base_model}")
        size = self._size(spec)
        budgets = [one.capacity.adapter_bytes for one in trainers]
        most = max((0 if one is None else one for one in budgets), default=0)
        if None not in budgets and size > most:
            raise ValidationError(
                f"a model of rank {spec.lora.rank} on {base_model} needs {size / 1e9:.2g} GB; the "
                f"replica with most memory has {most / 1e9:.2g} GB for models",
                remedy="use a smaller rank, or train fewer layers",
            )
        lost = self._lost.get(spec.adapter_id)
        if lost is not None and lost in trainers:
            # Its successor is started already. Elsewhere, a work that kills its replica would
            # take down one replica after another.
            if lost.is_open_to_new and lost.fits(size):
                return lost
            if lost.is_coming_back:
                raise NoReplicaError(f"replica {lost.name} is being restarted")
        name = place_adapter(self._pool.views(), base_model, size)
        return None if name is None else self._pool[name]

    async def _make_room(self, spec: AdapterSpec) -> Replica | None:
        """Move adapters of other base models away from a full replica, if they fit elsewhere."""
        size = self._size(spec)
        for replica in self._pool.all:
            is_full = replica.is_open_to_new and replica.spec.trains and not replica.fits(size)
            if not is_full or spec.base_model not in replica.serves:
                continue
            for adapter_id, held in list(replica.adapters.items()):
                home = self._homes.get(adapter_id)
                if home is None or home.spec.base_model == spec.base_model:
                    continue
                others = [one for one in self._pool.views() if one.name != replica.name]
                target = place_adapter(others, home.spec.base_model, held)
                if target is not None:
                    await self.move(adapter_id, self._pool[target])
                if replica.is_open_to_new and replica.fits(size):
                    return replica
        return None

    async def save(self, adapter_id: AdapterId, folder: Path, parts: AdapterParts) -> None:
        """Have the adapter's replica write its files."""
        self._pool.check_open()
        async with self._order.after_earlier_calls([adapter_id]):
            replica = self._home(adapter_id).replica
            await self._pool.call(
                replica, lambda: replica.engine.save_adapter(adapter_id, folder, parts)
            )

    async def drop(self, adapter_id: AdapterId) -> None:
        """Unload an adapter; no error if it is not loaded, or lost."""
        if not self._pool.is_open:
            return
        async with self._order.after_earlier_calls([adapter_id]):
            self._lost.pop(adapter_id, None)
            home = self._homes.pop(adapter_id, None)
            if home is not None:
                home.replica.adapters.pop(adapter_id, None)
                with contextlib.suppress(AdapterLostError):
                    await self._pool.call(
                        home.replica, lambda: home.replica.engine.drop_adapter(adapter_id)
                    )
                self._pool.wake()

    def has(self, adapter_id: AdapterId) -> bool:
        """Whether a replica holds the adapter."""
        return adapter_id in self._homes

    def _home(self, adapter_id: AdapterId) -> _Home:
        home = self._homes.get(adapter_id)
        if home is not None:
            return home
        if adapter_id in self._lost:
            raise lost_with(self._lost[adapter_id])
        raise NotFoundError(f"model {adapter_id} is not loaded")

    # Moves

    async def move(self, adapter_id: AdapterId, target: Replica) -> bool:
        """Move an adapter to another replica, after its running works; False if it stays.

        It stays if the other replica does not find the files that this one saved, by their digest.
        """
        async with self._order.after_earlier_calls([adapter_id]):
            home = self._homes.get(adapter_id)
            if home is None or home.replica is target:  # dropped or moved while this waited
                return False
            size = self._size(home.spec)
            if not target.is_open_to_new or not target.fits(size):
                return False
            source = home.replica
            try:
                with (
                    target.reserving(adapter_id, size),
                    tempfile.TemporaryDirectory(prefix="move-", dir=self._folder()) as name,
                ):
                    folder = Path(name)
                    digest = await self._pool.call(
                        source, lambda: source.engine.save_to_move(adapter_id, folder)
                    )
                    await self._pool.call(
                        target, lambda: target.engine.load_moved(home.spec, folder, digest)
                    )
            except (AdapterLostError, TinkerError, OSError) as exc:
                _log.warning("could not move %s to replica %s: %s", adapter_id, target.name, exc)
                return False
            source.adapters.pop(adapter_id, None)
            self._settle_in(home.spec, target)
            with contextlib.suppress(AdapterLostError):
                await self._pool.call(source, lambda: source.engine.drop_adapter(adapter_id))
        _log.info("moved %s from replica %s to %s", adapter_id, source.name, target.name)
        self._pool.wake()
        return True

    async def balance(self, replica: Replica) -> None:
        """Fill a replica that came back empty from those that have two adapters more than it.

        An adapter that cannot be moved stays where it is, and another one is tried.
        """
        tried: set[AdapterId] = set()
        while replica.is_open_to_new and replica.spec.trains and replica.room > 0:
            adapter_id = self._next_to_move(replica, tried)
            if adapter_id is None:
                return
            tried.add(adapter_id)
            await self.move(adapter_id, replica)

    def _next_to_move(self, replica: Replica, tried: Set[AdapterId]) -> AdapterId | None:
        """The adapter that was unused longest, of the fullest replica that has a fitting one."""
        returning = sum(one is replica for one in self._lost.values())
        held = len(replica.adapters) + len(replica.reserved) + returning
        trainers = [one for one in self._pool.all if one.is_open_to_new and one.spec.trains]
        for source in sorted(trainers, key=lambda one: len(one.adapters), reverse=True):
            if len(source.adapters) < held + 2:
                return None
            fitting = [
                (home.used_at, adapter_id)
                for adapter_id, size in source.adapters.items()
                if (home := self._homes.get(adapter_id)) is not None
                and home.spec.base_model in replica.serves
                and adapter_id not in tried
                and replica.fits(size)
            ]
            if fitting:
                return min(fitting)[1]
        return None

    # Training

    async def train(self, batch: Sequence[TrainingWork]) -> list[TrainingOutcome]:
        """Run the works of each replica there, all replicas concurrently."""
        self._pool.check_open()
        adapters = {work.adapter_id for work in batch}
        async with self._order.after_earlier_calls(adapters):
            places: dict[str, list[int]] = {}
            outcomes: dict[int, TrainingOutcome] = {}
            for place, work in enumerate(batch):
                try:
                    home = self._home(work.adapter_id)
                except (AdapterLostError, NotFoundError) as exc:
                    outcomes[place] = TrainingOutcome(work_id=work.work_id, error=exc)
                    continue
                home.used_at = time.monotonic()
                places.setdefault(home.replica.name, []).append(place)
            done = await asyncio.gather(
                *(
                    self._train_on(self._pool[name], [batch[place] for place in own])
                    for name, own in places.items()
                )
            )
            for own, found in zip(places.values(), done, strict=True):
                outcomes.update(zip(own, found, strict=True))
        return [outcomes[place] for place in range(len(batch))]

    async def _train_on(self, replica: Replica, works: list[TrainingWork]) -> list[TrainingOutcome]:
        try:
            return await self._pool.call(replica, lambda: replica.engine.train(works), is_work=True)
        except ClosedError:
            raise
        except Exception as exc:  # noqa: BLE001 - of this replica's works and of no other's
            return [TrainingOutcome(work_id=work.work_id, error=exc) for work in works]

    # Draining

    async def empty(self, replica: Replica) -> None:
        """Move the adapters of a replica elsewhere, as far as there is room."""
        for adapter_id, size in list(replica.adapters.items()):
            home = self._homes.get(adapter_id)
            if home is None or home.replica is not replica:
                continue
            target = place_adapter(self._pool.views(), home.spec.base_model, size)
            if target is not None:
                await self.move(adapter_id, self._pool[target])
