"""What refused bodies leave behind in a real `tinsmith serve`: nothing."""

from __future__ import annotations

import gzip
import http.client
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.service.served import Served, serving
from tinsmith.wire.content import PACKED_TYPE, PROTOBUF_TYPE, compress
from tinsmith.wire.endpoints import ENDPOINTS

MIB = 1024 * 1024
BOMBS = 8
"""Of each kind; each would leave 34 MB or more."""
KEPT_BYTES = 64 * MIB
"""How much more may be resident after all bombs than before the first."""
WARM_UP = 4
"""Bodies of the same kind before the first look: libraries and threads are loaded by them."""


class Bomb(NamedTuple):
    """A body that is refused, how it is sent, and the status that it must be refused with."""

    endpoint: str
    body: Callable[[], bytes]
    status: int
    headers: dict[str, str]


def text(size: int) -> bytes:
    return b'{"tags":[],"sdk_version":"1","x":"%b"}' % (b" " * size)


def lists(size: int) -> bytes:
    return b"[" + b"[]," * (size // 3)


def unannounced(body: bytes) -> bytes:
    """A zstd frame that does not say how large its content is, with a checksum at its end."""
    from tinsmith.wire.zstd_library import zstd

    options: dict[int, int] = {zstd.CompressionParameter.checksum_flag: 1}
    compressor = zstd.ZstdCompressor(options=options)
    return bytes(compressor.compress(body) + compressor.flush())


def damaged(frame: bytes) -> bytes:
    """The same with another checksum: all of it is unpacked before that is seen."""
    return frame[:-1] + bytes([frame[-1] ^ 1])


ZSTD, GZIP, DEFLATE = ({"Content-Encoding": name} for name in ("zstd", "gzip", "deflate"))
PROTOBUF, PACKED = {"Content-Type": PROTOBUF_TYPE}, {"Content-Type": PACKED_TYPE}
NO_MESSAGE = b"\x07"  # a field of a type that there is not
ADAM = "optim_step"
KINDS: dict[str, Bomb] = {
    "zstd JSON": Bomb("create_session", lambda: compress([lists(60 * MIB)]), 413, ZSTD),
    "zstd JSON, numbered": Bomb(ADAM, lambda: compress([lists(60 * MIB)]), 413, ZSTD),
    "zstd JSON, announced": Bomb("create_session", lambda: compress([text(250 * MIB)]), 413, ZSTD),
    "zstd JSON, endless": Bomb("create_session", lambda: unannounced(text(250 * MIB)), 413, ZSTD),
    "zstd JSON, damaged": Bomb(
        "create_session", lambda: damaged(unannounced(text(60 * MIB))), 400, ZSTD
    ),
    "zstd protobuf": Bomb(
        "forward_backward", lambda: compress([NO_MESSAGE, bytes(250 * MIB)]), 400, ZSTD | PROTOBUF
    ),
    "zstd protobuf, endless": Bomb(
        "forward_backward", lambda: unannounced(bytes(300 * MIB)), 413, ZSTD | PROTOBUF
    ),
    "gzip JSON": Bomb("create_session", lambda: gzip.compress(lists(60 * MIB)), 413, GZIP),
    "gzip JSON, endless": Bomb("create_session", lambda: gzip.compress(text(99 * MIB)), 413, GZIP),
    "deflate JSON": Bomb("create_session", lambda: zlib.compress(lists(60 * MIB)), 413, DEFLATE),
    "JSON": Bomb("create_session", lambda: lists(34 * MIB), 413, {}),
    "JSON, broken": Bomb("create_session", lambda: text(34 * MIB)[:-1], 400, {}),
    "JSON, broken, numbered": Bomb(ADAM, lambda: text(34 * MIB)[:-1], 400, {}),
    "JSON of another shape": Bomb(ADAM, lambda: text(34 * MIB), 400, {}),
    "protobuf": Bomb("forward_backward", lambda: NO_MESSAGE + bytes(34 * MIB), 400, PROTOBUF),
    "packed": Bomb("asample", lambda: b"\2\0\0\0{}" + bytes(34 * MIB), 400, PACKED),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served")) as running:
        yield running


def resident_bytes(served: Served) -> int:
    pages = int(Path(f"/proc/{served.pid}/statm").read_text().split()[1])
    return pages * 4096


def statuses(served: Served, bomb: Bomb, body: bytes, count: int) -> set[int]:
    """Send the same body so many times; the statuses that it was answered with."""
    found = set()
    headers = {"Content-Type": "application/json", "X-API-Key": "tml-any"} | bomb.headers
    for _ in range(count):
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=300)
        connection.request("POST", ENDPOINTS[bomb.endpoint].path, body, headers)
        found.add(connection.getresponse().status)
        connection.close()
    return found


@pytest.mark.parametrize("bomb", KINDS.values(), ids=KINDS)
def test_rejected_bodies_leave_nothing_behind(served: Served, bomb: Bomb) -> None:
    body = bomb.body()
    statuses(served, bomb, body, WARM_UP)
    before = resident_bytes(served)

    found = statuses(served, bomb, body, BOMBS)

    check_nothing_kept(served, before)
    assert found == {bomb.status}


def check_nothing_kept(served: Served, before: int) -> None:
    """At once, not after a while: the next ones are sent at once too."""
    after = resident_bytes(served)
    assert after - before < KEPT_BYTES, f"{before // MIB} MiB before, {after // MIB} MiB after"


def test_a_hundred_small_bodies_that_decompress_to_huge_ones_leave_nothing_behind(
    served: Served,
) -> None:
    bomb = KINDS["zstd JSON, endless"]
    body = bomb.body()
    assert len(body) < 33_000
    statuses(served, bomb, body, WARM_UP)
    before = resident_bytes(served)

    found = statuses(served, bomb, body, 100)

    check_nothing_kept(served, before)
    assert found == {413}


def test_concurrent_large_bodies_leave_nothing_behind(served: Served) -> None:
    """Each is read on another thread, and the C library has an arena for each of those."""
    bomb = KINDS["JSON, broken"]
    body = text(10 * MIB)[:-1]
    statuses(served, bomb, body, WARM_UP)
    before = resident_bytes(served)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: statuses(served, bomb, body, 5), range(8)))

    check_nothing_kept(served, before)
    assert found == [{400}] * 8
