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
    """Write one line into the access log, which nobody reads unless it is switched on."""
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug(
            "%s %s %s %s in %.1f ms, %d bytes in, %d out, tenant %r, id %s",
            report.method,
            report.path,
            report.endpoint,
            "left" if report.client_left else report.status,
            (report.ended_s - report.started_s) * 1000,
            report.body_bytes,
            report.reply_bytes,
            report.tenant_id,
            report.call_id,
        )
