"""A listing as one stream, fetched a page at a time and only as far as it is taken (S38)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from tinsmith.client.futures import APIFuture
from tinsmith.errors import ValidationError
from tinsmith.types.checkpoints import Cursor

T = TypeVar("T")

PAGE_SIZE = 1000
"""The most that a listing is asked for at a time."""


class Pages(Iterator[T], AsyncIterator[T]):
    """A listing: for `for` in a thread, for `async for` in a coroutine.

    A page is fetched when its first item is wanted, so that what comes before a failing page is
    delivered first. Where the service does not say how many there are, the end is an empty page: a
    short one may be all that it gives at a time.
    """

    def __init__(
        self,
        fetch: Callable[[int, int], APIFuture[Any]],
        read: Callable[[Any], tuple[list[T], Cursor | None]],
        page_size: int,
    ) -> None:
        if not 1 <= page_size <= PAGE_SIZE:
            raise ValidationError(f"page_size must lie in 1…{PAGE_SIZE}, not {page_size}")
        self._fetch = fetch
        self._read = read
        self._page_size = page_size
        self.total_count: int | None = None
        """How many there are in all, once a page has told it."""
        self._offset = 0
        self._items: list[T] = []
        self._position = 0
        self._is_last = False

    def __iter__(self) -> Pages[T]:
        return self

    def __next__(self) -> T:
        if self._wants_page():
            self._take(self._fetch(self._page_size, self._offset).result())
        if self._position >= len(self._items):
            raise StopIteration
        return self._next_item()

    def __aiter__(self) -> Pages[T]:
        return self

    async def __anext__(self) -> T:
        if self._wants_page():
            self._take(await self._fetch(self._page_size, self._offset))
        if self._position >= len(self._items):
            raise StopAsyncIteration
        return self._next_item()

    def _wants_page(self) -> bool:
        return self._position >= len(self._items) and not self._is_last

    def _take(self, page: Any) -> None:
        before = self._items
        self._items, cursor = self._read(page)
        if self._items == before:  # the service knows no offsets, and would give it for ever
            self._items = []
        self.total_count = None if cursor is None else cursor.total_count
        self._position = 0
        self._offset += len(self._items)
        is_end = cursor is not None and self._offset >= cursor.total_count
        self._is_last = not self._items or is_end

    def _next_item(self) -> T:
        item = self._items[self._position]
        self._position += 1
        return item
