"""Clients that speak HTTP by hand: they send as slowly, and as little, as they like."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec

from tests.e2e.service.served import Served
from tests.hostile.test_two_tenants import make_key
from tinsmith.wire.endpoints import ENDPOINTS

MIB = 1024 * 1024
WAIT_S = 60.0
CREATE_SESSION = ENDPOINTS["create_session"].path


class Keyed(Served):
    """A service with a key for each of three tenants."""

    def start(self, *, wait: bool = True) -> None:
        self.alice, self.bob, self.carol = (
            make_key(self, tenant)[0] for tenant in ("alice", "bob", "carol")
        )
        super().start(wait=wait)


@contextlib.contextmanager
def keyed(
    folder: Path, *arguments: str, program: tuple[str, ...] = ("-m", "tinsmith")
) -> Iterator[Keyed]:
    """Such a service, running."""
    folder.mkdir(parents=True, exist_ok=True)
    served = Keyed(folder, *arguments, program=program)
    try:
        served.start()
        yield served
    finally:
        served.end()


class RawClient:
    """One connection, from any address of this machine."""

    def __init__(self, served: Served, address: str = "127.0.0.1") -> None:
        where = ("127.0.0.1", served.port)
        self.socket = socket.create_connection(where, WAIT_S, source_address=(address, 0))
        self._received = b""

    def close(self) -> None:
        self.socket.close()

    def get(self, path: str, key: str = "") -> int:
        """The status of a whole request, on this connection; 0 if it was closed."""
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {key}\r\n\r\n"
        try:
            self.socket.sendall(head.encode())
            return self.answer()[0]
        except ConnectionError:
            return 0

    def begin_upload(self, key: str, length: int | None, **headers: str) -> None:
        """Send a head with a body to come, and wait until the service reads that."""
        told = {
            "Host": "localhost",
            "X-API-Key": key,
            "Content-Type": "application/json",
            "Expect": "100-continue",
            **({"Transfer-Encoding": "chunked"} if length is None else {}),
            **({} if length is None else {"Content-Length": str(length)}),
            **headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
        self.socket.sendall(f"POST {CREATE_SESSION} HTTP/1.1\r\n{lines}\r\n".encode())
        assert self.answer()[0] == 100

    def answer(self) -> tuple[int, bytes]:
        """The next answer: its status, 0 if the connection was closed instead, and its body."""
        while b"\r\n\r\n" not in self._received:
            if not self._receive():
                return 0, b""
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        size = int(length[1]) if length else 0
        while len(self._received) < size and self._receive():
            pass
        body, self._received = self._received[:size], self._received[size:]
        return int(head.split()[1]), body

    def is_open(self) -> bool:
        """Whether the service has not closed it."""
        self.socket.setblocking(False)
        try:
            return self._receive()
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        finally:
            self.socket.settimeout(WAIT_S)

    def _receive(self) -> bool:
        more = self.socket.recv(65536)
        self._received += more
        return bool(more)


@contextlib.contextmanager
def raw_clients(
    served: Served, count: int, address: str = "127.0.0.1"
) -> Iterator[list[RawClient]]:
    """So many connections, closed at the end."""
    with contextlib.ExitStack() as opened:
        clients = []
        for _ in range(count):
            clients.append(RawClient(served, address))
            opened.callback(clients[-1].close)
        yield clients


def session_body(size: int) -> bytes:
    """A body that begins a session, and has so many bytes."""
    body = msgspec.json.encode({"tags": [], "sdk_version": "0.36.0", "more": ""})
    return body[:-2] + b"x" * (size - len(body)) + body[-2:]


def send(served: Served, key: str, size: int = 100, address: str = "127.0.0.1") -> httpx.Response:
    """Begin a session with a body of this size, at once and on a new connection."""
    transport = httpx.HTTPTransport(local_address=address)
    with httpx.Client(base_url=served.base_url, timeout=WAIT_S, transport=transport) as http:
        headers = {"X-API-Key": key, "Content-Type": "application/json"}
        return http.post(CREATE_SESSION, content=session_body(size), headers=headers)


def heartbeat(served: Served, key: str, session_id: str) -> int:
    """The status of a heartbeat."""
    reply = httpx.post(
        served.base_url + ENDPOINTS["session_heartbeat"].path,
        json={"session_id": session_id},
        headers={"X-API-Key": key},
        timeout=WAIT_S,
    )
    return reply.status_code


def metric(served: Served, name: str, label: str = "") -> float:
    """One value of `/metrics`; 0 if it is not there."""
    text = httpx.get(served.base_url + "/metrics", timeout=WAIT_S).text
    found = re.search(rf"(?m)^{name}{{[^}}]*{label}[^}}]*}} (\S+)$", text) if label else None
    found = found or re.search(rf"(?m)^{name} (\S+)$", text)
    return float(found[1]) if found else 0.0
