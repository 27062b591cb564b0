"""A real `tinsmith serve` that gets no more memory from the system."""

from __future__ import annotations

import http.client
import json
import resource
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.service.served import Served, serving
from tinsmith.wire.content import JSON_TYPE, compress
from tinsmith.wire.endpoints import ENDPOINTS

MIB = 1024 * 1024

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prlimit is Linux's")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as running:
        yield running


def ask(served: Served, name: str, body: bytes, headers: dict[str, str]) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=120)
    headers = {"X-API-Key": "tml-any", "Content-Type": JSON_TYPE, **headers}
    connection.request("POST", ENDPOINTS[name].path, body, headers)
    reply = connection.getresponse()
    told = json.loads(reply.read())
    connection.close()
    return reply.status, told.get("detail", ""), reply.headers.get("Retry-After", "")


def sound(size: int) -> bytes:
    return b'{"tags":[],"sdk_version":"1","x":"%b"}' % (b" " * size)


@pytest.mark.parametrize(
    ("name", "pack", "headers"),
    [
        ("create_session", lambda body: compress([body]), {"Content-Encoding": "zstd"}),
        ("create_session", zlib.compress, {"Content-Encoding": "deflate"}),
        ("create_session", lambda body: body, {}),
    ],
    ids=["zstd", "deflate", "plain"],
)
def test_a_valid_body_gets_a_retryable_503_when_memory_is_short(
    served: Served, name: str, pack: Callable[[bytes], bytes], headers: dict[str, str]
) -> None:
    body = pack(sound(60 * MIB))
    assert ask(served, name, body, headers)[0] == 200  # threads and libraries are there now
    held = int(Path(f"/proc/{served.pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(served.pid, resource.RLIMIT_AS, (held + 32 * MIB, -1))

    status, told, again = ask(served, name, body, headers)

    assert (status, told.partition(";")[0]) == (503, "the service is out of memory")
    assert again
    assert ask(served, name, sound(10), {})[0] == 200

    resource.prlimit(served.pid, resource.RLIMIT_AS, (-1, -1))
    assert ask(served, name, body, headers)[0] == 200
