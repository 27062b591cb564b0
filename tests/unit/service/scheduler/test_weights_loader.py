"""Weights of samplers: how many stay, and who may have them dropped."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.engine.base import Engine, WeightsId
from tinsmith.service.ledger.fenced import FencedLedger
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.scheduler.model_files import ModelFiles
from tinsmith.service.scheduler.status import SchedulerStatus
from tinsmith.service.scheduler.suspects import EngineWatchdog
from tinsmith.service.scheduler.weights_loader import SampleSource, WeightsLoader


class SlowEngine:
    """One in another process: what it drops is gone a moment later."""

    def __init__(self) -> None:
        self.weights: set[WeightsId] = set()

    def has_weights(self, weights_id: WeightsId) -> bool:
        return weights_id in self.weights

    async def load_weights(self, weights_id: WeightsId, *_: object) -> None:
        self.weights.add(weights_id)

    async def drop_weights(self, weights_id: WeightsId) -> None:
        await asyncio.sleep(0.01)
        self.weights.discard(weights_id)


def a_source(number: int) -> SampleSource:
    path = CheckpointPath("run", "sampler_weights", f"w{number}")
    return SampleSource("m", path, WeightsId(f"w{number}"))


def test_evicting_weights_during_loads_fails_no_user_of_them() -> None:
    async def run() -> None:
        engine = SlowEngine()
        reading = SimpleNamespace(folder="x", close=lambda: None)
        store: Any = SimpleNamespace(open_whole=lambda _: reading)
        ledger, watchdog = FencedLedger(MemoryLedger(), None), EngineWatchdog(0)
        stands_in = cast(Engine, engine)
        samplers = WeightsLoader(
            ledger,
            stands_in,
            ModelFiles(ledger, store, stands_in, watchdog, store_wait_s=20.0),
            most_loaded=2,
            status=SchedulerStatus(),
            watchdog=watchdog,
        )
        sources = [a_source(number) for number in range(10)]
        for source in sources[:8]:
            await samplers.acquire(source)
        for source in sources[:8]:
            samplers.release(source)

        async def use(number: int, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            await samplers.acquire(sources[number])
            assert engine.has_weights(WeightsId(f"w{number}"))

        # The last is one that is being dropped just then.
        await asyncio.gather(use(8, 0.0), use(9, 0.005), use(4, 0.025))
        await asyncio.sleep(0.1)

        assert engine.weights == {"w8", "w9", "w4"}

    asyncio.run(run())
