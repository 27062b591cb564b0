"""Every kind of ledger, to hold each to the same promises."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.contract.postgres_server import new_database
from tinsmith.service.ledger.base import Ledger
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.postgres import PostgresLedger
from tinsmith.service.ledger.records import (
    QueueId,
    RequestId,
    Retention,
    SessionEntry,
    SessionId,
    Settlement,
    Submission,
    TenantId,
    Use,
)
from tinsmith.service.ledger.scheduler_lease import SteadyClock
from tinsmith.service.ledger.sqlite import SqliteLedger

T = TypeVar("T")

TENANT = TenantId("tenant-a")
SESSION = SessionId("session-0")
MODEL = QueueId("session-0:train:0")
SAMPLER = QueueId("session-0:sample:0")
INLINE_BYTES = 1000
"""Small, so that tests need no large payloads to have files."""


class SetClock:
    """A wall clock and a monotonic one, both set by the test."""

    def __init__(self) -> None:
        self.wall = 1_000_000.0
        self.ticks = 50.0

    def steady(self) -> SteadyClock:
        """The ledger's clock over these."""
        return SteadyClock(lambda: self.wall, lambda: self.ticks)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.wall += seconds
        self.ticks += seconds


class Place:
    """Where one kind of ledger is opened, again and again."""

    def __init__(self, kind: str, folder: Path, dsn: str = "") -> None:
        self.kind = kind
        self.dsn = dsn
        self.folder = folder
        self.clock = SetClock()
        self.is_durable = kind != "memory"
        self.has_files = kind == "sqlite"

    async def open(self, retention: Retention | None = None) -> Ledger:
        """Open it, or make it."""
        clock = self.clock.steady()
        if self.kind == "memory":
            return MemoryLedger(retention=retention, clock=clock)
        if self.kind == "postgres":
            return await PostgresLedger.open(self.dsn, retention=retention, clock=clock)
        return await SqliteLedger.open(
            self.folder, retention=retention, clock=clock, inline_bytes=INLINE_BYTES
        )


def story(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[[Place], None]:
    """Run a test in an event loop, with an open ledger and, if it wants it, the ledger's place."""
    wants_place = "place" in inspect.signature(test).parameters

    def run(place: Place) -> None:
        async def tell() -> None:
            async with await place.open() as ledger:
                await (test(ledger, place) if wants_place else test(ledger))

        asyncio.run(tell())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


DURABLE = ["sqlite", "postgres"]
KINDS = ["memory", *DURABLE]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Each kind of ledger, empty."""
    dsn = new_database() if request.param == "postgres" else ""
    return Place(request.param, tmp_path / "ledger", dsn)


def training(seq_id: int | None, payload: bytes = b"pass", queue_id: QueueId = MODEL) -> Submission:
    """A numbered training request."""
    return Submission(
        queue_id=queue_id,
        seq_id=seq_id,
        kind="forward_backward",
        tenant_id=TENANT,
        session_id=SESSION,
        fingerprint=hashlib.sha256(payload).digest(),
        payload=payload,
    )


def sampling(seq_id: int, payload: bytes = b"prompt", clone: int = 0) -> Submission:
    """A numbered sample."""
    return Submission(
        queue_id=SAMPLER,
        seq_id=seq_id,
        kind="asample",
        tenant_id=TENANT,
        session_id=SESSION,
        fingerprint=hashlib.sha256(payload).digest(),
        payload=payload,
        is_ordered=False,
        clone=clone,
    )


def ended(request_id: str, payload: bytes = b"done", *uses: Use, fail: bool = False) -> Settlement:
    """How a command ended."""
    return Settlement(request_id=RequestId(request_id), payload=payload, is_failed=fail, uses=uses)


def a_session(session_id: str = SESSION, at: float = 10.0, **fields: Any) -> SessionEntry:
    """A session."""
    made: dict[str, Any] = {
        "id": session_id,
        "tenant_id": TENANT,
        "created_at": at,
        "heartbeat_at": at,
        "project_id": "project-0",
        **fields,
    }
    return SessionEntry(**made)


async def raised(work: Awaitable[object], kind: type[BaseException]) -> str:
    """The message of the error that work ends with."""
    with pytest.raises(kind) as caught:
        await work
    return str(caught.value)
