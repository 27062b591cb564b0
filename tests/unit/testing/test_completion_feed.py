"""News of ended samples: kept until the cursor passes them, given as soon as they come."""

from __future__ import annotations

import asyncio

from tinsmith.testing.completion_feed import CompletionFeed
from tinsmith.types.futures import FutureFailed, FutureFinished


def test_entries_stay_until_the_cursor_passes_them() -> None:
    async def story() -> None:
        feed = CompletionFeed()
        feed.announce("a", 10, is_failed=False)
        feed.announce("b", None, is_failed=True)

        first, again = await feed.wait_after(0, 0), await feed.wait_after(0, 0)

        assert first == again
        assert first == {
            1: FutureFinished(request_id="a", response_payload_uncompressed_size=10),
            2: FutureFailed(request_id="b"),
        }
        partly = await feed.wait_after(1, 0)
        assert [one.request_id for one in partly.values()] == ["b"]
        assert await feed.wait_after(2, 0) == {}

    asyncio.run(story())


def test_all_who_wait_are_told_at_once() -> None:
    async def story() -> None:
        feed = CompletionFeed()
        waiting = [asyncio.create_task(feed.wait_after(0, 30)) for _ in range(3)]
        await asyncio.sleep(0)

        feed.announce("a", 1, is_failed=False)

        async with asyncio.timeout(60):
            told = await asyncio.gather(*waiting)
        assert [list(one) for one in told] == [[1], [1], [1]]

    asyncio.run(story())
