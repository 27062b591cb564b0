"""What goes out: odd characters, bodies of all sizes, and servers that do not want to read them."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.integration.client.scripted_server import Connection, Received, ScriptedServer
from tests.integration.client.transport_runs import Run, echo, post
from tinsmith.client.transports.base import Transport, TransportSettings
from tinsmith.client.transports.direct import DirectTransport
from tinsmith.errors import APIConnectionError, ValidationError
from tinsmith.wire.endpoint_types import Pool
from tinsmith.wire.exchange import HttpRequest
from tinsmith.wire.protobuf import Parts


def send(transport: Transport, request: HttpRequest) -> Any:
    return transport.send(request, pool=Pool.REST, timeout_s=20.0)


@pytest.mark.parametrize("path", ["/a%20b%2Fc%3Fd%23e%25f", "/~a:b/+c", "/%C3%A9%00", "/a//b"])
def test_a_path_arrives_as_it_was_written(run: Run, path: str) -> None:
    async def scenario(transport: Transport, server: ScriptedServer) -> str:
        await send(transport, HttpRequest("GET", path, {}, {}, []))
        return server.received[0].target

    assert run(echo, scenario) == path


def test_a_query_may_contain_any_text(run: Run) -> None:
    query = {"a": "é&=?# \r\n\0+%", "b": ""}

    async def scenario(transport: Transport, server: ScriptedServer) -> str:
        await send(transport, HttpRequest("GET", "/x", query, {}, []))
        return server.received[0].target

    target = run(echo, scenario)
    assert target.isascii()
    assert " " not in target
    found = parse_qs(urlsplit(target).query, keep_blank_values=True)
    assert found == {"a": [query["a"]], "b": [""]}


@pytest.mark.parametrize("value", ["a\r\nX-Other: b", "a\nb", "a\rb", "a\0b", "日本"])
def test_an_invalid_header_is_rejected_and_nothing_is_sent(run_direct: Run, value: str) -> None:
    async def scenario(transport: Transport, server: ScriptedServer) -> int:
        with pytest.raises(ValidationError):
            await post(transport, headers={"X-Note": value})
        return len(server.received)

    assert run_direct(echo, scenario) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            ("X-Note", value)
            for value in ("a\r\nX-Other: b", "a\nb", "a\rb", "a\0b", "日本", "\x7f")
        ],
        *[(name, "1") for name in ("", "X Note", "X:Note", "X\r\nNote", "é", "X-Note\n")],
    ],
)
def test_settings_reject_an_invalid_header(name: str, value: str) -> None:
    with pytest.raises(ValidationError, match="header"):
        TransportSettings(base_url="http://service", headers={name: value})


def test_a_default_header_replaces_ours_whatever_its_case(run: Run) -> None:
    async def scenario(transport: Transport, server: ScriptedServer) -> dict[str, str]:
        await post(transport, headers={"User-Agent": "ours", "Accept": "application/json"})
        return server.received[0].headers

    headers = run(echo, scenario, headers={"user-agent": "theirs", "ACCEPT-ENCODING": "gzip"})

    assert (headers["user-agent"], headers["accept-encoding"]) == ("theirs", "gzip")
    assert headers["accept"] == "application/json"


@pytest.mark.parametrize(
    ("method", "parts", "length"),
    [("POST", [], "0"), ("POST", [b""], "0"), ("GET", [], None), ("DELETE", [], "0")],
)
def test_an_empty_body_has_content_length_zero_where_a_body_is_expected(
    run: Run, method: str, parts: Parts, length: str | None
) -> None:
    async def scenario(transport: Transport, server: ScriptedServer) -> list[str | None]:
        for _ in range(2):
            await send(transport, HttpRequest(method, "/x", {}, {}, parts))
        return [request.headers.get("content-length") for request in server.received]

    assert set(run(echo, scenario)) <= {length, None if method == "DELETE" else length}


def test_the_same_request_can_be_resent_in_full(run: Run) -> None:
    body: Parts = [b"x" * 300_000, memoryview(b"y" * 3_000_000), b"z"]

    async def lose_the_first(request: Received, connection: Connection) -> None:
        if connection.number == 0:
            connection.reset()
        else:
            await connection.reply(b"%d" % len(request.body))

    async def scenario(transport: Transport, server: ScriptedServer) -> list[bytes]:
        request = HttpRequest("POST", "/x", {}, {}, body)
        replies = [await send(transport, request) for _ in range(2)]
        assert {bytes(received.body) for received in server.received} == {b"".join(body)}
        return [bytes(reply.body) for reply in replies]

    assert run(lose_the_first, scenario) == [b"3300001"] * 2


class _Unread:
    """A server that takes connections and reads nothing."""

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0, limit=1000)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _take(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        writer.transport.pause_reading()  # type: ignore[attr-defined]

    async def __aexit__(self, *_: object) -> None:
        self._writer.transport.abort()
        self._server.close()
        await self._server.wait_closed()


@pytest.mark.parametrize("parts", [1, 10, 4000])
def test_a_server_that_stops_reading_does_not_cause_body_copies(
    run_direct: Run, parts: int
) -> None:
    body: Parts = [memoryview(bytes(80_000_000 // parts))] * parts

    async def scenario(_: Transport, __: ScriptedServer) -> int:
        async with _Unread() as url:
            transport = DirectTransport(TransportSettings(base_url=url), lambda: "k")
            tracemalloc.start()
            try:
                with pytest.raises(APIConnectionError):
                    await post(transport, body, timeout_s=0.5)
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
                await transport.close()

    assert run_direct(echo, scenario) < 10_000_000


def test_a_connection_answered_before_the_request_was_complete_is_not_reused(
    run_direct: Run,
) -> None:
    """A server that reads no further would never see the next request."""

    async def scenario(_: Transport, __: ScriptedServer) -> list[int]:
        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            writers.append(writer)

        writers: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        transport = DirectTransport(TransportSettings(base_url=url), lambda: "k")
        async with server:
            statuses = [(await post(transport, [bytes(12_000_000)])).status for _ in range(3)]
            await transport.close()
            for writer in writers:
                writer.transport.abort()
        return statuses

    assert run_direct(echo, scenario) == [413] * 3


def test_a_server_that_closes_before_reading_everything_is_a_connection_error(
    run_direct: Run,
) -> None:
    async def scenario(_: Transport, __: ScriptedServer) -> None:
        async def end_then_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            reading.append(asyncio.current_task())
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                while await reader.read(1_000_000):
                    pass
            writer.close()

        reading: list[Any] = []
        server = await asyncio.start_server(end_then_read, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        transport = DirectTransport(TransportSettings(base_url=url), lambda: "k")
        async with server:
            with pytest.raises(APIConnectionError, match="closed the connection"):
                await post(transport, [bytes(12_000_000)])
            await transport.close()
            await asyncio.gather(*reading)

    run_direct(echo, scenario)
