"""Tenants that send large bodies slowly, to a real `tinsmith serve`: nobody else is locked out."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e.service.served import Served
from tests.hostile.raw_clients import (
    MIB,
    Keyed,
    RawClient,
    heartbeat,
    keyed,
    metric,
    raw_clients,
    send,
    session_body,
)
from tests.integration.service.api.in_process import InProcess
from tinsmith.wire.content import compress

PIECE = b"x" * (64 * 1024)
LARGEST = 64 * MIB


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    """With the limits that are the default."""
    with keyed(tmp_path_factory.mktemp("usual")) as running:
        yield running


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[Keyed]:
    """With room for two large bodies of a tenant, three of an address, and eight in all."""
    with keyed(
        tmp_path / "narrow",
        *("--limits-body-bytes", str(4 * MIB)),
        *("--limits-tenant-bodies-bytes", str(8 * MIB)),
        *("--limits-address-bodies-bytes", str(12 * MIB)),
        *("--limits-bodies-bytes", str(32 * MIB)),
        *("--limits-upload-window-s", "600"),
    ) as running:
        yield running


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Keyed]:
    """With a window of five seconds."""
    with keyed(tmp_path / "patient", "--limits-upload-window-s", "5") as running:
        yield running


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    """With a window of a second."""
    with keyed(tmp_path_factory.mktemp("strict"), "--limits-upload-window-s", "1") as running:
        yield running


def fill(client: RawClient, key: str) -> None:
    """Send all of a 4 MiB body but its last byte, and wait until that has arrived."""
    client.begin_upload(key, 4 * MIB)
    client.socket.sendall(b"x" * (4 * MIB - 1))


def wait_held(served: Served, size: int) -> None:
    deadline = time.monotonic() + 60
    while metric(served, "tinsmith_http_body_bytes") != size:
        assert time.monotonic() < deadline, metric(served, "tinsmith_http_body_bytes")
        time.sleep(0.02)


def test_eight_announced_large_bodies_lock_nobody_out(usual: Keyed) -> None:
    sessions = {key: send(usual, key).json()["session_id"] for key in (usual.alice, usual.bob)}
    with raw_clients(usual, 8) as attackers:
        for attacker in attackers:
            attacker.begin_upload(usual.alice, LARGEST)
            attacker.socket.sendall(b"{")

        for key, session_id in sessions.items():
            assert heartbeat(usual, key, session_id) == 200
            assert send(usual, key).status_code == 200
            assert send(usual, key, 8 * MIB).status_code == 200


def test_received_bytes_count_only_against_their_own_tenant(narrow: Keyed) -> None:
    session_id = send(narrow, narrow.alice).json()["session_id"]
    with raw_clients(narrow, 2) as attackers:
        for attacker in attackers:
            fill(attacker, narrow.alice)
        wait_held(narrow, 8 * MIB - 2)

        refused = send(narrow, narrow.alice, MIB)
        assert refused.status_code == 429
        assert "your requests" in refused.json()["detail"]
        assert "Retry-After" in refused.headers
        assert heartbeat(narrow, narrow.alice, session_id) == 200
        assert send(narrow, narrow.alice).status_code == 200
        assert send(narrow, narrow.bob, 3 * MIB).status_code == 200
        assert metric(narrow, "tinsmith_http_bodies_refused_total", "tenant") == 1

    wait_held(narrow, 0)
    assert send(narrow, narrow.alice, MIB).status_code == 200


def test_one_address_with_many_keys_cannot_lock_out_small_bodies_or_others(narrow: Keyed) -> None:
    session_id = send(narrow, narrow.carol).json()["session_id"]
    with raw_clients(narrow, 3) as attackers:
        for attacker, key in zip(attackers, (narrow.alice, narrow.alice, narrow.bob), strict=True):
            fill(attacker, key)
        wait_held(narrow, 12 * MIB - 3)

        refused = send(narrow, narrow.carol, MIB)
        assert (refused.status_code, "your address" in refused.text) == (429, True)
        assert heartbeat(narrow, narrow.carol, session_id) == 200
        assert send(narrow, narrow.carol, 60_000).status_code == 200
        assert send(narrow, narrow.carol, 3 * MIB, "127.0.0.2").status_code == 200
        with raw_clients(narrow, 1, "127.0.0.2") as (other,):
            fill(other, narrow.bob)
            wait_held(narrow, 16 * MIB - 4)
            assert send(narrow, narrow.bob, MIB, "127.0.0.3").status_code == 429
            assert send(narrow, narrow.carol, 3 * MIB, "127.0.0.3").status_code == 200
            assert (
                heartbeat(narrow, narrow.bob, send(narrow, narrow.bob).json()["session_id"]) == 200
            )


@pytest.mark.parametrize("length", [LARGEST, 100, None], ids=["large", "small", "chunked"])
def test_a_body_that_trickles_in_is_answered_408(strict: Keyed, length: int | None) -> None:
    before = metric(strict, "tinsmith_http_bodies_refused_total", "slow")
    with raw_clients(strict, 1) as (client,):
        client.begin_upload(strict.alice, length)
        trickling = threading.Event()

        def trickle() -> None:
            while not trickling.wait(0.1):
                try:
                    client.socket.send(b"x" if length else b"1\r\nx\r\n")
                except OSError:
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            status, body = client.answer()
        finally:
            trickling.set()
            thread.join()

    detail = msgspec.json.decode(body)["detail"]
    assert status == 408
    assert "at least 1024 bytes/s" in detail
    assert "limits.upload_bytes_per_s" in detail
    assert metric(strict, "tinsmith_http_bodies_refused_total", "slow") == before + 1


def test_a_body_that_starts_quickly_and_then_trickles_is_answered_408(strict: Keyed) -> None:
    """What was sent before the window buys no time."""
    with raw_clients(strict, 1) as (client,):
        client.begin_upload(strict.alice, LARGEST)
        client.socket.sendall(b"x" * (8 * MIB))

        assert client.answer()[0] == 408


def test_a_compressed_body_must_keep_the_minimum_rate_too(strict: Keyed) -> None:
    packed = compress([session_body(MIB)])
    with raw_clients(strict, 1) as (client,):
        client.begin_upload(strict.alice, len(packed), **{"Content-Encoding": "zstd"})
        client.socket.sendall(packed[:-1])

        assert client.answer()[0] == 408


def test_eight_honest_clients_on_slow_uplinks_all_succeed(patient: Keyed) -> None:
    """Each takes longer than the window, at 20 times the minimum rate."""
    body = session_body(30 * 5120)
    statuses: list[int] = []

    def upload(key: str) -> None:
        with raw_clients(patient, 1) as (client,):
            client.begin_upload(key, len(body))
            for start in range(0, len(body), 5120):
                client.socket.sendall(body[start : start + 5120])
                time.sleep(0.25)
            statuses.append(client.answer()[0])

    keys = [patient.alice, patient.bob] * 4
    threads = [threading.Thread(target=upload, args=(key,)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert statuses == [200] * 8


def test_responses_for_a_client_that_does_not_read_are_bounded() -> None:
    """The rest is withheld, and the memory is free again when it leaves."""

    async def run() -> None:
        service = InProcess(tenant_bodies_bytes=300_000)
        reading = asyncio.Event()
        statuses: list[int] = []

        async def ask() -> None:
            async def receive() -> dict[str, Any]:
                return {"type": "http.request"}

            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])
                elif statuses[-1] == 200:
                    await reading.wait()

            scope = {"type": "http", "method": "GET", "path": "/openapi.json", "headers": []}
            await service.edge(scope, receive, send)

        unread = [asyncio.create_task(ask()) for _ in range(2)]
        await asyncio.sleep(0)
        await ask()
        assert statuses == [200, 200, 503]
        assert 200_000 < service.edge.sent.held_bytes < 300_000

        unread[0].cancel()
        reading.set()
        await asyncio.gather(*unread, return_exceptions=True)
        await ask()
        assert statuses[-1] == 200
        assert service.edge.sent.held_bytes == 0

    asyncio.run(run())
