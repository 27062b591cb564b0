"""Connections are accepted again when the process has descriptors again."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

from tinsmith.service.http.connections import ConnectionGate
from tinsmith.service.http.edge import HttpEdge, HttpExchange
from tinsmith.service.http.server import HttpServer
from tinsmith.wire.exchange import HttpReply


class ShortOfDescriptors(socket.socket):
    """A listening socket that cannot accept while there are none left."""

    failures = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def answer(incoming: HttpExchange) -> None:
    await incoming.answer(HttpReply(204, {}, [b""]))


def test_an_idle_connection_is_closed_when_file_descriptors_run_out() -> None:
    async def run() -> None:
        gate = ConnectionGate()
        server = HttpServer(HttpEdge(answer), gate=gate)
        with ShortOfDescriptors() as listener:
            listener.bind(("127.0.0.1", 0))
            await server.open(listener)
            where = listener.getsockname()
            idle_reader, idle = await asyncio.open_connection(*where)
            async with asyncio.timeout(30):
                while not gate.counts["unauthenticated",]:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.001)
            listener.failures = 2

            reader, writer = await asyncio.open_connection(*where)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(30):
                assert await idle_reader.read() == b""
                assert (await reader.readline()).startswith(b"HTTP/1.1 204")

            assert gate.closed["total"] == 1
            for stream in (idle, writer):
                stream.close()
            await server.close(5.0)

    asyncio.run(run())
