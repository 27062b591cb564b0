"""Calls about one adapter run one after another, in the order in which they were made.

For engines that run calls about different adapters beside each other. Knows nothing of what a call
does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

from tinsmith.engines.base import AdapterId


class AdapterTurns:
    """The calls that are under way, by adapter. For one event loop."""

    def __init__(self) -> None:
        self._last: dict[AdapterId, asyncio.Future[None]] = {}

    @contextlib.asynccontextmanager
    async def turn(self, adapters: Iterable[AdapterId]) -> AsyncIterator[None]:
        """Wait until all earlier calls about any of these adapters have ended."""
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
            if running:  # cancelled while it waited: those behind it still wait for the earlier
                asyncio.gather(*running).add_done_callback(lambda _: ended.set_result(None))
            else:
                ended.set_result(None)
            for one in ids:
                if self._last.get(one) is ended and not running:
                    del self._last[one]
