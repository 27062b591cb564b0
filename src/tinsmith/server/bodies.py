"""Bodies: read within bounds on the way in, packed on the way out.

A body that is announced too large is refused before any of it is read; one that is not announced,
as soon as it has grown too large. A client that sends slowly is given a while and no more, and all
bodies that are being read share one budget, so that no number of clients can fill the memory.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

from tinsmith.errors import APIStatusError, BadRequestError, BodyTooLargeError, RateLimitError
from tinsmith.server.settings import ServerSettings
from tinsmith.types.buffers import Memory
from tinsmith.wire.content import compress
from tinsmith.wire.exchange import HttpReply

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]

_REQUEST_TIMEOUT = 408
_PACK_ASIDE_BYTES = 1024 * 1024  # larger ones are packed on a thread
_PACKED_TYPES = ("application/json", "application/x-protobuf", "text/")


class ClientLeftError(Exception):
    """The client closed the connection; there is nobody to answer."""


class BodyReader:
    """Reads the bodies of one server. For one event loop."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._held_bytes = 0

    async def read(self, receive: Receive, headers: Mapping[str, str]) -> Memory:
        """The whole body, as it was sent.

        Raises:
            BodyTooLargeError: It is larger than is allowed.
            RateLimitError: Too much is being read at the moment.
            APIStatusError: 408, it came too slowly.
            ClientLeftError: The client closed the connection before the end of it.
        """
        announced = self._announced(headers)
        if announced == 0 and "transfer-encoding" not in headers:
            return b""
        held = max(announced, 0)
        self._hold(held)
        try:
            return await self._gather(receive)
        except TimeoutError as exc:
            raise APIStatusError("the body came too slowly", status_code=_REQUEST_TIMEOUT) from exc
        finally:
            self._held_bytes -= held

    def _announced(self, headers: Mapping[str, str]) -> int:
        text = headers.get("content-length", "0")
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise BadRequestError(f"content-length {text[:40]!r} is no number of bytes")
        self._check(int(text))
        return int(text)

    def _check(self, size: int) -> None:
        if size > self._settings.body_bytes:
            raise BodyTooLargeError(
                f"the body is larger than {self._settings.body_bytes} bytes; send it in parts"
            )

    def _hold(self, size: int) -> None:
        if self._held_bytes and self._held_bytes + size > self._settings.bodies_bytes:
            raise RateLimitError("too many bodies are being read at once", retry_after_s=1.0)
        self._held_bytes += size

    async def _gather(self, receive: Receive) -> Memory:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._settings.body_s
        whole = bytearray()
        async with asyncio.timeout(self._settings.body_silence_s) as silence:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeftError
                piece: bytes = message.get("body", b"")
                more = message.get("more_body", False)
                self._check(len(whole) + len(piece))
                if not more and not whole:
                    return piece  # nearly always: all of it came at once
                whole += piece
                if not more:
                    return memoryview(whole)
                silence.reschedule(min(give_up_at, loop.time() + self._settings.body_silence_s))


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
