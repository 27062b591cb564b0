"""Requests that are sent while no connection is free."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.integration.client.scripted_server import Connection, Received, ScriptedServer
from tests.integration.client.transport_runs import Run, echo, post
from tinsmith.client.transports.base import ExchangeReply, TransportSettings
from tinsmith.client.transports.direct import DirectTransport
from tinsmith.errors import APIConnectionError, APITimeoutError
from tinsmith.wire.endpoint_types import Pool
from tinsmith.wire.exchange import HttpRequest


class Held:
    """A server that answers when `answer` is set."""

    def __init__(self) -> None:
        self.answer = asyncio.Event()

    async def __call__(self, request: Received, connection: Connection) -> None:
        await self.answer.wait()
        await echo(request, connection)


def start(
    transport: DirectTransport, body: bytes = b"{}", timeout_s: float = 20.0
) -> asyncio.Task[ExchangeReply]:
    """Send a request by a task of its own."""
    request = HttpRequest("POST", "/api/v1/asample", {}, {}, [body])
    return asyncio.create_task(transport.send(request, pool=Pool.SAMPLE, timeout_s=timeout_s))


def test_each_request_uses_the_next_free_connection(run_direct: Run) -> None:
    async def scenario(transport: DirectTransport, server: ScriptedServer) -> int:
        replies = await asyncio.gather(*(start(transport, b"%d" % n) for n in range(100)))
        assert [bytes(reply.body) for reply in replies] == [b"%d" % n for n in range(100)]
        return len(server.connections)

    assert run_direct(echo, scenario, most_connections=4) <= 4


def test_long_requests_soon_get_a_connection_each(run_direct: Run) -> None:
    held = Held()

    async def scenario(transport: DirectTransport, server: ScriptedServer) -> None:
        many = [start(transport) for _ in range(60)]
        await server.wait_received(60)
        held.answer.set()
        await asyncio.gather(*many)

    run_direct(held, scenario)


def test_a_request_that_gets_no_connection_in_time_times_out(run_direct: Run) -> None:
    held = Held()

    async def scenario(transport: DirectTransport, server: ScriptedServer) -> None:
        first = start(transport)
        await server.wait_received(1)
        with pytest.raises(APITimeoutError):
            await start(transport, timeout_s=0.05)
        held.answer.set()
        assert (await first).status == 200
        assert (await post(transport)).status == 200

    run_direct(held, scenario, most_connections=1)


def test_a_request_cancelled_while_waiting_is_never_sent(run_direct: Run) -> None:
    held = Held()

    async def scenario(transport: DirectTransport, server: ScriptedServer) -> int:
        first = start(transport)
        await server.wait_received(1)
        cancelled = start(transport)
        await asyncio.sleep(0)  # it waits for a connection from here on
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        held.answer.set()
        assert (await first).status == 200
        assert (await post(transport)).status == 200
        return len(server.received)

    assert run_direct(held, scenario, most_connections=1) == 2


def test_the_error_names_an_address_where_nothing_listens(run_direct: Run) -> None:
    async def scenario(_: DirectTransport, __: ScriptedServer) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{closed.getsockname()[1]}"
            transport = DirectTransport(TransportSettings(base_url=url), lambda: "tml-key")
            with pytest.raises(APIConnectionError, match=url):
                await start(transport)
            await transport.close()

    run_direct(echo, scenario)


def test_closing_fails_requests_that_were_sent_or_are_waiting(run_direct: Run) -> None:
    held = Held()

    async def scenario(transport: DirectTransport, server: ScriptedServer) -> None:
        many = [start(transport) for _ in range(3)]
        await server.wait_received(1)
        await transport.close()
        outcomes = await asyncio.gather(*many, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == 3 * [APIConnectionError]

    run_direct(held, scenario, most_connections=1)
