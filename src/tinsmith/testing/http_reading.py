"""Bytes of a connection into HTTP/1.1 requests, one after the other, within bounds.

A `RequestReader` is fed with bytes as they come and gives whole requests. A request has a
Content-Length or is chunked; a head or body beyond its bound is refused before it is taken in.

Knows nothing of sockets: what feeds it may pause while it does not read.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from urllib.parse import parse_qsl, urlsplit

import msgspec

MAX_HEAD_BYTES = 64 * 1024
_MOST_TRAILERS = 64
_LENGTH = re.compile(r"[0-9]{1,15}")
_CHUNK_SIZE = re.compile(r"[0-9a-fA-F]{1,15}[ \t]*(;.*)?")


class Incoming(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it came: header names in lower case, the path not yet unquoted."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    connection: int
    """Which connection brought it, counted from 0."""


class RefusedRequestError(Exception):
    """What came is not a request that can be answered; the connection ends with this status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class RequestReader:
    """Reads the requests of one connection.

    Args:
        connection: Its number, for `Incoming`.
        max_body_bytes: The most that a body may have.
        write: Sends bytes to the client, for those who ask whether to send their body.
    """

    def __init__(
        self, connection: int, max_body_bytes: int, write: Callable[[bytes], None]
    ) -> None:
        self._connection = connection
        self._max_body_bytes = max_body_bytes
        self._write = write
        self._buffer = bytearray()
        self._more = asyncio.Event()

    def feed(self, data: bytes) -> int:
        """Take in bytes that came; returns how many wait to be read."""
        self._buffer += data
        self._more.set()
        return len(self._buffer)

    async def read(self) -> tuple[Incoming, bool]:
        """The next request, and whether its connection stays open after it.

        Raises:
            RefusedRequestError: What came is no request, or too large.
        """
        head = (await self._take_until(b"\r\n\r\n", MAX_HEAD_BYTES)).decode("latin-1")
        line, *header_lines = head.split("\r\n")
        words = line.split(" ")
        if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
            raise RefusedRequestError(400, "the request line is not that of HTTP/1.1")
        headers = _parse_headers(header_lines)
        body = await self._read_body(headers)
        try:
            target = urlsplit(words[1])
        except ValueError as exc:
            raise RefusedRequestError(400, "the request names no path") from exc
        options = {option.strip().lower() for option in headers.get("connection", "").split(",")}
        keeps_alive = words[2] == "HTTP/1.1" and "close" not in options
        incoming = Incoming(
            method=words[0],
            path=target.path,
            query=dict(parse_qsl(target.query, keep_blank_values=True)),
            headers=headers,
            body=body,
            connection=self._connection,
        )
        return incoming, keeps_alive

    async def _read_body(self, headers: dict[str, str]) -> bytes:
        length, coding = headers.get("content-length"), headers.get("transfer-encoding")
        if headers.get("expect", "").lower() == "100-continue":
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if coding is not None:
            if coding.lower() != "chunked" or length is not None:
                raise RefusedRequestError(
                    400, "a body is chunked or has a Content-Length, not both"
                )
            return await self._read_chunks()
        if length is None:
            return b""
        if not _LENGTH.fullmatch(length):
            raise RefusedRequestError(400, "Content-Length is not one whole number")
        self._check_body_size(int(length))
        return await self._take(int(length))

    async def _read_chunks(self) -> bytes:
        body = bytearray()
        while True:
            line = (await self._take_until(b"\r\n", 1024)).decode("latin-1")
            if not _CHUNK_SIZE.fullmatch(line):
                raise RefusedRequestError(400, "a chunk does not begin with its size")
            size = int(line.partition(";")[0], 16)
            if size == 0:
                break
            self._check_body_size(len(body) + size)
            body += await self._take(size)
            if await self._take(2) != b"\r\n":
                raise RefusedRequestError(400, "a chunk is longer than it said")
        for _ in range(_MOST_TRAILERS):  # trailers say nothing that is needed
            if not await self._take_until(b"\r\n", 1024):
                return bytes(body)
        raise RefusedRequestError(431, f"more than {_MOST_TRAILERS} trailers follow the body")

    def _check_body_size(self, size_bytes: int) -> None:
        if size_bytes > self._max_body_bytes:
            raise RefusedRequestError(
                413, f"the body is larger than the limit of {self._max_body_bytes} bytes"
            )

    async def _take_until(self, mark: bytes, limit: int) -> bytes:
        """The bytes up to a mark, which is taken too."""
        while (end := self._buffer.find(mark)) < 0:
            if len(self._buffer) > limit:
                break
            await self._wait_more()
        if not 0 <= end <= limit:
            raise RefusedRequestError(431, f"the head of the request is longer than {limit} bytes")
        taken = bytes(self._buffer[:end])
        del self._buffer[: end + len(mark)]
        return taken

    async def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            await self._wait_more()
        taken = bytes(memoryview(self._buffer)[:size])
        del self._buffer[:size]
        return taken

    async def _wait_more(self) -> None:
        self._more.clear()
        await self._more.wait()


def _parse_headers(lines: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise RefusedRequestError(400, "a header line has no name")
        name, value = name.lower(), value.strip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
