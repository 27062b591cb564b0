"""Telling the service every few seconds that a session's client still runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tinsmith.client import events
from tinsmith.errors import APIError, APIStatusError
from tinsmith.types.requests import SessionHeartbeatRequest

_log = logging.getLogger(__name__)

INTERVAL_S = 10.0
TOLD_AFTER_S = 120.0
"""How long beats may fail before the user is told."""
GONE = 410


async def keep_alive(
    call: Callable[..., Awaitable[Any]],
    session_id: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> None:
    """Beat until the service says that the session is gone, or the task is cancelled.

    A beat that fails costs nothing but a log line, and that after two minutes without one that
    succeeded: whatever is wrong shows in the calls that matter.
    """
    last_heard = clock()
    while True:
        await sleep(INTERVAL_S)
        try:
            await call("session_heartbeat", SessionHeartbeatRequest(session_id=session_id))
        except APIStatusError as error:
            if error.status_code == GONE:
                _log.info("session %s is over; no more heartbeats", session_id)
                return
            _tell(session_id, clock() - last_heard, error)
        except APIError as error:
            _tell(session_id, clock() - last_heard, error)
        else:
            last_heard = clock()


def _tell(session_id: str, silent_s: float, error: APIError) -> None:
    level = logging.WARNING if silent_s > TOLD_AFTER_S else logging.DEBUG
    if events.listeners:
        events.tell(
            events.HeartbeatFailed(
                session_id=session_id, silent_s=silent_s, error=events.named(error)
            )
        )
    _log.log(level, "session %s: no heartbeat for %.0f s: %s", session_id, silent_s, error)
