"""What is told of each exchange when it is over, for metrics and the log, and of failures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeAlias

import msgspec

_log = logging.getLogger("tinsmith.access")
_failures_log = logging.getLogger(__name__)

TOLD_AGAIN_S = 10.0
"""How long failures that are alike are counted before they are told again."""


class ExchangeReport(msgspec.Struct, kw_only=True, eq=False):
    """One exchange. Filled while it goes on; frozen in spirit once it is given away."""

    call_id: str
    method: str
    started_s: float
    """By `time.perf_counter`."""
    ended_s: float = 0.0
    path: str = ""
    endpoint: str | None = None
    """None if the path belongs to none."""
    tenant_id: str = ""
    status: int | None = None
    """None if nothing was answered."""
    body_bytes: int = 0
    reply_bytes: int = 0
    client_left: bool = False
    error: BaseException | None = None


Observer: TypeAlias = Callable[[ExchangeReport], None]


def log_exchange(report: ExchangeReport) -> None:
    """Write one line into the log, where debugging is on. The app tells of failures itself."""
    if not _log.isEnabledFor(logging.DEBUG):
        return
    error = report.error
    _log.debug(
        "%s %s: %s",
        report.method,
        report.path,
        "the client left" if report.client_left else error or "answered",
        extra={
            "status": report.status,
            "duration_ms": round((report.ended_s - report.started_s) * 1000, 1),
            "body_bytes": report.body_bytes,
            **({} if error is None else {"error": type(error).__name__}),
        },
    )


class Failures:
    """Logs answers with a 5xx that were foreseen. For one event loop.

    While the ledger is away, or the service begins, every client asks again and again. A line for
    each would fill the disk, and nothing else would be found in the log.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[tuple[str | None, int], tuple[float, int]] = {}

    def tell(self, endpoint: str | None, status: int, error: BaseException) -> None:
        """Log the first of those that are alike, and after a while one more with their number."""
        now, key = self._clock(), (endpoint, status)
        told_until, untold = self._told.get(key, (0.0, 0))
        if now < told_until:
            self._told[key] = told_until, untold + 1
            return
        self._told[key] = now + TOLD_AGAIN_S, 0
        before = f" (and {untold} times before)" if untold else ""
        what = str(error) or type(error).__name__
        _failures_log.warning("%s is answered %d%s: %s", endpoint, status, before, what)
