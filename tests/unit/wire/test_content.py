from __future__ import annotations

import asyncio
import gzip
import json
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.errors import BodyTooLargeError, DecodeError
from tinsmith.wire.content import accepts_protobuf, compress, decompress, is_protobuf
from tinsmith.wire.decode_limits import DecodeLimits

MIB = 1024 * 1024
SMALL = DecodeLimits(memory_bytes=1000)

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
SKIPPABLE_MAGIC = b"\x50\x2a\x4d\x18"
NO_SIZE = b"\x00"  # a frame header that says nothing of the content's size ...
WINDOW_8_MIB = b"\x68"  # ... and that the content looks back up to 8 MiB
BLOCK_BYTES = 128 * 1024


def gzip_of(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def zstd_of(data: bytes) -> bytes:
    return compress([data])


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "identity": bytes,
    "zstd": zstd_of,
    "gzip": gzip_of,
    "deflate": zlib.compress,
}
PACKED = [name for name in PACKERS if name != "identity"]


def zstd_bomb(blocks: int, header: bytes = NO_SIZE + WINDOW_8_MIB) -> bytes:
    """A frame of 4 bytes for each 128 KiB of content."""
    repeat, last = 0b010, 0b001
    block = struct.pack("<I", BLOCK_BYTES << 3 | repeat)[:3] + b"A"
    last_block = struct.pack("<I", BLOCK_BYTES << 3 | repeat | last)[:3] + b"A"
    return ZSTD_MAGIC + header + block * (blocks - 1) + last_block


def gzip_bomb(size_bytes: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    zeros = bytes(MIB)
    return b"".join(packer.compress(zeros) for _ in range(size_bytes // MIB)) + packer.flush()


@pytest.mark.parametrize(
    "value",
    [
        "application/x-protobuf",
        "Application/X-Protobuf",
        " application/x-protobuf ; charset=utf-8",
        "application/x-protobuf;",
    ],
)
def test_protobuf_is_recognised(value: str) -> None:
    assert is_protobuf(value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        ";",
        "application/json",
        "application/x-protobuffer",
        "text/plain; a=application/x-protobuf",
    ],
)
def test_other_types_are_not_protobuf(value: str | None) -> None:
    assert not is_protobuf(value)


@pytest.mark.parametrize(
    ("accept", "is_accepted"),
    [
        ("application/x-protobuf", True),
        ("application/x-protobuf, application/json", True),
        ("application/json,application/x-protobuf;q=0.1", True),
        ("Application/X-Protobuf ; v=1 ; Q=0.001", True),
        ("application/x-protobuf;q=junk", True),
        ("application/x-protobuf;q=0", False),
        ("application/x-protobuf; q = 0.000, application/json", False),
        ("application/json", False),
        ("*/*", False),
        ("application/*", False),
        ("", False),
        (None, False),
        ("," * 10_000, False),
    ],
)
def test_protobuf_is_answered_only_where_it_is_named(accept: str | None, is_accepted: bool) -> None:
    assert accepts_protobuf(accept) is is_accepted


@pytest.mark.parametrize("encoding", PACKERS)
@given(data=st.binary(max_size=2000))
def test_compressed_bodies_round_trip(encoding: str, data: bytes) -> None:
    packed = PACKERS[encoding](data)

    assert decompress(packed, encoding) == data
    assert decompress(memoryview(packed), encoding) == data
    assert decompress(bytearray(packed), encoding) == data


@given(st.lists(st.binary(max_size=500)))
def test_parts_become_one_frame_with_its_content_size(parts: list[bytes]) -> None:
    zstandard = pytest.importorskip("zstandard")
    whole = b"".join(parts)

    packed = compress(part if i % 2 else memoryview(part) for i, part in enumerate(parts))

    assert zstandard.get_frame_parameters(packed).content_size == len(whole)
    unpacker = zstandard.ZstdDecompressor().decompressobj()
    assert unpacker.decompress(packed) == whole
    assert unpacker.eof
    assert unpacker.unused_data == b""
    assert decompress(packed, "zstd") == whole


def test_large_parts_of_any_item_size_can_be_read_by_the_zstandard_package() -> None:
    zstandard = pytest.importorskip("zstandard")
    numbers = memoryview(os.urandom(40_000) * 8).cast("i")

    packed = compress([b"head", numbers, b"tail"])

    # One call, as a receiver without a size of its own makes it: it needs the size in the header.
    assert zstandard.ZstdDecompressor().decompress(packed) == b"head" + bytes(numbers) + b"tail"


def test_a_body_compressed_by_the_official_sdk_is_read() -> None:
    tinker = pytest.importorskip("tinker")
    from tinker.proto.request_conv import forward_backward_request_to_proto

    request = an_official_request(tinker)

    sent = send_with_official_sdk(request)

    assert sent["options"]["headers"]["Content-Encoding"] == "zstd"
    expected = forward_backward_request_to_proto(request).SerializeToString()
    assert decompress(sent["body"], "zstd") == expected


def an_official_request(tinker: Any) -> Any:
    tokens = list(range(3000))
    datum = tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"weights": [1.0] * len(tokens), "target_tokens": tokens},
    )
    batch = tinker.types.ForwardBackwardInput(data=[datum] * 20, loss_fn="cross_entropy")
    return tinker.types.ForwardBackwardRequest(forward_backward_input=batch, model_id="m", seq_id=1)


def send_with_official_sdk(request: Any) -> dict[str, Any]:
    from tinker.resources.training import AsyncTrainingResource

    sent: dict[str, Any] = {}

    async def post(_path: str, **arguments: object) -> None:
        sent.update(arguments)

    client: Any = SimpleNamespace(
        _client_config=SimpleNamespace(proto_compress_fwdbwd=True),
        **dict.fromkeys(["get", "post", "patch", "put", "delete", "get_api_list"], post),
    )
    asyncio.run(AsyncTrainingResource(client).forward_backward(request=request))
    return sent


@pytest.mark.parametrize(
    "encoding", [None, "", "identity", " Identity ", "identity, identity", ","]
)
def test_a_body_without_an_encoding_is_unchanged(encoding: str | None) -> None:
    body = b"plain"

    assert decompress(body, encoding) is body


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("ZSTD", compress([b"x"])),
        ("identity, zstd", compress([b"x"])),
        ("x-gzip", gzip_of(b"x")),
        ("deflate", zlib.compress(b"x", wbits=-15)),  # without its header, as some senders do
        ("gzip", gzip_of(b"") + gzip_of(b"x")),
        ("zstd", compress([]) + compress([b"x"])),
        (
            "zstd",
            SKIPPABLE_MAGIC + b"\x03\0\0\0abc" + compress([b"x"]) + b"\x5f\x2a\x4d\x18\0\0\0\0",
        ),
    ],
)
def test_encoding_names_and_frame_forms_of_other_senders_are_accepted(
    encoding: str, body: bytes
) -> None:
    assert decompress(body, encoding) == b"x"


@pytest.mark.parametrize("encoding", ["br", "x" * 10_000, "zstandard", "\0", "gzip;q=1"])
def test_the_error_names_an_unknown_encoding_and_the_supported_ones(encoding: str) -> None:
    with pytest.raises(DecodeError, match="identity, zstd, gzip, x-gzip, deflate") as caught:
        decompress(b"", encoding)

    assert repr(encoding[:80]) in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("encoding", ["zstd, gzip", "gzip,gzip", "zstd," * 10_000])
def test_more_than_one_encoding_is_rejected(encoding: str) -> None:
    with pytest.raises(DecodeError, match="multiple encodings"):
        decompress(b"", encoding)


@pytest.mark.parametrize("encoding", PACKED)
def test_a_body_truncated_anywhere_is_rejected(encoding: str) -> None:
    packed = PACKERS[encoding](b"a text that is long enough to be packed, packed, packed")

    for length in range(len(packed)):
        with pytest.raises(DecodeError):
            decompress(packed[:length], encoding)


@pytest.mark.parametrize("encoding", PACKED)
@pytest.mark.parametrize("garbage", [b"\0", b"\0" * 16, b"garbage", ZSTD_MAGIC, b"\x1f\x8b"])
def test_bytes_after_the_end_are_rejected(encoding: str, garbage: bytes) -> None:
    packed = PACKERS[encoding](b"content")

    with pytest.raises(DecodeError):
        decompress(packed + garbage, encoding)


@pytest.mark.parametrize("encoding", PACKERS)
@given(body=st.binary(max_size=300))
def test_any_bytes_decode_or_raise_a_typed_error(encoding: str, body: bytes) -> None:
    unpacked = value_or_refusal(body, encoding)

    assert unpacked is None or len(unpacked) <= SMALL.memory_bytes


@pytest.mark.parametrize("encoding", PACKED)
@given(data=st.binary(max_size=300), change=st.data())
def test_a_damaged_body_decodes_or_raises_a_typed_error(
    encoding: str, data: bytes, change: st.DataObject
) -> None:
    packed = bytearray(PACKERS[encoding](data))
    where = change.draw(st.integers(0, len(packed) - 1))
    packed[where] = change.draw(st.integers(0, 255))

    unpacked = value_or_refusal(bytes(packed), encoding)

    assert unpacked is None or len(unpacked) <= SMALL.memory_bytes


@given(header=st.binary(max_size=20), blocks=st.integers(1, 3), tail=st.binary(max_size=8))
def test_any_zstd_header_decodes_or_raises_a_typed_error(
    header: bytes, blocks: int, tail: bytes
) -> None:
    unpacked = value_or_refusal(zstd_bomb(blocks, header) + tail, "zstd")

    assert unpacked is None or len(unpacked) <= SMALL.memory_bytes


@given(st.text(max_size=50), st.binary(max_size=50))
def test_any_encoding_decodes_or_raises_a_typed_error(encoding: str, body: bytes) -> None:
    value_or_refusal(body, encoding)


def value_or_refusal(body: bytes, encoding: str) -> bytes | memoryview | None:
    try:
        return decompress(body, encoding, SMALL)
    except DecodeError:
        return None


@pytest.mark.parametrize("encoding", PACKERS)
def test_a_body_may_be_as_large_as_the_limit_and_no_larger(encoding: str) -> None:
    at_limit = PACKERS[encoding](bytes(1000))
    above = PACKERS[encoding](bytes(1001))

    assert decompress(at_limit, encoding, SMALL) == bytes(1000)
    with pytest.raises(BodyTooLargeError, match="1000 bytes"):
        decompress(above, encoding, SMALL)


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
def test_several_frames_share_one_limit(encoding: str) -> None:
    packed = PACKERS[encoding](bytes(600))

    assert decompress(packed, encoding, SMALL) == bytes(600)
    with pytest.raises(BodyTooLargeError):
        decompress(packed * 2, encoding, SMALL)


@pytest.mark.parametrize("limit_bytes", [-1, 0])
@pytest.mark.parametrize("encoding", PACKERS)
def test_a_limit_of_zero_rejects_everything(encoding: str, limit_bytes: int) -> None:
    limits = DecodeLimits(memory_bytes=limit_bytes)

    with pytest.raises(BodyTooLargeError):
        decompress(PACKERS[encoding](bytes(10)), encoding, limits)


@pytest.mark.parametrize(
    "body",
    [compress([]) * 1025, (SKIPPABLE_MAGIC + b"\0\0\0\0") * 1025],
    ids=["empty frames", "skippable frames"],
)
def test_too_many_frames_are_rejected(body: bytes) -> None:
    with pytest.raises(DecodeError, match="more than 1024 frames"):
        decompress(body, "zstd")


def test_too_many_gzip_members_are_rejected() -> None:
    assert decompress(gzip_of(b"") * 1024, "gzip") == b""
    with pytest.raises(DecodeError, match="after 1024 gzip stream"):
        decompress(gzip_of(b"") * 1025, "gzip")


@pytest.mark.parametrize(
    ("size_bytes", "descriptor", "field"),
    [(200, 0x20, "<B"), (1000, 0x60, "<H"), (70_000, 0xA0, "<I"), (70_000, 0xE0, "<Q")],
)
def test_a_frame_that_announces_too_much_is_rejected_without_decoding(
    size_bytes: int, descriptor: int, field: str
) -> None:
    announced = size_bytes - 256 if field == "<H" else size_bytes  # two bytes count from 256
    body = ZSTD_MAGIC + bytes([descriptor]) + struct.pack(field, announced) + b"\xff" * 8

    with pytest.raises(BodyTooLargeError):
        decompress(body, "zstd", DecodeLimits(memory_bytes=size_bytes - 1))
    with pytest.raises(DecodeError, match="corrupt"):
        decompress(body, "zstd", DecodeLimits(memory_bytes=size_bytes))


def test_a_frame_that_needs_a_dictionary_is_rejected() -> None:
    with_dictionary_id = b"\x01" + WINDOW_8_MIB + b"\x07"

    with pytest.raises(DecodeError):
        decompress(zstd_bomb(1, with_dictionary_id), "zstd")


def test_a_frame_smaller_than_its_announced_size_is_rejected() -> None:
    says_one_mib = b"\x80" + WINDOW_8_MIB + struct.pack("<I", MIB)

    with pytest.raises(DecodeError):
        decompress(zstd_bomb(1, says_one_mib), "zstd")


@pytest.mark.parametrize("window", [0x69, 0x70, 0xA8, 0xFF], ids=["9MiB", "16MiB", "2GiB", "4TiB"])
def test_a_frame_with_too_large_a_window_is_rejected(window: int) -> None:
    body = zstd_bomb(1, NO_SIZE + bytes([window]))

    with pytest.raises(BodyTooLargeError, match="window of"):
        decompress(body, "zstd")


LIMIT_BYTES = 8 * MIB
SAYS_TEN_BYTES = b"\x80" + WINDOW_8_MIB + struct.pack("<I", 10)
SAYS_TWO_TO_THE_64 = b"\xc0" + WINDOW_8_MIB + b"\xff" * 8
WINDOW_1_GIB = NO_SIZE + b"\xa0"
SKIPPABLE = SKIPPABLE_MAGIC + b"\x04\0\0\0skip"

BOMBS = {
    "zstd without a size": ("zstd", zstd_bomb(8192)),
    "zstd that says 10 bytes": ("zstd", zstd_bomb(8192, SAYS_TEN_BYTES)),
    "zstd that says 2**64 - 1": ("zstd", zstd_bomb(8192, SAYS_TWO_TO_THE_64)),
    "zstd with a huge window": ("zstd", zstd_bomb(8192, WINDOW_1_GIB)),
    "zstd in many frames": ("zstd", (SKIPPABLE + zstd_bomb(16)) * 500),
    "gzip": ("gzip", gzip_bomb(128 * MIB)),
    "gzip in many members": ("gzip", gzip_bomb(MIB) * 500),
}

# tracemalloc does not see what zstd and zlib allocate, so the process's own peak is read. VmHWM and
# not ru_maxrss: that one starts at the size of the process that started this one.
MEASURE = """
import json, sys
from pathlib import Path
from tinsmith.errors import DecodeError
from tinsmith.wire.content import compress, decompress
from tinsmith.wire.decode_limits import DecodeLimits

def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

encoding, limit_bytes = sys.argv[1], int(sys.argv[2])
body = sys.stdin.buffer.read()
decompress(compress([b"warm"]), "zstd")
before = peak_bytes()
try:
    decompress(body, encoding, DecodeLimits(memory_bytes=limit_bytes))
    ending = "value"
except DecodeError as exc:
    ending = type(exc).__name__
print(json.dumps([ending, peak_bytes() - before]))
"""

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="peak memory is read from /proc"
)


def run_python(program: str, *arguments: str, stdin: bytes) -> Any:
    finished = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        input=stdin,
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    return json.loads(finished.stdout)


@needs_proc
@pytest.mark.parametrize("name", BOMBS)
def test_a_decompression_bomb_is_rejected_before_it_uses_memory(name: str) -> None:
    encoding, body = BOMBS[name]

    ending, grown_bytes = run_python(MEASURE, encoding, str(LIMIT_BYTES), stdin=body)

    # libzstd itself stops at a size that was understated: then the frame is damaged, not large.
    assert ending == ("DecodeError" if "says 10 bytes" in name else "BodyTooLargeError")
    assert grown_bytes <= LIMIT_BYTES + 8 * MIB + 2 * MIB  # the result, the window, small change


@needs_proc
def test_the_memory_measurement_detects_an_unpacked_bomb() -> None:
    ending, grown_bytes = run_python(MEASURE, "zstd", str(64 * MIB), stdin=zstd_bomb(512))

    assert ending == "value"
    assert 64 * MIB <= grown_bytes <= 64 * MIB + 8 * MIB + 2 * MIB


WITH_LITTLE_ADDRESS_SPACE = """
import json, resource, sys
from pathlib import Path
from tinsmith.errors import DecodeError
from tinsmith.wire.content import compress, decompress
from tinsmith.wire.decode_limits import DecodeLimits

body = sys.stdin.buffer.read()
decompress(compress([b"warm"]), "zstd")
in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + 32 * 2**20, in_use + 32 * 2**20))
try:
    decompress(body, "zstd", DecodeLimits(memory_bytes=8 * 2**20))
except DecodeError as exc:
    print(json.dumps(type(exc).__name__))
"""


@needs_proc
@pytest.mark.parametrize("name", [name for name in BOMBS if name.startswith("zstd")])
def test_a_decompression_bomb_is_rejected_if_memory_is_short(name: str) -> None:
    _, body = BOMBS[name]

    ending = run_python(WITH_LITTLE_ADDRESS_SPACE, stdin=body)

    assert ending in ("BodyTooLargeError", "DecodeError")


def test_importing_the_module_does_not_load_zstd() -> None:
    program = (
        "import json, sys, tinsmith.wire.content; "
        "print(json.dumps([name for name in sys.modules if 'zstd' in name]))"
    )

    loaded = run_python(program, stdin=b"")

    assert loaded == []
