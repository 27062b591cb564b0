"""A request that has come in, and the way back to whoever sent it.

`App` is given one for every exchange. On a socket it is `serve/http_connection.py`'s; `AsgiRequest`
is made of what an ASGI server, or our client in the same process, calls the app with.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote

if TYPE_CHECKING:
    from tinsmith.server.connections import Connection

Message: TypeAlias = MutableMapping[str, Any]
"""Of ASGI."""
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]


class ClientLeftError(Exception):
    """The client closed the connection; there is nobody to answer."""


class Incoming(abc.ABC):
    """One request. It is answered once: by `answer`, or by `start`, `write` and `end`.

    Attributes:
        method: In capitals.
        path: As it was sent, escaped, without the query.
        query: What came after the `?`.
        headers: Names in lower case; of one that came twice, the last.
        scheme: `http` or `https`.
        body: All of it, if it is here already; else None, and `receive` gives it.
        client: Host and port of who sent it, as ASGI has them; None if that is not known.
        connection: What is counted of its connection, where connections are counted.
    """

    __slots__ = ("body", "client", "connection", "headers", "method", "path", "query", "scheme")

    def __init__(
        self, method: str, path: str, query: str, headers: dict[str, str], scheme: str
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.scheme = scheme
        self.body: bytes | None = None
        self.client: tuple[str, int] | None = None
        self.connection: Connection | None = None

    @abc.abstractmethod
    async def receive(self) -> Message:
        """The next part of the body, as ASGI has it: `http.request`, or `http.disconnect`."""

    @abc.abstractmethod
    def left(self) -> asyncio.Future[None]:
        """A future that is done when the client has left. Whoever asks for it cancels it."""

    @abc.abstractmethod
    async def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send the whole answer. `headers` has the length of the body, if it may have one."""

    @abc.abstractmethod
    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin an answer that is sent in pieces."""

    @abc.abstractmethod
    async def write(self, piece: bytes) -> None:
        """Send a piece; returns when there is room for the next."""

    @abc.abstractmethod
    async def end(self) -> None:
        """Say that the last piece was sent."""


class AsgiRequest(Incoming):
    """A request as ASGI has it."""

    __slots__ = ("_receive", "_send")

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        raw = scope.get("raw_path")
        path = quote(scope["path"], safe="/:~%") if raw is None else raw.decode("latin-1")
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        query = scope.get("query_string", b"").decode("latin-1")
        super().__init__(
            scope["method"], path.partition("?")[0], query, headers, scope.get("scheme", "http")
        )
        client = scope.get("client")
        self.client = None if client is None else (client[0], client[1])
        self._receive = receive
        self._send = send

    async def receive(self) -> Message:
        """`Incoming.receive`."""
        return await self._receive()

    def left(self) -> asyncio.Future[None]:
        """`Incoming.left`."""
        return asyncio.ensure_future(self._wait_left())

    async def _wait_left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """`Incoming.answer`."""
        await self.start(status, headers)
        await self._send({"type": "http.response.body", "body": body})

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """`Incoming.start`."""
        pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, piece: bytes) -> None:
        """`Incoming.write`."""
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        """`Incoming.end`."""
        await self._send({"type": "http.response.body", "body": b""})
