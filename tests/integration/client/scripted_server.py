"""A server on a real socket that does with each connection exactly what a test wrote down."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

ACCEPT_TURNS = 10
"""How often the event loop turns, and more, until a connection that it has accepted is ours."""


class Received:
    """One request as it came over the socket."""

    def __init__(self, line: str, headers: dict[str, str], body: bytes) -> None:
        self.method, self.target, _ = line.split(" ", 2)
        self.headers = headers
        self.body = body


Handler = Callable[[Received, "Connection"], Awaitable[None]]


class Connection:
    """One socket; the handler writes what it likes to it."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> None:
        self._reader = reader
        self.writer = writer
        self.number = number
        self.requests = 0

    async def read_request(self) -> Received | None:
        """The next request, or None if the other side closed."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            line, *rest = head.strip().split("\r\n")
            pairs = (header.split(":", 1) for header in rest)
            headers = {name.strip().lower(): value.strip() for name, value in pairs}
            body = await self._reader.readexactly(int(headers.get("content-length", "0")))
            self.requests += 1
            return Received(line, headers, body)
        return None

    async def reply(
        self, body: bytes = b"{}", status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        """Write a whole reply."""
        lines = [f"HTTP/1.1 {status} Status", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await self.writer.drain()

    def reset(self) -> None:
        """Break the connection off."""
        with contextlib.suppress(AttributeError):  # asyncio's own, where it has ended already
            self.writer.transport.abort()


class ScriptedServer:
    """Hands every request to a handler and keeps what came."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.received: list[Received] = []
        self.connections: list[Connection] = []
        self.url = ""
        self._answering: set[asyncio.Task[Any]] = set()
        self._came = asyncio.Condition()

    async def wait_received(self, count: int) -> None:
        """Wait until so many requests have come."""
        async with self._came:
            await self._came.wait_for(lambda: len(self.received) >= count)

    async def serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one connection until it ends."""
        connection = Connection(reader, writer, len(self.connections))
        self.connections.append(connection)
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        # Only `end` cancels, and the streams of asyncio complain of handlers that are cancelled.
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while (request := await connection.read_request()) is not None:
                async with self._came:
                    self.received.append(request)
                    self._came.notify_all()
                await self._handler(request, connection)
        self._answering.discard(task)
        writer.close()

    async def end(self) -> None:
        """Reset all connections and wait until nobody answers any more."""
        for _ in range(ACCEPT_TURNS):  # one may have come that nobody used, just now
            await asyncio.sleep(0)
        for connection in self.connections:
            connection.reset()
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering)
        await asyncio.sleep(0)  # lets the event loop close the sockets


@contextlib.asynccontextmanager
async def scripted_server(
    handler: Handler, *, unix_socket: str | None = None
) -> AsyncIterator[ScriptedServer]:
    """Serve on loopback, or on a Unix socket, while the block lasts."""
    scripted = ScriptedServer(handler)
    if unix_socket is not None:
        server = await asyncio.start_unix_server(scripted.serve_connection, unix_socket)
        scripted.url = "http://service"
    else:
        server = await asyncio.start_server(scripted.serve_connection, "127.0.0.1", 0)
        scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield scripted
    finally:
        server.close()
        await scripted.end()
