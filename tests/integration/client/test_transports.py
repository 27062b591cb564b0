"""One exchange over real sockets: what goes out, what comes back, and what can go wrong.

Both transports keep the same promise, so every test runs with each.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import pathlib
import socket
import ssl
from collections.abc import Callable
from typing import Any

import pytest
import trustme

from tests.integration.client.scripted_server import Connection, Received, ScriptedServer
from tests.integration.client.transport_runs import Maker, Run, echo, post, run_with
from tinsmith.client.transports import direct
from tinsmith.client.transports.base import ExchangeReply, Transport, TransportSettings
from tinsmith.client.transports.direct import DirectTransport
from tinsmith.client.transports.proxied import ProxiedTransport
from tinsmith.errors import APIConnectionError, APITimeoutError, BodyTooLargeError, TinkerError
from tinsmith.wire import content
from tinsmith.wire.decode_limits import DecodeLimits
from tinsmith.wire.endpoint_types import Pool
from tinsmith.wire.exchange import HttpRequest
from tinsmith.wire.protobuf import Parts


def test_a_reply_has_its_status_headers_and_body(run: Run) -> None:
    async def refuse(_: Received, connection: Connection) -> None:
        await connection.reply(b'{"detail": "no"}', 422, {"X-Request-Id": "r1"})

    reply = run(refuse, lambda transport, _: post(transport))

    assert (reply.status, reply.headers["x-request-id"]) == (422, "r1")
    assert bytes(reply.body) == b'{"detail": "no"}'


def test_a_body_in_parts_arrives_complete_with_its_length(run: Run) -> None:
    parts: Parts = [b"head", memoryview(bytes(range(256)) * 1000), b"tail"]

    async def scenario(transport: Transport, server: ScriptedServer) -> Received:
        await post(transport, parts)
        return server.received[0]

    received = run(echo, scenario)

    assert received.body == b"".join(parts)
    assert received.headers["content-length"] == str(len(received.body))


def test_s12_no_header_of_a_call_replaces_the_credential(run: Run) -> None:
    async def scenario(transport: Transport, server: ScriptedServer) -> Received:
        await post(transport, headers={"X-API-Key": "stolen", "X-Extra": "1"})
        return server.received[0]

    received = run(
        echo, scenario, headers={"X-API-Key": "other", "x-api-key": "third", "X-Team": "blue"}
    )

    assert received.headers["x-api-key"] == "tml-key"
    assert (received.headers["x-extra"], received.headers["x-team"]) == ("1", "blue")


def test_every_mutating_call_has_an_idempotency_key(run: Run) -> None:
    async def scenario(transport: Transport, server: ScriptedServer) -> list[Received]:
        await post(transport, key="mine")
        await post(transport)
        await transport.send(
            HttpRequest("GET", "/api/v1/healthz", {"a": "b c"}, {}, []),
            pool=Pool.REST,
            timeout_s=20.0,
            idempotency_key=None,
        )
        return server.received

    given, made, read = run(echo, scenario)

    assert given.headers["x-idempotency-key"] == "mine"
    assert made.headers["x-idempotency-key"].startswith("tinsmith-")
    assert "x-idempotency-key" not in read.headers
    assert read.target in ("/api/v1/healthz?a=b+c", "/api/v1/healthz?a=b%20c")


def test_an_idle_connection_closed_by_the_server_causes_no_error(run: Run) -> None:
    async def close_the_second(request: Received, connection: Connection) -> None:
        if connection.number == 0 and connection.requests == 2:
            connection.reset()
            return
        await echo(request, connection)

    async def scenario(transport: Transport, server: ScriptedServer) -> list[Received]:
        await post(transport)
        await post(transport, key="same")
        return server.received

    received = run(close_the_second, scenario)

    assert len(received) == 3
    assert {request.headers["x-idempotency-key"] for request in received[1:]} == {"same"}


def test_a_server_that_always_disconnects_is_a_connection_error(run: Run) -> None:
    async def hang_up(_: Received, connection: Connection) -> None:
        connection.reset()

    async def scenario(transport: Transport, server: ScriptedServer) -> int:
        with pytest.raises(APIConnectionError, match="/api/v1/asample"):
            await post(transport)
        return len(server.received)

    assert run(hang_up, scenario) == 2


def test_a_truncated_reply_is_a_connection_error(run: Run) -> None:
    async def half(_: Received, connection: Connection) -> None:
        connection.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await connection.writer.drain()
        connection.writer.close()

    async def scenario(transport: Transport, _: ScriptedServer) -> None:
        with pytest.raises(APIConnectionError):
            await post(transport)

    run(half, scenario)


def test_bytes_that_are_not_http_are_a_connection_error(run: Run) -> None:
    async def nonsense(_: Received, connection: Connection) -> None:
        connection.writer.write(b"\x00\x01 nonsense \xff\r\n\r\n")
        await connection.writer.drain()

    async def scenario(transport: Transport, _: ScriptedServer) -> None:
        with pytest.raises(APIConnectionError):
            await post(transport)

    run(nonsense, scenario)


def test_a_missing_reply_times_out_and_frees_its_connection(run: Run) -> None:
    async def silent_at_first(request: Received, connection: Connection) -> None:
        if connection.number == 0:
            await asyncio.sleep(3600)
        await echo(request, connection)

    async def scenario(transport: Transport, _: ScriptedServer) -> ExchangeReply:
        with pytest.raises(APITimeoutError, match=r"0\.05 s"):
            await post(transport, timeout_s=0.05)
        return await post(transport)

    assert run(silent_at_first, scenario, most_connections=1).status == 200


def test_each_request_on_a_connection_has_its_own_timeout(run: Run) -> None:
    """However much or little the one before it had: neither cuts it short nor lends it time."""
    early_s = 0.1

    async def answer(request: Received, connection: Connection) -> None:
        if request.body == b"never":
            return
        if request.body == b"late":
            await asyncio.sleep(3 * early_s)
        await connection.reply(b"%d" % connection.number)

    async def scenario(transport: Transport, _: ScriptedServer) -> list[ExchangeReply]:
        replies = [
            await post(transport, [b"soon"], timeout_s=60.0),
            await post(transport, [b"soon"], timeout_s=early_s * 100),
            await post(transport, [b"late"], timeout_s=60.0),
        ]
        with contextlib.suppress(APITimeoutError):  # a busy machine may miss it
            replies.append(await post(transport, [b"soon"], timeout_s=early_s))
        replies.append(await post(transport, [b"late"], timeout_s=60.0))
        with contextlib.suppress(APITimeoutError):
            await post(transport, [b"soon"], timeout_s=early_s)
        with pytest.raises(APITimeoutError, match=r"0\.4 s"):
            await post(transport, [b"never"], timeout_s=4 * early_s)
        return replies

    replies = run(answer, scenario)

    assert [bytes(reply.body) for reply in replies[:3]] == [b"0"] * 3
    assert len(replies) >= 4


def test_a_closed_port_fails_immediately_and_says_what_to_check(made_by: Maker) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

    async def scenario() -> None:
        settings = TransportSettings(base_url=f"http://127.0.0.1:{port}")
        transport = made_by(settings, lambda: "tml-key")
        try:
            with pytest.raises(APIConnectionError, match="check the base URL"):
                await post(transport)
        finally:
            await transport.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("zstd", lambda body: content.compress([body]))],
)
def test_a_compressed_reply_is_decompressed(
    run: Run, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    async def packed(_: Received, connection: Connection) -> None:
        await connection.reply(pack(b"x" * 10_000), headers={"Content-Encoding": encoding})

    reply = run(packed, lambda transport, _: post(transport))

    assert bytes(reply.body) == b"x" * 10_000


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_reply_above_the_size_limit_is_rejected(run: Run, is_packed: bool) -> None:
    body = bytes(5_000_000)

    async def too_much(_: Received, connection: Connection) -> None:
        if is_packed:
            packed = content.compress([body])
            await connection.reply(packed, headers={"Content-Encoding": "zstd"})
        else:
            await connection.reply(body)

    async def scenario(transport: Transport, _: ScriptedServer) -> None:
        with pytest.raises(BodyTooLargeError):
            await post(transport)

    run(too_much, scenario, limits=DecodeLimits(memory_bytes=1_000_000))


def test_s22_hung_samples_do_not_block_other_pools(run: Run) -> None:
    async def hang_samples(request: Received, connection: Connection) -> None:
        if b"hang" in request.body:
            await asyncio.sleep(3600)
        await connection.reply(request.body)

    async def scenario(transport: Transport, server: ScriptedServer) -> list[int]:
        hung = [asyncio.create_task(post(transport, [b"hang"])) for _ in range(400)]
        await server.wait_received(400)
        pools = (Pool.SESSION, Pool.TRAIN, Pool.RETRIEVE)
        replies = [await post(transport, [b"quick"], pool=pool, timeout_s=20.0) for pool in pools]
        for task in hung:
            task.cancel()
        await asyncio.gather(*hung, return_exceptions=True)
        return [reply.status for reply in replies]

    assert run(hang_samples, scenario) == [200, 200, 200]


def test_a_cancelled_call_closes_its_connection(run: Run) -> None:
    gone = asyncio.Event()

    async def watch(_: Received, connection: Connection) -> None:
        assert await connection.read_request() is None
        gone.set()

    async def scenario(transport: Transport, server: ScriptedServer) -> None:
        call = asyncio.create_task(post(transport))
        await server.wait_received(1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.wait_for(gone.wait(), timeout=60)

    run(watch, scenario)


def test_s2_a_closed_transport_rejects_calls_and_sends_nothing(run: Run) -> None:
    async def scenario(transport: Transport, server: ScriptedServer) -> int:
        await transport.close()
        with pytest.raises(APIConnectionError, match="closed"):
            await post(transport)
        return len(server.received)

    assert run(echo, scenario) == 0


def test_a_unix_socket_can_be_used(run: Run, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "service.sock")

    reply = run(echo, lambda transport, _: post(transport, [b"over the wall"]), unix_socket=path)

    assert bytes(reply.body) == b"over the wall"


def test_a_proxy_gets_the_absolute_url() -> None:
    async def scenario(_: Transport, server: ScriptedServer) -> str:
        settings = TransportSettings(base_url="http://service.invalid/svc", proxy=server.url)
        proxied = ProxiedTransport(settings, lambda: "tml-key")
        try:
            await post(proxied)
        finally:
            await proxied.close()
        return server.received[0].target

    assert run_with(DirectTransport, echo, scenario) == "http://service.invalid/svc/api/v1/asample"


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nwho\r\n2\r\nle\r\n0\r\n\r\n",
        b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwhole",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nwhole",
        b"HTTP/1.0 200 OK\r\n\r\nwhole",
    ],
    ids=["chunked", "after an interim reply", "until the end", "HTTP/1.0"],
)
def test_a_reply_in_every_framing_is_read(run: Run, reply: bytes) -> None:
    async def answer(_: Received, connection: Connection) -> None:
        for byte in reply:  # torn apart as far as it can be
            connection.writer.write(bytes([byte]))
            await connection.writer.drain()
        if b"Content-Length" not in reply and b"chunked" not in reply:
            connection.writer.close()

    async def scenario(transport: Transport, _: ScriptedServer) -> list[bytes]:
        return [bytes((await post(transport)).body) for _ in range(2)]

    assert run(answer, scenario) == [b"whole", b"whole"]


def test_sending_a_large_body_respects_backpressure(run: Run) -> None:
    body = bytes(range(256)) * 40_000

    async def scenario(transport: Transport, server: ScriptedServer) -> bytes:
        await post(transport, [body[:100], memoryview(body)[100:6_000_000], body[6_000_000:]])
        return server.received[0].body

    assert run(echo, scenario) == body


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_arrays_of_a_large_reply_share_its_writable_memory(run: Run, encoding: str) -> None:
    whole = bytes(range(256)) * 16_384  # 4 MiB, which no system hands over in one piece

    async def answer(_: Received, connection: Connection) -> None:
        sent = gzip.compress(whole) if encoding == "gzip" else whole
        await connection.reply(sent, headers={"Content-Encoding": encoding})

    reply = run(answer, lambda transport, _: post(transport))

    assert reply.body == whole
    assert not memoryview(reply.body).readonly


def test_a_rejection_sent_before_the_body_is_complete_reaches_the_caller() -> None:
    async def scenario() -> int:
        async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            await answered.wait()  # and reads nothing of what is sent
            writer.transport.abort()

        answered = asyncio.Event()
        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        transport = DirectTransport(
            TransportSettings(base_url=f"http://127.0.0.1:{port}"), lambda: "tml-key"
        )
        async with server:
            reply = await post(transport, [bytes(4_000_000)] * 20)
            answered.set()
            await transport.close()
        return reply.status

    assert asyncio.run(scenario()) == 413


def test_a_header_value_cannot_inject_another_header(run: Run) -> None:
    async def scenario(transport: Transport, server: ScriptedServer) -> int:
        with pytest.raises((TinkerError, ValueError)):
            await post(transport, headers={"X-Note": "a\r\nX-Other: b"})
        return len(server.received)

    assert run(echo, scenario) == 0


def test_unsolicited_bytes_do_not_become_the_next_reply(run: Run) -> None:
    async def twice(request: Received, connection: Connection) -> None:
        await connection.reply(request.body)
        await connection.reply(b"unasked")

    async def scenario(transport: Transport, _: ScriptedServer) -> list[bytes]:
        replies = []
        for number in range(3):
            replies.append(bytes((await post(transport, [b"%d" % number])).body))
            await asyncio.sleep(0.01)
        return replies

    assert run(twice, scenario) == [b"0", b"1", b"2"]


def test_connections_are_reused(run: Run) -> None:
    async def scenario(transport: Transport, server: ScriptedServer) -> int:
        for _ in range(5):
            await asyncio.gather(*(post(transport) for _ in range(20)))
        return len(server.connections)

    assert run(echo, scenario) <= 20


def test_idle_connections_are_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "KEEP_ALIVE_S", 0.05)
    gone = asyncio.Event()

    async def watch(request: Received, connection: Connection) -> None:
        await echo(request, connection)
        assert await connection.read_request() is None
        gone.set()

    async def scenario(transport: Transport, _: ScriptedServer) -> None:
        await post(transport)
        await asyncio.wait_for(gone.wait(), timeout=20)

    run_with(DirectTransport, watch, scenario)


def test_closing_fails_calls_in_flight(run: Run) -> None:
    async def silent(_: Received, connection: Connection) -> None:
        assert await connection.read_request() is None

    async def scenario(transport: Transport, server: ScriptedServer) -> list[Any]:
        calls = [asyncio.create_task(post(transport)) for _ in range(3)]
        await server.wait_received(1)
        await transport.close()
        return await asyncio.gather(*calls, return_exceptions=True)

    failures = run(silent, scenario, most_connections=1)

    assert [type(failure) for failure in failures] == [APIConnectionError] * 3


def test_a_private_certificate_authority_can_be_trusted(
    made_by: Maker, tmp_path: pathlib.Path
) -> None:
    authority = trustme.CA()
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca_file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    async def scenario() -> tuple[int, str]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        trusting = made_by(TransportSettings(base_url=url, ca_file=str(ca_file)), lambda: "k")
        wary = made_by(TransportSettings(base_url=url), lambda: "k")
        async with server:
            reply = await post(trusting, [b""])
            with pytest.raises(APIConnectionError) as refused:
                await post(wary)
            await trusting.close()
            await wary.close()
        return reply.status, str(refused.value)

    status, refusal = asyncio.run(scenario())

    assert status == 200
    assert "certificate" in refusal.lower()
