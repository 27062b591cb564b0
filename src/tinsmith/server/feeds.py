"""The news of one sampler and clone, as both kinds of polls for it ask."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from tinsmith.errors import BadRequestError
from tinsmith.ledger.board import ACTIVE, QueueReport
from tinsmith.ledger.records import LARGEST_NUMBER, Completion, LineId
from tinsmith.server.call import Call
from tinsmith.types.extensions import ResultsRetrieveRequest
from tinsmith.types.requests import FuturesRetrieveRequest

MOST_REMEMBERED = 10_000
ACKNOWLEDGED_AT_ONCE = 1000
"""Results in one transaction: others' submissions go in between."""


class ToldHolds:
    """Which pollers know that, and why, their samples are held back. For one event loop."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, int], QueueReport] = {}

    def told(self, line: str, clone: int) -> QueueReport:
        """What a poller was told last."""
        return self._told.get((line, clone), ACTIVE)

    def tell(self, line: str, clone: int, report: QueueReport) -> None:
        """Note what a poller is being told."""
        if report.state == "active":
            self._told.pop((line, clone), None)
        else:
            if len(self._told) >= MOST_REMEMBERED:
                self._told.clear()  # then some are told once more
            self._told[line, clone] = report


async def told_completions(
    call: Call,
    request: FuturesRetrieveRequest | ResultsRetrieveRequest,
    *,
    tells_holds: bool = False,
) -> list[Completion]:
    """Let go of the results that the client has; then what ended since, as soon as there is some.

    Ids of other samplers, and so of other tenants, are passed by. With `tells_holds` it also ends
    when the sampler begins to be held back.
    """
    target, cursor = request.target, request.prev_cursor
    if not 0 <= cursor <= LARGEST_NUMBER:
        raise BadRequestError(f"prev_cursor is {cursor}; it may be 0 to {LARGEST_NUMBER}")
    if not 0 <= target.cloned_sampler_id <= LARGEST_NUMBER:
        raise BadRequestError(f"cloned_sampler_id may be 0 to {LARGEST_NUMBER}")
    sampler = await call.service.lookups.sampler(call.tenant_id, target.sampling_session_id)
    own = f"{sampler.id}:"
    retrieved = [known for known in request.retrieved_request_ids if known.startswith(own)]
    for start in range(0, len(retrieved), ACKNOWLEDGED_AT_ONCE):
        await call.ledger.acknowledge(retrieved[start : start + ACKNOWLEDGED_AT_ONCE])
    line, clone = LineId(sampler.id), target.cloned_sampler_id
    found = await call.ledger.completions(line, clone, after=cursor)
    if not found:
        waiting = call.ledger.wait_completions(
            line, clone, after=cursor, timeout_s=_timeout_s(call, request.timeout)
        )
        if tells_holds:
            told = call.service.told_holds.told(line, clone)
            waiting = _unless_held(waiting, call.ledger.board.wait_held(line, told))
        found = await call.service.waits.until(waiting, call) or []
    for entry in found:
        call.service.admission.settled(call.tenant_id, entry.request_id)
    return found


async def _unless_held(
    news: Coroutine[Any, Any, list[Completion]], held: Coroutine[Any, Any, None]
) -> list[Completion]:
    """The news, or none if the samples are being held back first."""
    tasks = asyncio.create_task(news), asyncio.create_task(held)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else []
    finally:
        for task in tasks:
            task.cancel()


def _timeout_s(call: Call, asked: float | None) -> float:
    longest = call.settings.long_poll_s
    return longest if asked is None else max(0.0, min(asked, longest))
