"""A road between client and service on which replies are lost and requests come twice or late.

It stands between them as a proxy that reads whole requests and whole replies. What it does to each
follows from a seed.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
import threading
from collections.abc import Iterator

TROUBLE = 0.15
"""How often each kind of trouble meets a request."""
MOST_DELAY_S = 0.05


class BadRoad:
    """See the top of the module. Runs on a thread of its own."""

    def __init__(self, port: int, seed: int) -> None:
        self._target = port
        self._chance = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self.met: collections.Counter[str] = collections.Counter()
        """How often each kind of trouble was met."""

    def open(self) -> None:
        """Begin to listen."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(30)

    def close(self) -> None:
        """End everything."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _end(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
                while await self._one_exchange(reader, writer):
                    pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _one_exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Carry one request; False if the connection ended with it."""
        request = await _message(reader)
        if self._meets("late"):
            await asyncio.sleep(self._chance.uniform(0, MOST_DELAY_S))
        if self._meets("never arrived"):
            return False
        if self._meets("came twice"):
            await asyncio.gather(self._carry(request), self._carry(request))
        reply = await self._carry(request)
        if self._meets("reply lost"):
            return False
        if self._meets("reply cut"):
            writer.write(reply[: self._chance.randrange(len(reply))])
            await writer.drain()
            return False
        writer.write(reply)
        await writer.drain()
        return True

    def _meets(self, trouble: str) -> bool:
        is_met = self._chance.random() < TROUBLE
        self.met[trouble] += is_met
        return is_met

    async def _carry(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            writer.write(request)
            await writer.drain()
            return await _message(reader)
        finally:
            writer.close()


async def _message(reader: asyncio.StreamReader) -> bytes:
    """One request or reply, whole; both ends give lengths and nothing is chunked."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            length = int(value)
        assert name.strip().lower() != b"transfer-encoding", head
    return head + await reader.readexactly(length)


@contextlib.contextmanager
def bad_road(port: int, seed: int) -> Iterator[BadRoad]:
    """Such a road to a port, for the length of a test."""
    road = BadRoad(port, seed)
    road.open()
    try:
        yield road
    finally:
        road.close()
