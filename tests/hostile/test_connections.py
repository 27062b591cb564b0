"""Clients without a key that send no request, or one without an end, to a real `tinsmith serve`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.e2e.service.served import Served, serving
from tinsmith.service.http.edge import HttpEdge, HttpExchange
from tinsmith.service.http.protocol import MAX_HEAD_BYTES, BoundedHttpProtocol
from tinsmith.service.http.server import HttpServer
from tinsmith.wire.exchange import HttpReply

MEGABYTE = 1024 * 1024


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served")) as running:
        yield running


def memory_bytes(served: Served) -> int:
    pages = int(Path(f"/proc/{served.pid}/statm").read_text().split()[1])
    return pages * 4096


def send_until_closed(served: Served, start: bytes, piece: bytes, most: int) -> int:
    """Send pieces until the server closes; returns how much it took."""
    sent = 0
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        try:
            connection.sendall(start)
            while sent < most:
                connection.sendall(piece)
                sent += len(piece)
        except OSError:
            pass  # it closed
    return sent


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"GET /api/v1/healthz HTTP/1.1\r\nA: ", b"a" * MEGABYTE),
        (b"GET /api/v1/healthz HTTP/1.1\r\n", b"Name: value\r\n" * 80_000),
        (b"GET /", b"a" * MEGABYTE),
        (
            b"POST /api/v1/telemetry HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
            b"Trailer: value\r\n" * 60_000,
        ),
        (
            b"POST /api/v1/telemetry HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;a=",
            b"a" * MEGABYTE,
        ),
    ],
    ids=["one header", "many headers", "the path", "trailers", "beside a chunk"],
)
def test_an_endless_request_head_is_cut_off(served: Served, start: bytes, piece: bytes) -> None:
    before = memory_bytes(served)

    sent = send_until_closed(served, start, piece, 64 * MEGABYTE)

    assert sent < 32 * MEGABYTE  # what the sockets of both sides hold, and no more
    assert memory_bytes(served) - before < 32 * MEGABYTE
    assert served.is_ready()


@contextlib.asynccontextmanager
async def _serving_alone() -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(HttpEdge(_answer))
    await server.open(listener)
    yield listener.getsockname()[1]
    await server.close(5.0)


async def _answer(incoming: HttpExchange) -> None:
    await incoming.read_body()
    await incoming.answer(HttpReply(204, {}, [b""]))


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_a_request_head_that_never_arrives_times_out(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedHttpProtocol, "head_timeout_s", 0.05)

    async def connect() -> bytes:
        async with _serving_alone() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            answer = await asyncio.wait_for(reader.read(), 30)
            writer.close()
            return answer

    assert asyncio.run(connect()) == b""


def test_an_incomplete_head_after_a_complete_request_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BoundedHttpProtocol, "head_timeout_s", 0.05)

    async def connect() -> bytes:
        async with _serving_alone() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            answered = await reader.readuntil(b"\r\n\r\n")
            writer.write(b"GET")
            rest = await asyncio.wait_for(reader.read(), 30)
            writer.close()
            return answered + rest

    assert asyncio.run(connect()).startswith(b"HTTP/1.1 204")


def test_large_bodies_and_many_requests_on_one_connection_do_not_count_as_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BoundedHttpProtocol, "head_timeout_s", 0.2)
    whole = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (8 * MAX_HEAD_BYTES)

    async def connect() -> int:
        async with _serving_alone() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(3):
                writer.write(whole)
                for _ in range(8):
                    writer.write(b"b" * MAX_HEAD_BYTES)
                    await writer.drain()
                await asyncio.sleep(0.1)  # all of them take longer than a head may
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")
            writer.close()
            return 3

    assert asyncio.run(connect()) == 3
