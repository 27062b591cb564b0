"""What comes before a request is bounded: nobody without a key can use up the service."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from tinsmith.serve.http_protocol import MOST_HEAD_BYTES, BoundedHttp
from tinsmith.testing.running import ServiceThread


class Impatient(BoundedHttp):
    """Gives up early."""

    head_s = 0.2


async def echo(_: Any, receive: Any, send: Any) -> None:
    """Answers with the length of the body."""
    length, more = 0, True
    while more:
        message = await receive()
        length += len(message["body"])
        more = message["more_body"]
    headers = [(b"content-length", str(len(str(length))).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": str(length).encode()})


@pytest.fixture(params=[BoundedHttp, Impatient])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """A server that speaks this HTTP."""
    config = uvicorn.Config(echo, port=0, lifespan="off", log_config=None, http=request.param)
    server = uvicorn.Server(config)
    found: list[int] = []
    tasks: list[asyncio.Task[None]] = []

    async def start() -> None:
        tasks.append(asyncio.create_task(server.serve()))
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        found.append(server.servers[0].sockets[0].getsockname()[1])

    async def stop() -> None:
        server.should_exit = True
        await tasks[0]

    thread = ServiceThread(start, stop)
    thread.start()
    yield found[0]
    thread.stop()


def read(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    whole = b""
    while piece := connection.recv(65536):
        whole += piece
    return whole


@pytest.mark.parametrize("port", [BoundedHttp], indirect=True)
@pytest.mark.parametrize("line", [b"x: " + b"y" * 5000 + b"\r\n", b"z" * 5000])
def test_a_head_without_end_is_refused(port: int, line: bytes) -> None:
    """Many headers, and one that goes on and on."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nlong: ")
        sent = 0
        try:
            while sent < 10 * MOST_HEAD_BYTES:
                connection.sendall(line)
                sent += len(line)
        except OSError:
            pass  # it was closed while we sent
        try:
            answer = read(connection)
        except ConnectionResetError:
            answer = b"HTTP/1.1 431 "

    assert answer.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("port", [Impatient], indirect=True)
@pytest.mark.parametrize("sent", [b"", b"GET / HTT", b"GET / HTTP/1.1\r\nhost: x\r\n"])
def test_a_head_that_does_not_come_is_given_up(port: int, sent: bytes) -> None:
    """The connection is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(sent)

        assert read(connection) == b""


@pytest.mark.parametrize("port", [Impatient], indirect=True)
def test_a_second_head_that_does_not_come_is_given_up_too(port: int) -> None:
    """After a whole request on the same connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b"\r\n\r\n0"):
            answer += connection.recv(65536)
        connection.sendall(b"GET / HT")

        assert read(connection) == b""


@pytest.mark.parametrize("port", [BoundedHttp], indirect=True)
def test_large_bodies_and_many_requests_are_not_heads(port: int) -> None:
    """They are counted elsewhere; several requests on one connection, in one go too."""
    body = b"b" * (8 * MOST_HEAD_BYTES)
    head = f"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        for _ in range(3):
            connection.sendall(head + body)
            answer = b""
            while not answer.endswith(str(len(body)).encode()):
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200 ")
        last = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 50 + last)

        assert read(connection).count(b"HTTP/1.1 200 ") == 51


@pytest.mark.parametrize("port", [Impatient], indirect=True)
def test_a_slow_answer_is_waited_for(port: int) -> None:
    """The time for a head ends with the head: a body may take longer."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\na")
        connection.settimeout(3 * Impatient.head_s)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(20)
        connection.sendall(b"bc")

        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
