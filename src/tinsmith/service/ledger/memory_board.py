"""The board of a single process: everything in memory, nothing stale."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tinsmith.service.ledger.board import ACTIVE, Board, QueueReport, SchedulerReport, TokenPiece

MOST_STREAMS = 4096
"""How many streams may be watched at a time."""


class MemoryBoard(Board):
    """A board for the API and the scheduler in one process. For one event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._report = SchedulerReport()
        self._ledger_doubted = asyncio.Event()
        self._store_doubted = asyncio.Event()
        self._all_queues = ACTIVE
        self._queues: dict[str, QueueReport] = {}
        self._waiting: dict[asyncio.Future[None], str] = {}
        self._streams: dict[str, _Stream] = {}

    def publish_report(self, report: SchedulerReport) -> None:
        """`Board.publish_report`."""
        self._report = report

    @property
    def published_report(self) -> SchedulerReport:
        """`Board.published_report`."""
        return self._report

    def doubt_ledger(self) -> None:
        """`Board.doubt_ledger`."""
        self._ledger_doubted.set()

    async def wait_ledger_doubt(self) -> None:
        """`Board.wait_ledger_doubt`."""
        await self._ledger_doubted.wait()
        self._ledger_doubted.clear()

    def doubt_store(self) -> None:
        """`Board.doubt_store`."""
        self._store_doubted.set()

    async def wait_store_doubt(self, *, timeout_s: float) -> bool:
        """`Board.wait_store_doubt`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._store_doubted.wait()
        except TimeoutError:
            return False
        self._store_doubted.clear()
        return True

    # Queue states

    def set_queue_state(self, report: QueueReport, queue_id: str | None = None) -> None:
        """`Board.set_queue_state`."""
        if queue_id is None:
            self._all_queues = report
        elif report.state == "active":
            self._queues.pop(queue_id, None)
        else:
            self._queues[queue_id] = report
        for waiting, waited_for in self._waiting.items():
            if queue_id in (None, waited_for) and not waiting.done():
                waiting.set_result(None)

    def clear_queue_states(self) -> None:
        """`Board.clear_queue_states`."""
        for queue_id in list(self._queues):
            self.set_queue_state(ACTIVE, queue_id)

    def queue_state(self, queue_id: str) -> QueueReport:
        """`Board.queue_state`."""
        return self._queues.get(queue_id, self._all_queues)

    async def wait_paused(self, queue_id: str, known: QueueReport) -> None:
        """`Board.wait_paused`."""
        while (report := self.queue_state(queue_id)).state == "active" or report == known:
            known = known if report == known else ACTIVE
            waiting = asyncio.get_running_loop().create_future()
            self._waiting[waiting] = queue_id
            try:
                await waiting
            finally:
                del self._waiting[waiting]

    # Tokens

    def watch(self, request_id: str) -> bool:
        """`Board.watch`."""
        stream = self._streams.get(request_id)
        if stream is None:
            if len(self._streams) >= MOST_STREAMS:
                return False
            stream = self._streams[request_id] = _Stream()
        stream.watchers += 1
        return True

    def unwatch(self, request_id: str) -> None:
        """`Board.unwatch`."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.watchers -= 1
            if stream.watchers <= 0:
                del self._streams[request_id]

    def is_watched(self, request_id: str) -> bool:
        """`Board.is_watched`."""
        return request_id in self._streams

    def publish_tokens(self, request_id: str, pieces: Sequence[TokenPiece]) -> None:
        """`Board.publish_tokens`."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.pieces.extend(pieces)
            stream.changed.set()

    def restart_tokens(self, request_id: str) -> None:
        """`Board.restart_tokens`."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.pieces.clear()
            stream.restarts += 1
            stream.changed.set()

    def restarts(self, request_id: str) -> int:
        """`Board.restarts`."""
        stream = self._streams.get(request_id)
        return 0 if stream is None else stream.restarts

    async def wait_tokens(
        self, request_id: str, after: int, *, timeout_s: float
    ) -> list[TokenPiece]:
        """`Board.wait_tokens`."""
        stream = self._streams.get(request_id)
        if stream is None:
            return []
        if len(stream.pieces) <= after:
            stream.changed.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await stream.changed.wait()
            except TimeoutError:
                return []
        return stream.pieces[after:]


class _Stream:
    """Tokens of one command that somebody watches."""

    def __init__(self) -> None:
        self.pieces: list[TokenPiece] = []
        self.changed = asyncio.Event()
        self.watchers = 0
        self.restarts = 0
