"""The relay in front of the service: it passes everything on, until it is told to break."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tinsmith.testing.byte_proxy import ByteProxy, ProxiedConnection

TIMEOUT_S = 60.0
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send back what comes, until it ends."""
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def connected(answer: Answer = echo) -> AsyncIterator[tuple[ByteProxy, Streams]]:
    """A proxy in front of a service, and one client's connection to it."""
    service = await asyncio.start_server(answer, "127.0.0.1", 0)
    listener = socket.create_server(("127.0.0.1", 0))
    proxy = ByteProxy(listener, service.sockets[0].getsockname()[1])
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield proxy, (reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await proxy.close()
        service.close()
        await service.wait_closed()


def test_bytes_pass_in_both_directions_however_many_there_are() -> None:
    async def passing() -> None:
        sent = bytes(range(256)) * 40_000
        async with connected() as (_, (reader, writer)):
            writer.write(sent)
            assert await reader.readexactly(len(sent)) == sent

    asyncio.run(passing())


def test_the_service_is_told_when_its_client_closes() -> None:
    async def leaving() -> None:
        ended = asyncio.Event()

        async def read_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert await reader.read() == b"last words"
            writer.close()
            ended.set()

        async with connected(read_all) as (_, (_, writer)):
            writer.write(b"last words")
            writer.close()
            await ended.wait()

    asyncio.run(leaving())


def test_the_client_gets_all_that_was_sent_before_the_service_closed() -> None:
    async def ending() -> bytes:
        async def say(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"x" * 1_000_000)
            writer.close()

        async with connected(say) as (_, (reader, _)):
            return await reader.read()

    assert asyncio.run(ending()) == b"x" * 1_000_000


def breaking(how: Callable[..., None], *details: int) -> bytes:
    """What a client reads of ten bytes if its connection is broken before they are sent."""

    async def broken() -> bytes:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(1)
            connection = proxies[0].connection_from(writer.get_extra_info("peername")[1])
            assert connection.number == 0
            how(connection, *details)
            writer.write(b"0123456789")
            writer.close()

        proxies: list[ByteProxy] = []
        async with connected(answer) as (proxy, (reader, writer)):
            proxies.append(proxy)
            writer.write(b"?")
            return await reader.read()

    return asyncio.run(broken())


@pytest.mark.parametrize("size", [0, 4, 10])
def test_connection_is_cut_after_so_many_bytes(size: int) -> None:
    assert breaking(ProxiedConnection.cut_after, size) == b"0123456789"[:size]


def test_connection_is_closed_without_a_byte() -> None:
    assert breaking(ProxiedConnection.close) == b""


def test_reset_is_a_reset() -> None:
    with pytest.raises(ConnectionResetError):
        breaking(ProxiedConnection.reset)


def test_connection_ends_if_the_service_cannot_be_reached() -> None:
    async def alone() -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        listener = socket.create_server(("127.0.0.1", 0))
        proxy = ByteProxy(listener, port)
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        await proxy.close()

    asyncio.run(alone())
