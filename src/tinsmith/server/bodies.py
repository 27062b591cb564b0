"""Bodies: read within bounds on the way in, packed on the way out.

A body that is announced too large is refused before any of it is read; one that is not announced,
as soon as it has grown too large. A client must keep up a minimum rate, or is answered 408.

Bodies that are being read and worked on are held to budgets: of all of them, of one tenant and of
one address. What counts is what was received, not what was announced, and the unpacked size once it
is known. A small body counts for nothing, so that no number of large ones keeps it out; how many
small ones there can be is bounded by the number of connections.
"""

from __future__ import annotations

import asyncio
import gzip
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tinsmith.errors import APIStatusError, BadRequestError, BodyTooLargeError, RateLimitError
from tinsmith.server.incoming import ClientLeftError, Receive
from tinsmith.server.settings import ServerSettings
from tinsmith.types.buffers import Memory
from tinsmith.wire.content import compress
from tinsmith.wire.exchange import HttpReply

_REQUEST_TIMEOUT = 408
_NO_ROOM = {
    "tenant": "your requests that are being read take {} bytes already; send fewer at once",
    "address": "requests from your address that are being read take {} bytes already; send fewer "
    "at once",
    "total": "requests that are being read take most of {} bytes already; send this one again",
}
_PACK_ASIDE_BYTES = 1024 * 1024  # larger ones are packed on a thread
_PACKED_TYPES = ("application/json", "application/x-protobuf", "text/")


class BodyBudget:
    """What the bodies of one server may take together. For one event loop.

    Attributes:
        held_bytes: What all of them take now.
        refused: How many were refused, by the reason: `slow`, or the budget that had no room.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.held_bytes = 0
        self.refused: Counter[str] = Counter()
        self._held_by: Counter[tuple[str, str]] = Counter()

    @property
    def refused_counts(self) -> dict[tuple[str, ...], float]:
        """`refused`, as a metric with one label has it."""
        return {(reason,): float(count) for reason, count in self.refused.items()}

    def resize(self, tenant_id: str, host: str, before: int, size: int) -> None:
        """Have a body take `size` bytes instead of `before`.

        Raises:
            RateLimitError: It grows, and one of its budgets has no room.
        """
        tenant, address = ("tenant", tenant_id), ("address", host)
        if size > before:
            of_tenant = self._held_by[tenant] - before
            of_address = self._held_by[address] - before
            settings, of_all = self.settings, self.held_bytes - before
            self._check("tenant", of_tenant, size, settings.tenant_bodies_bytes)
            self._check("address", of_address, size, settings.address_bodies_bytes)
            # A tenant takes no more than it leaves free: there is always room for the next one.
            self._check("total", of_all, of_tenant + 2 * size, settings.bodies_bytes)
        self.held_bytes += size - before
        for share in (tenant, address):
            self._held_by[share] += size - before
            if not self._held_by[share]:
                del self._held_by[share]

    def _check(self, budget: str, others: int, size: int, most: int) -> None:
        if others and others + size > most:  # one alone is read, however small the budget
            self.refused[budget] += 1
            raise RateLimitError(_NO_ROOM[budget].format(most), retry_after_s=1.0)


class HeldBody:
    """The body of one exchange, and what it takes of the budgets until `release`.

    Attributes:
        tenant_id: Whose it is, once that is known.
    """

    __slots__ = ("_address", "_budget", "_held_bytes", "tenant_id")

    def __init__(self, budget: BodyBudget, address: str = "") -> None:
        self.tenant_id = ""
        self._address = address
        self._budget = budget
        self._held_bytes = 0

    async def read(
        self, receive: Receive, headers: Mapping[str, str], whole: bytes | None = None
    ) -> Memory:
        """The whole body, as it was sent; `whole` if it is here already.

        Raises:
            BodyTooLargeError: It is larger than is allowed.
            RateLimitError: Bodies take too much at the moment.
            APIStatusError: 408, it arrived more slowly than the minimum rate.
            ClientLeftError: The client closed the connection before the end of it.
        """
        announced = self._announced(headers)
        if announced == 0 and "transfer-encoding" not in headers:
            return b""
        if whole is not None:
            self._check(len(whole))
            self.hold(len(whole))
            return whole
        return await self._gather(receive)

    def hold(self, size: int) -> None:
        """Take so much of the budgets in all; raises `RateLimitError` if there is not so much."""
        if size > max(self._held_bytes, self._budget.settings.small_body_bytes):
            self._budget.resize(self.tenant_id, self._address, self._held_bytes, size)
            self._held_bytes = size

    def release(self) -> None:
        """Give back what was taken."""
        if self._held_bytes:
            self._budget.resize(self.tenant_id, self._address, self._held_bytes, 0)
            self._held_bytes = 0

    def _announced(self, headers: Mapping[str, str]) -> int:
        text = headers.get("content-length", "0")
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise BadRequestError(f"content-length {text[:40]!r} is no number of bytes")
        self._check(int(text))
        return int(text)

    def _check(self, size: int) -> None:
        most = self._budget.settings.body_bytes
        if size > most:
            raise BodyTooLargeError(f"the body is larger than {most} bytes; send it in parts")

    async def _gather(self, receive: Receive) -> Memory:
        """All pieces. Every `window_s` at least `rate * window_s` of them, or the rest."""
        loop, settings = asyncio.get_running_loop(), self._budget.settings
        window_s = settings.upload_window_s
        due = settings.upload_bytes_per_s * window_s
        whole, since = bytearray(), 0
        try:
            async with asyncio.timeout(window_s) as window:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeftError
                    piece: bytes = message.get("body", b"")
                    more = message.get("more_body", False)
                    self._check(len(whole) + len(piece))
                    self.hold(len(whole) + len(piece))
                    if not more and not whole:
                        return piece  # nearly always: all of it came at once
                    whole += piece
                    if not more:
                        return memoryview(whole)
                    if len(whole) - since >= due:
                        since = len(whole)
                        window.reschedule(loop.time() + window_s)
        except TimeoutError:
            received = len(whole) - since
        self._budget.refused["slow"] += 1
        raise APIStatusError(
            f"the body arrives too slowly: {received} bytes in {window_s:g} s, where at least "
            f"{settings.upload_bytes_per_s} bytes/s are needed",
            status_code=_REQUEST_TIMEOUT,
            remedy="send it again over a faster connection or in smaller requests, or have the "
            "service's operator lower limits.upload_bytes_per_s",
        )


async def packed(reply: HttpReply, accepted: str, settings: ServerSettings) -> HttpReply:
    """The reply, packed if it is large and the client can unpack it."""
    size = sum(map(len, reply.parts))
    if not settings.compress_from_bytes or size < settings.compress_from_bytes:
        return reply
    if "Content-Encoding" in reply.headers or reply.status != 200:
        return reply
    if not reply.headers.get("Content-Type", "").startswith(_PACKED_TYPES):
        return reply
    encoding = _encoding(accepted)
    if encoding is None:
        return reply
    if size > _PACK_ASIDE_BYTES:
        body = await asyncio.to_thread(_pack, encoding, reply.parts)
    else:
        body = _pack(encoding, reply.parts)
    headers = {
        **reply.headers,
        "Content-Encoding": encoding,
        "Content-Length": str(len(body)),
        "Vary": "Accept-Encoding",
    }
    return HttpReply(reply.status, headers, [body])


def _encoding(accepted: str) -> str | None:
    choices = {}
    for choice in accepted.lower().split(",")[:16]:
        name, _, weight = choice.partition(";")
        choices[name.strip()] = weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return next((name for name in ("zstd", "gzip") if choices.get(name)), None)


def _pack(encoding: str, parts: Any) -> bytes:
    if encoding == "zstd":
        return compress(parts)
    return gzip.compress(b"".join(parts), compresslevel=1)
