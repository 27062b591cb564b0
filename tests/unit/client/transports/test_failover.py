"""A request that one server cannot answer is sent to the next, under the same key."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tinsmith.client.settings import settings_from
from tinsmith.client.transports.base import ExchangeReply, StreamReply
from tinsmith.client.transports.failover import FailoverTransport
from tinsmith.errors import APIConnectionError, APITimeoutError, ValidationError
from tinsmith.wire.endpoint_types import Pool
from tinsmith.wire.exchange import HttpRequest

REQUEST = HttpRequest("POST", "/api/v1/optim_step", {}, {}, [b"{}"])


class Server:
    """A transport that answers as it is told."""

    def __init__(self, answer: Callable[[], int]) -> None:
        self.answer = answer
        self.keys: list[str | None] = []
        self.is_closed = False

    async def send(self, request: HttpRequest, **options: Any) -> ExchangeReply:
        del request
        self.keys.append(options["idempotency_key"])
        return ExchangeReply(self.answer(), {}, b"")

    @contextlib.asynccontextmanager
    async def stream(self, request: HttpRequest, **options: Any) -> AsyncIterator[StreamReply]:
        del request, options
        yield StreamReply(self.answer(), {}, self._pieces())

    async def _pieces(self) -> AsyncIterator[bytes]:
        yield b"piece"

    async def close(self) -> None:
        self.is_closed = True


def lost() -> int:
    raise APIConnectionError("connection refused")


def late() -> int:
    raise APITimeoutError("no reply")


def send(transport: FailoverTransport) -> int:
    reply = asyncio.run(transport.send(REQUEST, pool=Pool.TRAIN, timeout_s=1.0))
    return reply.status


def test_a_server_that_cannot_be_reached_is_replaced_at_once() -> None:
    dead, alive = Server(lost), Server(lambda: 200)
    transport = FailoverTransport([dead, alive], first=0)

    assert send(transport) == 200
    assert dead.keys == alive.keys
    assert dead.keys[0] is not None
    assert send(transport) == 200
    assert len(dead.keys) == 1, "it stays with the server that answers"


def test_if_no_server_can_be_reached_the_error_is_raised() -> None:
    servers = [Server(lost), Server(lost), Server(lost)]
    with pytest.raises(APIConnectionError):
        send(FailoverTransport(servers))
    assert [len(server.keys) for server in servers] == [1, 1, 1]


def test_after_a_timeout_the_next_attempt_goes_to_the_next_server() -> None:
    paused, alive = Server(late), Server(lambda: 200)
    transport = FailoverTransport([paused, alive], first=0)
    with pytest.raises(APITimeoutError):
        send(transport)
    assert alive.keys == []

    assert send(transport) == 200


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_server_that_is_unavailable_is_left_after_its_answer(status: int) -> None:
    transport = FailoverTransport([Server(lambda: status), Server(lambda: 200)], first=0)

    assert send(transport) == status
    assert send(transport) == 200


def test_a_stream_that_breaks_off_is_resumed_at_the_next_server() -> None:
    async def resumed() -> int:
        transport = FailoverTransport([Server(lost), Server(lambda: 200)], first=0)
        options: dict[str, Any] = {"pool": Pool.TRAIN, "timeout_s": 1.0, "idle_s": 1.0}
        with pytest.raises(APIConnectionError):
            async with transport.stream(REQUEST, **options):
                pass
        async with transport.stream(REQUEST, **options) as reply:
            return reply.status

    assert asyncio.run(resumed()) == 200


def test_closing_closes_all() -> None:
    servers = [Server(lost), Server(lost)]
    asyncio.run(FailoverTransport(servers).close())
    assert all(server.is_closed for server in servers)


@pytest.mark.parametrize(
    "given", ["http://a:1, http://b:2/,http://a:1", ["http://a:1", "http://b:2"]]
)
def test_several_addresses_are_given_as_a_list_or_with_commas(given: str | list[str]) -> None:
    settings = settings_from(base_url=given, api_key="tml-x", environment={})

    assert (settings.base_url, settings.further_urls) == ("http://a:1", ("http://b:2",))
    if isinstance(given, str):
        settings = settings_from(environment={"TINKER_BASE_URL": given})
        assert settings.further_urls == ("http://b:2",)


@pytest.mark.parametrize("given", [",", "http://a:1,nowhere", "http://a:1,embedded", ["", " "]])
def test_addresses_that_cannot_be_used_are_refused(given: str | list[str]) -> None:
    with pytest.raises(ValidationError):
        settings_from(base_url=given, environment={})
