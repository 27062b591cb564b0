"""The base of the management clients, which make calls outside of any training session.

Clients with the same settings share their connections and make their start-up calls once. The
connections are closed when the last of these clients is garbage-collected.

A listing is one iterator (`Pages`), whose pages are fetched only as needed.
"""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tinsmith.client.background import background
from tinsmith.client.embedding import chosen_url
from tinsmith.client.futures import APIFuture
from tinsmith.client.lease import SessionLease, shared_leases
from tinsmith.client.retry import RetryBudget
from tinsmith.client.session import Session
from tinsmith.client.settings import FURTHER_SETTINGS, settings_from
from tinsmith.errors import ExperimentalWarning, UnknownFieldError, ValidationError
from tinsmith.types.checkpoints import Cursor
from tinsmith.types.record import Record


def warn_experimental(method: str) -> None:
    """Warn at the line that called a method which may change."""
    warnings.warn(f"{method} is experimental and may change", ExperimentalWarning, stacklevel=3)


class ManagementClient:
    """Makes calls outside of any training session.

    Create it either with a base URL and an API key (by default from the environment) and any other
    setting of `ServiceClient` (`proxy`, `ca_file`, `unix_socket` and so on), or with the `holder`
    of a `ServiceClient` and nothing else.
    """

    def __init__(
        self,
        _holder: SessionLease | None = None,
        *,
        base_url: str | Sequence[str] | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        retry: RetryBudget | None = None,
        **settings: Any,
    ) -> None:
        unknown = [name for name in settings if name not in FURTHER_SETTINGS]
        if unknown:
            raise UnknownFieldError(
                f"unknown argument of {type(self).__name__}: {', '.join(unknown)}"
            )
        if default_headers_overrides is not None:
            settings["default_headers"] = default_headers_overrides
        if retry is not None:
            settings["retry"] = retry
        if _holder is not None and (base_url is not None or api_key is not None or settings):
            raise ValidationError(
                "holder already sets the address, the key and the settings",
                remedy="pass only holder, or no holder",
            )
        if _holder is None:
            url = chosen_url(base_url, api_key)
            chosen = settings_from(base_url=url, api_key=api_key, **settings)
            _holder = shared_leases.lease(chosen)
        self._lease = _holder

    @property
    def holder(self) -> SessionLease:
        """This client's lease of its connections, for programs that use the lower-level API."""
        return self._lease

    def get_telemetry(self) -> None:
        """Always None: tinsmith sends no telemetry. For compatibility with the official SDK."""
        return

    def _start(
        self,
        name: str,
        request: Record,
        timeout: float | None,
        *,
        method: str | None = None,
    ) -> APIFuture[Any]:
        """Start a call; `method` is the name of the public method, if it differs from `name`."""
        return background().start(self._call(name, request, method), method or name, timeout)

    async def _call(self, name: str, request: Record, method: str | None = None) -> Any:
        session = await self._ready()
        headers = None if method is None else {"x-sdk-method": method}
        return await session.call(name, request, headers=headers)

    async def _ready(self) -> Session:
        session = self._lease.session
        await session.ready()
        return session

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} holds connections and cannot be pickled; "
            "create one in the other "
            "process"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(base_url={self._lease.session.settings.base_url!r})"


T = TypeVar("T")

PAGE_SIZE = 1000
"""Maximum items per request."""


class Pages(Iterator[T], AsyncIterator[T]):
    """A listing, for both `for` and `async for`.

    A page is fetched when its first item is needed, so all items before a failing page are
    delivered first. If the service does not report a total, the listing ends at an empty page: a
    short page may only mean that the service has a smaller page size.
    """

    def __init__(
        self,
        fetch: Callable[[int, int], APIFuture[Any]],
        read: Callable[[Any], tuple[list[T], Cursor | None]],
        page_size: int,
    ) -> None:
        if not 1 <= page_size <= PAGE_SIZE:
            raise ValidationError(f"page_size must be 1 to {PAGE_SIZE}, not {page_size}")
        self._fetch = fetch
        self._read = read
        self._page_size = page_size
        self.total_count: int | None = None
        """The total number of items; None until a page has reported it."""
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
        if self._items == before:  # the service ignores offsets: this would never end
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
