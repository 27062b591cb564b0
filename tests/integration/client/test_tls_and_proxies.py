"""Certificates that are not to be trusted, and proxies, good and bad ones."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import pathlib
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import trustme

from tests.integration.client.scripted_server import ScriptedServer
from tests.integration.client.transport_runs import (
    LOOPS,
    Maker,
    NewLoop,
    echo,
    post,
    run_quietly,
    run_with,
)
from tinsmith.client.retry import may_pass
from tinsmith.client.settings import settings_from
from tinsmith.client.transports import address
from tinsmith.client.transports.base import Transport, TransportSettings
from tinsmith.client.transports.direct import DirectTransport
from tinsmith.client.transports.proxied import ProxiedTransport
from tinsmith.errors import (
    APIConnectionError,
    APITimeoutError,
    CertificateError,
    ValidationError,
)

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def listening(serve: Serve, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A port whose connections are served; whoever serves is waited for at the end."""
    tasks: list[asyncio.Task[None]] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        with contextlib.suppress(
            ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError
        ):
            await serve(reader, writer)
        writer.transport.abort()

    server = await asyncio.start_server(take, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwhole")
        await writer.drain()


async def hang(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: pathlib.Path) -> str:
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return str(path)


def server_context(authority: trustme.CA, *names: str, **limits: Any) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names, **limits).configure_cert(context)
    return context


async def ask(made_by: Maker, url: str, **settings: Any) -> Any:
    timeout_s = settings.pop("timeout_s", 20.0)
    transport = made_by(TransportSettings(base_url=url, **settings), lambda: "tml-key")
    try:
        return await post(transport, timeout_s=timeout_s)
    finally:
        await transport.close()


async def close(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n{}")


async def alert(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n{}")
    writer.write(b"\x15\x03\x01\x00\x02\x02\x46")
    await writer.drain()
    writer.close()


@pytest.mark.parametrize("serve", [close, alert])
def test_plain_http_to_a_tls_server_suggests_https(serve: Serve) -> None:
    """Such servers end the connection, or send an alert first."""

    async def scenario() -> None:
        async with listening(serve) as port:
            with pytest.raises(APIConnectionError) as told:
                await ask(DirectTransport, f"http://127.0.0.1:{port}")
            assert f"https://127.0.0.1:{port}" in str(told.value.remedy)

    asyncio.run(scenario())


def test_https_to_a_plain_server_suggests_http() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(16)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async def scenario() -> None:
        async with listening(refuse) as port:
            with pytest.raises(APIConnectionError) as told:
                await ask(DirectTransport, f"https://127.0.0.1:{port}")
            assert f"http://127.0.0.1:{port}" in str(told.value.remedy)

    asyncio.run(scenario())


YESTERDAY = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)


@pytest.mark.parametrize(
    ("names", "limits", "is_known", "said"),
    [
        (["elsewhere.example"], {}, True, r"IP address mismatch.*127\.0\.0\.1"),
        (["127.0.0.1"], {"not_after": YESTERDAY}, True, "expired"),
        (["127.0.0.1"], {}, False, "unable to get local issuer|self-signed"),
    ],
    ids=["another name", "expired", "unknown authority"],
)
def test_an_untrusted_certificate_is_reported_and_not_retried(
    made_by: Maker,
    authority: trustme.CA,
    ca_file: str,
    names: list[str],
    limits: dict[str, Any],
    is_known: bool,
    said: str,
) -> None:
    async def scenario() -> CertificateError:
        context = server_context(authority, *names, **limits)
        async with listening(answer, context) as port:
            with pytest.raises(CertificateError, match=said) as refused:
                await ask(
                    made_by, f"https://127.0.0.1:{port}", ca_file=ca_file if is_known else None
                )
        return refused.value

    error = run_quietly(scenario())

    assert not may_pass(error)
    assert "ca_file" in str(error)


@pytest.mark.parametrize("new_loop", list(LOOPS.values()), ids=list(LOOPS))
def test_calls_over_tls_can_be_cancelled_at_any_moment(
    new_loop: NewLoop, authority: trustme.CA, ca_file: str
) -> None:
    chance = random.Random(11)

    async def scenario() -> list[int]:
        context = server_context(authority, "127.0.0.1")
        async with listening(answer, context) as port:
            settings = TransportSettings(
                base_url=f"https://127.0.0.1:{port}", ca_file=ca_file, most_connections=6
            )
            transport = DirectTransport(settings, lambda: "tml-key")
            for _ in range(10):
                calls = [asyncio.create_task(post(transport)) for _ in range(30)]
                for call in chance.sample(calls, 25):
                    await asyncio.sleep(0 if chance.random() < 0.7 else chance.random() * 0.01)
                    call.cancel()
                ends = await asyncio.gather(*calls, return_exceptions=True)
                assert not [end for end in ends if isinstance(end, Exception)]
            replies = await asyncio.gather(*(post(transport) for _ in range(10)))
            calls = [asyncio.create_task(post(transport)) for _ in range(30)]
            await asyncio.sleep(0)
            await transport.close()
            await asyncio.gather(*calls, return_exceptions=True)
        return [reply.status for reply in replies]

    assert run_quietly(scenario(), new_loop) == [200] * 10


@pytest.mark.parametrize("new_loop", list(LOOPS.values()), ids=list(LOOPS))
def test_large_bodies_over_tls_respect_backpressure_in_both_directions(
    new_loop: NewLoop, authority: trustme.CA, ca_file: str
) -> None:
    async def echo_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        body = await reader.readexactly(size)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + body)
        await writer.drain()
        await reader.read()

    body = bytes(range(256)) * 50_000

    async def scenario() -> bool:
        context = server_context(authority, "127.0.0.1")
        async with listening(echo_slowly, context) as port:
            settings = TransportSettings(base_url=f"https://127.0.0.1:{port}", ca_file=ca_file)
            transport = DirectTransport(settings, lambda: "tml-key")
            reply = await post(transport, [body[:10], memoryview(body)[10:]])
            await transport.close()
        return reply.body == body

    assert run_quietly(scenario(), new_loop)


def test_a_server_without_tls_is_a_connection_error(made_by: Maker) -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    async def scenario() -> None:
        async with listening(plain) as port:
            with pytest.raises(APIConnectionError, match=r"(?i)ssl|tls|version"):
                await ask(made_by, f"https://127.0.0.1:{port}")

    run_quietly(scenario())


def test_a_hanging_handshake_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "CONNECT_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        async with listening(hang) as port:
            with pytest.raises(APIConnectionError, match="no connection within"):
                await ask(DirectTransport, f"https://127.0.0.1:{port}")

    run_quietly(scenario())


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
    writer.close()


class ConnectProxy:
    """A proxy that passes bytes on, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.heads: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        host, port = head.split()[1].rsplit(":", 1)
        there, to_there = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(_pass_on(reader, to_there), _pass_on(there, writer))


def test_an_https_proxy_sees_only_the_host_and_port(authority: trustme.CA, ca_file: str) -> None:
    proxy = ConnectProxy()

    async def scenario() -> bytes:
        context = server_context(authority, "127.0.0.1")
        async with listening(answer, context) as port, listening(proxy.serve) as through:
            reply = await ask(
                ProxiedTransport,
                f"https://127.0.0.1:{port}",
                ca_file=ca_file,
                proxy=f"http://user:secret@127.0.0.1:{through}",
            )
        return bytes(reply.body)

    assert run_quietly(scenario()) == b"whole"
    assert proxy.heads[0].startswith("CONNECT 127.0.0.1:")
    assert "Basic dXNlcjpzZWNyZXQ=" in proxy.heads[0]
    assert "tml-key" not in "".join(proxy.heads)


def test_every_request_through_a_proxy_carries_its_login() -> None:
    async def scenario(_: Transport, server: ScriptedServer) -> list[str | None]:
        proxy = server.url.replace("//", "//user:se%3Acret@")
        settings = TransportSettings(base_url="http://service.invalid", proxy=proxy)
        transport = ProxiedTransport(settings, lambda: "tml-key")
        for __ in range(3):
            await post(transport)
        await transport.close()
        return [request.headers.get("proxy-authorization") for request in server.received]

    assert run_with(DirectTransport, echo, scenario) == ["Basic dXNlcjpzZTpjcmV0"] * 3


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("refusal", ["407 Proxy Authentication Required", "no HTTP", ""])
def test_the_error_of_a_proxy_that_refuses_reveals_no_password(scheme: str, refusal: str) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if refusal:
            writer.write(f"HTTP/1.1 {refusal}\r\nContent-Length: 0\r\n\r\n".encode())
            await writer.drain()

    async def scenario() -> str:
        async with listening(refuse) as through:
            proxy = f"http://user:secret@127.0.0.1:{through}"
            try:
                reply = await ask(ProxiedTransport, f"{scheme}://service.invalid", proxy=proxy)
            except APIConnectionError as error:
                return f"{error} {error!r}"
            return str(reply.status)

    said = run_quietly(scenario())

    assert "secret" not in said
    assert scheme == "http" or "service.invalid" in said


def test_a_hanging_proxy_times_out() -> None:
    async def scenario() -> None:
        async with listening(hang) as through:
            with pytest.raises(APITimeoutError, match=r"0\.2 s"):
                await ask(
                    ProxiedTransport,
                    "https://service.invalid",
                    proxy=f"http://127.0.0.1:{through}",
                    timeout_s=0.2,
                )

    run_quietly(scenario())


def test_the_error_of_an_unreachable_proxy_says_to_check_the_proxy() -> None:
    async def scenario() -> None:
        with pytest.raises(APIConnectionError, match="check the proxy"):
            await ask(ProxiedTransport, "http://service.invalid", proxy="http://127.0.0.1:1")

    run_quietly(scenario())


@pytest.mark.parametrize(
    "proxy", ["socks5://127.0.0.1:1080", "ftp://proxy", "http://", "http://a:b"]
)
def test_the_error_names_an_unusable_proxy(proxy: str) -> None:
    async def scenario() -> None:
        with pytest.raises(ValidationError, match="proxy"):
            await ask(ProxiedTransport, "http://service.invalid", proxy=proxy)

    run_quietly(scenario())


@pytest.mark.parametrize(
    ("no_proxy", "is_used"),
    [
        ("", True),
        ("elsewhere.example", True),
        ("service.example", False),
        ("service.example:8000", False),
        ("service.example:9000", True),
        (".example", False),
        ("*", False),
    ],
)
def test_the_no_proxy_variable_is_respected(
    monkeypatch: pytest.MonkeyPatch, no_proxy: str, is_used: bool
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:3128")
    monkeypatch.setenv("no_proxy", no_proxy)

    settings = settings_from(base_url="http://service.example:8000", api_key="tml-key")

    assert (settings.proxy is not None) is is_used


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "[::1]"])
def test_no_proxy_is_used_for_localhost(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.delenv("no_proxy", raising=False)

    assert settings_from(base_url=f"http://{host}:8000", api_key="tml-key").proxy is None


def test_the_error_names_a_missing_ca_file() -> None:
    with pytest.raises(ValidationError, match=r"missing\.pem"):
        TransportSettings(base_url="https://service", ca_file="/no/such/missing.pem")
