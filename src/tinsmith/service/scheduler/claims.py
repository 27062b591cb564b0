"""Claims commands from the ledger and puts each into its queue.

Training and other model commands go to their model's queue, samples to the sample queue. What its
client cancelled is removed from whichever holds it.

**Gaps** are queues whose next number has not arrived. A queue continues without a missing number
once that is known to be refused, or has been waited for long enough. The ledger records it first:
it refuses the number from then on, and a replay sees the same order.
"""

from __future__ import annotations

import asyncio
import logging
import time

from tinsmith.errors import BadRequestError
from tinsmith.service.ledger.board import ACTIVE, QueueReport
from tinsmith.service.ledger.fenced import FencedLedger
from tinsmith.service.ledger.records import Command, QueueId, RequestId, Settlement, identity
from tinsmith.service.scheduler.command_queues import CommandQueues, SampleQueue, SequenceGap
from tinsmith.service.scheduler.sample_loop import SampleLoop
from tinsmith.service.scheduler.settling import Settler, failure, success
from tinsmith.service.scheduler.status import InFlight, SchedulerStatus
from tinsmith.service.scheduler.suspects import Suspects
from tinsmith.types.training import CreateCustomLossResponse

LARGEST_CLAIM = 512
IDLE_WAIT_S = 60.0
CANCEL_LOOK_S = 0.05
"""While commands keep coming, cancellations are looked for no more often."""


class Claimer:
    """Takes commands out of the ledger. For one event loop.

    Args:
        name: Under which commands are claimed.
    """

    def __init__(
        self,
        ledger: FencedLedger,
        name: str,
        *,
        queues: CommandQueues,
        samples: SampleQueue,
        sampling: SampleLoop,
        in_flight: InFlight,
        settler: Settler,
        suspects: Suspects,
        status: SchedulerStatus,
    ) -> None:
        self._ledger = ledger
        self._name = name
        self._queues = queues
        self._samples = samples
        self._sampling = sampling
        self._in_flight = in_flight
        self._settler = settler
        self._suspects = suspects
        self._status = status
        self._looked_at = 0.0
        self._looking: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Claim commands as there is room, until cancelled or the scheduler closes."""
        while not self._status.is_closing:
            room = await self._in_flight.wait_room()
            claimed = await self._ledger.wait_claim(
                self._name, limit=min(LARGEST_CLAIM, room), timeout_s=IDLE_WAIT_S
            )
            self._in_flight.add(len(claimed))
            for command in claimed:
                await self._add(command)
            if not claimed:
                await self._take_cancelled()
            elif time.monotonic() - self._looked_at > CANCEL_LOOK_S:
                self._look_in_background()

    async def stop(self) -> None:
        """End what runs in the background."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _add(self, command: Command) -> None:
        if command.kind == "asample":
            self._samples.add(command)
        elif command.kind == "create_custom_loss":
            self._settler.add(_custom_loss_created(command))
        else:
            if not self._queues.knows(command.queue_id):
                await self._open_queue(command)
            if not self._queues.add(command, time.monotonic()):
                error = BadRequestError(
                    f"request number {command.seq_id} of {command.queue_id} arrived too late: "
                    "later requests have already run without it"
                )
                self._settler.add(failure(command, error))

    async def _open_queue(self, command: Command) -> None:
        """Open a queue that nothing is known of, at the first number that has not ended."""
        queue_id = command.queue_id
        if command.seq_id == 0:
            self._queues.begin(queue_id, 0)
            return
        progress = await self._ledger.queue(queue_id)
        replayed = await self._ledger.replay(queue_id)
        ended = {one.seq_id for one in replayed if one.is_settled}
        self._queues.begin(queue_id, min(progress.position, command.seq_id), ended)

    # Cancellations

    def _look_in_background(self) -> None:
        """Look for cancellations without delaying the next claim."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._take_cancelled())

    async def _take_cancelled(self) -> None:
        self._looked_at = time.monotonic()
        for request_id in await self._ledger.take_cancelled(self._name):
            self._cancel(request_id)

    def _cancel(self, request_id: RequestId) -> None:
        queue_id, number = identity(request_id)
        is_removed = (
            self._samples.drop(request_id)
            or self._sampling.cancel(request_id)
            or self._queues.drop(queue_id, number, time.monotonic())
        )
        if is_removed:
            self._suspects.leave([request_id])
            self._status.count("cancelled_commands")
            self._in_flight.finish()


def _custom_loss_created(command: Command) -> Settlement:
    """The settlement of `create_custom_loss`, which was checked and stored when it arrived."""
    return success(command, CreateCustomLossResponse(loss_id=command.request_id))


_log = logging.getLogger(__name__)


class GapLoop:
    """Waits for missing numbers, and skips those that will not arrive. For one event loop.

    Args:
        wait_s: How long a missing number is waited for.
        look_s: How often the ledger is asked meanwhile whether it was refused.
    """

    def __init__(
        self,
        ledger: FencedLedger,
        queues: CommandQueues,
        status: SchedulerStatus,
        *,
        wait_s: float,
        look_s: float,
    ) -> None:
        self._ledger = ledger
        self._queues = queues
        self._status = status
        self._wait_s = wait_s
        self._look_s = look_s
        self._passed: dict[QueueId, int] = {}

    async def run(self) -> None:
        """Handle gaps until cancelled."""
        paused: set[QueueId] = set()
        while True:
            self._queues.gap_found.clear()
            gaps = self._queues.gaps()
            for queue_id in paused - {gap.queue_id for gap in gaps}:
                self._ledger.board.set_queue_state(ACTIVE, queue_id)
            paused = {gap.queue_id for gap in gaps}
            for gap in gaps:
                self._report(gap)
                await self._handle(gap)
            if self._queues.gaps():
                await asyncio.sleep(self._look_s)
            elif not paused:
                await self._queues.gap_found.wait()

    def _report(self, gap: SequenceGap) -> None:
        reason = f"waiting for request number {gap.missing} of the model, which has not arrived"
        self._ledger.board.set_queue_state(QueueReport("paused_capacity", reason), gap.queue_id)

    async def _handle(self, gap: SequenceGap) -> None:
        queue_id = gap.queue_id
        if self._passed.get(queue_id, 0) < gap.found:
            spent = set(await self._ledger.spent(queue_id))
            is_refused = spent.issuperset(range(gap.missing, gap.found))
            waited_s = time.monotonic() - gap.since
            if not is_refused and waited_s < self._wait_s:
                return
            if not is_refused:
                _log.warning(
                    "request %d did not arrive within %.1f s; the model continues with request %d",
                    gap.missing,
                    waited_s,
                    gap.found,
                    extra={"model": queue_id},
                )
                self._status.count("skipped_numbers", gap.found - gap.missing)
            await self._ledger.pass_over(queue_id, gap.found)
            self._passed[queue_id] = gap.found
        # One that was accepted just before is in the ledger and will still be claimed.
        coming = [
            one.seq_id
            for one in await self._ledger.replay(queue_id)
            if gap.missing <= one.seq_id < gap.found and not one.is_settled
        ]
        self._queues.skip_to(queue_id, min(coming, default=gap.found), time.monotonic())
