"""Where the adapters of a fleet are: spread when they are created, moved, balanced.

The replicas are fake engines in this process, so that each test decides what waits and what fails.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import cast

import pytest

from tinsmith.engine.base import AdapterId, AdapterParts, AdapterSpec, StepWork
from tinsmith.engine.fake.engine import FakeEngine, fake_model
from tinsmith.engine.fake.fake_settings import FakeSettings
from tinsmith.engine.fleet.fleet_adapters import FleetAdapters
from tinsmith.engine.fleet.placement import PARAMETER_BYTES, RANK_PARAMETERS
from tinsmith.engine.fleet.replica import Replica, ReplicaSpec
from tinsmith.engine.fleet.replica_pool import ReplicaPool
from tinsmith.engine.process.engine_spec import EngineSpec
from tinsmith.engine.process.process_engine import ProcessEngine
from tinsmith.errors import CheckpointUnavailableError, NoReplicaError, ValidationError
from tinsmith.types import AdamOptimizerConfig, AdamParams, LoraConfig

X, Y = "test/x", "test/y"
WAIT_S = 60.0


class _Engine(FakeEngine):
    """A replica's engine in this process; some adapters cannot be saved."""

    def __init__(self, models: tuple[str, ...], settings: FakeSettings) -> None:
        super().__init__([fake_model(one) for one in models], settings)
        self.stuck: set[AdapterId] = set()

    async def create_adapter(self, spec: AdapterSpec) -> None:
        await asyncio.sleep(0)  # as a process, it does not reply at once
        await super().create_adapter(spec)

    async def save_to_move(self, adapter_id: AdapterId, folder: Path) -> str:
        if adapter_id in self.stuck:
            raise CheckpointUnavailableError("the disk does not want it")
        await self.save_adapter(adapter_id, folder, AdapterParts.SNAPSHOT)
        return ""

    async def load_moved(self, spec: AdapterSpec, folder: Path, digest: str) -> None:
        assert digest == ""
        await self.load_adapter(spec, folder, AdapterParts.SNAPSHOT)


class _Fleet:
    """Replicas by name, and their adapters."""

    def __init__(self, folder: Path, serving: Mapping[str, tuple[str, ...]], **fake: int) -> None:
        settings = FakeSettings(**fake)
        self.engines = {name: _Engine(models, settings) for name, models in serving.items()}
        self.pool = ReplicaPool(
            Replica(
                ReplicaSpec(name=name, engine=EngineSpec(engine="fake")),
                cast("ProcessEngine", engine),
            )
            for name, engine in self.engines.items()
        )
        models = {one: fake_model(one) for one in (X, Y)}
        self.adapters = FleetAdapters(self.pool, lambda: models, lambda: folder)

    async def create(self, *names: str, base: str = X, rank: int = 4) -> None:
        """Create adapters at the same time."""
        await asyncio.gather(*(self.adapters.create(_spec(one, base, rank)) for one in names))

    @property
    def held(self) -> dict[str, str]:
        """The adapters of each replica."""
        return {one.name: "".join(sorted(one.adapters)) for one in self.pool.all}


def _spec(name: str, base: str = X, rank: int = 4) -> AdapterSpec:
    return AdapterSpec(
        adapter_id=AdapterId(name),
        base_model=base,
        lora=LoraConfig(rank=rank, seed=1),
        optimizer=AdamOptimizerConfig(),
    )


@contextlib.asynccontextmanager
async def _fleet(
    folder: Path, serving: Mapping[str, tuple[str, ...]] | int = 3, **fake: int
) -> AsyncIterator[_Fleet]:
    """An open fleet: what its replicas serve, or how many serve everything."""
    if isinstance(serving, int):
        serving = {f"r{number}": (X, Y) for number in range(serving)}
    made = _Fleet(folder, serving, **fake)
    async with asyncio.timeout(WAIT_S):
        await made.pool.open()
        try:
            yield made
        finally:
            await made.pool.close()


def test_adapters_that_are_created_at_the_same_time_are_spread(tmp_path: Path) -> None:
    """One that is on its way to a replica counts like one that is there."""

    async def test() -> None:
        async with _fleet(tmp_path) as fleet:
            await fleet.create(*"abcdef")

            assert fleet.held == {"r0": "ad", "r1": "be", "r2": "cf"}

    asyncio.run(test())


def test_a_replica_is_filled_although_some_adapters_cannot_be_moved(tmp_path: Path) -> None:
    """The first that is chosen cannot be saved; others take its place."""

    async def test() -> None:
        async with _fleet(tmp_path, 2) as fleet:
            r1 = fleet.pool["r1"]
            r1.is_draining = True
            for name in "abcdef":
                await fleet.create(name)
            fleet.engines["r0"].stuck = {AdapterId("a"), AdapterId("c")}
            r1.is_draining = False
            await fleet.adapters.balance(r1)

            assert fleet.held == {"r0": "acf", "r1": "bde"}

    asyncio.run(test())


def test_a_replica_is_filled_from_those_that_have_what_it_serves(tmp_path: Path) -> None:
    """The fullest has nothing for it, the second fullest does."""

    async def test() -> None:
        serving = {"full": (Y,), "second": (X,), "back": (X,)}
        async with _fleet(tmp_path, serving) as fleet:
            back = fleet.pool["back"]
            back.is_draining = True
            await fleet.create(*"stuvw", base=Y)
            for name in "abcd":
                await fleet.create(name)
            back.is_draining = False
            await fleet.adapters.balance(back)

            assert fleet.held == {"full": "stuvw", "second": "cd", "back": "ab"}

    asyncio.run(test())


def test_adapters_are_placed_and_moved_only_where_their_memory_is(tmp_path: Path) -> None:
    """Each replica has slots for a thousand, and memory for ranks of 100."""
    unit = RANK_PARAMETERS * PARAMETER_BYTES

    async def test() -> None:
        async with _fleet(tmp_path, 2, adapter_bytes=100 * unit) as fleet:
            for name, rank in zip("abcd", (60, 50, 30, 40), strict=True):
                await fleet.create(name, rank=rank)
            assert fleet.held == {"r0": "ad", "r1": "bc"}
            with pytest.raises(NoReplicaError, match="has room"):
                await fleet.create("e", rank=21)
            with pytest.raises(ValidationError, match=r"needs 2\.1 GB"):
                await fleet.create("e", rank=101)
            assert not await fleet.adapters.move(AdapterId("d"), fleet.pool["r1"])
            await fleet.adapters.drop(AdapterId("c"))
            assert await fleet.adapters.move(AdapterId("d"), fleet.pool["r1"])
            assert fleet.held == {"r0": "a", "r1": "bd"}

    asyncio.run(test())


def test_an_adapter_that_is_moved_twice_at_once_stays_usable(tmp_path: Path) -> None:
    """The second move finds it where it should be."""

    async def test() -> None:
        async with _fleet(tmp_path, 2) as fleet:
            await fleet.create("a")
            r1 = fleet.pool["r1"]
            moves = (fleet.adapters.move(AdapterId("a"), r1) for _ in range(2))
            assert await asyncio.gather(*moves) == [True, False]

            work = StepWork(work_id="w", adapter_id=AdapterId("a"), params=AdamParams())
            [outcome] = await fleet.adapters.train([work])
            assert fleet.held == {"r0": "", "r1": "a"}
            assert outcome.error is None

    asyncio.run(test())
