"""Many calls, few connections, and everything that ends at the wrong moment.

Whatever is cancelled, refused or cut off, no connection and no place is lost, and whoever waits is
answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.client.scripted_server import (
    Connection,
    Received,
    ScriptedServer,
)
from tests.integration.client.transport_runs import Run, echo, post
from tinsmith.client.transports import address
from tinsmith.client.transports.base import Transport, TransportSettings
from tinsmith.client.transports.direct import DirectTransport
from tinsmith.errors import APIConnectionError, APITimeoutError
from tinsmith.wire.endpoint_types import Pool


def open_count(transport: DirectTransport) -> tuple[int, int, int, int]:
    """Connections in all, free ones, those being made, and calls that wait."""
    pool = transport._pools[Pool.SAMPLE]
    return len(pool._all), len(pool._free), len(pool._opening), len(pool._waiting)


def test_a_thousand_cancelled_calls_leak_no_connection_and_no_slot(
    run_direct: Run,
) -> None:
    chance = random.Random(7)

    async def dawdle(request: Received, connection: Connection) -> None:
        await asyncio.sleep(chance.random() * 0.01)
        await echo(request, connection)

    async def scenario(transport: DirectTransport, _: ScriptedServer) -> None:
        for __ in range(20):
            calls = [asyncio.create_task(post(transport)) for __ in range(50)]
            for call in chance.sample(calls, 40):
                await asyncio.sleep(0 if chance.random() < 0.7 else chance.random() * 0.003)
                call.cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert not [r for r in results if isinstance(r, Exception)]
        # Those given up are closed by the loop, which tells nobody.
        while open_count(transport)[2] or open_count(transport)[0] != open_count(transport)[1]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert open_count(transport)[3] == 0
        replies = await asyncio.gather(*(post(transport) for _ in range(20)))
        assert [reply.status for reply in replies] == [200] * 20

    run_direct(dawdle, scenario, most_connections=6)


def test_a_connection_assigned_to_a_call_being_cancelled_goes_to_the_next(
    run_direct: Run,
) -> None:
    answer = asyncio.Event()

    async def wait_then_echo(request: Received, connection: Connection) -> None:
        await answer.wait()
        await echo(request, connection)

    async def scenario(transport: DirectTransport, server: ScriptedServer) -> int:
        first = asyncio.create_task(post(transport))
        await server.wait_received(1)
        second, third = (asyncio.create_task(post(transport)) for _ in range(2))
        first.add_done_callback(lambda _: second.cancel())
        answer.set()
        await asyncio.gather(first, second, return_exceptions=True)
        return (await third).status

    assert run_direct(wait_then_echo, scenario, most_connections=1) == 200


def test_a_burst_of_calls_never_exceeds_the_connection_limit(run_direct: Run) -> None:
    async def scenario(transport: DirectTransport, server: ScriptedServer) -> int:
        replies = await asyncio.gather(*(post(transport, [b"%d" % n]) for n in range(2000)))
        assert [bytes(reply.body) for reply in replies] == [b"%d" % n for n in range(2000)]
        return len(server.connections)

    assert run_direct(echo, scenario, most_connections=16) <= 16


def test_each_of_many_calls_to_a_closed_port_gets_an_error(run_direct: Run) -> None:
    async def scenario(_: DirectTransport, __: ScriptedServer) -> list[Any]:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{unused.getsockname()[1]}"
            transport = DirectTransport(TransportSettings(base_url=url), lambda: "tml-key")
            calls = (post(transport) for _ in range(300))
            failures = await asyncio.gather(*calls, return_exceptions=True)
            await transport.close()
        return failures

    failures = run_direct(echo, scenario)

    assert [type(failure) for failure in failures] == [APIConnectionError] * 300


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 64])
def test_an_unresolvable_host_is_a_connection_error_that_names_it(
    run_direct: Run, host: str
) -> None:
    async def scenario(_: DirectTransport, __: ScriptedServer) -> None:
        settings = TransportSettings(base_url=f"http://{host}")
        transport = DirectTransport(settings, lambda: "tml-key")
        with pytest.raises(APIConnectionError, match=host):
            await post(transport)
        await transport.close()

    run_direct(echo, scenario)


def test_a_burst_of_calls_resolves_its_host_once(
    run_direct: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    real = socket.getaddrinfo

    async def scenario(_: DirectTransport, server: ScriptedServer) -> None:
        loop = asyncio.get_running_loop()

        async def look_up(host: Any, port: Any, **wanted: Any) -> Any:
            asked.append(host)
            await asyncio.sleep(0.01)
            return real("127.0.0.1", port, **wanted)

        monkeypatch.setattr(loop, "getaddrinfo", look_up)
        url = server.url.replace("127.0.0.1", "service.example")
        transport = DirectTransport(TransportSettings(base_url=url), lambda: "tml-key")
        await asyncio.gather(*(post(transport) for __ in range(100)))
        await transport.close()

    run_direct(echo, scenario)

    assert asked.count(b"service.example") == 1


@contextlib.contextmanager
def full_backlog() -> Iterator[int]:
    """A port whose connections are neither taken nor refused."""
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = sockets.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(listener.getsockname())
        yield listener.getsockname()[1]


def test_a_hanging_address_does_not_delay_others_of_the_same_host(
    run_direct: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(transport: DirectTransport, server: ScriptedServer) -> int:
        good = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        with full_backlog() as port:
            kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
            refused = (socket.AF_INET6, *kind[1:], ("::1", 1, 0, 0))
            found = [refused, (*kind, ("127.0.0.1", port)), (*kind, good)]
            monkeypatch.setattr(transport._address, "_found", found)
            monkeypatch.setattr(transport._address, "_found_at", float("inf"))
            return (await post(transport)).status

    assert run_direct(echo, scenario) == 200


@pytest.mark.parametrize("is_call_late", [True, False])
def test_a_connection_that_is_never_established_times_out(
    run_direct: Run, is_call_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "CONNECT_TIMEOUT_S", 30.0 if is_call_late else 0.2)
    timeout_s = 0.2 if is_call_late else 30.0
    expected = APITimeoutError if is_call_late else APIConnectionError

    async def scenario(_: DirectTransport, __: ScriptedServer) -> list[Any]:
        with full_backlog() as port:
            settings = TransportSettings(base_url=f"http://127.0.0.1:{port}")
            transport = DirectTransport(settings, lambda: "tml-key")
            calls = (post(transport, timeout_s=timeout_s) for _ in range(40))
            failures = await asyncio.gather(*calls, return_exceptions=True)
            await transport.close()
        return failures

    failures = run_direct(echo, scenario)

    assert [type(failure) for failure in failures] == [expected] * 40


def test_a_server_that_closes_every_connection_is_an_error_and_leaks_no_slot(
    run_direct: Run,
) -> None:
    async def scenario(_: DirectTransport, __: ScriptedServer) -> tuple[int, int, int, int]:
        def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.abort()

        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        settings = TransportSettings(base_url=url, most_connections=4)
        transport = DirectTransport(settings, lambda: "tml-key")
        async with server:
            calls = (post(transport) for _ in range(100))
            failures = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(failure) for failure in failures} == {APIConnectionError}
            await asyncio.sleep(0.05)  # what was aborted is closed by the loop
            counts = open_count(transport)
            await transport.close()
        return counts

    assert run_direct(echo, scenario) == (0, 0, 0, 0)


def test_stale_keep_alive_connections_cause_no_error(run_direct: Run) -> None:
    """As when a balancer between us forgot them: each ends when it is written to."""
    is_forgotten = False

    async def forget(request: Received, connection: Connection) -> None:
        if is_forgotten and connection.number < 20:
            connection.reset()
            return
        if not is_forgotten:
            await server_full.wait()
        await echo(request, connection)

    server_full = asyncio.Event()

    async def scenario(transport: DirectTransport, server: ScriptedServer) -> list[int]:
        nonlocal is_forgotten
        first = [asyncio.create_task(post(transport)) for _ in range(20)]
        await server.wait_received(20)
        server_full.set()
        await asyncio.gather(*first)
        is_forgotten = True
        return [(await post(transport)).status for _ in range(5)]

    assert run_direct(forget, scenario) == [200] * 5


def test_a_server_that_was_restarted_on_its_port_is_reached_by_every_call(
    run_direct: Run,
) -> None:
    async def scenario(transport: DirectTransport, server: ScriptedServer) -> list[int]:
        statuses = []
        for _ in range(10):
            replies = await asyncio.gather(*(post(transport) for _ in range(20)))
            statuses += [reply.status for reply in replies]
            for connection in server.connections:
                connection.reset()
        return statuses

    assert run_direct(echo, scenario) == [200] * 200


@pytest.mark.parametrize("after", range(1, 40, 6))
def test_closing_at_any_moment_settles_every_call(run_direct: Run, after: int) -> None:
    async def dawdle(request: Received, connection: Connection) -> None:
        await asyncio.sleep(0.002)
        await echo(request, connection)

    async def scenario(transport: DirectTransport, _: ScriptedServer) -> list[Any]:
        calls = [asyncio.create_task(post(transport)) for _ in range(100)]
        for __ in range(after):
            await asyncio.sleep(0)
        await transport.close()
        results = await asyncio.gather(*calls, return_exceptions=True)
        gc.collect()
        assert open_count(transport)[1:] == (0, 0, 0)
        return results

    results = run_direct(dawdle, scenario, most_connections=20)

    failures = [result for result in results if isinstance(result, BaseException)]
    assert {type(failure) for failure in failures} <= {APIConnectionError}


def test_closing_twice_is_allowed(run: Run) -> None:
    async def scenario(transport: Transport, _: ScriptedServer) -> None:
        await post(transport)
        await asyncio.gather(transport.close(), transport.close())

    run(echo, scenario)
