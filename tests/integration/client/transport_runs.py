"""What tests of the transports share: a scripted server, a transport to it, and a short request.

Whatever the event loop complains of during a run fails the test: errors that nobody looked at,
callbacks that raised, connections left behind.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import uvloop

from tests.integration.client.scripted_server import (
    Connection,
    Handler,
    Received,
    ScriptedServer,
    scripted_server,
)
from tinsmith.client import held_gil
from tinsmith.client.transports.base import ExchangeReply, Transport, TransportSettings
from tinsmith.client.transports.direct import DirectTransport
from tinsmith.client.transports.proxied import ProxiedTransport
from tinsmith.wire.endpoint_types import Pool
from tinsmith.wire.exchange import HttpRequest
from tinsmith.wire.protobuf import Parts

Scenario = Callable[[Any, ScriptedServer], Awaitable[Any]]
Run = Callable[..., Any]
Maker = type[DirectTransport] | type[ProxiedTransport]
NewLoop = Callable[[], asyncio.AbstractEventLoop]
LOOPS: dict[str, NewLoop] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
"""The event loops on which our own connections are tried."""
if (_held := held_gil.new_event_loop()) is not None:
    LOOPS["held"] = type(_held)
    _held.close()


def run_with(
    made_by: Maker,
    handler: Handler,
    scenario: Scenario,
    *,
    new_loop: NewLoop = asyncio.new_event_loop,
    **settings: Any,
) -> Any:
    """Run a scenario with a transport to a server that answers as `handler` does."""

    async def whole() -> Any:
        async with scripted_server(handler, unix_socket=settings.get("unix_socket")) as server:
            transport = made_by(
                TransportSettings(base_url=server.url, **settings), lambda: "tml-key"
            )
            try:
                return await asyncio.wait_for(scenario(transport, server), timeout=60)
            finally:
                await transport.close()

    return run_quietly(whole(), new_loop)


def run_quietly(whole: Coroutine[Any, Any, Any], new_loop: NewLoop = asyncio.new_event_loop) -> Any:
    """Run a coroutine on a loop that has nothing to complain of."""
    complaints: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.get_loop().set_exception_handler(lambda _, context: complaints.append(context))
        result = runner.run(whole)
        gc.collect()  # futures and tasks complain when they are freed
    assert not complaints, complaints
    return result


def post(
    transport: Transport,
    parts: Parts | None = None,
    *,
    pool: Pool = Pool.SAMPLE,
    timeout_s: float = 20.0,
    headers: dict[str, str] | None = None,
    key: str | None = None,
) -> Coroutine[Any, Any, ExchangeReply]:
    """Send a short request."""
    request = HttpRequest("POST", "/api/v1/asample", {}, headers or {}, parts or [b"{}"])
    return transport.send(request, pool=pool, timeout_s=timeout_s, idempotency_key=key)


async def echo(request: Received, connection: Connection) -> None:
    """Answer with what was sent."""
    await connection.reply(request.body, headers={"X-Method": request.method})


def answering(reply: bytes, *, then_close: bool = False) -> Handler:
    """A handler that answers every request with these bytes, in one piece."""

    async def answer(_: Received, connection: Connection) -> None:
        connection.writer.write(reply)
        await connection.writer.drain()
        if then_close:
            connection.writer.close()

    return answer
