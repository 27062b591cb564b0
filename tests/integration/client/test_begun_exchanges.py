"""Requests that are begun while no connection is free, and whatever may become of them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from tests.integration.client.scripted_server import Connection, Received, ScriptedServer
from tests.integration.client.transport_runs import Run, echo, post, run_with
from tinsmith.client.transports.base import Begun, TransportSettings
from tinsmith.client.transports.direct import DirectTransport
from tinsmith.errors import APIConnectionError, APITimeoutError
from tinsmith.wire.endpoint_types import Pool
from tinsmith.wire.exchange import HttpRequest


class Held:
    """A server that answers when it is told to."""

    def __init__(self) -> None:
        self.answer = asyncio.Event()

    async def __call__(self, request: Received, connection: Connection) -> None:
        await self.answer.wait()
        await echo(request, connection)


def begin(
    transport: DirectTransport,
    body: bytes = b"{}",
    timeout_s: float = 20.0,
    on_over: Callable[[], object] | None = None,
) -> tuple[Begun, asyncio.Event]:
    """Begin a request; gives what was begun, and what is set when it is over."""
    request = HttpRequest("POST", "/api/v1/asample", {}, {}, [body])
    over = asyncio.Event()
    begun = transport.begin(
        request,
        pool=Pool.SAMPLE,
        timeout_s=timeout_s,
        idempotency_key="k",
        on_over=on_over or over.set,
    )
    assert begun is not None
    return begun, over


def test_each_is_sent_over_the_next_connection_that_is_free(run_direct: Run) -> None:
    async def scenario(transport: DirectTransport, server: ScriptedServer) -> int:
        many = [begin(transport, b"%d" % number) for number in range(100)]
        for number, (begun, over) in enumerate(many):
            await over.wait()
            reply = begun.whole_reply()
            assert reply is not None
            assert bytes(reply.body) == b"%d" % number
        return len(server.connections)

    assert run_direct(echo, scenario, most_connections=4) <= 4


def test_those_that_take_long_soon_have_a_connection_each(run_direct: Run) -> None:
    held = Held()

    async def scenario(transport: DirectTransport, server: ScriptedServer) -> None:
        many = [begin(transport) for _ in range(60)]
        await server.wait_received(60)
        held.answer.set()
        for _, over in many:
            await over.wait()

    run_direct(held, scenario)


def test_one_that_has_no_connection_in_time_is_over_and_late(run_direct: Run) -> None:
    held = Held()

    async def scenario(transport: DirectTransport, server: ScriptedServer) -> None:
        first, first_over = begin(transport)
        await server.wait_received(1)
        late, late_over = begin(transport, timeout_s=0.05)
        await late_over.wait()
        assert late.whole_reply() is None
        with pytest.raises(APITimeoutError):
            await late.reply()
        held.answer.set()
        await first_over.wait()
        assert first.whole_reply() is not None
        assert (await post(transport)).status == 200

    run_direct(held, scenario, most_connections=1)


def test_one_that_is_given_up_while_it_waits_is_never_sent(run_direct: Run) -> None:
    held = Held()

    async def scenario(transport: DirectTransport, server: ScriptedServer) -> int:
        first, first_over = begin(transport)
        await server.wait_received(1)
        given_up, over = begin(transport)
        given_up.cancel()
        assert over.is_set()
        assert given_up.whole_reply() is None
        held.answer.set()
        await first_over.wait()
        assert first.whole_reply() is not None
        assert (await post(transport)).status == 200
        return len(server.received)

    assert run_direct(held, scenario, most_connections=1) == 2


def test_one_that_finds_nobody_at_the_address_says_so(run_direct: Run) -> None:
    async def scenario(_: DirectTransport, __: ScriptedServer) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{closed.getsockname()[1]}"
            transport = DirectTransport(TransportSettings(base_url=url), lambda: "tml-key")
            begun, over = begin(transport)
            await over.wait()
            assert begun.whole_reply() is None
            with pytest.raises(APIConnectionError, match=url):
                await begun.reply()
            await transport.close()

    run_direct(echo, scenario)


@pytest.mark.parametrize("is_answered", [True, False])
def test_whoever_fails_on_being_told_harms_no_other(is_answered: bool) -> None:
    """Not even by keeping the only connection that there may be."""
    complaints: list[BaseException] = []

    def fail() -> None:
        raise RuntimeError("it is ours")

    async def answer_or_hang_up(request: Received, connection: Connection) -> None:
        if is_answered or request.body != b"first":
            await echo(request, connection)
        else:
            connection.reset()

    async def scenario(transport: DirectTransport, _: ScriptedServer) -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: complaints.append(context["exception"])
        )
        begin(transport, b"first", on_over=fail)
        second, over = begin(transport, b"second", timeout_s=60.0)
        await over.wait()
        reply = second.whole_reply()
        assert reply is not None
        assert bytes(reply.body) == b"second"

    run_with(DirectTransport, answer_or_hang_up, scenario, most_connections=1)

    assert [str(error) for error in complaints] == ["it is ours"]


def test_whoever_fails_on_being_told_keeps_nothing_from_being_closed() -> None:
    held = Held()
    complaints: list[BaseException] = []

    def fail() -> None:
        raise RuntimeError("it is ours")

    async def scenario(transport: DirectTransport, server: ScriptedServer) -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: complaints.append(context["exception"])
        )
        for _ in range(3):
            begin(transport, on_over=fail)
        await server.wait_received(3)
        await transport.close()

    run_with(DirectTransport, held, scenario)

    assert [str(error) for error in complaints] == 3 * ["it is ours"]
