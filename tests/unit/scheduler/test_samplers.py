"""Weights of samplers: how many stay, and who may have them dropped."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from tinsmith.checkpoints.paths import CheckpointPath
from tinsmith.engines.base import WeightsId
from tinsmith.ledger.memory import MemoryLedger
from tinsmith.scheduler.samplers import Samplers, Source
from tinsmith.scheduler.silence import Silence


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


def a_source(number: int) -> Source:
    path = CheckpointPath("run", "sampler_weights", f"w{number}")
    return Source("m", path, WeightsId(f"w{number}"))


def test_weights_that_are_dropped_while_others_come_fail_nobody_and_stay_for_their_users() -> None:
    async def run() -> None:
        engine = SlowEngine()
        reading = SimpleNamespace(folder="x", close=lambda: None)
        parts: Any = SimpleNamespace(
            ledger=MemoryLedger(),
            ask=lambda make: make(),
            engine=engine,
            store=SimpleNamespace(open_whole=lambda _: reading),
            silence=Silence(0),
            statistics=SimpleNamespace(count=lambda *_: None),
            settings=SimpleNamespace(most_sampler_weights=2),
        )
        samplers = Samplers(parts)
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
