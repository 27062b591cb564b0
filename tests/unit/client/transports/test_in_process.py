"""Requests to an application in the same process: as over the wire, without one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tinsmith.client.transports.base import ExchangeReply, TransportSettings
from tinsmith.client.transports.in_process import InProcessTransport
from tinsmith.errors import APIConnectionError, APITimeoutError, BodyTooLargeError
from tinsmith.wire import content
from tinsmith.wire.decode_limits import DecodeLimits
from tinsmith.wire.endpoint_types import Pool
from tinsmith.wire.exchange import HttpRequest

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


def transport_to(application: Any, **settings: Any) -> InProcessTransport:
    told = TransportSettings(base_url="http://in-process/svc", **settings)
    return InProcessTransport(application, told, lambda: "tml-key")


async def post(
    transport: InProcessTransport, *parts: bytes | memoryview, timeout_s: float = 20.0
) -> ExchangeReply:
    request = HttpRequest("POST", "/api/v1/asample", {"a": "b c"}, {"X-One": "1"}, list(parts))
    return await transport.send(request, pool=Pool.SAMPLE, timeout_s=timeout_s)


async def read_all(receive: Receive) -> bytes:
    body: bytes = b""
    while True:
        message = await receive()
        body += bytes(message["body"])
        if not message["more_body"]:
            return body


async def answer(
    send: Send, *pieces: bytes, status: int = 200, headers: dict[str, str] | None = None
) -> None:
    headers = headers or {}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    for piece in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body"})


def test_the_application_gets_the_same_asgi_scope_as_from_a_server() -> None:
    seen: list[Any] = []

    async def application(scope: Any, receive: Receive, send: Send) -> None:
        seen.extend((scope, await read_all(receive)))
        await answer(send, b"to", b"gether", status=422, headers={"X-Request-Id": "r1"})

    reply = asyncio.run(post(transport_to(application), b"in ", memoryview(b"parts")))

    scope, body = seen
    headers = dict(scope["headers"])
    assert (scope["method"], scope["path"]) == ("POST", "/svc/api/v1/asample")
    assert scope["query_string"] == b"a=b+c"
    assert (headers[b"x-api-key"], headers[b"x-one"]) == (b"tml-key", b"1")
    assert headers[b"content-length"] == b"8"
    assert headers[b"x-idempotency-key"].startswith(b"tinsmith-")
    assert body == b"in parts"
    assert (reply.status, reply.headers["x-request-id"]) == (422, "r1")
    assert bytes(reply.body) == b"together"


def test_a_compressed_reply_is_decompressed_within_its_limit() -> None:
    async def application(_: Any, __: Receive, send: Send) -> None:
        packed = content.compress([bytes(5_000_000)])
        await answer(send, packed, headers={"Content-Encoding": "zstd"})

    assert len(asyncio.run(post(transport_to(application))).body) == 5_000_000
    with pytest.raises(BodyTooLargeError):
        asyncio.run(post(transport_to(application, limits=DecodeLimits(memory_bytes=1_000_000))))


def test_a_slow_application_times_out_and_is_cancelled() -> None:
    ended: list[str] = []

    async def application(*_: Any) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    with pytest.raises(APITimeoutError, match=r"0\.01 s"):
        asyncio.run(post(transport_to(application), timeout_s=0.01))
    assert ended == ["cancelled"]


def test_the_application_is_notified_when_its_caller_is_cancelled() -> None:
    async def scenario() -> bool:
        began, left = asyncio.Event(), asyncio.Event()

        async def application(*_: Any) -> None:
            began.set()
            try:
                await asyncio.sleep(60)
            finally:
                left.set()

        call = asyncio.create_task(post(transport_to(application)))
        await began.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return left.is_set() and call.cancelled()

    assert asyncio.run(scenario())


@pytest.mark.parametrize("is_raised", [True, False])
def test_an_application_that_fails_is_a_connection_error(is_raised: bool) -> None:
    async def application(*_: Any) -> None:
        if is_raised:
            raise LookupError("broken inside")

    with pytest.raises(APIConnectionError, match=r"broken inside|before its response was complete"):
        asyncio.run(post(transport_to(application)))


def test_closing_ends_calls_in_flight_and_rejects_new_ones() -> None:
    async def scenario() -> None:
        began = asyncio.Event()

        async def application(*_: Any) -> None:
            began.set()
            await asyncio.sleep(60)

        transport = transport_to(application)
        call = asyncio.create_task(post(transport))
        await began.wait()
        await transport.close()

        with pytest.raises(APIConnectionError, match="closed"):
            await call
        with pytest.raises(APIConnectionError, match="closed"):
            await post(transport)

    asyncio.run(scenario())


START = {"type": "http.response.start", "status": 200}


def piece(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def streamed(transport: InProcessTransport, *, idle_s: float = 20.0) -> Any:
    request = HttpRequest("POST", "/api/v1/stream", {}, {}, [b"{}"])
    return transport.stream(request, pool=Pool.SAMPLE, timeout_s=20.0, idle_s=idle_s)


async def whole_of(transport: InProcessTransport) -> bytes:
    async with streamed(transport) as reply:
        return b"".join([piece async for piece in reply.pieces])


@pytest.mark.parametrize("ask", [post, whole_of])
@pytest.mark.parametrize(
    "said",
    [
        [piece(b"too early", more=False), START],
        [START, piece(b"half")],
        [START],
        [],
        [piece(b"too early", more=False)],
    ],
)
def test_an_incomplete_response_is_a_connection_error(
    ask: Callable[[InProcessTransport], Awaitable[Any]], said: list[Any]
) -> None:
    async def application(_: Any, __: Receive, send: Send) -> None:
        for message in said:
            await send(message)

    async def scenario() -> None:
        with pytest.raises(
            APIConnectionError, match=r"before its response was complete|after its start"
        ):
            await ask(transport_to(application))

    asyncio.run(scenario())


@pytest.mark.parametrize("ask", [post, whole_of])
def test_an_error_after_the_response_started_is_reported(
    ask: Callable[[InProcessTransport], Awaitable[Any]],
) -> None:
    async def application(_: Any, __: Receive, send: Send) -> None:
        await send(START)
        await send(piece(b"half"))
        raise LookupError("broken inside")

    async def scenario() -> None:
        with pytest.raises(APIConnectionError, match="broken inside"):
            await ask(transport_to(application))

    asyncio.run(scenario())


def test_a_complete_response_is_returned_while_the_application_still_runs() -> None:
    async def scenario() -> tuple[bytes, bool]:
        go_on, has_gone_on = asyncio.Event(), asyncio.Event()

        async def application(_: Any, __: Receive, send: Send) -> None:
            await answer(send, b"whole")
            await go_on.wait()
            has_gone_on.set()

        reply = await post(transport_to(application))
        go_on.set()
        await asyncio.wait_for(has_gone_on.wait(), 20)
        return bytes(reply.body), has_gone_on.is_set()

    assert asyncio.run(scenario()) == (b"whole", True)


def test_an_endless_response_is_rejected_at_the_limit() -> None:
    async def application(_: Any, __: Receive, send: Send) -> None:
        await send(START)
        while True:
            await send(piece(bytes(100_000)))

    with pytest.raises(BodyTooLargeError):
        asyncio.run(post(transport_to(application, limits=DecodeLimits(memory_bytes=1_000_000))))


def test_an_endless_stream_waits_for_its_reader() -> None:
    sent = 0

    async def application(_: Any, __: Receive, send: Send) -> None:
        nonlocal sent
        await send(START)
        while True:
            await send(piece(b"more"))
            sent += 1

    async def scenario() -> int:
        async with streamed(transport_to(application)) as reply:
            for _ in range(3):
                assert await anext(reply.pieces) == b"more"
            await asyncio.sleep(0.05)  # time in which it could run ahead
        return sent

    assert asyncio.run(scenario()) < 40


def test_a_stream_in_progress_ends_when_the_transport_is_closed() -> None:
    async def application(_: Any, __: Receive, send: Send) -> None:
        await send(START)
        await asyncio.sleep(60)

    async def scenario() -> None:
        transport = transport_to(application)
        async with streamed(transport) as reply:
            reading = asyncio.ensure_future(anext(reply.pieces))
            await asyncio.sleep(0)
            await transport.close()
            with pytest.raises(APIConnectionError, match="closed"):
                await asyncio.wait_for(reading, 20)

    asyncio.run(scenario())


def test_a_stream_that_stalls_times_out() -> None:
    async def application(_: Any, __: Receive, send: Send) -> None:
        await send(START)
        await asyncio.sleep(60)

    async def scenario() -> None:
        async with streamed(transport_to(application), idle_s=0.01) as reply:
            with pytest.raises(APITimeoutError, match="no data"):
                await anext(reply.pieces)

    asyncio.run(scenario())


def test_a_path_is_passed_decoded_and_raw() -> None:
    seen: list[Any] = []

    async def application(scope: Any, _: Receive, send: Send) -> None:
        seen.extend((scope["path"], scope["raw_path"]))
        await answer(send)

    request = HttpRequest("GET", "/a%20b/%C3%A9", {}, {}, [])
    asyncio.run(transport_to(application).send(request, pool=Pool.REST, timeout_s=20.0))

    assert seen == ["/svc/a b/é", b"/svc/a%20b/%C3%A9"]


def test_reading_the_body_late_or_never_is_not_an_error() -> None:
    async def application(_: Any, receive: Receive, send: Send) -> None:
        await answer(send, b"early")
        assert await read_all(receive) == b"one two"

    reply = asyncio.run(post(transport_to(application), b"one ", b"two"))

    assert bytes(reply.body) == b"early"
