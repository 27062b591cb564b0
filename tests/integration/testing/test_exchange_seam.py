"""Requests on a raw socket: the service's own server reads them, and replies can be changed."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tinsmith.testing import ReceivedRequest, ScriptedService, running_service
from tinsmith.wire.exchange import HttpReply

TIMEOUT_S = 60.0
HEALTH = b"GET /api/v1/healthz HTTP/1.1\r\nHost: test\r\n"


@contextlib.contextmanager
def connected(**options: Any) -> Iterator[tuple[ScriptedService, socket.socket]]:
    """A service and one connection to it."""
    with running_service(**options) as service:
        host, port = service.base_url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as client:
            yield service, client


def reply_on(client: socket.socket) -> tuple[int, bytes]:
    reply = http.client.HTTPResponse(client)
    reply.begin()
    return reply.status, reply.read()


def read_all(client: socket.socket) -> bytes:
    with client.makefile("rb") as stream:
        return stream.read()


def test_pipelined_requests_are_answered_in_order_on_one_connection() -> None:
    with connected() as (service, client):
        service.answers["healthz"] = lambda received: HttpReply(
            200, {}, [received.query["n"].encode().rjust(4)]
        )
        asked = [HEALTH.replace(b"healthz", b"healthz?n=%d" % n) + b"\r\n" for n in range(20)]
        client.sendall(
            b"".join(asked[:-1]) + asked[-1].replace(b"Host", b"Connection: close\r\nHost")
        )
        read = read_all(client)
        connections = {received.connection for received in service.requests("healthz")}

    bodies = [part[:4].decode().strip() for part in read.split(b"\r\n\r\n")[1:]]
    assert bodies == [str(n) for n in range(20)]
    assert connections == {0}


def test_a_malformed_request_is_rejected_and_not_recorded() -> None:
    with connected() as (service, client):
        client.sendall(b"nonsense\r\n\r\n")

        assert reply_on(client)[0] == 400
        assert service.requests() == []


@pytest.mark.parametrize(
    "body",
    [
        b"Content-Length: 1001\r\n\r\n" + b"x" * 1001,
        b"Transfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n",
    ],
)
def test_body_above_the_limit_is_refused_by_the_service(body: bytes) -> None:
    with connected(max_body_bytes=1000) as (_, client):
        head = b"POST /api/v1/create_session HTTP/1.1\r\nHost: test\r\nX-API-Key: tml-test\r\n"
        client.sendall(head + body)

        assert reply_on(client)[0] == 413


def test_error_in_an_answer_is_a_500_that_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: ReceivedRequest) -> HttpReply:
        raise RuntimeError("a secret")

    with connected() as (service, client):
        service.answers["healthz"] = fail
        client.sendall(HEALTH + b"\r\n")
        status, body = reply_on(client)

    assert (status, b"secret" in body) == (500, False)
    assert "a secret" in caplog.text


@pytest.mark.parametrize(("body", "sent"), [(b"abcdef", b"abc"), (b"", b"")])
def test_half_reply_ends_in_its_body_or_without_one_in_its_head(body: bytes, sent: bytes) -> None:
    with connected() as (service, client):
        service.answers["healthz"] = lambda _: HttpReply(200, {}, [body])
        service.faults.add(on="healthz", half_reply=True)
        client.sendall(HEALTH + b"\r\n")
        head, end, got = read_all(client).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 200")
    assert (bool(end), got) == (bool(body), sent)
