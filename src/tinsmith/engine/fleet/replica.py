"""One replica of a fleet: its engine, kept running, and how busy it is.

A replica whose engine is lost is started again, at once after the first losses in a row, then after
pauses that grow: loading a model over and over helps nobody. A call that takes longer than
`silence_s` means that the engine hangs; it is killed, and that is a loss like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Literal

import msgspec

from tinsmith.engine.base import AdapterId, EngineCapacity, WeightsId
from tinsmith.engine.process.engine_spec import EngineSpec
from tinsmith.engine.process.process_engine import NOTHING, ProcessEngine
from tinsmith.errors import TinkerError

_log = logging.getLogger(__name__)

Duty = Literal["train", "sample", "both"]
State = Literal["starting", "running", "restarting", "draining", "drained"]

LOSSES_AT_ONCE = 3
"""How often in a row, with nothing trained or sampled, a lost engine is restarted without a pause.
A command that kills the engine costs as many losses."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0
LOAD_S = 60.0
"""Over which time the load is measured."""
LOOK_S = 1.0
"""How often hanging calls are looked for."""


def pause_after(losses_in_a_row: int) -> float:
    """The pause before an engine is restarted that was lost so often in a row, in seconds."""
    beyond = losses_in_a_row - LOSSES_AT_ONCE
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(beyond - 1, 32)) if beyond > 0 else 0.0


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that is not started yet."""

    name: str
    duty: Duty = "both"
    engine: EngineSpec

    @property
    def trains(self) -> bool:
        """Whether it holds adapters."""
        return self.duty in ("train", "both")

    @property
    def draws(self) -> bool:
        """Whether it draws samples."""
        return self.duty in ("sample", "both")


class Replica:
    """A replica. For one event loop.

    Args:
        spec: What it is.
        engine: Its engine, which can be opened again after a loss.
        silence_s: How long a call may take before the engine is killed; 0 for no limit.
        pause: Sleeps for so many seconds.

    Attributes:
        adapters: The adapters that it holds, and the memory that each takes, in bytes.
        weights: The sampler weights that it holds.
        samples: The samples that it is drawing.
        reserved: The adapters that are on their way here, likewise.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        engine: ProcessEngine,
        *,
        silence_s: float = 0.0,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.engine = engine
        self.adapters: dict[AdapterId, int] = {}
        self.weights: set[WeightsId] = set()
        self.samples: set[str] = set()
        self.reserved: dict[AdapterId, int] = {}
        self.is_draining = False
        self.losses = 0
        self.losses_in_a_row = 0
        self.last_loss: str | None = None
        self.restarts_at: float | None = None
        self._state: State = "starting"
        self._silence_s = silence_s
        self._pause = pause
        self._capacity = NOTHING
        self._numbers = itertools.count()
        self._calls: dict[int, float] = {}
        self._busy_since: float | None = None
        self._busy_s = 0.0
        self._measured_at = time.monotonic()

    # State

    @property
    def state(self) -> State:
        """What it is doing."""
        is_emptied = self._state == "running" and self.is_draining
        return "draining" if is_emptied else self._state

    @property
    def is_running(self) -> bool:
        """Whether its engine can be called."""
        return self._state == "running"

    @property
    def is_open_to_new(self) -> bool:
        """Whether adapters and samples may be added."""
        return self.is_running and not self.is_draining

    @property
    def is_coming_back(self) -> bool:
        """Whether its engine is being started, without a pause before."""
        return self._state in ("starting", "restarting") and self.restarts_at is None

    @property
    def serves(self) -> frozenset[str]:
        """The names of its base models."""
        return frozenset(model.name for model in self.engine.base_models())

    @property
    def capacity(self) -> EngineCapacity:
        """The capacity of its engine, as of before the loss if it is lost."""
        if self.is_running:
            self._capacity = self.engine.capacity()
        return self._capacity

    @property
    def room(self) -> int:
        """How many more adapters it may hold."""
        return self.capacity.most_adapters - len(self.adapters) - len(self.reserved)

    @property
    def held_bytes(self) -> int:
        """The memory that its adapters take, and those on their way here."""
        return sum(self.adapters.values()) + sum(self.reserved.values())

    @property
    def free_bytes(self) -> int | None:
        """Memory for more adapters; None if it is not known."""
        has = self.capacity.adapter_bytes
        return None if has is None else has - self.held_bytes

    def fits(self, size_bytes: int) -> bool:
        """Whether there is a slot and memory for an adapter."""
        free = self.free_bytes
        return self.room > 0 and (free is None or size_bytes <= free)

    @contextlib.contextmanager
    def reserving(self, adapter_id: AdapterId, size_bytes: int) -> Iterator[None]:
        """Keep a place for an adapter that is on its way here while the block runs."""
        self.reserved[adapter_id] = size_bytes
        try:
            yield
        finally:
            del self.reserved[adapter_id]

    def forget(self) -> None:
        """It holds nothing any more."""
        self.adapters.clear()
        self.weights.clear()
        self.samples.clear()

    # Calls

    @contextlib.contextmanager
    def calling(self, *, is_work: bool = False) -> Iterator[None]:
        """Watch a call of the engine while the block runs.

        Args:
            is_work: Whether its success proves that the engine does not crash each time.
        """
        number = next(self._numbers)
        self._calls[number] = time.monotonic()
        self._measure()
        self._busy_since = self._busy_since or time.monotonic()
        try:
            yield
            if is_work:
                self.losses_in_a_row = 0
        finally:
            del self._calls[number]
            self._measure()
            if not self._calls:
                self._busy_since = None

    @property
    def load(self) -> float:
        """The share of the last minute in which it was computing, 0 to 1."""
        self._measure()
        return min(1.0, self._busy_s / LOAD_S)

    def _measure(self) -> None:
        """Add the busy time since the last look, and let the older decay."""
        now = time.monotonic()
        passed, self._measured_at = now - self._measured_at, now
        self._busy_s *= max(0.0, 1.0 - passed / LOAD_S)
        if self._busy_since is not None:
            self._busy_s += min(passed, now - self._busy_since)

    # Lifecycle

    async def open(self) -> None:
        """Start the engine for the first time, or after `close`."""
        self._state = "starting"
        await self.engine.open()
        self._state = "running"

    async def close(self, state: State = "drained") -> None:
        """End the engine."""
        self._state = state
        await self.engine.close()

    async def keep_running(
        self, on_lost: Callable[[Replica, TinkerError], None], on_running: Callable[[Replica], None]
    ) -> None:
        """Start the engine again whenever it is lost, until cancelled."""
        while True:
            on_lost(self, await self._until_lost())
            await self._reopen()
            on_running(self)

    def note_lost(self, why: str) -> bool:
        """The engine is gone; False if that is known already."""
        if self._state != "running":
            return False
        self._state = "restarting"
        self.losses += 1
        self.losses_in_a_row += 1
        self.last_loss = why
        return True

    async def _until_lost(self) -> TinkerError:
        waiting = asyncio.ensure_future(self.engine.wait_lost())
        try:
            while not (await asyncio.wait([waiting], timeout=LOOK_S))[0]:
                self._kill_hanging()
            return waiting.result()
        finally:
            waiting.cancel()

    def _kill_hanging(self) -> None:
        oldest = min(self._calls.values(), default=None)
        if not self._silence_s or oldest is None:
            return
        silent_s = time.monotonic() - oldest
        if silent_s > self._silence_s:
            _log.error(
                "replica %s has not returned from a call for %.0f s; it is killed and restarted",
                self.name,
                silent_s,
            )
            self.engine.kill()

    async def _reopen(self) -> None:
        while True:
            with contextlib.suppress(TinkerError):
                await self.engine.close()
            pause_s = pause_after(self.losses_in_a_row)
            if pause_s:
                self.restarts_at = time.monotonic() + pause_s
                _log.error(
                    "replica %s was lost %d times in a row with nothing trained or sampled; "
                    "restarting it in %g s",
                    self.name,
                    self.losses_in_a_row,
                    pause_s,
                )
                await self._pause(pause_s)
            self.restarts_at = None
            try:
                await self.engine.open()
            except Exception as exc:  # noqa: BLE001 - it may work later, and others work now
                _log.error("replica %s could not be started: %s", self.name, exc)
                self.losses_in_a_row += 1
                self.last_loss = f"it could not be started: {exc}"
                continue
            self._state = "running"
            _log.info("replica %s is running again", self.name)
            return
