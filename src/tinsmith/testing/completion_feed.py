"""Which samples of one sampler and clone have ended, in order, for those who ask with a cursor.

Entries stay until a poll comes with a cursor at or past them: a poll whose reply was lost is made
again with the cursor it had. A pause of samples that are not done is told as well, once at once
and then with every answer while it lasts.
"""

from __future__ import annotations

import asyncio
import contextlib

from tinsmith.testing.holds import Hold
from tinsmith.types.futures import FutureCompletion, FutureFailed, FutureFinished


class CompletionFeed:
    """Numbered completions, from 1."""

    def __init__(self) -> None:
        self._entries: dict[int, FutureCompletion] = {}
        self._last = 0
        self._grown = asyncio.Event()
        self._pauses: list[Hold] = []
        self._untold_pauses = 0

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
        self._wake()

    def begin_pause(self, hold: Hold) -> None:
        """A sample is being held back, and whoever polls is to know."""
        self._pauses.append(hold)
        self._untold_pauses += 1
        self._wake()

    def end_pause(self, hold: Hold) -> None:
        """That sample goes on."""
        self._pauses.remove(hold)

    def tell_pause(self) -> Hold | None:
        """What holds samples back, for an answer; it counts as told from now on."""
        self._untold_pauses = 0
        return self._pauses[-1] if self._pauses else None

    async def wait_after(
        self, cursor: int, timeout_s: float, *, wants_pauses: bool = False
    ) -> dict[int, FutureCompletion]:
        """What ended after this cursor, as soon as something has; nothing when time is up.

        Args:
            cursor: Up to where the client has seen everything.
            timeout_s: How long to wait.
            wants_pauses: Return also when a pause begins.
        """
        for number in [number for number in self._entries if number <= cursor]:
            del self._entries[number]
        if not self._entries and not (wants_pauses and self._untold_pauses):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._grown.wait()
        return {number: entry for number, entry in self._entries.items() if number > cursor}

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()  # whoever waits next waits for the next one
