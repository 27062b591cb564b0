"""The ledger in memory, with the faults that strike accepted commands.

Rules are looked up when a command is appended. A command that is held, paused or delayed is not
claimable meanwhile, nor is anything behind it in an ordered queue; a pause is also reported on the
board, from where the service tells its clients. Failures, reversed completions and expired results
take effect when the command is settled.

Knows nothing of HTTP: the exchange that appends is in the context variable `CURRENT`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from tinsmith.errors import APIStatusError
from tinsmith.service.ledger.board import ACTIVE, QueueReport
from tinsmith.service.ledger.memory import MemoryLedger
from tinsmith.service.ledger.memory_commands import KeptCommand, MemoryCommands
from tinsmith.service.ledger.records import (
    Appended,
    Command,
    QueueId,
    RequestId,
    Result,
    Settlement,
    Submission,
)
from tinsmith.service.ledger.wakeups import NEW_WORK
from tinsmith.testing.faults import CommandFault, ExchangeFault, Faults
from tinsmith.testing.holds import Hold
from tinsmith.testing.received import ReceivedRequest
from tinsmith.types.futures import RequestFailedResponse
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.failures import retry_after_s
from tinsmith.wire.stored import read_stored, stored_failure

CURRENT: contextvars.ContextVar[ReceivedRequest | None] = contextvars.ContextVar(
    "the exchange that is being answered", default=None
)
REFUSED = "refused, as the test asked"
OTHER_ROUTES = frozenset({"asample_many", "asample_stream"})
"""Endpoints whose samples are struck by rules for `asample`."""


class FaultyLedger(MemoryLedger):
    """A ledger in memory whose commands fail, wait and expire as rules say."""

    def __init__(self, faults: Faults, result_lifetime_s: float | None = None) -> None:
        super().__init__()
        self._gated: dict[str, asyncio.Task[None]] = {}
        """Commands that may not be claimed yet, by request id, with what waits for that."""
        self._commands = _GatedCommands(self._gated)
        self._faults = faults
        self._result_lifetime_s = result_lifetime_s
        self._struck: dict[str, list[CommandFault]] = {}
        self._queue_locks: dict[QueueId, asyncio.Lock] = {}
        self._pauses: dict[str, Hold] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """`Ledger.close`; what is held back is given up."""
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()

    def pause_of(self, request_id: str) -> Hold | None:
        """The pause that a command is under."""
        return self._pauses.get(request_id)

    def pauses_of_queue(self, queue_id: str) -> list[Hold]:
        """All pauses of the commands in a queue."""
        found = [(self._commands.find(one), hold) for one, hold in self._pauses.items()]
        return [
            hold for kept, hold in found if kept is not None and kept.command.queue_id == queue_id
        ]

    def failure_of(self, request_id: str) -> RequestFailedResponse | None:
        """The error with which a command is to fail instead of being run."""
        rules = self._struck.get(request_id, ())
        return next((rule.failure for rule in rules if rule.failure is not None), None)

    # Appending

    async def append(self, submission: Submission) -> Appended:
        """`Ledger.append`."""
        received = CURRENT.get()
        if received is None or submission.kind not in ENDPOINTS:
            return await super().append(submission)
        if received.endpoint in OTHER_ROUTES:
            received = msgspec.structs.replace(
                received,
                endpoint=submission.kind,
                request=read_stored(submission.kind, submission.payload),
            )
            fault = self._faults.of_exchange(received)
            if fault is not None and fault.status is not None:
                raise _refusal(fault)
        appended = await super().append(submission)
        if appended.is_new:  # nothing is awaited before the rules are in force
            self._strike(appended.request_id, self._faults.of_command(received))
        return appended

    def _strike(self, request_id: str, rules: list[CommandFault]) -> None:
        if not rules:
            return
        self._struck[request_id] = rules
        if any(rule.hold is not None or rule.delay_s for rule in rules):
            command = self._commands.known(request_id).command
            self._gated[request_id] = self._start(self._open_gate(command, rules))

    async def _open_gate(self, command: Command, rules: list[CommandFault]) -> None:
        """Let a command be claimed once nothing holds it back."""
        try:
            if command.is_ordered:
                async with self._queue_locks.setdefault(command.queue_id, asyncio.Lock()):
                    await self._wait(command, rules)
            else:
                await self._wait(command, rules)
        finally:
            self._gated.pop(command.request_id, None)
            self._wakeups.tell([NEW_WORK])

    async def _wait(self, command: Command, rules: list[CommandFault]) -> None:
        for rule in rules:
            if rule.hold is not None and rule.hold.queue_state == "active":
                await rule.hold.wait_released()
            elif rule.hold is not None:
                await self._wait_paused(command, rule.hold)
            await asyncio.sleep(rule.delay_s)

    async def _wait_paused(self, command: Command, hold: Hold) -> None:
        delay_s = None if hold.retry_after_ms is None else hold.retry_after_ms / 1000
        self._pauses[command.request_id] = hold
        report = QueueReport(hold.queue_state, hold.reason, delay_s)
        if not hold.is_released:
            self.board.set_queue_state(report, command.queue_id)
        try:
            await hold.wait_released()
        finally:
            del self._pauses[command.request_id]
            if not self.pauses_of_queue(command.queue_id):
                self.board.set_queue_state(ACTIVE, command.queue_id)

    # Settling

    async def settle(
        self, settlements: Sequence[Settlement], *, epoch: int | None = None
    ) -> list[RequestId]:
        """`Ledger.settle`; some commands fail instead, and some are settled later, last first."""
        at_once: list[Settlement] = []
        later: list[RequestId] = []
        for settlement in map(self._as_ruled, settlements):
            rules = self._struck.get(settlement.request_id, [])
            if any(rule.reversal is not None for rule in rules):
                _ = self._start(self._settle_in_turn(settlement, rules))
                later.append(settlement.request_id)
            else:
                at_once.append(settlement)
        return [*await super().settle(at_once, epoch=epoch), *later]

    def _as_ruled(self, settlement: Settlement) -> Settlement:
        failure = self.failure_of(settlement.request_id)
        if failure is None:
            return settlement
        return Settlement(
            request_id=settlement.request_id, payload=stored_failure(failure), is_failed=True
        )

    async def _settle_in_turn(self, settlement: Settlement, rules: list[CommandFault]) -> None:
        for rule in rules:
            if rule.reversal is not None:
                await rule.reversal.wait_turn()
        await super().settle([settlement])

    def _end(self, kept: KeptCommand, settlement: Settlement) -> None:
        super()._end(kept, settlement)
        gate = self._gated.get(settlement.request_id)
        if gate is not None:  # it was cancelled by its client
            gate.cancel()
        if any(rule.expires for rule in self._struck.pop(settlement.request_id, ())):
            self._commands.drop_result(kept)

    async def result(self, request_id: str) -> Result | None:
        """`Ledger.result`, if it has not expired."""
        kept, lifetime_s = self._commands.find(request_id), self._result_lifetime_s
        if kept is not None and lifetime_s is not None:
            is_old = kept.was_settled_before(self.now() - lifetime_s)
            if is_old:
                self._commands.drop_result(kept)
        return await super().result(request_id)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _GatedCommands(MemoryCommands):
    """Commands of which some are not pending yet, nor what is behind them in an ordered queue."""

    def __init__(self, gated: Mapping[str, object]) -> None:
        super().__init__()
        self._gated = gated

    def pending(self) -> list[KeptCommand]:
        """Those that wait to be claimed and may be."""
        if not self._gated:
            return super().pending()
        first: dict[QueueId, int] = {}
        for request_id in self._gated:
            command = self.known(request_id).command
            if command.is_ordered:
                first[command.queue_id] = min(
                    command.seq_id, first.get(command.queue_id, command.seq_id)
                )
        return [
            kept
            for kept in super().pending()
            if kept.command.request_id not in self._gated
            and not (
                kept.command.is_ordered
                and kept.command.seq_id > first.get(kept.command.queue_id, kept.command.seq_id)
            )
        ]


def _refusal(fault: ExchangeFault) -> APIStatusError:
    """What refuses one sample of several; the service makes an item or a reply of it."""
    assert fault.status is not None
    headers = {name.lower(): value for name, value in fault.headers.items()}
    detail = (fault.body or {}).get("detail", REFUSED)
    return APIStatusError(
        str(detail), status_code=fault.status, retry_after_s=retry_after_s(headers)
    )
