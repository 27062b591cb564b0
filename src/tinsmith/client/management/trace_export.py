"""Waiting for a session's trace, which the service makes when it is first asked for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from tinsmith.client.session import Session
from tinsmith.errors import APIResponseValidationError, TinkerError
from tinsmith.types.requests import ExportSessionTraceRequest
from tinsmith.types.runs import TraceExportResponse

_log = logging.getLogger(__name__)

POLL_EVERY_S = 5.0
TOLD_EVERY_S = 30.0


class TraceExportError(TinkerError, RuntimeError):
    """The service could not make a session's trace.

    Ask again; the message is the service's.
    """


async def export_trace(
    session: Session,
    session_id: str,
    *,
    poll_every_s: float = POLL_EVERY_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> str:
    """Ask until the trace is there, and give its address.

    Waits as long as the service is at work; the caller bounds it.

    Raises:
        TraceExportError: The service could not make it.
        APIError: The service could not be asked.
    """
    request = ExportSessionTraceRequest(session_id=session_id)
    began = clock()
    told_at = began - TOLD_EVERY_S
    while True:
        answer: TraceExportResponse = await session.call("export_session_trace", request)
        if answer.status == "failed":
            raise TraceExportError(
                f"the trace of session {session_id} could not be made: "
                f"{answer.error or 'the service does not say why'}"
            )
        if answer.status == "ready":
            return _address(session_id, answer)
        if clock() - told_at >= TOLD_EVERY_S:
            told_at = clock()
            _log.info(
                "the trace of session %s is being made; waiting for %.0f s",
                session_id,
                told_at - began,
            )
        with session.work.under_way():
            await sleep(poll_every_s)


def _address(session_id: str, answer: TraceExportResponse) -> str:
    if not answer.url:
        raise APIResponseValidationError(
            message=f"the trace of session {session_id} is ready, and the service says not where"
        )
    return answer.url
