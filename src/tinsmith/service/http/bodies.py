"""Bounds on bodies: their size, the rate at which they arrive, and the memory they take together.

A body announced as too large is refused before any of it is read; one of unknown length, as soon as
it has grown too large. A client must keep up a minimum rate, or is answered 408.

Bodies that are being read and processed are charged to budgets: of all of them, of one tenant and
of one address. What counts is what was received, not what was announced, and the decompressed size
once it is known. A small body is not charged, so that no number of large ones keeps it out; how
many small ones there can be is bounded by the number of connections.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from tinsmith.errors import APIStatusError, BadRequestError, BodyTooLargeError, RateLimitError
from tinsmith.types.buffers import Memory
from tinsmith.wire.decode_limits import MIB

_REQUEST_TIMEOUT = 408
_NO_ROOM = {
    "tenant": "your requests in progress already take {} bytes; send fewer at once",
    "address": "requests in progress from your address already take {} bytes; send fewer at once",
    "total": "requests in progress already take most of {} bytes; retry",
}


class BodyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the bodies of one server; `run/service_settings.py` explains them."""

    body_bytes: int = 64 * MIB
    """The largest body, as it is sent."""
    bodies_bytes: int = 1024 * MIB
    """The most that all bodies which are being processed may take together."""
    tenant_bodies_bytes: int = 512 * MIB
    """The same of one tenant: eight of the largest."""
    address_bodies_bytes: int = 768 * MIB
    """The same of one address, which many tenants may share."""
    small_body_bytes: int = 64 * 1024
    """Bodies up to this size are not charged to the budgets."""
    upload_bytes_per_s: int = 1024
    """The minimum rate at which a body must arrive, on average over a window."""
    upload_window_s: float = 30.0
    """The window, which is also how long a body may take to begin."""
    compress_from_bytes: int = 64 * 1024
    """Answers of at least this size are compressed for clients that accept it; 0: none are."""


class BodyBudget:
    """The memory that bodies take together. For one event loop.

    Attributes:
        held_bytes: What all of them take now.
        refused: How many were refused, by the reason: `slow`, or the budget without room.
    """

    def __init__(self, limits: BodyLimits) -> None:
        self.limits = limits
        self.held_bytes = 0
        self.refused: Counter[str] = Counter()
        self._held_by: Counter[tuple[str, str]] = Counter()

    @property
    def refused_counts(self) -> dict[tuple[str, ...], float]:
        """`refused`, in the form of a metric with one label."""
        return {(reason,): float(count) for reason, count in self.refused.items()}

    def resize(self, tenant_id: str, address: str, before: int, size: int) -> None:
        """Charge a body with `size` bytes instead of `before`.

        Raises:
            RateLimitError: It grows, and one of its budgets has no room.
        """
        of_tenant, of_address = ("tenant", tenant_id), ("address", address)
        if size > before:
            limits, tenant_bytes = self.limits, self._held_by[of_tenant] - before
            address_bytes = self._held_by[of_address] - before
            self._check("tenant", tenant_bytes, size, limits.tenant_bodies_bytes)
            self._check("address", address_bytes, size, limits.address_bodies_bytes)
            # A tenant takes no more than it leaves free: there is always room for the next one.
            self._check(
                "total", self.held_bytes - before, tenant_bytes + 2 * size, limits.bodies_bytes
            )
        self.held_bytes += size - before
        for account in (of_tenant, of_address):
            self._held_by[account] += size - before
            if not self._held_by[account]:
                del self._held_by[account]

    def _check(self, budget: str, others_bytes: int, size: int, limit: int) -> None:
        if others_bytes and others_bytes + size > limit:  # one alone is read in any case
            self.refused[budget] += 1
            raise RateLimitError(_NO_ROOM[budget].format(limit), retry_after_s=1.0)


class BudgetedBody:
    """One body, charged to the budgets until `release`.

    Attributes:
        tenant_id: Whose it is, once that is known.
    """

    __slots__ = ("_address", "_budget", "_held_bytes", "tenant_id")

    def __init__(self, budget: BodyBudget, address: str = "") -> None:
        self.tenant_id = ""
        self._address = address
        self._budget = budget
        self._held_bytes = 0

    @property
    def limits(self) -> BodyLimits:
        """The limits of its server."""
        return self._budget.limits

    async def read(
        self,
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        headers: Mapping[str, str],
    ) -> Memory | None:
        """The whole body, as it was sent; None if the client left before its end.

        Raises:
            BodyTooLargeError: It is larger than allowed.
            RateLimitError: Bodies take too much memory at the moment.
            APIStatusError: 408, it arrived more slowly than the minimum rate.
        """
        self._check_announced(headers.get("content-length", "0"), self.limits.body_bytes)
        loop, limits = asyncio.get_running_loop(), self.limits
        window_s = limits.upload_window_s
        due = limits.upload_bytes_per_s * window_s
        whole, counted = bytearray(), 0
        try:
            async with asyncio.timeout(window_s) as window:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    piece: bytes = message.get("body", b"")
                    has_more = message.get("more_body", False)
                    self._check_size(len(whole) + len(piece), limits.body_bytes)
                    self.hold(len(whole) + len(piece))
                    if not has_more and not whole:
                        return piece  # the usual case: all of it came at once
                    whole += piece
                    if not has_more:
                        return memoryview(whole)
                    if len(whole) - counted >= due:
                        counted = len(whole)
                        window.reschedule(loop.time() + window_s)
        except TimeoutError:
            received = len(whole) - counted
        raise self._too_slow(received)

    async def pieces(
        self,
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        headers: Mapping[str, str],
        most_bytes: int,
    ) -> AsyncIterator[Memory | None]:
        """The body as it arrives; the last piece is None if the client left before the end.

        It is not charged to the budgets: the reader keeps none of it in memory. The time that it
        takes for a piece does not count for the minimum rate.

        Raises:
            BodyTooLargeError: It is larger than `most_bytes`.
            APIStatusError: 408, it arrived more slowly than the minimum rate.
        """
        self._check_announced(headers.get("content-length", "0"), most_bytes)
        loop, limits = asyncio.get_running_loop(), self.limits
        due = limits.upload_bytes_per_s * limits.upload_window_s
        size = counted = 0
        deadline, has_more = loop.time() + limits.upload_window_s, True
        while has_more:
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow(size - counted) from None
            if message["type"] == "http.disconnect":
                yield None
                return
            piece: bytes = message.get("body", b"")
            has_more = message.get("more_body", False)
            size += len(piece)
            self._check_size(size, most_bytes)
            began = loop.time()
            yield piece
            deadline += loop.time() - began
            if size - counted >= due:
                counted, deadline = size, loop.time() + limits.upload_window_s

    def _too_slow(self, received: int) -> APIStatusError:
        limits = self.limits
        self._budget.refused["slow"] += 1
        return APIStatusError(
            f"the body arrives too slowly: {received} bytes in {limits.upload_window_s:g} s, where "
            f"at least {limits.upload_bytes_per_s} bytes/s are needed",
            status_code=_REQUEST_TIMEOUT,
            remedy="send it again over a faster connection or in smaller requests, or have the "
            "service's operator lower limits.upload_bytes_per_s",
        )

    def hold(self, size: int) -> None:
        """Charge it with this size; raises `RateLimitError` without room."""
        if size > max(self._held_bytes, self.limits.small_body_bytes):
            self._budget.resize(self.tenant_id, self._address, self._held_bytes, size)
            self._held_bytes = size

    def release(self) -> None:
        """Take it off the budgets."""
        if self._held_bytes:
            self._budget.resize(self.tenant_id, self._address, self._held_bytes, 0)
            self._held_bytes = 0

    def _check_announced(self, text: str, most: int) -> None:
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise BadRequestError(f"content-length {text[:40]!r} is not a number of bytes")
        self._check_size(int(text), most)

    def _check_size(self, size: int, most: int) -> None:
        if size > most:
            raise BodyTooLargeError(f"the body is larger than {most} bytes; send it in parts")
