"""Bodies that are small on the way and large when they have come, many at a time."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import msgspec
import pytest

from tests.integration.service.api.calls import a_model, ok, post
from tests.integration.service.api.in_process import InProcess
from tests.integration.service.api.running import KEYS, RunningServer
from tinsmith.wire.content import compress
from tinsmith.wire.endpoints import ENDPOINTS

MIB = 1024 * 1024


def chunked_head(name: str) -> bytes:
    return (
        f"POST {ENDPOINTS[name].path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEYS['alice']}\r\n"
        "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    ).encode()


def test_bodies_without_a_content_length_share_the_same_budget() -> None:
    piece = b"%x\r\n%s\r\n" % (MIB, b" " * MIB)
    with RunningServer(with_keys=True, bodies_bytes=8 * MIB) as server:
        opened = [socket.create_connection(("127.0.0.1", server.port), 30) for _ in range(16)]
        try:
            for connection in opened:
                connection.sendall(chunked_head("create_session"))
            for connection in opened:
                connection.sendall(piece * 2)

            server.wait_for(lambda: sum(one.status == 429 for one in server.reports) >= 8)

            assert server.edge.received.held_bytes <= 8 * MIB
        finally:
            for connection in opened:
                connection.close()
        server.wait_for(lambda: len(server.reports) >= 16)
        assert server.edge.received.held_bytes == 0


def test_a_body_counts_towards_the_budget_until_its_request_is_answered() -> None:
    """Else clients that send quickly would fill the memory with what waits for its turn."""

    async def run() -> None:
        service = InProcess(bodies_bytes=4 * MIB)
        seen: list[int] = []
        handlers = service.app._handlers

        async def look(_: Any) -> None:
            seen.append(service.edge.received.held_bytes)

        handlers["create_session"] = look
        body = msgspec.json.encode({"tags": [], "sdk_version": "1", "more": "x" * MIB})
        await service.send("POST", ENDPOINTS["create_session"].path, body)
        packed = compress([body])
        headers = {"content-encoding": "zstd"}
        await service.send("POST", ENDPOINTS["create_session"].path, packed, headers)

        assert seen == [len(body), len(body)]
        assert service.edge.received.held_bytes == 0

    asyncio.run(run())


def test_a_waiting_poll_does_not_retain_its_body() -> None:
    with RunningServer(with_keys=True, long_poll_s=20) as server, server.http() as http:
        model = a_model(http)
        server.held.add("optim_step")
        ok(post(http, "optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}}))
        body = msgspec.json.encode({"request_id": f"{model}:1", "more": "x" * (8 * MIB)})
        headers = {"Content-Encoding": "zstd", "Content-Type": "application/json"}

        def poll() -> None:
            with server.http() as other:
                other.post(
                    ENDPOINTS["retrieve_future"].path, content=compress([body]), headers=headers
                )

        polling = threading.Thread(target=poll)
        polling.start()
        server.wait_polls(1)

        assert server.edge.received.held_bytes == 0
        server.release()
        polling.join(30)


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
def test_decompressing_a_large_body_does_not_block_the_event_loop(encoding: str) -> None:
    """The bomb is unpacked on a thread: the loop goes on meanwhile."""

    async def run() -> None:
        import gzip

        service = InProcess()
        large = msgspec.json.encode({"tags": [], "sdk_version": "1", "x": " " * (60 * MIB)})
        packed = compress([large]) if encoding == "zstd" else gzip.compress(large, 1)
        assert len(packed) < 512 * 1024
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        turning = asyncio.create_task(turn())
        started_turns = turns
        reply = await service.send(
            "POST",
            ENDPOINTS["create_session"].path,
            packed,
            {"content-encoding": encoding},
        )
        turning.cancel()

        assert reply.status == 200
        assert turns - started_turns > 50  # 3 or 4 if it is unpacked on the loop

    asyncio.run(run())
