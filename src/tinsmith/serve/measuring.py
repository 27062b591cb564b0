"""What the service's metrics are filled from: exchanges as they end, and the ledger's own figures.

The figures of the ledger and the scheduler are read every few seconds, not for every look at
`/metrics`: they cost a query.
"""

from __future__ import annotations

import asyncio
import logging

from tinsmith.errors import LedgerError
from tinsmith.ledger.base import Ledger
from tinsmith.observe.metrics import ServiceMetrics
from tinsmith.observe.spans import Spans
from tinsmith.server.exchanges import ExchangeReport, log_exchange

_log = logging.getLogger(__name__)

READ_S = 5.0
_UNAUTHORISED = 401


class Measuring:
    """Keeps the metrics of one service up to date. For one event loop."""

    def __init__(self, metrics: ServiceMetrics, ledger: Ledger, spans: Spans) -> None:
        self._metrics = metrics
        self._spans = spans
        self._ledger = ledger
        board = ledger.board
        metrics.ready.read_with(lambda: float(board.readiness.is_ready))
        metrics.read_figures(lambda: board.scheduler.figures)

    def tell_exchange(self, report: ExchangeReport) -> None:
        """Count one exchange, write it into the log, and name its span."""
        endpoint = report.endpoint or "none"
        status = "left" if report.status is None else str(report.status)
        self._metrics.http_requests.add(1, endpoint, status)
        self._metrics.http_seconds.observe(report.ended_s - report.started_s, endpoint)
        self._metrics.http_received_bytes.add(report.body_bytes)
        self._metrics.http_sent_bytes.add(report.reply_bytes)
        if report.status == _UNAUTHORISED:
            self._metrics.unauthorised.add(1)
        log_exchange(report)
        if not self._spans.is_on:
            return
        self._spans.tell(
            request=report.call_id,
            endpoint=report.endpoint,
            tenant=report.tenant_id,
            status=report.status,
            error=None if report.error is None else type(report.error).__name__,
        )

    async def run(self) -> None:
        """Read the ledger's figures again and again."""
        while True:
            try:
                await self._read()
            except LedgerError as exc:
                _log.debug("figures of the ledger: %s", exc)
            await asyncio.sleep(READ_S)

    async def _read(self) -> None:
        figures = await self._ledger.statistics()
        metrics = self._metrics
        metrics.commands_pending.set(figures.pending, "pending")
        metrics.commands_pending.set(figures.claimed, "claimed")
        metrics.oldest_pending_seconds.set(figures.oldest_pending_s)
        metrics.ledger_commits.set(figures.commits)
        metrics.ledger_writes.set(figures.writes)
        metrics.ledger_bytes.set(figures.stored_bytes)
        metrics.payload_bytes.set(figures.payload_bytes)
        metrics.payload_files.set(figures.payload_files)
