"""Replies that are read as they come: their ends, their pace, and whoever goes away too early."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.integration.client.scripted_server import Connection, Received, ScriptedServer
from tests.integration.client.transport_runs import Run, answering
from tinsmith.client.session import Session
from tinsmith.client.settings import settings_from
from tinsmith.client.transports.base import StreamReply, Transport
from tinsmith.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APITimeoutError,
    BodyTooLargeError,
)
from tinsmith.wire.endpoint_types import Pool
from tinsmith.wire.endpoints import ENDPOINTS
from tinsmith.wire.exchange import HttpRequest

OK = b"HTTP/1.1 200 OK\r\n"
REQUEST = HttpRequest("POST", "/api/v1/stream", {}, {}, [b"{}"])


def streamed(
    transport: Transport, *, timeout_s: float = 20.0, idle_s: float = 20.0
) -> contextlib.AbstractAsyncContextManager[StreamReply]:
    return transport.stream(REQUEST, pool=Pool.SAMPLE, timeout_s=timeout_s, idle_s=idle_s)


async def whole_of(transport: Transport, _: ScriptedServer) -> bytes:
    async with streamed(transport) as reply:
        return b"".join([piece async for piece in reply.pieces])


@pytest.mark.parametrize(
    "reply",
    [
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nwho\r\n2\r\nle\r\n0\r\n\r\n",
        OK + b"Content-Length: 5\r\n\r\nwhole",
        OK + b"Connection: close\r\n\r\nwhole",
        b"HTTP/1.0 200 OK\r\n\r\nwhole",
        b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + OK + b"Content-Length: 5\r\n\r\nwhole",
    ],
)
@pytest.mark.parametrize("is_torn", [True, False])
def test_a_body_ends_where_its_framing_says(
    run: Run, run_direct: Run, reply: bytes, is_torn: bool
) -> None:
    async def answer(_: Received, connection: Connection) -> None:
        for piece in [reply[n : n + 1] for n in range(len(reply))] if is_torn else [reply]:
            connection.writer.write(piece)
            await connection.writer.drain()
        connection.writer.close()

    for each in (run, run_direct):
        assert each(answer, whole_of) == b"whole"


@pytest.mark.parametrize(
    "reply",
    [
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nwho\r\n2\r\nl",
        OK + b"Content-Length: 6\r\n\r\nwhole",
        OK + b"Content-Le",
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n\0\0\0",
        b"\0\0\0\0",
        b"",
    ],
)
def test_a_truncated_body_is_a_connection_error(run_direct: Run, reply: bytes) -> None:
    async def scenario(transport: Transport, server: ScriptedServer) -> None:
        with pytest.raises(APIConnectionError):
            await whole_of(transport, server)

    run_direct(answering(reply, then_close=True), scenario)


def test_data_received_before_the_connection_closed_is_still_read(run_direct: Run) -> None:
    """Far more than is kept at a time, so that reading is paused when the connection ends."""
    gone = asyncio.Event()
    whole = bytes(range(256)) * 20_000

    async def answer(_: Received, connection: Connection) -> None:
        connection.writer.write(OK + b"Content-Length: %d\r\n\r\n" % len(whole) + whole)
        connection.writer.close()
        gone.set()

    async def scenario(transport: Transport, _: ScriptedServer) -> bytes:
        async with streamed(transport) as reply:
            await gone.wait()
            body = b""
            async for piece in reply.pieces:
                body += piece
                await asyncio.sleep(0.001)  # slower than what comes
            return body

    assert run_direct(answer, scenario) == whole


def test_data_received_before_a_reset_is_still_delivered(run_direct: Run) -> None:
    async def answer(_: Received, connection: Connection) -> None:
        connection.writer.write(OK + b"Content-Length: 100\r\n\r\nhalf")
        await connection.writer.drain()
        await half_read.wait()
        connection.reset()

    half_read = asyncio.Event()

    async def scenario(transport: Transport, _: ScriptedServer) -> bytes:
        async with streamed(transport) as reply:
            half = await anext(reply.pieces)
            half_read.set()
            with pytest.raises(APIConnectionError):
                await anext(reply.pieces)
        return half

    assert run_direct(answer, scenario) == b"half"


@pytest.mark.parametrize("steps", range(0, 12, 2))
def test_a_stream_cancelled_at_any_moment_leaves_nothing_behind(
    run_direct: Run, steps: int
) -> None:
    async def endless(_: Received, connection: Connection) -> None:
        connection.writer.write(OK + b"Transfer-Encoding: chunked\r\n\r\n")
        while True:
            connection.writer.write(b"5\r\nwhole\r\n")
            await connection.writer.drain()
            await asyncio.sleep(0)

    async def scenario(transport: Transport, server: ScriptedServer) -> None:
        call = asyncio.create_task(whole_of(transport, server))
        for _ in range(steps):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert call.cancelled()
        assert not transport._streams  # type: ignore[attr-defined]

    run_direct(endless, scenario)


@pytest.mark.parametrize("steps", range(0, 12, 2))
def test_closing_ends_streams_at_any_moment(run_direct: Run, steps: int) -> None:
    async def silent(_: Received, connection: Connection) -> None:
        connection.writer.write(OK + b"\r\nhalf")
        assert await connection.read_request() is None

    async def scenario(transport: Transport, server: ScriptedServer) -> None:
        call = asyncio.create_task(whole_of(transport, server))
        for _ in range(steps):
            await asyncio.sleep(0)
        await transport.close()
        with pytest.raises(APIConnectionError):
            await call

    run_direct(silent, scenario)


def test_a_stream_that_stalls_or_never_begins_times_out(run: Run) -> None:
    async def silent(_: Received, connection: Connection) -> None:
        if connection.number == 0:
            connection.writer.write(OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nwhole\r\n")
        assert await connection.read_request() is None

    async def scenario(transport: Transport, _: ScriptedServer) -> None:
        with pytest.raises(APITimeoutError, match=r"no data for 0\.1 s"):
            async with streamed(transport, idle_s=0.1) as reply:
                assert [piece async for piece in reply.pieces] == []
        with pytest.raises(APITimeoutError, match=r"no reply .* within 0\.1 s"):
            async with streamed(transport, timeout_s=0.1):
                pass

    run(silent, scenario)


def test_an_endless_head_of_a_stream_is_rejected(run_direct: Run) -> None:
    async def flood(_: Received, connection: Connection) -> None:
        connection.writer.write(OK)
        for __ in range(1000):
            connection.writer.write(b"X-More: and more\r\n" * 1000)
            await connection.writer.drain()

    async def scenario(transport: Transport, server: ScriptedServer) -> None:
        with pytest.raises((BodyTooLargeError, APIConnectionError)):
            await whole_of(transport, server)

    run_direct(flood, scenario)


def test_the_error_names_the_encoding_of_a_compressed_stream(run_direct: Run) -> None:
    reply = OK + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nwhole"

    async def scenario(transport: Transport, server: ScriptedServer) -> None:
        session = Session(settings_from(base_url=server.url, api_key="tml-key"), transport)
        endpoint, sent = ENDPOINTS["asample"], HttpRequest("POST", "/x", {}, {}, [b"{}"])
        with pytest.raises(APIResponseValidationError, match="'gzip'"):
            async with session.stream(endpoint, sent, idle_s=20.0):
                pass

    run_direct(answering(reply), scenario)
