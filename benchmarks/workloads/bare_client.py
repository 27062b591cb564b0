"""The least that a client can do: prepared bytes sent, replies looked at for an id, nothing made.

It makes the exchanges of the plain protocol, a submission and a fetch for each sample beside one
poll for all, as both SDKs do, in one thread on uvloop. What it takes is the server's and the
machine's part, which no client can go below by being better written. It reads no other server's
replies than those of `server.py`.
"""

from __future__ import annotations

import asyncio
import collections
import json
import time
from collections.abc import Callable
from typing import Any

import uvloop

from benchmarks.workloads.client import (
    DELAY_MS,
    WARM_UP_SAMPLES,
    Burst,
    Server,
    figures,
    running,
)

MOST_S = 120.0
"""Longer than any burst takes: whoever changes the server is told, and need not wait."""


def samples(
    server_python: str,
    tokens: str,
    in_flight: str,
    count: str,
    prompts: str = "one",
    delay_ms: str = DELAY_MS,
) -> dict[str, float]:
    """As `client.samples`; whose prompt it is makes no difference to bytes that are there."""
    del prompts
    ids = list(range(1000, 1000 + int(tokens)))
    prompt = {"chunks": [{"tokens": ids, "type": "encoded_text"}]}
    params = {"max_tokens": 64, "temperature": 1.0}
    body = {"prompt": prompt, "sampling_params": params, "num_samples": 1, "seq_id": 1}
    submission = _request(b"asample", json.dumps(body, separators=(",", ":")).encode())
    with running(server_python, delay_ms, is_plain=True) as server:
        found: Burst = uvloop.run(_bursts(server, submission, int(count), int(in_flight)))
        return figures(found, int(count))


async def _bursts(server: Server, submission: bytes, count: int, in_flight: int) -> Burst:
    """Warm up and draw, over the same connections: the server holds the poll all the while."""
    client = _BareClient(server.url, submission)
    await client.connect(in_flight)
    await client.draw(WARM_UP_SAMPLES)
    used, cpu, wall = server.cpu_s(), time.process_time(), time.perf_counter()
    latencies = await client.draw(count)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    added = [latency - server.delay_s for latency in latencies]
    return Burst(cpu, wall, server.cpu_s() - used, added)


class _BareClient:
    """Draws samples; each connection has one under way."""

    def __init__(self, url: str, submission: bytes) -> None:
        self._port = int(url.rsplit(":", 1)[1])
        self._submission = submission
        self._connections: list[_Connection] = []
        self._left = 0
        self._count = 0
        self._waiting: dict[str, _Connection] = {}
        self._ended_early: set[str] = set()
        self._latencies: list[float] = []

    async def connect(self, in_flight: int) -> None:
        self._connections = [await self._connection() for _ in range(in_flight)]
        self._poll = await self._connection()
        self._ask(0)

    async def draw(self, count: int) -> list[float]:
        """So many samples; gives how long each took."""
        self._is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left = self._count = count
        self._latencies = []
        for connection in self._connections:
            self._submit(connection)
        async with asyncio.timeout(MOST_S):
            await self._is_over
        return self._latencies

    async def _connection(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, "127.0.0.1", self._port)
        return connection

    def _submit(self, connection: _Connection) -> None:
        if not self._left:
            return
        self._left -= 1
        connection.began = time.perf_counter()
        connection.ask(self._submission, self._submitted)

    def _submitted(self, connection: _Connection, body: bytes) -> None:
        request_id = body.split(b'"', 4)[3].decode()
        if request_id in self._ended_early:
            self._ended_early.remove(request_id)
            self._fetch(connection, request_id)
        else:
            self._waiting[request_id] = connection

    def _ask(self, cursor: int) -> None:
        self._poll.ask(_request(b"retrieve_futures", b'{"prev_cursor":%d}' % cursor), self._told)

    def _told(self, _: _Connection, body: bytes) -> None:
        answer = json.loads(body)
        self._ask(answer["cursor"])
        for completion in answer["completions"]:
            request_id = completion["request_id"]
            connection = self._waiting.pop(request_id, None)
            if connection is None:
                self._ended_early.add(request_id)
            else:
                self._fetch(connection, request_id)

    def _fetch(self, connection: _Connection, request_id: str) -> None:
        body = b'{"request_id":"%b"}' % request_id.encode()
        connection.ask(_request(b"retrieve_future", body), self._fetched)

    def _fetched(self, connection: _Connection, _: bytes) -> None:
        self._latencies.append(time.perf_counter() - connection.began)
        if len(self._latencies) == self._count:
            self._is_over.set_result(None)
        else:
            self._submit(connection)


class _Connection(asyncio.Protocol):
    """One exchange at a time."""

    def __init__(self) -> None:
        self.began = 0.0
        self._transport: Any = None
        self._came: collections.deque[bytes] = collections.deque()
        self._answered: Callable[[_Connection, bytes], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def ask(self, request: bytes, answered: Callable[[_Connection, bytes], None]) -> None:
        self._answered = answered
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._came.append(data)
        whole = b"".join(self._came)
        head, _, body = whole.partition(b"\r\n\r\n")
        if len(body) < int(head.rsplit(b" ", 1)[1]):  # the length is the last header
            return
        self._came.clear()
        assert self._answered is not None
        self._answered(self, body)


def _request(path: bytes, body: bytes) -> bytes:
    head = b"POST /api/v1/%b HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    return (head + b"Content-Length: %d\r\n\r\n%b") % (path, len(body), body)
