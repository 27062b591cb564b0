"""Bodies: read within bounds on the way in, packed on the way out.

A body that is announced too large is refused before any of it is read; one that is not announced,
as soon as it has grown too large. A client that sends slowly is given a while and no more, and all
bodies that are being read and worked on share one budget, so that no number of clients can fill the
memory. A body counts as it was sent, and as it is unpacked from when it is.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Mapping
from typing import Any

from tinsmith.errors import APIStatusError, BadRequestError, BodyTooLargeError, RateLimitError
from tinsmith.server.incoming import ClientLeftError, Receive
from tinsmith.server.settings import ServerSettings
from tinsmith.types.buffers import Memory
from tinsmith.wire.content import compress
from tinsmith.wire.exchange import HttpReply

_REQUEST_TIMEOUT = 408
_PACK_ASIDE_BYTES = 1024 * 1024  # larger ones are packed on a thread
_PACKED_TYPES = ("application/json", "application/x-protobuf", "text/")


class BodyBudget:
    """What all bodies of one server may take together. For one event loop."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.held_bytes = 0


class HeldBody:
    """The body of one exchange, and what it takes of the budget until `release`."""

    __slots__ = ("_budget", "_held_bytes")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held_bytes = 0

    async def read(
        self, receive: Receive, headers: Mapping[str, str], whole: bytes | None = None
    ) -> Memory:
        """The whole body, as it was sent; `whole` if it is here already.

        Raises:
            BodyTooLargeError: It is larger than is allowed.
            RateLimitError: Bodies take too much at the moment.
            APIStatusError: 408, it came too slowly.
            ClientLeftError: The client closed the connection before the end of it.
        """
        announced = self._announced(headers)
        if announced == 0 and "transfer-encoding" not in headers:
            return b""
        if whole is not None:
            self._check(len(whole))
            self.hold(len(whole))
            return whole
        self.hold(announced)
        try:
            return await self._gather(receive)
        except TimeoutError as exc:
            raise APIStatusError("the body came too slowly", status_code=_REQUEST_TIMEOUT) from exc

    def hold(self, size: int) -> None:
        """Take so much of the budget in all; raises `RateLimitError` if there is not so much."""
        budget, more = self._budget, size - self._held_bytes
        if more <= 0:
            return
        others = budget.held_bytes - self._held_bytes
        if others and others + size > budget.settings.bodies_bytes:
            raise RateLimitError("too many bodies are being read at once", retry_after_s=1.0)
        budget.held_bytes += more
        self._held_bytes = size

    def release(self) -> None:
        """Give back what was taken."""
        self._budget.held_bytes -= self._held_bytes
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
        loop, settings = asyncio.get_running_loop(), self._budget.settings
        give_up_at = loop.time() + settings.body_s
        whole = bytearray()
        async with asyncio.timeout(settings.body_silence_s) as silence:
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
                silence.reschedule(min(give_up_at, loop.time() + settings.body_silence_s))


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
