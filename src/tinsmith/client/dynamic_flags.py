"""Flags that a service may change while a client runs, read again every so often."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tinsmith.errors import TinkerError
from tinsmith.types.service import ClientDynamicConfigResponse

_log = logging.getLogger(__name__)

SHORTEST_PERIOD_S = 10.0
LONGEST_PERIOD_S = 24 * 3600.0


async def keep_fresh(
    flags: ClientDynamicConfigResponse,
    fetch: Callable[[], Awaitable[ClientDynamicConfigResponse]],
    take: Callable[[ClientDynamicConfigResponse], object],
    *,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> None:
    """Fetch the flags as often as they ask for, until cancelled.

    A fetch that fails leaves them as they are: whatever is wrong shows in the calls that matter.

    Args:
        flags: As they are now.
        fetch: Asks the service, once.
        take: Is given the flags that came.
        sleep: Waits for so many seconds.
    """
    while True:
        await sleep(min(max(flags.refresh_interval_sec, SHORTEST_PERIOD_S), LONGEST_PERIOD_S))
        try:
            flags = await fetch()
        except TinkerError as error:
            _log.debug("the service's flags stay as they are: %s", error)
        else:
            take(flags)
