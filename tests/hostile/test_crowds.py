"""More connections than a real `tinsmith serve` has descriptors for, most of them without a key."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from tests.e2e.service.served import START_S, Served
from tests.hostile.raw_clients import Keyed, RawClient, keyed, metric, raw_clients, send

DESCRIPTORS = 256
FEW_DESCRIPTORS = f"""
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
runpy.run_module("tinsmith", run_name="__main__", alter_sys=True)
"""
KEYED_PATH = "/api/v1/get_server_capabilities"


PROGRAM = ("-c", FEW_DESCRIPTORS)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    with keyed(tmp_path_factory.mktemp("crowded"), program=PROGRAM) as running:
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
def test_idle_unauthenticated_connections_do_not_lock_out_other_clients(
    served: Keyed, sent: bytes
) -> None:
    with raw_clients(served, 2 * DESCRIPTORS) as strangers:
        for stranger in strangers:
            with contextlib.suppress(ConnectionError):
                stranger.socket.sendall(sent)

        assert readiness(served) == [200] * 12
        assert send(served, served.alice).status_code == 200
        assert send(served, served.alice, 3 * 1024 * 1024).status_code == 200  # takes a file


def test_authenticated_connections_of_the_same_address_stay_open(served: Keyed) -> None:
    with users_of(served, served.alice, 60) as users, raw_clients(served, 2 * DESCRIPTORS):
        assert readiness(served) == [200] * 12

        assert {user.get(KEYED_PATH, served.alice) for user in users} == {200}
        assert metric(served, "tinsmith_connections", '"authenticated"') >= 60
        assert metric(served, "tinsmith_connections_closed_total", "total") > 0


def test_unauthenticated_connections_do_not_evict_those_of_another_address(served: Keyed) -> None:
    with raw_clients(served, 10) as others, raw_clients(served, 2 * DESCRIPTORS, "127.0.0.2"):
        assert readiness(served) == [200] * 12
        assert all(other.is_open() for other in others)
        assert {other.get("/healthz") for other in others} == {200}


def test_one_tenant_cannot_take_all_connections(served: Keyed) -> None:
    with users_of(served, served.alice, 2 * DESCRIPTORS):
        with users_of(served, served.bob, 10) as light, users_of(served, served.alice, 50):
            assert {user.get(KEYED_PATH, served.bob) for user in light} == {200}
        assert readiness(served) == [200] * 12


def test_unauthenticated_connections_per_address_are_limited(tmp_path: Path) -> None:
    """Once they have had some seconds to show one; those that showed one stay."""
    with (
        keyed(tmp_path / "capped", "--limits-address-connections", "20", program=PROGRAM) as served,
        users_of(served, served.alice, 30) as users,
        raw_clients(served, 60) as strangers,
        raw_clients(served, 5, "127.0.0.2") as others,
    ):
        deadline = time.monotonic() + 30
        while sum(stranger.is_open() for stranger in strangers) > 20:
            assert time.monotonic() < deadline
            assert readiness(served) == [200] * 12  # each is one more connection
            time.sleep(0.2)

        assert metric(served, "tinsmith_connections_closed_total", "address") >= 40
        assert all(other.is_open() for other in others)
        assert {user.get(KEYED_PATH, served.alice) for user in users} == {200}


def test_many_clients_at_one_address_work_concurrently(served: Keyed) -> None:
    """As behind a NAT or a proxy: more than an address may have without a key."""
    with users_of(served, served.alice, 150) as users:
        for _ in range(3):
            assert {user.get(KEYED_PATH, served.alice) for user in users} == {200}


def test_connections_that_are_opened_and_closed_quickly_are_forgotten(served: Keyed) -> None:
    for _ in range(20):
        with raw_clients(served, 100):
            pass
    deadline = time.monotonic() + 30
    while metric(served, "tinsmith_connections", "unauthenticated") > 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert readiness(served) == [200] * 12


def test_connections_that_never_complete_the_tls_handshake_lock_nobody_out(tmp_path: Path) -> None:
    """They count from when they are accepted, before TLS says anything about them."""
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    chain, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made.cert_chain_pems[0].write_to_path(chain)
    made.private_key_pem.write_to_path(key)
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    served = Keyed(tmp_path, "--tls-cert", str(chain), "--tls-key", str(key), program=PROGRAM)
    served.base_url = f"https://127.0.0.1:{served.port}"

    def ask(path: str, api_key: str = "") -> int:
        headers = {"X-API-Key": api_key}
        try:
            with httpx.Client(verify=trusted, headers=headers, timeout=30.0) as http:
                return http.get(served.base_url + path).status_code
        except httpx.HTTPError:
            return 0

    try:
        served.start(wait=False)
        deadline = time.monotonic() + START_S
        while ask("/readyz") != 200:
            assert time.monotonic() < deadline, served.log_text()
            time.sleep(0.02)
        with raw_clients(served, 2 * DESCRIPTORS) as silent:
            assert [ask("/readyz") for _ in range(6)] == [200] * 6
            assert ask(KEYED_PATH, served.alice) == 200
            for client in silent:
                with contextlib.suppress(ConnectionError):
                    client.socket.sendall(b"\x16\x03\x01\x02\x00\x01")  # a half of a hello
            assert [ask("/readyz") for _ in range(6)] == [200] * 6
        deadline = time.monotonic() + 30
        while len(list(Path(f"/proc/{served.pid}/fd").iterdir())) > 100:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        served.end()


@pytest.mark.parametrize("kind", ["unix", "ipv6"])
def test_connections_on_other_kinds_of_sockets_are_limited_too(tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "socket")
    arguments = ("--unix-socket", path) if kind == "unix" else ("--host", "::1")
    served = Keyed(tmp_path, *arguments, program=PROGRAM)

    def connect() -> socket.socket:
        if kind == "ipv6":
            return socket.create_connection(("::1", served.port), 30)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(30)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            raise
        return connection

    def ask(connection: socket.socket, path: str) -> bytes:
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {served.alice}\r\n\r\n"
        connection.sendall(head.encode())
        return connection.recv(65536)[:12]

    def is_ready() -> bool:
        with contextlib.suppress(OSError), connect() as connection:
            return ask(connection, "/readyz") == b"HTTP/1.1 200"
        return False

    with contextlib.ExitStack() as opened:
        opened.callback(served.end)
        served.start(wait=False)
        deadline = time.monotonic() + START_S
        while not is_ready():
            assert time.monotonic() < deadline, served.log_text()
            time.sleep(0.02)
        users = [opened.enter_context(connect()) for _ in range(40)]
        assert {ask(user, KEYED_PATH) for user in users} == {b"HTTP/1.1 200"}
        for _ in range(2 * DESCRIPTORS):
            opened.enter_context(connect())

        assert all(is_ready() for _ in range(12))
        assert {ask(user, KEYED_PATH) for user in users} == {b"HTTP/1.1 200"}
