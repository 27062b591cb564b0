"""What the loops of the scheduler share."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tinsmith.checkpoints.base import CheckpointStore
from tinsmith.engines.base import Engine
from tinsmith.ledger.fenced import FencedLedger
from tinsmith.ledger.records import Command, UsageKey, Use
from tinsmith.observe.spans import Spans
from tinsmith.scheduler.admission import SampleQueue
from tinsmith.scheduler.fairness import EngineTurns
from tinsmith.scheduler.models import Models
from tinsmith.scheduler.order import Order
from tinsmith.scheduler.patience import PatientLedger
from tinsmith.scheduler.settings import SchedulerSettings
from tinsmith.scheduler.settling import Settler
from tinsmith.scheduler.silence import Silence
from tinsmith.scheduler.statistics import Statistics
from tinsmith.scheduler.suspects import Suspects
from tinsmith.wire.stored import read_stored

T = TypeVar("T")

LARGE_BYTES = 64 * 1024
"""Larger payloads are read on a thread, so that many of them do not hold up the event loop."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Parts:
    """See the top of the module. For one event loop."""

    ledger: FencedLedger
    engine: Engine
    store: CheckpointStore
    settings: SchedulerSettings
    patient: PatientLedger
    settler: Settler
    turns: EngineTurns
    silence: Silence
    order: Order = dataclasses.field(default_factory=Order)
    models: Models = dataclasses.field(default_factory=Models)
    samples: SampleQueue = dataclasses.field(default_factory=SampleQueue)
    statistics: Statistics = dataclasses.field(default_factory=Statistics)
    spans: Spans = dataclasses.field(default_factory=Spans)
    suspects: Suspects = dataclasses.field(default_factory=Suspects)
    is_recovered: bool = False
    """Whether all models are where their lines are."""
    recovery: str | None = None
    """How far that is, until they are."""
    began_at: float = 0.0
    """The ledger's time when this scheduler began: what came before was another's to do."""
    is_closing: bool = False
    problem: str | None = None
    """What keeps the scheduler from working, if it is not the ledger."""
    held: int = 0
    """How many claimed commands have not ended."""
    _listeners: list[asyncio.Event] = dataclasses.field(default_factory=list)

    def listen(self) -> asyncio.Event:
        """An event that `wake` sets; whoever waits for it clears it before it looks."""
        event = asyncio.Event()
        event.set()
        self._listeners.append(event)
        return event

    def wake(self) -> None:
        """Have all loops look again: a command came, ended or was dropped."""
        for event in self._listeners:
            event.set()

    def ended(self, commands: int = 1) -> None:
        """Commands that were claimed have ended, so that there is room for others."""
        self.held -= commands
        self.wake()

    async def ask(self, make: Callable[[], Awaitable[T]]) -> T:
        """A call of the ledger that waits out its troubles."""
        return await self.patient.call(make)

    async def request(self, command: Command) -> Any:
        """What was submitted; raises `DecodeError`, `LedgerDamagedError` if it cannot be read."""
        payload = await self.ask(lambda: self.ledger.payload(command.request_id))
        if len(payload) > LARGE_BYTES:
            return await asyncio.to_thread(read_stored, command.kind, payload)
        return read_stored(command.kind, payload)


def about(command: Command) -> dict[str, str]:
    """The fields of a log line about a command."""
    return {
        "command": command.request_id,
        "kind": command.kind,
        "tenant": command.tenant_id,
        "session": command.session_id,
        "model": command.line,
    }


def use(command: Command, kind: str, amount: float, base_model: str) -> Use:
    """An amount that a command used."""
    key = UsageKey(
        tenant_id=command.tenant_id,
        kind=kind,
        session_id=command.session_id,
        line=command.line,
        base_model=base_model,
    )
    return Use(key=key, amount=amount)
