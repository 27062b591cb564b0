"""Fills the service's metrics: from exchanges as they end, and from the ledger's figures.

The figures of the ledger are read every few seconds, not for each request of `/metrics`: they cost
a query.
"""

from __future__ import annotations

import asyncio
import logging

from tinsmith.errors import LedgerError
from tinsmith.observe.metrics import ServiceMetrics
from tinsmith.observe.spans import Spans
from tinsmith.service.api.app import ExchangeReport, log_exchange
from tinsmith.service.ledger.base import Ledger

_log = logging.getLogger(__name__)

READ_S = 5.0
_UNAUTHORISED = 401


class MetricsReader:
    """Keeps the metrics of one service up to date. For one event loop."""

    def __init__(
        self, metrics: ServiceMetrics, ledger: Ledger, spans: Spans, *, has_scheduler: bool = True
    ) -> None:
        self._metrics = metrics
        self._spans = spans
        self._ledger = ledger
        board = ledger.board
        metrics.ready.read_with(lambda: float(board.readiness.is_ready))
        if has_scheduler:  # elsewhere they would be counted twice
            metrics.read_figures(lambda: board.report.figures)

    def tell_exchange(self, report: ExchangeReport) -> None:
        """Count one exchange, log it, and set the attributes of its span."""
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
        """Read the ledger's figures periodically, until cancelled."""
        while True:
            try:
                await self._read()
            except LedgerError as exc:
                _log.debug("could not read the ledger's figures: %s", exc)
            await asyncio.sleep(READ_S)

    async def _read(self) -> None:
        figures = await self._ledger.statistics()
        metrics = self._metrics
        metrics.commands_pending.set(figures.pending, "pending")
        metrics.commands_pending.set(figures.claimed, "claimed")
        metrics.oldest_pending_seconds.set(figures.oldest_pending_s)
        metrics.ledger_commits.set(figures.commits)
        metrics.ledger_writes.set(figures.writes)
        metrics.ledger_lock_waited.set(figures.lock_waited_s)
        metrics.ledger_lock_held.set(figures.lock_held_s)
        metrics.ledger_bytes.set(figures.stored_bytes)
        metrics.payload_bytes.set(figures.payload_bytes)
        metrics.payload_files.set(figures.payload_files)
