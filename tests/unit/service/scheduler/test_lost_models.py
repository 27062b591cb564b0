"""Models that were lost with a replica: held at once, restored, let go on."""

from __future__ import annotations

import asyncio

import msgspec

from tests.unit.service.scheduler.made import a_command
from tinsmith.engine.base import AdapterId, ReplicaChange
from tinsmith.errors import AdapterLostError, NoReplicaError
from tinsmith.service.ledger.fenced import FencedLedger
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.records import QueueId
from tinsmith.service.scheduler.command_queues import CommandQueues
from tinsmith.service.scheduler.lost_models import LostModels
from tinsmith.service.scheduler.settling import Settler
from tinsmith.service.scheduler.status import InFlight, SchedulerStatus
from tinsmith.service.scheduler.suspects import Suspects

M, N = QueueId("m"), QueueId("n")
LOST = ReplicaChange(replica="r", lost="it died", adapters=frozenset({AdapterId("m")}))
BACK = ReplicaChange(replica="r")


class _Bench:
    """Two queues with a command each, and a restore that is done when told to."""

    def __init__(self) -> None:
        ledger = MemoryLedger()
        self.board = ledger.board
        self.queues = CommandQueues()
        for queue_id in (M, N):
            self.queues.begin(queue_id, 0)
            self.queues.add(a_command(queue_id, number=0), 0.0)
        settler = Settler(FencedLedger(ledger, None), InFlight(100), most_unsettled=100)
        self.lost = LostModels(
            self.board,
            queues=self.queues,
            settler=settler,
            suspects=Suspects(),
            status=SchedulerStatus(),
            replica_of=lambda _: "r",
        )
        self.may_restore = asyncio.Event()
        self.errors: list[Exception] = []
        self.restored: list[QueueId] = []
        self.told = 0
        self.given_up: list[QueueId] = []
        self.lost.begin(self._restore, lambda one, _: self.given_up.append(one), [self._tell])

    def _tell(self) -> None:
        self.told += 1

    async def _restore(self, queue_id: QueueId) -> None:
        await self.may_restore.wait()
        if self.errors:
            raise self.errors.pop()
        self.restored.append(queue_id)


def test_the_queue_of_a_lost_model_is_held_at_once_and_others_are_not() -> None:
    async def test() -> None:
        bench = _Bench()
        bench.lost.replica_changed(LOST)
        held = bench.queues.ready()
        await asyncio.sleep(0)
        state = bench.board.queue_state(M).state
        bench.may_restore.set()
        await bench.lost.wait()

        assert held == [N]
        assert state == "paused_capacity"
        assert bench.restored == [M]
        assert sorted(bench.queues.ready()) == [M, N]
        assert bench.board.queue_state(M).state == "active"

    asyncio.run(test())


def test_a_model_that_is_lost_again_meanwhile_is_restored_again() -> None:
    async def test() -> None:
        bench = _Bench()
        bench.lost.replica_changed(LOST)
        await asyncio.sleep(0)
        bench.lost.replica_changed(LOST)
        bench.may_restore.set()
        await bench.lost.wait()

        assert bench.restored == [M, M]
        assert sorted(bench.queues.ready()) == [M, N]

    asyncio.run(test())


def test_a_model_without_a_replica_is_tried_again_when_one_is_there() -> None:
    async def test() -> None:
        bench = _Bench()
        bench.errors = [NoReplicaError("none")]
        bench.may_restore.set()
        bench.lost.replica_changed(LOST)
        while bench.errors:  # noqa: ASYNC110 - what is looked at tells nobody
            await asyncio.sleep(0)
        before = list(bench.restored)
        bench.lost.replica_changed(BACK)
        await bench.lost.wait()

        assert (before, bench.restored, bench.told) == ([], [M], 2)

    asyncio.run(test())


def test_a_model_whose_restoration_crashes_the_replica_is_given_up() -> None:
    """Then its commands run, and fail; the model beside it is restored."""

    async def test() -> None:
        bench = _Bench()
        both = msgspec.structs.replace(LOST, adapters=frozenset({AdapterId("m"), AdapterId("n")}))

        async def restore(queue_id: QueueId) -> None:
            await asyncio.sleep(0)
            if queue_id == M:
                bench.lost.replica_changed(both)
                raise AdapterLostError("gone")
            await asyncio.sleep(0.01)
            bench.restored.append(queue_id)

        bench.lost.begin(restore, lambda one, _: bench.given_up.append(one), [])
        bench.lost.replica_changed(both)
        await bench.lost.wait()

        assert bench.given_up == [M]
        assert bench.restored[-1] == N
        assert sorted(bench.queues.ready()) == [M, N]

    asyncio.run(test())
