"""Replies as no good server writes them: each is read as far as it is sound, or refused at once.

None may hang, take memory without bound, raise an error that is not ours, or leave bytes behind
that the next call on the connection would take for its reply.
"""

from __future__ import annotations

import asyncio
import gzip
import time
import tracemalloc

import pytest

from tests.integration.client.scripted_server import Connection, Received, ScriptedServer
from tests.integration.client.transport_runs import Run, answering, post
from tinsmith.client.poller import Poll
from tinsmith.client.session import Session
from tinsmith.client.settings import settings_from
from tinsmith.client.transports.base import Transport
from tinsmith.errors import (
    APIConnectionError,
    BadRequestError,
    BodyTooLargeError,
    DecodeError,
    RequestFailedError,
)
from tinsmith.types.requests import ClientConfigRequest
from tinsmith.wire.decode_limits import DecodeLimits

OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "reply",
    [
        OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nwhole",
        OK + b"Content-Length: five\r\n\r\nwhole",
        OK + b"Content-Length: -5\r\n\r\nwhole",
        OK + b"Content-Length: 99999999999999999999999\r\n\r\nwhole",
        OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nwhole\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nwhole\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nwhole\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nwhole\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nwhole\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nwho",
        OK + b"no header at all\r\n\r\nwhole",
        OK + b"X-Folded: a\r\n b\r\nX-Nul: \0\r\n\r\nwhole",
        b"whole\n",
        b"HTTP/9.9 200 OK\r\nContent-Length: 5\r\n\r\nwhole",
        b"HTTP/1.1 999999 OK\r\nContent-Length: 5\r\n\r\nwhole",
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n\0\0\0",
        OK[:9],
        OK + b"Content-Le",
        b"",
    ],
    ids=lambda reply: str(reply[:60]),
)
def test_a_malformed_reply_is_a_connection_error(run_direct: Run, reply: bytes) -> None:
    async def scenario(transport: Transport, _: ScriptedServer) -> None:
        with pytest.raises((APIConnectionError, BodyTooLargeError)):
            await post(transport)

    run_direct(answering(reply, then_close=True), scenario)


@pytest.mark.parametrize(
    "reply",
    [
        OK + b'Transfer-Encoding: chunked\r\n\r\n5;a=b;c="d"\r\nwhole\r\n0;e\r\n\r\n',
        OK + b"Transfer-Encoding: chunked\r\n\r\n005\r\nwhole\r\n000\r\n\r\n",
        b"HTTP/1.1 200\r\nContent-Length: 5\r\n\r\nwhole",
        b"HTTP/1.1 200 \xe9t\xe9\r\nContent-Length: 5\r\n\r\nwhole",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 50 + OK + b"Content-Length: 5\r\n\r\nwhole",
        OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nwhole",
    ],
    ids=lambda reply: str(reply[:60]),
)
def test_an_unusual_but_valid_reply_is_read(run: Run, reply: bytes) -> None:
    async def scenario(transport: Transport, _: ScriptedServer) -> list[bytes]:
        return [bytes((await post(transport)).body) for _ in range(2)]

    assert run(answering(reply), scenario) == [b"whole", b"whole"]


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("encoding", ["", "Content-Encoding: gzip\r\n"])
def test_a_status_without_a_body_is_read_without_one(run: Run, status: int, encoding: str) -> None:
    head = f"HTTP/1.1 {status} Nothing\r\n{encoding}\r\n".encode()

    async def scenario(transport: Transport, _: ScriptedServer) -> list[tuple[int, int]]:
        replies = [await post(transport) for _ in range(3)]
        return [(reply.status, len(reply.body)) for reply in replies]

    assert run(answering(head), scenario) == [(status, 0)] * 3


@pytest.mark.parametrize("rest", [b"Content-Length: 2\r\n\r\n", b"Content-Le"])
def test_the_beginning_of_a_second_reply_is_not_read_by_the_next_call(
    run_direct: Run, rest: bytes
) -> None:
    async def smuggle(request: Received, connection: Connection) -> None:
        whole = OK + b"Content-Length: 1\r\n\r\n" + request.body
        connection.writer.write(whole + OK + rest)
        await connection.writer.drain()

    async def scenario(transport: Transport, _: ScriptedServer) -> list[bytes]:
        return [bytes((await post(transport, [b"%d" % n])).body) for n in range(3)]

    assert run_direct(smuggle, scenario) == [b"0", b"1", b"2"]


def test_bytes_after_a_chunked_body_are_not_taken_for_headers(run_direct: Run) -> None:
    reply = (
        OK + b"Transfer-Encoding: chunked\r\nX-Request-Id: r1\r\n\r\n5\r\nwhole\r\n"
        b"0\r\nContent-Encoding: zstd\r\nX-Request-Id: r2\r\n\r\n"
    )

    got = run_direct(answering(reply), lambda transport, _: post(transport))

    assert (bytes(got.body), got.headers["x-request-id"]) == (b"whole", "r1")
    assert "content-encoding" not in got.headers


@pytest.mark.parametrize(
    "beginning",
    [
        OK + b"X-Long: ",
        OK,
        b"HTTP/1.1 200 ",
        OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nwhole\r\n0\r\nX-Trailer: ",
        OK + b"Transfer-Encoding: chunked\r\n\r\n5;",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
    ids=["one header", "many headers", "the reason", "a trailer", "an extension", "interim"],
)
def test_an_endless_response_head_is_rejected_early(run_direct: Run, beginning: bytes) -> None:
    """The server would go on for 100 MB."""
    piece = {OK: b"X-More: and more\r\n", b"HTTP/1.1 100 Continue\r\n\r\n": beginning}.get(
        beginning, b"x" * 1000
    )
    sent_bytes = 0

    async def flood(_: Received, connection: Connection) -> None:
        nonlocal sent_bytes
        connection.writer.write(beginning)
        while sent_bytes < 100_000_000:
            connection.writer.write(piece * 1000)
            await connection.writer.drain()
            sent_bytes += len(piece) * 1000

    async def scenario(transport: Transport, _: ScriptedServer) -> None:
        with pytest.raises((BodyTooLargeError, APIConnectionError)):
            await post(transport)

    run_direct(flood, scenario)
    assert sent_bytes < 50_000_000


def test_memory_is_allocated_for_received_bytes_not_for_announced_ones(run_direct: Run) -> None:
    announced = b"Content-Length: 200000000\r\n\r\nlittle"

    async def scenario(transport: Transport, server: ScriptedServer) -> int:
        tracemalloc.start()
        try:
            calls = [asyncio.create_task(post(transport)) for _ in range(8)]
            await server.wait_received(8)
            await asyncio.sleep(0.1)  # there is nothing to see until they have been read
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        return peak

    assert run_direct(answering(OK + announced), scenario) < 100_000_000


def test_a_body_in_many_small_chunks_uses_no_more_memory_than_its_bytes(run_direct: Run) -> None:
    chunks = b"2\r\nab\r\n" * 200_000

    async def scenario(transport: Transport, _: ScriptedServer) -> tuple[int, int]:
        tracemalloc.start()
        try:
            reply = await post(transport)
            return len(reply.body), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    head = OK + b"Transfer-Encoding: chunked\r\n\r\n"
    size, peak = run_direct(answering(head + chunks + b"0\r\n\r\n"), scenario)

    assert size == 400_000
    assert peak < 8_000_000  # the server's own copies of what it sends are 1.4 MB each


def test_a_reply_without_a_length_fails_if_the_client_closes(run_direct: Run) -> None:
    begun = asyncio.Event()

    async def half(_: Received, connection: Connection) -> None:
        connection.writer.write(b"HTTP/1.0 200 OK\r\n\r\nhalf of it")
        await connection.writer.drain()
        begun.set()
        await connection.read_request()

    async def scenario(transport: Transport, _: ScriptedServer) -> None:
        call = asyncio.create_task(post(transport))
        await begun.wait()
        await asyncio.sleep(0.05)  # until the half has been read, which nothing tells
        await transport.close()
        with pytest.raises(APIConnectionError, match="closed"):
            await call

    run_direct(half, scenario)


@pytest.mark.parametrize("body", [b"\x1b\x00", b""])
def test_a_rejection_with_an_unknown_content_encoding_is_still_a_rejection(
    run: Run, body: bytes
) -> None:
    """Proxies answer with what browsers can read."""

    async def refuse(_: Received, connection: Connection) -> None:
        await connection.reply(body, 503, {"Content-Encoding": "br", "Retry-After": "1"})

    reply = run(refuse, lambda transport, _: post(transport))

    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert len(reply.body) == 0


def test_the_error_names_an_unknown_content_encoding(run: Run) -> None:
    async def packed(_: Received, connection: Connection) -> None:
        await connection.reply(b"\x1b\x00", headers={"Content-Encoding": "br"})

    async def scenario(transport: Transport, _: ScriptedServer) -> None:
        with pytest.raises(DecodeError, match="'br'"):
            await post(transport)

    run(packed, scenario)


def test_a_decompression_bomb_is_rejected_before_it_is_large(run: Run) -> None:
    bomb = gzip.compress(bytes(100_000_000), 1)

    async def packed(_: Received, connection: Connection) -> None:
        await connection.reply(bomb, headers={"Content-Encoding": "gzip"})

    async def scenario(transport: Transport, _: ScriptedServer) -> int:
        tracemalloc.start()
        try:
            with pytest.raises(BodyTooLargeError):
                await post(transport)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert run(packed, scenario, limits=DecodeLimits(memory_bytes=10_000_000)) < 40_000_000


@pytest.mark.parametrize(
    "begun", [b"", OK[:5], OK + b"Content-Le", OK + b"Content-Length: 9\r\n\r\n1"]
)
def test_a_connection_reset_at_any_stage_is_a_connection_error(
    run_direct: Run, begun: bytes
) -> None:
    async def reset(_: Received, connection: Connection) -> None:
        connection.writer.write(begun)
        await connection.writer.drain()
        connection.reset()

    async def scenario(transport: Transport, server: ScriptedServer) -> int:
        with pytest.raises(APIConnectionError):
            await post(transport)
        return len(server.received)

    # Sent once more only where nothing had come: what had begun may have been done.
    assert run_direct(reset, scenario) == (1 if begun else 2)


def test_a_reply_before_a_half_close_is_read(run: Run) -> None:
    async def half_close(request: Received, connection: Connection) -> None:
        await connection.reply(request.body)
        connection.writer.write_eof()
        await connection.read_request()  # which it may still read, and cannot answer
        connection.reset()

    async def scenario(transport: Transport, _: ScriptedServer) -> list[bytes]:
        return [bytes((await post(transport, [b"%d" % n])).body) for n in range(3)]

    assert run(half_close, scenario) == [b"0", b"1", b"2"]


def test_an_unsolicited_reply_is_not_used_for_a_later_request(
    run_direct: Run,
) -> None:
    async def eager(request: Received, connection: Connection) -> None:
        await connection.reply(request.body)
        connection.writer.write(OK + b"Content-Length: 5\r\n\r\nearly")
        await connection.writer.drain()

    async def scenario(transport: Transport, _: ScriptedServer) -> list[bytes]:
        replies = []
        for number in range(3):
            replies.append(bytes((await post(transport, [b"%d" % number])).body))
            await asyncio.sleep(0.05)  # the bytes arrive while nobody has asked
        return replies

    assert run_direct(eager, scenario) == [b"0", b"1", b"2"]


def test_a_400_with_a_chunked_body_is_not_retried(run_direct: Run) -> None:
    """One without a body is taken for a broken proxy's."""
    reply = (
        b"HTTP/1.1 400 Bad\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'11\r\n{"detail": "bad"}\r\n0\r\n\r\n'
    )

    async def scenario(transport: Transport, server: ScriptedServer) -> int:
        session = Session(settings_from(base_url=server.url, api_key="tml-key"), transport)
        with pytest.raises(BadRequestError, match="bad"):
            await session.call("client_config", ClientConfigRequest(sdk_version="1"))
        return len(server.received)

    assert run_direct(answering(reply), scenario) == 1


@pytest.mark.parametrize("delay_ms", ["1" + "0" * 400, "1e300", "-5", "true", '"soon"', "null"])
def test_a_pending_reply_pauses_samples_for_at_most_a_minute(
    run_direct: Run, delay_ms: str
) -> None:
    paused = '"type": "try_again", "queue_state": "paused_capacity"'
    pending = f'{{{paused}, "retry_after_ms": {delay_ms}}}'

    async def answer(_: Received, connection: Connection) -> None:
        is_first = connection.requests == 1
        failed = b'{"error": "at last", "category": "user"}'
        await connection.reply(pending.encode() if is_first else failed)

    async def scenario(transport: Transport, server: ScriptedServer) -> float:
        settings = settings_from(base_url=server.url, api_key="tml-key", limiter_scope="client")
        session = Session(settings, transport)
        with pytest.raises(RequestFailedError, match="at last"):
            await Poll(session, "r1", "Sample").result()
        return session.limiter.pause().until - time.monotonic()

    assert run_direct(answer, scenario) <= 60
