from __future__ import annotations

import asyncio

import pytest

from tinsmith.client.futures import APIFuture
from tinsmith.client.management.base import Pages
from tinsmith.types.checkpoints import Cursor

Page = tuple[list[int], Cursor | None]


class Listing:
    """A service with so many entries, which gives at most `cap` of them at a time."""

    def __init__(self, count: int, cap: int, *, tells_total: bool) -> None:
        self.entries = list(range(count))
        self.cap = cap
        self.tells_total = tells_total
        self.requests = 0

    def fetch(self, limit: int, offset: int) -> APIFuture[Page]:
        self.requests += 1
        cursor = Cursor(offset=offset, limit=limit, total_count=len(self.entries))
        page = self.entries[offset : offset + min(limit, self.cap)]
        future: APIFuture[Page] = APIFuture("page")
        future.settle((page, cursor if self.tells_total else None))
        return future

    def pages(self, page_size: int = 1000) -> Pages[int]:
        return Pages(self.fetch, lambda page: page, page_size)


async def gathered(pages: Pages[int]) -> list[int]:
    return [entry async for entry in pages]


@pytest.mark.parametrize("tells_total", [False, True])
def test_s38_a_service_with_short_pages_is_listed_completely(tells_total: bool) -> None:
    listing = Listing(3500, cap=100, tells_total=tells_total)

    assert list(listing.pages()) == listing.entries
    assert asyncio.run(gathered(listing.pages())) == listing.entries


@pytest.mark.parametrize(
    ("count", "tells_total", "requests"),
    [(3500, True, 4), (4000, True, 4), (5, True, 1), (0, True, 1), (0, False, 1), (5, False, 2)],
)
def test_s38_no_request_is_made_after_the_service_reported_the_end(
    count: int, tells_total: bool, requests: int
) -> None:
    listing = Listing(count, cap=1000, tells_total=tells_total)

    pages = listing.pages()

    assert len(list(pages)) == count
    assert next(pages, None) is None
    assert listing.requests == requests


def test_a_service_that_ignores_offsets_is_listed_once() -> None:
    listing = Listing(5, cap=1000, tells_total=False)

    pages = Pages(lambda limit, _: listing.fetch(limit, 0), lambda page: page, 1000)

    assert list(pages) == listing.entries
