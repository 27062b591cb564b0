"""Content types and content encodings of HTTP bodies.

Client and server use it to read `content-type` and `accept`, to `compress` large bodies, and to
`decompress` received ones, which `json_format.py`, `proto_format.py` or `packed_format.py` then
decode.

A small hostile body can decompress to more than all memory, so decompression proceeds in chunks and
stops at the limit. The size that a body announces is trusted only if it is too large.

The libraries for zstd and gzip are imported on first use, since most responses are short and
uncompressed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from tinsmith.errors import BodyTooLargeError, DecodeError
from tinsmith.wire.decode_limits import DEFAULT_LIMITS, DecodeLimits

JSON_TYPE: Final = "application/json"
PROTOBUF_TYPE: Final = "application/x-protobuf"
PACKED_TYPE: Final = "application/x-tinsmith-packed"
EVENT_STREAM_TYPE: Final = "text/event-stream"

_LEVEL = 1

_WINDOW_LOG_MAX = 23
"""8 MiB: the largest zstd window for HTTP, by RFC 9659."""

_MAX_WINDOW_BITS = 15
"""zlib's largest window, 32 KiB, which can read any stream."""

_MAX_FRAMES = 1024
"""A body may be several frames. Each costs about 10 µs to open and can be 9 bytes long."""

_FEED_BYTES = 64 * 1024  # compressed bytes per step: decoders copy what they cannot use yet
_PIECE_BYTES = 128 * 1024  # decompressed bytes per step

_SMALLEST_FRAME_BYTES = 9
_ZSTD_MAGIC = (0xFD2FB528).to_bytes(4, "little")
_ZSTD_SKIPPABLE_MAGIC = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")

# Messages of the libraries when memory runs out, for which they have no error class.
_ZSTD_NO_MEMORY = "not enough memory"
_ZLIB_NO_MEMORY = "Error -4 "

_ZERO_WEIGHT = re.compile(r"q[ \t]*=[ \t]*0(?:\.0*)?", re.ASCII | re.IGNORECASE)

Body = bytes | bytearray | memoryview


def is_protobuf(content_type: str | None) -> bool:
    """Whether a `content-type` is protobuf, with or without parameters."""
    return _media_type(content_type) == PROTOBUF_TYPE


def is_packed(content_type: str | None) -> bool:
    """Whether a `content-type` is the packed format."""
    return _media_type(content_type) == PACKED_TYPE


def accepts_protobuf(accept: str | None) -> bool:
    """Whether an `accept` header lists protobuf with a weight above 0.

    Wildcards do not count: only a client that names protobuf is known to read it.
    """
    return any(
        _media_type(choice) == PROTOBUF_TYPE and not _has_zero_weight(choice)
        for choice in (accept or "").split(",")
    )


def _media_type(text: str | None) -> str:
    if text == JSON_TYPE:  # nearly always
        return text
    return (text or "").partition(";")[0].strip(" \t").lower()


def _has_zero_weight(choice: str) -> bool:
    return any(_ZERO_WEIGHT.fullmatch(part.strip(" \t")) for part in choice.split(";")[1:])


def compress(parts: Iterable[bytes | memoryview]) -> bytes:
    """Compress the parts into one zstd frame with the content size in its header.

    The parts are not concatenated first. Some receivers need the size to decode a frame at once.

    Args:
        parts: Contiguous buffers.
    """
    from tinsmith.wire.zstd_library import zstd

    parts = list(parts)
    compressor = zstd.ZstdCompressor(level=_LEVEL)
    compressor.set_pledged_input_size(sum(map(_size_bytes, parts)))
    packed = [compressor.compress(part) for part in parts]
    packed.append(compressor.flush())
    return b"".join(packed)


def _size_bytes(part: bytes | memoryview) -> int:
    return len(part) if isinstance(part, bytes) else memoryview(part).nbytes


def decompress(
    body: Body, encoding: str | None, limits: DecodeLimits = DEFAULT_LIMITS
) -> bytes | memoryview:
    """Decompress a body by its `content-encoding`.

    Uses at most `limits.memory_bytes` for the result and, for zstd, 8 MiB or the size of the result
    for the window, whichever is less.

    Args:
        body: The received bytes.
        encoding: The value of the header; `None`, empty and `identity` leave the body unchanged.
        limits: `memory_bytes` limits the size of the result.

    Raises:
        BodyTooLargeError: The result would exceed the limit, or a zstd window exceeds 8 MiB.
        DecodeError: The encoding is unsupported, or there are several; or the body is truncated,
            corrupt, of another encoding, followed by other bytes, or has over 1,024 frames.
        MemoryError: This process is out of memory.
    """
    name = _only_encoding(encoding) if encoding else "identity"
    if name == "identity":
        check_size(memoryview(body).nbytes, limits.memory_bytes)
        return body if isinstance(body, bytes) else memoryview(body)
    output = _Decompressed(limits.memory_bytes)
    _DECOMPRESSORS[name](memoryview(body).cast("B"), output)
    return output.whole()


def _only_encoding(header: str | None) -> str:
    names = [name.strip(" \t").lower() for name in (header or "").split(",", 8)]
    names = [name for name in names if name not in ("", "identity")]
    supported = ", ".join(["identity", *_DECOMPRESSORS])
    if len(names) > 1:
        raise DecodeError(
            f"multiple encodings in content-encoding {(header or '')[:80]!r}: "
            f"send one of {supported}"
        )
    if not names:
        return "identity"
    if names[0] not in _DECOMPRESSORS:
        raise DecodeError(
            f"unsupported content-encoding {names[0][:80]!r}: send one of {supported}"
        )
    return names[0]


def check_size(size_bytes: int, limit_bytes: int) -> None:
    """Raise `BodyTooLargeError` if a body exceeds the limit."""
    if size_bytes > limit_bytes:
        raise BodyTooLargeError(
            f"the decoded body is larger than the limit of {limit_bytes} bytes; "
            "send less per request, or raise limits.memory_bytes"
        )


class _Decompressed:
    """The decompressed bytes so far; raises as soon as they exceed the limit.

    This is one growing buffer, because joining a list of chunks would take twice the memory. It is
    never preallocated from the announced size, which cannot be trusted.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()

    def room(self) -> int:
        """The size of the next step: at most one byte beyond the limit; never 0, zlib's "all"."""
        return max(1, min(_PIECE_BYTES, self._limit_bytes - len(self._buffer) + 1))

    def expect(self, size_bytes: int) -> None:
        """Raise if the announced size exceeds the limit."""
        check_size(len(self._buffer) + size_bytes, self._limit_bytes)

    def add(self, piece: bytes) -> None:
        check_size(len(self._buffer) + len(piece), self._limit_bytes)
        self._buffer += piece

    def whole(self) -> memoryview:
        return memoryview(self._buffer)  # not shared, so it may be writable


def _decompress_zstd(body: memoryview, output: _Decompressed) -> None:
    from tinsmith.wire.zstd_library import zstd

    try:
        for frame in _zstd_frames(body, output, zstd.get_frame_size):
            # The library checks the window again, in case it reads the header differently.
            options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG_MAX}
            decoder = zstd.ZstdDecompressor(options=options)
            feed = _slices(frame)
            while not decoder.eof:
                chunk = next(feed, None) if decoder.needs_input else b""
                if chunk is None:
                    raise DecodeError("the zstd body is truncated in a frame")
                output.add(decoder.decompress(chunk, output.room()))
    except zstd.ZstdError as exc:
        if _ZSTD_NO_MEMORY in str(exc):
            raise MemoryError("out of memory while decompressing a zstd body") from exc
        raise DecodeError("the zstd body is truncated or corrupt") from exc


def _zstd_frames(
    body: memoryview, output: _Decompressed, frame_size: Callable[[memoryview], int]
) -> Iterator[memoryview]:
    """The frames with content, whose announced sizes are checked; skippable frames are skipped.

    Frames are separated by their block headers before they are decompressed: the decoder copies
    whatever follows its frame, which would be quadratic in the number of frames.
    """
    if not body:
        raise DecodeError("the zstd body is empty: expected at least one frame")
    rest = body
    for _ in range(_MAX_FRAMES):
        has_content = rest[:4] == _ZSTD_MAGIC
        if has_content:
            _check_announced_sizes(rest, output)
        elif not _ZSTD_SKIPPABLE_MAGIC.match(rest):
            raise DecodeError(f"expected a zstd frame at byte {len(body) - len(rest)} of the body")
        size_bytes = frame_size(rest)
        if has_content:
            yield rest[:size_bytes]
        rest = rest[size_bytes:]
        if not rest:
            return
    raise DecodeError(f"the zstd body has more than {_MAX_FRAMES} frames; compress it as one")


def _check_announced_sizes(frame: memoryview, output: _Decompressed) -> None:
    if len(frame) < _SMALLEST_FRAME_BYTES:
        raise DecodeError("the zstd body is truncated in a frame header")
    content_bytes, window_bytes = _announced_sizes(frame)
    output.expect(content_bytes or 0)
    if window_bytes > 1 << _WINDOW_LOG_MAX:
        raise BodyTooLargeError(
            f"the zstd window of {window_bytes} bytes exceeds the 8 MiB that HTTP allows; "
            "compress with level 19 or lower and without long-distance matching"
        )


def _announced_sizes(frame: memoryview) -> tuple[int | None, int]:
    """Content and window size from a frame's header, RFC 8878 section 3.1.1.1."""
    descriptor = frame[4]
    is_single_segment = bool(descriptor & 0x20)
    dictionary_id_bytes = (0, 1, 2, 4)[descriptor & 3]
    content_size_bytes = (int(is_single_segment), 2, 4, 8)[descriptor >> 6]
    start = 5 + (not is_single_segment) + dictionary_id_bytes
    content = int.from_bytes(frame[start : start + content_size_bytes], "little")
    if content_size_bytes == 2:
        content += 256
    if is_single_segment:
        return content, content
    power, eighths = frame[5] >> 3, frame[5] & 7
    window = (1 << 10 + power) // 8 * (8 + eighths)
    return (content if content_size_bytes else None), window


def _decompress_gzip(body: memoryview, output: _Decompressed) -> None:
    wbits = 16 + _MAX_WINDOW_BITS
    _decompress_zlib(body, output, name="gzip", wbits=wbits, max_streams=_MAX_FRAMES)


def _decompress_deflate(body: memoryview, output: _Decompressed) -> None:
    # RFC 9110 means the zlib format; some senders omit its two-byte header and checksum.
    has_header = len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
    wbits = _MAX_WINDOW_BITS if has_header else -_MAX_WINDOW_BITS
    _decompress_zlib(body, output, name="deflate", wbits=wbits, max_streams=1)


def _decompress_zlib(
    body: memoryview, output: _Decompressed, *, name: str, wbits: int, max_streams: int
) -> None:
    import zlib

    start = 0
    try:
        for _ in range(max_streams):
            start += _decompress_zlib_stream(body[start:], output, name, wbits)
            if start == len(body):
                return
    except zlib.error as exc:
        if str(exc).startswith(_ZLIB_NO_MEMORY):
            raise MemoryError(f"out of memory while decompressing a {name} body") from exc
        raise DecodeError(f"the {name} body is corrupt: {exc}") from exc
    raise DecodeError(f"unexpected data at byte {start}, after {max_streams} {name} stream(s)")


def _decompress_zlib_stream(body: memoryview, output: _Decompressed, name: str, wbits: int) -> int:
    """Decompress the first stream of a body and return its compressed size."""
    import zlib

    decoder = zlib.decompressobj(wbits)
    feed = _slices(body)
    taken = 0
    while not decoder.eof:
        chunk: bytes | memoryview = decoder.unconsumed_tail
        if not chunk:
            chunk = next(feed, b"")
            taken += len(chunk)
        piece = decoder.decompress(chunk, output.room())
        if not chunk and not piece:
            raise DecodeError(f"the {name} body is truncated")
        output.add(piece)
    return taken - len(decoder.unused_data)


def _slices(body: memoryview) -> Iterator[memoryview]:
    return (body[start : start + _FEED_BYTES] for start in range(0, len(body), _FEED_BYTES))


_DECOMPRESSORS: dict[str, Callable[[memoryview, _Decompressed], None]] = {
    "zstd": _decompress_zstd,
    "gzip": _decompress_gzip,
    "x-gzip": _decompress_gzip,
    "deflate": _decompress_deflate,
}
