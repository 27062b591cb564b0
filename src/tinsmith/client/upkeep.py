"""What a session repeats in the background: its heartbeat, and reading flags that may change.

Neither raises: whatever is wrong shows in the calls that matter.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tinsmith.client import events
from tinsmith.errors import APIError, APIStatusError, TinkerError
from tinsmith.types.requests import SessionHeartbeatRequest
from tinsmith.types.service import ClientDynamicConfigResponse

_log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 10.0
WARNED_AFTER_S = 120.0
"""How long heartbeats may fail before a warning is logged."""
SHORTEST_REFRESH_S = 10.0
LONGEST_REFRESH_S = 24 * 3600.0
GONE = 410

Sleep = Callable[[float], Awaitable[object]]


async def keep_alive(
    call: Callable[..., Awaitable[Any]],
    session_id: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Sleep = asyncio.sleep,
) -> None:
    """Send heartbeats until the service says that the session is gone, or the task is cancelled."""
    last_heard = clock()
    while True:
        await sleep(HEARTBEAT_INTERVAL_S)
        try:
            await call("session_heartbeat", SessionHeartbeatRequest(session_id=session_id))
        except APIError as error:
            if isinstance(error, APIStatusError) and error.status_code == GONE:
                _log.info("session %s has ended; no more heartbeats", session_id)
                return
            _tell(session_id, clock() - last_heard, error)
        else:
            last_heard = clock()


def _tell(session_id: str, silent_s: float, error: APIError) -> None:
    level = logging.WARNING if silent_s > WARNED_AFTER_S else logging.DEBUG
    if events.listeners:
        events.tell(
            events.HeartbeatFailed(
                session_id=session_id, silent_s=silent_s, error=events.named(error)
            )
        )
    _log.log(level, "session %s: no heartbeat for %.0f s: %s", session_id, silent_s, error)


async def keep_fresh(
    flags: ClientDynamicConfigResponse,
    fetch: Callable[[], Awaitable[ClientDynamicConfigResponse]],
    take: Callable[[ClientDynamicConfigResponse], object],
    *,
    sleep: Sleep = asyncio.sleep,
) -> None:
    """Fetch the flags as often as they ask for, until cancelled.

    Args:
        flags: The current ones.
        fetch: Asks the service once.
        take: Receives the new flags.
        sleep: Waits for so many seconds.
    """
    while True:
        await sleep(min(max(flags.refresh_interval_sec, SHORTEST_REFRESH_S), LONGEST_REFRESH_S))
        try:
            flags = await fetch()
        except TinkerError as error:
            _log.debug("the service's flags could not be refreshed: %s", error)
        else:
            take(flags)
