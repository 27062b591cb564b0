"""More connections than a real `tinsmith serve` has descriptors for, most of them without a key."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.service.served import Served
from tests.hostile.raw_clients import RawClient, metric, raw_clients, send
from tests.hostile.test_two_tenants import make_key

DESCRIPTORS = 256
FEW_DESCRIPTORS = f"""
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
runpy.run_module("tinsmith", run_name="__main__", alter_sys=True)
"""
KEYED_PATH = "/api/v1/get_server_capabilities"


class Crowded(Served):
    """A service with 256 descriptors and a key for each of two tenants."""

    def start(self, *, wait: bool = True) -> None:
        self.alice, self.bob = (make_key(self, tenant)[0] for tenant in ("alice", "bob"))
        super().start(wait=wait)


@contextlib.contextmanager
def crowded(folder: Path, *arguments: str) -> Iterator[Crowded]:
    folder.mkdir(parents=True, exist_ok=True)
    served = Crowded(folder, *arguments, program=("-c", FEW_DESCRIPTORS))
    try:
        served.start()
        yield served
    finally:
        served.end()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowded]:
    with crowded(tmp_path_factory.mktemp("crowded")) as running:
        yield running


@contextlib.contextmanager
def users_of(served: Served, key: str, count: int) -> Iterator[list[RawClient]]:
    """So many connections, each of which has shown a key."""
    with contextlib.ExitStack() as opened:
        users = []
        for _ in range(count):
            users.append(RawClient(served))
            opened.callback(users[-1].close)
            assert users[-1].get(KEYED_PATH, key) == 200
        yield users


def readiness(served: Served) -> list[int]:
    """What `/readyz` answers twelve times, each on a new connection; 0 for nothing."""
    statuses = []
    for _ in range(12):
        try:
            statuses.append(httpx.get(f"{served.base_url}/readyz", timeout=5.0).status_code)
        except httpx.HTTPError:
            statuses.append(0)
    return statuses


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n"], ids=["idle", "half"])
def test_a_stranger_with_idle_connections_keeps_nobody_out(served: Crowded, sent: bytes) -> None:
    with raw_clients(served, 2 * DESCRIPTORS) as strangers:
        for stranger in strangers:
            with contextlib.suppress(ConnectionError):
                stranger.socket.sendall(sent)

        assert readiness(served) == [200] * 12
        assert send(served, served.alice).status_code == 200
        assert send(served, served.alice, 3 * 1024 * 1024).status_code == 200  # takes a file


def test_authenticated_connections_of_the_same_address_stay_open(served: Crowded) -> None:
    with users_of(served, served.alice, 60) as users, raw_clients(served, 2 * DESCRIPTORS):
        assert readiness(served) == [200] * 12

        assert {user.get(KEYED_PATH, served.alice) for user in users} == {200}
        assert metric(served, "tinsmith_connections", '"authenticated"') >= 60
        assert metric(served, "tinsmith_connections_closed_total", "address") > 0


def test_a_stranger_closes_no_connection_of_another_address(served: Crowded) -> None:
    with raw_clients(served, 10) as others, raw_clients(served, 2 * DESCRIPTORS, "127.0.0.2"):
        assert readiness(served) == [200] * 12
        assert all(other.is_open() for other in others)
        assert {other.get("/healthz") for other in others} == {200}


def test_one_tenant_with_all_connections_leaves_room_for_another(served: Crowded) -> None:
    with users_of(served, served.alice, 2 * DESCRIPTORS):
        with users_of(served, served.bob, 10) as light, users_of(served, served.alice, 50):
            assert {user.get(KEYED_PATH, served.bob) for user in light} == {200}
        assert readiness(served) == [200] * 12


def test_many_clients_of_one_address_work_side_by_side(served: Crowded) -> None:
    """As behind a NAT or a proxy: more than an address may have without a key."""
    with users_of(served, served.alice, 150) as users:
        for _ in range(3):
            assert {user.get(KEYED_PATH, served.alice) for user in users} == {200}


def test_connections_that_are_opened_and_closed_quickly_are_forgotten(served: Crowded) -> None:
    for _ in range(20):
        with raw_clients(served, 100):
            pass
    deadline = time.monotonic() + 30
    while metric(served, "tinsmith_connections", "unauthenticated") > 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert readiness(served) == [200] * 12
