"""The seam around the service's application, where each exchange can be recorded, changed or lost.

`ExchangeSeam` is an ASGI application: it reads a whole request, has a handler answer it, and sends
the reply. A `BrokenReply` is sent with the help of the proxy in front of the server. When a client
leaves, the handler is cancelled.

Knows nothing of endpoints, rules or credentials.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeAlias
from urllib.parse import parse_qsl

import msgspec

from tinsmith.service.api.api_call import StreamedReply
from tinsmith.service.http.edge import Message, Receive, Send
from tinsmith.testing.byte_proxy import ProxiedConnection
from tinsmith.wire.exchange import HttpReply
from tinsmith.wire.failures import reply_from_error

_log = logging.getLogger(__name__)

_PART_OF_HEAD_BYTES = 16
"""What a client gets of a broken reply without a body."""


class Incoming(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it came: header names in lower case, the path not yet unquoted."""

    scope: Message
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    connection: ProxiedConnection


class BrokenReply(msgspec.Struct, frozen=True):
    """A reply that does not arrive: reset, closed without a byte, or cut in the middle."""

    how: Literal["reset", "close", "half"]
    reply: HttpReply = HttpReply(204, {}, [])


Reply: TypeAlias = HttpReply | StreamedReply | BrokenReply
Handler: TypeAlias = Callable[[Incoming], Awaitable[Reply]]


class ExchangeSeam:
    """An ASGI application around a handler.

    Args:
        handler: Answers requests.
        connection_from: Finds the proxy's connection by the port that a request came from.
        max_body_bytes: Reading a body ends beyond this; the service refuses it.
    """

    def __init__(
        self,
        handler: Handler,
        connection_from: Callable[[int], ProxiedConnection],
        max_body_bytes: int,
    ) -> None:
        self._handler = handler
        self._connection_from = connection_from
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request, unless its client leaves first."""
        body = bytearray()
        is_whole = await self._read(receive, body)
        if is_whole is None:
            return
        incoming = self._incoming(scope, bytes(body))
        answering = asyncio.ensure_future(self._answer(incoming, send))
        leaving = asyncio.ensure_future(_client_left(receive, is_whole=is_whole))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            answering.cancel()
            leaving.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        if not answering.cancelled():
            answering.result()

    async def _read(self, receive: Receive, body: bytearray) -> bool | None:
        """Whether the body is whole, and not too large; None if the client left before its end."""
        while len(body) <= self._max_body_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message["body"]
            if not message["more_body"]:
                return True
        return False

    def _incoming(self, scope: Message, body: bytes) -> Incoming:
        query = scope["query_string"].decode("latin-1")
        return Incoming(
            scope=scope,
            method=scope["method"],
            path=scope["raw_path"].decode("latin-1"),
            query=dict(parse_qsl(query, keep_blank_values=True)),
            headers={n.decode("latin-1"): v.decode("latin-1") for n, v in scope["headers"]},
            body=body,
            connection=self._connection_from(scope["client"][1]),
        )

    async def _answer(self, incoming: Incoming, send: Send) -> None:
        try:
            reply = await self._handler(incoming)
        except Exception as exc:  # noqa: BLE001 - the outer edge; the test reads of it in the log
            _log.exception("%s %s failed inside the test service", incoming.method, incoming.path)
            reply = reply_from_error(exc)
        # The head is sent by itself: what the application said of it concerned its own reply.
        incoming.scope["state"]["connection"].is_body_next = False
        if isinstance(reply, BrokenReply):
            await _send_broken(reply, incoming.connection, send)
        elif isinstance(reply, StreamedReply):
            await _send_stream(reply, send)
        else:
            await _send_head(reply.status, _with_length(reply), send)
            await send({"type": "http.response.body", "body": b"".join(reply.parts)})


async def _client_left(receive: Receive, *, is_whole: bool) -> None:
    """Return when the client has left: any message after the end of the body means this."""
    while True:
        message = await receive()
        if is_whole or message["type"] == "http.disconnect":
            return
        is_whole = not message["more_body"]


async def _send_head(status: int, headers: Mapping[str, str], send: Send) -> None:
    pairs = [(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


async def _send_stream(reply: StreamedReply, send: Send) -> None:
    pieces: Any = reply.pieces
    await _send_head(reply.status, reply.headers, send)
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)  # once the client has left, sending waits for nothing
    await send({"type": "http.response.body", "body": b""})


async def _send_broken(broken: BrokenReply, connection: ProxiedConnection, send: Send) -> None:
    if broken.how == "reset":
        connection.reset()
    elif broken.how == "close":
        connection.close()
    else:
        reply, body = broken.reply, b"".join(broken.reply.parts)
        if not body:
            connection.cut_after(_PART_OF_HEAD_BYTES)
        await _send_head(reply.status, _with_length(reply), send)
        if body:
            await connection.wait_relayed()
            connection.cut_after(len(body) // 2)
        await send({"type": "http.response.body", "body": body})


def _with_length(reply: HttpReply) -> dict[str, str]:
    headers = {n: v for n, v in reply.headers.items() if n.lower() != "content-length"}
    if reply.status not in (204, 304):
        headers["Content-Length"] = str(sum(map(len, reply.parts)))
    return headers
