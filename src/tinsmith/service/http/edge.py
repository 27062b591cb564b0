"""The ASGI application that the server and the in-process client call, one exchange at a time.

It makes an `HttpExchange` of each request, with the budgets that all bodies share, and answers 500
where the handler fails. What a request asks for is the handler's concern.

`HttpExchange` is one request and its answer, within the bounds on bodies and connections.
`HttpExchange` reads an ASGI request and writes its answer. The API works with it through the
interface that it declares itself (`api/incoming.py`); the two packages do not import each other.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import quote

from tinsmith.errors import APIStatusError, BodyTooLargeError, RateLimitError
from tinsmith.service.http.bodies import BodyBudget, BodyLimits, BudgetedBody
from tinsmith.service.http.connections import (
    ServerConnection,
    TooManyConnectionsError,
    address_group,
)
from tinsmith.types.buffers import Memory
from tinsmith.wire.content import compress
from tinsmith.wire.exchange import HttpReply
from tinsmith.wire.failures import reply_from_error

_ON_THREAD_BYTES = 1024 * 1024
"""Larger answers are compressed on a thread."""
_COMPRESSIBLE = ("application/json", "application/x-protobuf", "text/")


async def compressed(reply: HttpReply, accept_encoding: str, from_bytes: int) -> HttpReply:
    """The reply, compressed if it has at least `from_bytes` bytes; 0 compresses nothing."""
    size = sum(map(len, reply.parts))
    if not from_bytes or size < from_bytes:
        return reply
    if "Content-Encoding" in reply.headers or reply.status != 200:
        return reply
    if not reply.headers.get("Content-Type", "").startswith(_COMPRESSIBLE):
        return reply
    encoding = _best_encoding(accept_encoding)
    if encoding is None:
        return reply
    if size > _ON_THREAD_BYTES:
        body = await asyncio.to_thread(_encode, encoding, reply.parts)
    else:
        body = _encode(encoding, reply.parts)
    headers = {
        **reply.headers,
        "Content-Encoding": encoding,
        "Content-Length": str(len(body)),
        "Vary": "Accept-Encoding",
    }
    return HttpReply(reply.status, headers, [body])


def _best_encoding(accept_encoding: str) -> str | None:
    choices = {}
    for choice in accept_encoding.lower().split(",")[:16]:
        name, _, weight = choice.partition(";")
        choices[name.strip()] = weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return next((name for name in ("zstd", "gzip") if choices.get(name)), None)


def _encode(encoding: str, parts: Sequence[Memory]) -> bytes:
    if encoding == "zstd":
        return compress(parts)
    return gzip.compress(b"".join(parts), compresslevel=1)


Message: TypeAlias = MutableMapping[str, Any]
"""An ASGI message or scope."""
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

_NO_CONTENT = 204
_REQUEST_TIMEOUT = 408
_UNREAD_RETRY_S = 1.0


class HttpExchange:
    """One exchange. It is answered once: by `answer`, or by `start`, `write` and `end`.

    Attributes:
        method: In capitals.
        path: Still percent-encoded, without the query.
        query: What follows the `?`.
        headers: Names in lower case; of a repeated one, the last.
        scheme: `http` or `https`.
        is_started: Whether the answer's head has been sent.
    """

    __slots__ = (
        "_connection",
        "_has_body_begun",
        "_must_close",
        "_receive",
        "_received",
        "_send",
        "_sent",
        "headers",
        "is_started",
        "method",
        "path",
        "query",
        "scheme",
    )

    def __init__(
        self, scope: Message, receive: Receive, send: Send, received: BodyBudget, sent: BodyBudget
    ) -> None:
        raw = scope.get("raw_path")
        path: str = quote(scope["path"], safe="/:~%") if raw is None else raw.decode("latin-1")
        self.method: str = scope["method"]
        self.path = path.partition("?")[0]
        self.query: str = scope.get("query_string", b"").decode("latin-1")
        self.headers: Mapping[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.scheme: str = scope.get("scheme", "http")
        self.is_started = False
        client = scope.get("client")
        address = "" if client is None else address_group(client[0])
        self._connection: ServerConnection | None = scope.get("state", {}).get("connection")
        self._received = BudgetedBody(received, address)
        self._sent = BudgetedBody(sent, address)
        self._receive = receive
        self._send = send
        self._has_body_begun = False
        self._must_close = False

    def authenticate(self, tenant_id: str) -> None:
        """Count the body and the connection as this tenant's.

        Raises:
            TooManyConnectionsError: There is no room for another connection of this tenant.
        """
        self._received.tenant_id = self._sent.tenant_id = tenant_id
        if self._connection is not None:
            try:
                self._connection.authenticate(tenant_id)
            except TooManyConnectionsError:
                self._must_close = True
                raise

    # The request's body

    async def read_body(self) -> Memory | None:
        """The whole body, still compressed; None if the client left before it was complete.

        Raises:
            BodyTooLargeError: It is larger than allowed.
            RateLimitError: Bodies take too much memory at the moment.
            APIStatusError: 408, it arrived more slowly than the minimum rate.
        """
        self._has_body_begun = True
        try:
            return await self._received.read(self._receive, self.headers)
        except (BodyTooLargeError, APIStatusError) as exc:
            # The rest of it may still be arriving.
            self._must_close = not isinstance(exc, RateLimitError)
            raise

    def read_pieces(self, most_bytes: int) -> AsyncIterator[Memory | None]:
        """The body as it arrives, in place of `read_body`; None if the client left before its end.

        Unless it is read to its end, the connection is closed after the answer: the rest may be
        large, and nobody wants it.

        Args:
            most_bytes: The largest body, whatever the limit for bodies that are read at once.

        Raises:
            BodyTooLargeError: From the iterator: it is larger than allowed.
            APIStatusError: From the iterator: 408, it arrived more slowly than the minimum rate.
        """
        self._must_close = True
        return self._pieces(most_bytes)

    async def _pieces(self, most_bytes: int) -> AsyncIterator[Memory | None]:
        self._has_body_begun = True
        async for piece in self._received.pieces(self._receive, self.headers, most_bytes):
            yield piece
        self._must_close = False

    def hold_body(self, size: int) -> None:
        """Count the body with this size from now on; raises `RateLimitError` without room."""
        self._received.hold(size)

    def release_body(self) -> None:
        """The body is not needed any more."""
        self._received.release()

    def left(self) -> asyncio.Future[None]:
        """A future that completes when the client has left; the caller cancels it.

        To be called after `read_body`: any message after the end of the body means this.
        """
        return asyncio.ensure_future(self._wait_left())

    async def _wait_left(self) -> None:
        await self._receive()

    # The answer

    async def answer(self, reply: HttpReply) -> HttpReply:
        """Send a whole answer, compressed if it is large and the client accepts that.

        Returns:
            What was sent: a 503 instead of the reply where the tenant's clients leave too much
            unread. After a 503 clients ask for a result again; a 429 could end their wait for it.
        """
        reply = await compressed(
            reply, self.headers.get("accept-encoding", ""), self._sent.limits.compress_from_bytes
        )
        try:
            self._sent.hold(sum(map(len, reply.parts)))
        except RateLimitError:
            reply = reply_from_error(
                APIStatusError(
                    "answers that were sent to you but not read yet take too much memory",
                    status_code=503,
                    retry_after_s=_UNREAD_RETRY_S,
                    remedy="read answers faster, or ask for fewer at once",
                )
            )
            await asyncio.sleep(_UNREAD_RETRY_S)  # clients repeat the request at once
        try:
            body = reply.parts[0] if len(reply.parts) == 1 else b"".join(reply.parts)
            headers = dict(reply.headers)
            if reply.status != _NO_CONTENT and "Content-Length" not in headers:
                headers["Content-Length"] = str(len(body))
            if self._connection is not None:
                self._connection.is_body_next = self.method != "HEAD"
            await self.start(reply.status, headers)
            await self._send({"type": "http.response.body", "body": body})
        finally:
            self._sent.release()
        return reply

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin an answer that is sent in pieces."""
        pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        if any(b"\n" in value or b"\r" in value for _, value in pairs):
            raise ValueError("a header of an answer has more than one line")
        is_body_held_back = self.headers.get("expect") and not self._has_body_begun
        if self._must_close or is_body_held_back:  # whether that body comes cannot be known
            pairs.append((b"connection", b"close"))
        self.is_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, piece: Memory) -> None:
        """Send a piece; returns when there is room for the next."""
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        """End the answer."""
        await self._send({"type": "http.response.body", "body": b""})


_log = logging.getLogger(__name__)

ExchangeHandler: TypeAlias = Callable[[HttpExchange], Awaitable[None]]


class HttpEdge:
    """An ASGI application. For one event loop.

    Attributes:
        received: What request bodies take that are being read or processed.
        sent: What answers take that are being sent.
    """

    def __init__(self, handle: ExchangeHandler, limits: BodyLimits | None = None) -> None:
        limits = limits or BodyLimits()
        self._handle = handle
        self.received = BodyBudget(limits)
        self.sent = BodyBudget(limits)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise NotImplementedError(f"ASGI {scope['type']} is not supported")
        exchange = HttpExchange(scope, receive, send, self.received, self.sent)
        connection: ServerConnection | None = scope.get("state", {}).get("connection")
        if connection is None:
            await self._answer(exchange)
            return
        connection.set_busy(True)
        try:
            await self._answer(exchange)
            if not exchange.is_started:
                connection.close()
        finally:
            connection.set_busy(False)

    async def _answer(self, exchange: HttpExchange) -> None:
        try:
            await self._handle(exchange)
        except Exception as exc:
            _log.exception("%s %s failed", exchange.method, exchange.path)
            if exchange.is_started:
                raise  # the server closes the connection
            await exchange.answer(reply_from_error(exc))
        finally:
            exchange.release_body()
