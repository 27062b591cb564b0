"""The HTTP server on a raw socket: what it reads, what it refuses, what it sends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tinsmith.testing import HttpServer, Incoming, StreamedReply
from tinsmith.testing.http_server import BrokenReply, Reply
from tinsmith.wire.exchange import HttpReply

TIMEOUT_S = 60.0
CHUNKS = b"3\r\nabc\r\n2;note\r\nde\r\n0\r\nTrailer: x\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def echo(incoming: Incoming) -> Reply:
    """What came, as text."""
    said = f"{incoming.method} {incoming.path} {incoming.query} {incoming.body.decode()}"
    return HttpReply(200, {}, [said.encode()])


@contextlib.asynccontextmanager
async def connected(
    handler: Callable[[Incoming], Awaitable[Reply]] = echo, *, max_body_bytes: int = 1000
) -> AsyncIterator[tuple[HttpServer, Streams]]:
    """A server and one connection to it."""
    server = HttpServer(handler, max_body_bytes=max_body_bytes)
    port = await server.open()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield server, (reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await server.close()


async def head_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    pairs = (line.split(": ", 1) for line in lines[1:])
    return int(lines[0].split(" ")[1]), {name.lower(): value for name, value in pairs}


async def reply_of(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    status, headers = await head_of(reader)
    return status, await reader.readexactly(int(headers.get("content-length", 0)))


async def exchanged(request: bytes) -> tuple[int, bytes]:
    async with connected() as (_, (reader, writer)):
        writer.write(request)
        return await reply_of(reader)


@pytest.mark.parametrize(
    ("request_bytes", "body"),
    [
        (b"GET /a?x=1&y= HTTP/1.1\r\n\r\n", b"GET /a {'x': '1', 'y': ''} "),
        (b"POST /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"POST /a {} abc"),
        (
            b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS,
            b"POST /a {} abcde",
        ),
        (b"PUT http://host/a HTTP/1.1\r\n\r\n", b"PUT /a {} "),
    ],
)
def test_request_is_read(request_bytes: bytes, body: bytes) -> None:
    assert asyncio.run(exchanged(request_bytes)) == (200, body)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/2\r\n\r\n", 400),
        (b"GET http://[ HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n folded: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1001\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n", 413),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000, 431),
    ],
)
def test_what_is_no_request_is_refused_and_the_connection_ends(
    request_bytes: bytes, status: int
) -> None:
    async def refused() -> None:
        async with connected() as (_, (reader, writer)):
            writer.write(request_bytes)
            assert (await reply_of(reader))[0] == status
            assert await reader.read() == b""

    asyncio.run(refused())


def test_bytes_may_come_one_at_a_time() -> None:
    async def slow() -> tuple[int, bytes]:
        async with connected() as (_, (reader, writer)):
            for byte in b"POST /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc":
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0)
            return await reply_of(reader)

    assert asyncio.run(slow()) == (200, b"POST /a {} abc")


def test_connection_is_kept_and_pipelined_requests_are_answered_in_order() -> None:
    async def pipelined() -> None:
        async with connected() as (server, (reader, writer)):
            writer.write(b"".join(b"GET /%d HTTP/1.1\r\n\r\n" % n for n in range(20)))
            for n in range(20):
                assert await reply_of(reader) == (200, b"GET /%d {} " % n)
            assert server.connection_count == 1

    asyncio.run(pipelined())


@pytest.mark.parametrize(
    "request_bytes",
    [b"GET / HTTP/1.1\r\nConnection: Close\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n"],
)
def test_connection_ends_when_the_client_wants_it_to(request_bytes: bytes) -> None:
    async def closing() -> None:
        async with connected() as (_, (reader, writer)):
            writer.write(request_bytes)
            _, headers = await head_of(reader)
            assert headers["connection"] == "close"
            await reader.read()  # up to the end

    asyncio.run(closing())


def test_client_that_asks_first_is_told_to_go_on() -> None:
    async def asking() -> None:
        async with connected() as (_, (reader, writer)):
            writer.write(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"x")
            assert await reply_of(reader) == (200, b"POST / {} x")

    asyncio.run(asking())


def test_large_body_and_large_reply_pass() -> None:
    async def large() -> None:
        async def send_back(incoming: Incoming) -> Reply:
            return HttpReply(200, {}, [incoming.body])

        body = bytes(range(256)) * 40_000
        async with connected(send_back, max_body_bytes=len(body)) as (_, (reader, writer)):
            writer.write(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            assert await reply_of(reader) == (200, body)

    asyncio.run(large())


def test_streamed_reply_arrives_piece_by_piece() -> None:
    async def streamed() -> None:
        more = asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            await more.wait()
            yield b"data: 2\n\n"

        async def stream(_: Incoming) -> Reply:
            return StreamedReply(200, {"Content-Type": "text/event-stream"}, pieces())

        async with connected(stream) as (_, (reader, writer)):
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            _, headers = await head_of(reader)
            assert headers["transfer-encoding"] == "chunked"
            assert await reader.readuntil(b"\r\n") == b"9\r\n"
            assert await reader.readexactly(11) == b"data: 1\n\n\r\n"
            more.set()
            assert await reader.readuntil(b"0\r\n\r\n") == b"9\r\ndata: 2\n\n\r\n0\r\n\r\n"

    asyncio.run(streamed())


def test_handler_ends_when_its_client_leaves() -> None:
    async def leaving() -> None:
        began, ended = asyncio.Event(), asyncio.Event()

        async def wait(_: Incoming) -> Reply:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            raise AssertionError

        async with connected(wait) as (server, (_, writer)):
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await began.wait()
            writer.close()
            await ended.wait()
            assert server.connections == set()

    asyncio.run(leaving())


def test_handlers_of_several_connections_run_at_once() -> None:
    async def crowd() -> None:
        everybody = asyncio.Barrier(50)

        async def meet(_: Incoming) -> Reply:
            await everybody.wait()
            return HttpReply(204, {}, [])

        async def visit(port: int) -> int:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            status, _ = await head_of(reader)
            writer.close()
            await writer.wait_closed()
            return status

        server = HttpServer(meet)
        port = await server.open()
        async with asyncio.timeout(TIMEOUT_S):
            assert await asyncio.gather(*(visit(port) for _ in range(50))) == [204] * 50
        await server.close()

    asyncio.run(crowd())


def test_error_in_a_handler_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def failing() -> tuple[int, bytes]:
        async def fail(_: Incoming) -> Reply:
            raise RuntimeError("a secret")

        async with connected(fail) as (_, (reader, writer)):
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            return await reply_of(reader)

    status, body = asyncio.run(failing())

    assert (status, b"secret" in body) == (500, False)
    assert "a secret" in caplog.text


@pytest.mark.parametrize(
    ("broken", "sent"),
    [
        (BrokenReply("close"), b""),
        (BrokenReply("half", HttpReply(200, {}, [b"abcdef"])), b"abc"),
    ],
)
def test_broken_reply_ends_the_connection(broken: BrokenReply, sent: bytes) -> None:
    async def breaking() -> bytes:
        async def fail(_: Incoming) -> Reply:
            return broken

        async with connected(fail) as (_, (reader, writer)):
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            return await reader.read()

    assert asyncio.run(breaking()).rpartition(b"\r\n\r\n")[2] == sent


def test_reset_is_a_reset() -> None:
    async def resetting() -> None:
        async def fail(_: Incoming) -> Reply:
            return BrokenReply("reset")

        async with connected(fail) as (_, (reader, writer)):
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            with pytest.raises(ConnectionResetError):
                await reader.read()

    asyncio.run(resetting())
