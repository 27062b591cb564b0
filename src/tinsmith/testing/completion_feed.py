"""Which samples of one sampler and clone have ended, in order, for those who ask with a cursor.

Entries stay until a poll comes with a cursor at or past them: a poll whose reply was lost is made
again with the cursor it had.
"""

from __future__ import annotations

import asyncio
import contextlib

from tinsmith.types.futures import (
    FutureCompletion,
    FutureFailed,
    FutureFinished,
    FuturesRetrieveResponse,
)


class CompletionFeed:
    """Numbered completions, from 1."""

    def __init__(self) -> None:
        self._entries: dict[int, FutureCompletion] = {}
        self._last = 0
        self._grown = asyncio.Event()

    def announce(self, request_id: str, size_bytes: int | None, *, is_failed: bool) -> None:
        """A sample ended."""
        completion: FutureCompletion
        if is_failed:
            completion = FutureFailed(request_id=request_id)
        else:
            completion = FutureFinished(
                request_id=request_id, response_payload_uncompressed_size=size_bytes
            )
        self._last += 1
        self._entries[self._last] = completion
        self._grown.set()
        self._grown = asyncio.Event()  # whoever waits next waits for the next one

    async def wait_after(self, cursor: int, timeout_s: float) -> FuturesRetrieveResponse:
        """What ended after this cursor, as soon as something has; nothing when time is up."""
        for number in [number for number in self._entries if number <= cursor]:
            del self._entries[number]
        if not self._entries:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._grown.wait()
        found = {number: entry for number, entry in self._entries.items() if number > cursor}
        return FuturesRetrieveResponse(
            completions=list(found.values()), cursor=max(found, default=cursor)
        )
