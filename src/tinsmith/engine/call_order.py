"""Runs calls on the same adapter in call order, while calls on different adapters are concurrent.

Knows nothing of what a call does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

from tinsmith.engine.base import AdapterId


class AdapterCallOrder:
    """The running and waiting calls by adapter. For one event loop."""

    def __init__(self) -> None:
        self._last: dict[AdapterId, asyncio.Future[None]] = {}

    @contextlib.asynccontextmanager
    async def after_earlier_calls(self, adapters: Iterable[AdapterId]) -> AsyncIterator[None]:
        """Wait until all earlier calls on any of these adapters have ended."""
        ids = set(adapters)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        earlier = {self._last[one] for one in ids if one in self._last}
        self._last.update(dict.fromkeys(ids, ended))
        try:
            if earlier:
                await asyncio.wait(earlier)
            yield
        finally:
            running = [one for one in earlier if not one.done()]
            if running:  # cancelled while waiting: later calls must still wait for the earlier ones
                asyncio.gather(*running).add_done_callback(lambda _: ended.set_result(None))
            else:
                ended.set_result(None)
            for one in ids:
                if self._last.get(one) is ended and not running:
                    del self._last[one]
