"""The replicas of a fleet: opened, kept running, called, and looked at.

What a replica holds is recorded in the replica. Whoever has more to do when one is lost or runs
again gives the pool a function for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import TypeVar

from tinsmith.engine.base import AdapterId, ReplicaReport
from tinsmith.engine.fleet.placement import ReplicaView
from tinsmith.engine.fleet.replica import Replica
from tinsmith.errors import AdapterLostError, ClosedError, EngineLostError, TinkerError

_log = logging.getLogger(__name__)

T = TypeVar("T")

OnLost = Callable[[Replica, frozenset[AdapterId], Sequence[str]], None]
"""Called with a lost replica, the adapters that it held, and the samples that it drew."""


class ReplicaPool:
    """The replicas, by name. For one event loop.

    Attributes:
        on_lost: Called before any call fails because of a loss.
        on_running: Called when a replica runs again.
    """

    def __init__(self, replicas: Iterable[Replica]) -> None:
        self._replicas = {one.name: one for one in replicas}
        assert self._replicas, "a fleet has replicas"
        self.on_lost: OnLost = lambda *_: None
        self.on_running: Callable[[Replica], None] = lambda _: None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._keepers: dict[str, asyncio.Task[None]] = {}
        """What restarts each replica that is used."""
        self._is_open = False

    @property
    def all(self) -> list[Replica]:
        """All replicas, in the order of the settings."""
        return list(self._replicas.values())

    @property
    def used(self) -> list[Replica]:
        """Those that are not being drained."""
        return [one for one in self._replicas.values() if not one.is_draining]

    @property
    def is_open(self) -> bool:
        """Whether replicas may be called."""
        return self._is_open

    def get(self, name: str) -> Replica | None:
        """A replica by its name."""
        return self._replicas.get(name)

    def __getitem__(self, name: str) -> Replica:
        return self._replicas[name]

    # Lifecycle

    async def open(self) -> None:
        """Start all that are used; the first error of one ends them all."""
        self._is_open = True
        opening = [asyncio.create_task(one.open()) for one in self.used]
        try:
            await asyncio.gather(*opening)
        except BaseException:
            for task in opening:
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)
            raise
        for replica in self.used:
            self.keep_running(replica)

    async def close(self) -> None:
        """End all replicas and tasks; running calls fail."""
        self._is_open = False
        self.wake()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(one.close() for one in self._replicas.values()))
        for one in self._replicas.values():
            one.forget()

    def check_open(self) -> None:
        """Raise `ClosedError` if the fleet is closed."""
        if not self._is_open:
            raise ClosedError("the engine is closed")

    def keep_running(self, replica: Replica) -> None:
        """Restart a replica whenever it is lost."""
        keeping = replica.keep_running(self.note_lost, self.note_running)
        self._keepers[replica.name] = self.start(keeping)

    async def close_one(self, replica: Replica) -> None:
        """End one replica, and do not restart it."""
        keeper = self._keepers.pop(replica.name)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        replica.forget()
        await replica.close()

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run something in the background until the fleet is closed."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a task of the fleet has failed", exc_info=task.exception())

    # Changes

    def note_lost(self, replica: Replica, error: TinkerError) -> None:
        """Forget what a replica held, and tell; may be called again for the same loss."""
        if replica.note_lost(str(error.args[0])):
            adapters, samples = frozenset(replica.adapters), sorted(replica.samples)
            replica.forget()
            self.on_lost(replica, adapters, samples)
            self.wake()

    def note_running(self, replica: Replica) -> None:
        """A replica can be used again."""
        self.wake()
        self.on_running(replica)

    def wake(self) -> None:
        """End all `wait_change`: something was lost, came back, or has room."""
        self._changed.set()

    async def wait_change(self, timeout_s: float | None = None) -> None:
        """Return after the next change."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        self.check_open()

    # Calls

    async def call(
        self, replica: Replica, call: Callable[[], Awaitable[T]], *, is_work: bool = False
    ) -> T:
        """Make a call to a replica.

        Args:
            replica: Which one.
            call: A call of its engine.
            is_work: Whether its success proves that the replica does not crash each time.

        Raises:
            AdapterLostError: The replica was lost.
        """
        self.check_open()
        if not replica.is_running:
            raise lost_with(replica)
        try:
            with replica.calling(is_work=is_work):
                return await call()
        except ClosedError as exc:
            self.check_open()
            if isinstance(exc, EngineLostError):
                self.note_lost(replica, exc)
            raise lost_with(replica) from exc

    # Views

    def views(self) -> list[ReplicaView]:
        """What placement needs to know of those that take adapters and samples."""
        return [
            ReplicaView(
                name=one.name,
                serves=one.serves,
                trains=one.spec.trains,
                draws=one.spec.draws,
                room=one.room,
                held_bytes=one.held_bytes,
                free_bytes=one.free_bytes,
                load=one.load,
                samples=len(one.samples),
            )
            for one in self._replicas.values()
            if one.is_open_to_new
        ]

    def reports(self) -> tuple[ReplicaReport, ...]:
        """All replicas, for operators."""
        return tuple(map(_report, self._replicas.values()))


def _report(one: Replica) -> ReplicaReport:
    now = time.monotonic()
    return ReplicaReport(
        name=one.name,
        state=one.state,
        duty=one.spec.duty,
        device=one.spec.engine.settings.device,
        threads=one.spec.engine.settings.threads,
        base_models=tuple(model.name for model in one.engine.base_models()),
        pid=one.engine.pid,
        adapters=tuple(sorted(one.adapters)),
        most_adapters=one.capacity.most_adapters if one.spec.trains else 0,
        weights=len(one.weights),
        samples=len(one.samples),
        load=round(one.load, 3),
        losses=one.losses,
        last_loss=one.last_loss,
        restarts_in_s=None if one.restarts_at is None else max(0.0, one.restarts_at - now),
    )


def lost_with(replica: Replica) -> AdapterLostError:
    """The error for what was lost with a replica."""
    return AdapterLostError(f"replica {replica.name} was lost")
