"""Long polls: waiting for the ledger on behalf of a client that may leave at any moment.

A wait ends with what it waits for, at its timeout, when the client leaves, or when the server is
about to stop. In the last case the client is told to ask again.

`told_completions` waits for completed samples of one sampler and clone, for both kinds of polls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from tinsmith.errors import BadRequestError
from tinsmith.service.api.api_call import ApiCall
from tinsmith.service.api.incoming import ClientLeftError
from tinsmith.service.ledger.board import ACTIVE, QueueReport
from tinsmith.service.ledger.records import LARGEST_NUMBER, Completion, QueueId
from tinsmith.types.extensions import ResultsRetrieveRequest
from tinsmith.types.requests import FuturesRetrieveRequest

T = TypeVar("T")


class LongPolls:
    """All long polls of one server. For one event loop."""

    def __init__(self) -> None:
        self._waits: set[_Wait] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def __len__(self) -> int:
        """How many are waiting."""
        return len(self._waits) + len(self._tasks)

    def close(self) -> None:
        """End all waits now, and later ones at once."""
        self._is_closed = True
        for wait in list(self._waits):
            wait.cancel()
        for task in list(self._tasks):
            task.cancel()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A wait that its caller ends; `close` cancels it too."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._is_closed:
            task.cancel()
        return task

    async def until(self, work: Coroutine[Any, Any, T], call: ApiCall) -> T | None:
        """The result of the work; None if the server is about to stop.

        Raises:
            ClientLeftError: The client left first, and the work was cancelled.
        """
        if self._is_closed:
            work.close()
            return None
        wait, left = _Wait(), call.left()
        self._waits.add(wait)
        left.add_done_callback(wait.cancel)
        try:
            return await work
        except asyncio.CancelledError:
            if not wait.is_ours():
                raise
            if left.done():
                raise ClientLeftError from None
            return None
        finally:
            self._waits.discard(wait)
            wait.is_over = True
            left.cancel()


class _Wait:
    """A wait in the task that answers a request; a second task would double the cost."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "waits begin in coroutines"
        self._task = task
        self._is_cancelled = False
        self.is_over = False

    def cancel(self, _: object = None) -> None:
        """End it, unless it is over."""
        if not self._is_cancelled and not self.is_over:
            self._is_cancelled = True
            self._task.cancel()

    def is_ours(self) -> bool:
        """Whether a cancellation came from here alone."""
        return self._is_cancelled and self._task.uncancel() == 0


MOST_REMEMBERED = 10_000
ACKNOWLEDGED_AT_ONCE = 1000
"""Results acknowledged in one transaction, so that submissions need not wait for all of them."""


class ReportedPauses:
    """Which pollers were told that, and why, their samples are paused. For one event loop."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, int], QueueReport] = {}

    def told(self, queue_id: str, clone: int) -> QueueReport:
        """What a poller was told last."""
        return self._told.get((queue_id, clone), ACTIVE)

    def tell(self, queue_id: str, clone: int, report: QueueReport) -> None:
        """Note what a poller is told."""
        if report.state == "active":
            self._told.pop((queue_id, clone), None)
        else:
            if len(self._told) >= MOST_REMEMBERED:
                self._told.clear()  # some are told again
            self._told[queue_id, clone] = report


async def told_completions(
    call: ApiCall,
    request: FuturesRetrieveRequest | ResultsRetrieveRequest,
    *,
    tells_holds: bool = False,
) -> list[Completion]:
    """Acknowledge the results that the client has; then return new completions once there are any.

    Ids of other samplers, and so of other tenants, are ignored. With `tells_holds` it also returns
    when the sampler is paused.
    """
    target, cursor = request.target, request.prev_cursor
    if not 0 <= cursor <= LARGEST_NUMBER:
        raise BadRequestError(f"prev_cursor is {cursor}; it must be 0 to {LARGEST_NUMBER}")
    if not 0 <= target.cloned_sampler_id <= LARGEST_NUMBER:
        raise BadRequestError(f"cloned_sampler_id must be 0 to {LARGEST_NUMBER}")
    sampler = await call.context.lookups.sampler(call.tenant_id, target.sampling_session_id)
    own = f"{sampler.id}:"
    retrieved = [known for known in request.retrieved_request_ids if known.startswith(own)]
    for start in range(0, len(retrieved), ACKNOWLEDGED_AT_ONCE):
        await call.ledger.acknowledge(retrieved[start : start + ACKNOWLEDGED_AT_ONCE])
    queue_id, clone = QueueId(sampler.id), target.cloned_sampler_id
    found = await call.ledger.completions(queue_id, clone, after=cursor)
    if not found:
        waiting = call.ledger.wait_completions(
            queue_id, clone, after=cursor, timeout_s=_timeout_s(call, request.timeout)
        )
        if tells_holds:
            told = call.context.reported_pauses.told(queue_id, clone)
            waiting = _unless_held(waiting, call.ledger.board.wait_paused(queue_id, told))
        found = await call.context.long_polls.until(waiting, call) or []
    for entry in found:
        call.context.admission.settled(call.tenant_id, entry.request_id)
    return found


async def _unless_held(
    news: Coroutine[Any, Any, list[Completion]], held: Coroutine[Any, Any, None]
) -> list[Completion]:
    """The completions, or none if the samples are paused first."""
    tasks = asyncio.create_task(news), asyncio.create_task(held)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else []
    finally:
        for task in tasks:
            task.cancel()


def _timeout_s(call: ApiCall, asked: float | None) -> float:
    longest = call.settings.long_poll_s
    return longest if asked is None else max(0.0, min(asked, longest))
