"""A TCP load balancer, for clients that know one address.

Each connection goes to the next server that accepts it. When either end of a connection is lost,
so is the other, and the client connects again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence

PIECE_BYTES = 65_536
RETRY_S = 0.05
"""How long it waits when no server accepts a connection."""


class Balancer:
    """Forwards bytes, on a thread of its own."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = ports
        self._turns = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        listening = asyncio.run_coroutine_threadsafe(self._listen(), self._loop)
        self.base_url = f"http://127.0.0.1:{listening.result(30)}"

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        """End everything."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            from_server, to_server = await self._connect()
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
        writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            for _ in self._ports:
                port = self._ports[next(self._turns) % len(self._ports)]
                with contextlib.suppress(OSError):
                    return await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(RETRY_S)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(PIECE_BYTES):
        writer.write(piece)
        await writer.drain()


@contextlib.contextmanager
def balancer(ports: Sequence[int]) -> Iterator[Balancer]:
    """A load balancer over the servers at these ports of this machine."""
    made = Balancer(ports)
    try:
        yield made
    finally:
        made.close()
