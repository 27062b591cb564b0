"""The loops that take commands out of the ledger: one claims them, one minds the gaps in lines.

Claimed commands go into their model's line or into the queue of samples; what was cancelled is
dropped at once. A line whose next number is missing goes on when that number is known to be
refused, or has been waited for long enough; the ledger is told first, so that it refuses the number
from then on and a replay sees the same order.
"""

from __future__ import annotations

import asyncio
import logging
import time

from tinsmith.errors import BadRequestError
from tinsmith.ledger.board import ACTIVE, QueueReport
from tinsmith.ledger.records import Command, LineId, RequestId, Settlement, identity
from tinsmith.scheduler.order import Gap
from tinsmith.scheduler.parts import Parts
from tinsmith.scheduler.sampling import Sampling
from tinsmith.scheduler.settling import failure, success
from tinsmith.types.training import CreateCustomLossResponse

_log = logging.getLogger(__name__)

LARGEST_CLAIM = 512
IDLE_WAIT_S = 60.0
TROUBLED_WAIT_S = 1.0
"""A claim that is tried again returns soon: until it does, the ledger is taken for unavailable."""
CANCEL_LOOK_S = 0.05
"""While commands keep coming, cancels are looked for no more often."""


class Intake:
    """See the top of the module. For one event loop."""

    def __init__(self, parts: Parts, sampling: Sampling) -> None:
        self._parts = parts
        self._sampling = sampling
        self._passed: dict[LineId, int] = {}
        self._looked_at = 0.0
        self._looking: asyncio.Task[None] | None = None

    async def claim(self) -> None:
        """Claim commands as there is room, until cancelled or the scheduler closes."""
        parts, claimer = self._parts, self._parts.settings.claimer
        changed = parts.listen()
        while not parts.is_closing:
            changed.clear()
            room = min(LARGEST_CLAIM, parts.settings.most_claimed - parts.held)
            if room <= 0:
                await changed.wait()
                continue
            claimed = await parts.ask(
                lambda: parts.ledger.wait_claim(
                    claimer,
                    limit=room,  # noqa: B023 - called at once
                    timeout_s=TROUBLED_WAIT_S if parts.patient.problem else IDLE_WAIT_S,
                )
            )
            if claimed:
                parts.held += len(claimed)
                for command in claimed:
                    await self._add(command)
                parts.wake()
            if not claimed:
                await self._take_cancelled()
            elif time.monotonic() - self._looked_at > CANCEL_LOOK_S:
                self._look_beside()

    async def _add(self, command: Command) -> None:
        parts = self._parts
        if command.kind == "asample":
            parts.samples.add(command)
        elif command.kind == "create_custom_loss":
            parts.settler.add(_custom_loss_made(command))
            parts.ended()
        else:
            if not parts.order.knows(command.line):
                await self._begin(command)
            if not parts.order.add(command, time.monotonic()):
                error = BadRequestError(
                    f"number {command.seq_id} of {command.line} came too late: "
                    "the line has gone on without it"
                )
                parts.settler.add(failure(command, error))
                parts.ended()

    async def _begin(self, command: Command) -> None:
        """Open a line that nothing is known of, at the first number that has not ended."""
        parts, line = self._parts, command.line
        if command.seq_id == 0:
            parts.order.begin(line, 0)
            return
        kept = await parts.ask(lambda: parts.ledger.line(line))
        replayed = await parts.ask(lambda: parts.ledger.replay(line))
        ended = {one.seq_id for one in replayed if one.is_settled}
        position = min(kept.position, command.seq_id)
        parts.order.begin(line, position, ended)

    def _look_beside(self) -> None:
        """Look for cancels without holding up the next claim."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._take_cancelled())

    async def _take_cancelled(self) -> None:
        self._looked_at = time.monotonic()
        claimer = self._parts.settings.claimer
        cancelled = await self._parts.ask(lambda: self._parts.ledger.take_cancelled(claimer))
        for request_id in cancelled:
            self._cancel(request_id)

    def _cancel(self, request_id: RequestId) -> None:
        parts = self._parts
        line, number = identity(request_id)
        is_dropped = (
            parts.samples.drop(request_id)
            or self._sampling.cancel(request_id)
            or parts.order.drop(line, number, time.monotonic())
        )
        if is_dropped:
            parts.suspects.leave([request_id])
            parts.statistics.count("cancelled_commands")
            parts.ended()

    async def stop(self) -> None:
        """End what runs beside the loops."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    # Gaps

    async def mind_gaps(self) -> None:
        """Let lines go on whose next number will not come, until cancelled."""
        parts, changed = self._parts, self._parts.listen()
        held: set[LineId] = set()
        while True:
            changed.clear()
            gaps = parts.order.gaps()
            for line in held - {gap.line for gap in gaps}:
                parts.ledger.board.hold(ACTIVE, line)
            held = {gap.line for gap in gaps}
            for gap in gaps:
                self._say(gap)
                await self._mind(gap)
            if not parts.order.gaps():
                await changed.wait()
            else:
                await asyncio.sleep(parts.settings.gap_look_s)

    def _say(self, gap: Gap) -> None:
        reason = f"request number {gap.missing} of the model has not come; later ones wait for it"
        self._parts.ledger.board.hold(QueueReport("paused_capacity", reason), gap.line)

    async def _mind(self, gap: Gap) -> None:
        parts, line = self._parts, gap.line
        if self._passed.get(line, 0) < gap.found:
            spent = set(await parts.ask(lambda: parts.ledger.spent(line)))
            is_refused = spent.issuperset(range(gap.missing, gap.found))
            waited_s = time.monotonic() - gap.since
            if not is_refused and waited_s < parts.settings.gap_wait_s:
                return
            if not is_refused:
                _log.warning(
                    "a line goes on with number %d: %d has not come within %.1f s",
                    gap.found,
                    gap.missing,
                    waited_s,
                    extra={"model": line},
                )
                parts.statistics.count("skipped_numbers", gap.found - gap.missing)
            await parts.ask(lambda: parts.ledger.pass_over(line, gap.found))
            self._passed[line] = gap.found
        # One that was accepted just before is in the ledger and still comes; no other can.
        kept = await parts.ask(lambda: parts.ledger.replay(line))
        coming = [
            one.seq_id
            for one in kept
            if gap.missing <= one.seq_id < gap.found and not one.is_settled
        ]
        parts.order.skip_to(line, min(coming, default=gap.found), time.monotonic())
        parts.wake()


def _custom_loss_made(command: Command) -> Settlement:
    """The end of `create_custom_loss`, which was checked and kept when it came."""
    return success(command, CreateCustomLossResponse(loss_id=command.request_id))
