"""What is told of each exchange when it is over; metrics and the access log are made of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

import msgspec

_log = logging.getLogger("tinsmith.access")


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
