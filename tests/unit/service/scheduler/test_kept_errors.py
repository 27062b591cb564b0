"""An error that a scheduler keeps holds nothing of the calls that met it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Iterator

import pytest

from tinsmith.engine.base import AdapterId, AdapterSpec
from tinsmith.errors import BadRequestError, LedgerUnavailableError
from tinsmith.service.ledger.memory_board import MemoryBoard
from tinsmith.service.ledger.records import QueueId
from tinsmith.service.scheduler.known_models import KnownModels, model_unloaded
from tinsmith.service.scheduler.status import OutageRetry
from tinsmith.types import AdamOptimizerConfig, LoraConfig

LINE = QueueId("session-1:train:0")


class Payload:
    """Stands for the bytes of a command or of its result."""


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    """What is freed here is freed at once, and not when cycles are looked for."""
    gc.disable()
    yield
    gc.enable()


def test_results_held_during_an_outage_are_freed_once_settled() -> None:
    async def no_pause(_: float) -> None:
        await asyncio.sleep(0)

    async def settle() -> list[weakref.ref[Payload]]:
        held: list[weakref.ref[Payload]] = []
        retry = OutageRetry(MemoryBoard(), sleep=no_pause)

        async def write() -> None:
            payload = Payload()
            held.append(weakref.ref(payload))
            if len(held) < 4:
                raise LedgerUnavailableError("the disk is full")

        await retry(write)
        return [one for one in held if one() is not None]

    assert asyncio.run(settle()) == []


def test_only_the_last_command_of_a_released_model_is_kept_in_memory() -> None:
    models = KnownModels()
    spec = AdapterSpec(
        adapter_id=AdapterId(LINE),
        base_model="test/base",
        lora=LoraConfig(rank=1),
        optimizer=AdamOptimizerConfig(),
    )
    models.add(spec).error = model_unloaded(LINE, "was unloaded")
    held: list[weakref.ref[Payload]] = []

    def run() -> None:
        payload = Payload()
        held.append(weakref.ref(payload))
        models.ready(LINE)

    for _ in range(5):
        with contextlib.suppress(BadRequestError):
            run()

    assert [one() is None for one in held[:-1]] == [True] * 4
