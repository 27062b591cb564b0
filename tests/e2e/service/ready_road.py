"""A road that leads clients to whichever server works now, as a load balancer in front of it does.

It forwards bytes. When it is led to another server, it cuts the connections to the one before:
their clients connect anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

PIECE_BYTES = 65_536


class ReadyRoad:
    """See the top of the module. Runs on a thread of its own."""

    def __init__(self) -> None:
        self._target = 0
        self._leads = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.base_url = ""

    def open(self) -> None:
        """Begin to listen."""
        self._thread.start()
        self._run(self._listen())

    def hold(self) -> None:
        """Have new connections wait until it leads somewhere again."""
        self._loop.call_soon_threadsafe(self._leads.clear)

    def lead_to(self, port: int) -> None:
        """Forward to this server from now on."""
        self._run(self._lead_to(port))

    def close(self) -> None:
        """End everything."""
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def _run(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)  # type: ignore[arg-type]

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _end(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._cut()

    async def _lead_to(self, port: int) -> None:
        self._target = port
        await self._cut()
        self._leads.set()

    async def _cut(self) -> None:
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._forward(reader, writer)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._leads.wait()
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target)
        ways = [
            asyncio.create_task(_carry(reader, to_server)),
            asyncio.create_task(_carry(from_server, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            to_server.close()  # first: a second cancellation may come while this waits
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(PIECE_BYTES):
        writer.write(piece)
        await writer.drain()


@contextlib.contextmanager
def ready_road() -> Iterator[ReadyRoad]:
    """A road, for the length of a test; it leads nowhere at first."""
    road = ReadyRoad()
    road.open()
    try:
        yield road
    finally:
        road.close()
