"""An error that a scheduler keeps holds nothing of the calls that met it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Iterator

import pytest

from tinsmith.engines.base import AdapterId, AdapterSpec
from tinsmith.errors import BadRequestError, LedgerUnavailableError
from tinsmith.ledger.board import Board
from tinsmith.ledger.records import LineId
from tinsmith.scheduler.models import Models, was_let_go
from tinsmith.scheduler.patience import PatientLedger
from tinsmith.types import AdamOptimizerConfig, LoraConfig

LINE = LineId("session-1:train:0")


class Payload:
    """Stands for the bytes of a command or of its result."""


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    """What is freed here is freed at once, and not when cycles are looked for."""
    gc.disable()
    yield
    gc.enable()


def test_the_results_of_an_outage_are_let_go_of_when_they_are_settled() -> None:
    async def no_pause(_: float) -> None:
        await asyncio.sleep(0)

    async def settle() -> list[weakref.ref[Payload]]:
        held: list[weakref.ref[Payload]] = []
        patient = PatientLedger(Board(), sleep=no_pause)

        async def write() -> None:
            payload = Payload()
            held.append(weakref.ref(payload))
            if len(held) < 4:
                raise LedgerUnavailableError("the disk is full")

        await patient.call(write)
        return [one for one in held if one() is not None]

    assert asyncio.run(settle()) == []


def test_of_the_commands_of_a_model_that_is_gone_only_the_last_stays_behind() -> None:
    models = Models()
    spec = AdapterSpec(
        adapter_id=AdapterId(LINE),
        base_model="test/base",
        lora=LoraConfig(rank=1),
        optimizer=AdamOptimizerConfig(),
    )
    models.add(spec).trouble = was_let_go(LINE, "was unloaded")
    held: list[weakref.ref[Payload]] = []

    def run() -> None:
        payload = Payload()
        held.append(weakref.ref(payload))
        models.ready(LINE)

    for _ in range(5):
        with contextlib.suppress(BadRequestError):
            run()

    assert [one() is None for one in held[:-1]] == [True] * 4
