"""Which format a body has, which one the other side takes, and how a body is packed for the road.

`server/` and `client/` ask here about `content-type` and `accept`, pack large bodies with
`compress`, and open what arrives with `decompress`, whose result goes on to `json_format.py`,
`proto_format.py` or `packed_format.py`.

Unpacking is where a small hostile body could take all memory, so it goes piece by piece and stops
at the limit; nothing that a body says of its own size is believed, except that it is too large.

Knows nothing of what the bodies mean. The libraries for zstd and gzip are imported on first use:
most answers are short, and not packed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from tinsmith.errors import BodyTooLargeError, DecodeError, ValidationError
from tinsmith.wire.limits import DEFAULT_LIMITS, DecodeLimits

JSON_TYPE: Final = "application/json"
PROTOBUF_TYPE: Final = "application/x-protobuf"
PACKED_TYPE: Final = "application/x-tinsmith-packed"
EVENT_STREAM_TYPE: Final = "text/event-stream"

DEFAULT_LEVEL: Final = 1
_LARGEST_LEVEL = 19  # from 20 on, zstd looks back further than _WINDOW_LOG_MAX

_WINDOW_LOG_MAX = 23
"""8 MiB: the furthest that RFC 9659 lets a zstd-encoded HTTP body look back."""

_MOST_WINDOW_BITS = 15
"""zlib's largest window, 32 KiB, with which it reads any stream."""

_MAX_FRAMES = 1024
"""A body may be several frames. Each costs about 10 µs to open and can be 9 bytes long."""

_FEED_BYTES = 64 * 1024  # compressed bytes given at a time: decoders copy what they cannot use yet
_PIECE_BYTES = 128 * 1024  # decoded bytes taken at a time

_SMALLEST_FRAME_BYTES = 9
_ZSTD_MAGIC = (0xFD2FB528).to_bytes(4, "little")
_ZSTD_SKIPPABLE_MAGIC = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")

# How the libraries say that the fault is ours. They have no error of its own for it.
_ZSTD_NO_MEMORY = "not enough memory"
_ZLIB_NO_MEMORY = "Error -4 "

_ZERO_WEIGHT = re.compile(r"q[ \t]*=[ \t]*0(?:\.0*)?", re.ASCII | re.IGNORECASE)

Body = bytes | bytearray | memoryview


def is_protobuf(content_type: str | None) -> bool:
    """Whether a `content-type` header says protobuf, with or without parameters."""
    return _media_type(content_type) == PROTOBUF_TYPE


def is_packed(content_type: str | None) -> bool:
    """Whether a `content-type` header says that token ids lie behind the JSON text."""
    return _media_type(content_type) == PACKED_TYPE


def accepts_protobuf(accept: str | None) -> bool:
    """Whether an `accept` header names protobuf, other than to exclude it with a weight of 0.

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


def compress(parts: Iterable[bytes | memoryview], *, level: int = DEFAULT_LEVEL) -> bytes:
    """Pack the parts, end to end, into one zstd frame that says how large its content is.

    The parts are not joined first. Receivers that decode a frame in one go need the size in its
    header.

    Args:
        parts: Contiguous buffers.
        level: From negative, fastest, to 19, smallest.

    Raises:
        ValidationError: The level is above 19, where frames need more memory than receivers allow.
    """
    if level > _LARGEST_LEVEL:
        raise ValidationError(f"zstd level {level} is above {_LARGEST_LEVEL}; choose a lower one")
    from tinsmith.wire.zstd_library import zstd

    parts = list(parts)
    compressor = zstd.ZstdCompressor(level=level)
    compressor.set_pledged_input_size(sum(map(_size_bytes, parts)))
    packed = [compressor.compress(part) for part in parts]
    packed.append(compressor.flush())
    return b"".join(packed)


def _size_bytes(part: bytes | memoryview) -> int:
    return len(part) if isinstance(part, bytes) else memoryview(part).nbytes


def decompress(
    body: Body, encoding: str | None, limits: DecodeLimits = DEFAULT_LIMITS
) -> bytes | memoryview:
    """Undo a body's `content-encoding`.

    Memory stays below `limits.memory_bytes` for the result plus, for zstd, what the frame may look
    back to: 8 MiB, or the length of the result if that is less.

    Args:
        body: The bytes as they arrived.
        encoding: The header's value; `None`, empty and `identity` leave the body as it is.
        limits: `memory_bytes` is the most that the result may hold.

    Raises:
        BodyTooLargeError: The result would pass the limit, or a zstd frame looks back over 8 MiB.
        DecodeError: The encoding is not supported, or more than one is named; or the body is cut
            off, damaged, of another encoding, followed by other bytes, or in over 1,024 frames.
        MemoryError: There is not enough memory here, whatever the body is.
    """
    name = _only_encoding(encoding) if encoding else "identity"
    if name == "identity":
        check_size(memoryview(body).nbytes, limits.memory_bytes)
        return body if isinstance(body, bytes) else memoryview(body)
    unpacked = _Unpacked(limits.memory_bytes)
    _UNPACKERS[name](memoryview(body).cast("B"), unpacked)
    return unpacked.whole()


def _only_encoding(header: str | None) -> str:
    names = [name.strip(" \t").lower() for name in (header or "").split(",", 8)]
    names = [name for name in names if name not in ("", "identity")]
    supported = ", ".join(["identity", *_UNPACKERS])
    if len(names) > 1:
        raise DecodeError(
            f"content-encoding {(header or '')[:80]!r} names more than one encoding; "
            f"send the body with a single one of {supported}"
        )
    if not names:
        return "identity"
    if names[0] not in _UNPACKERS:
        raise DecodeError(
            f"content-encoding {names[0][:80]!r} is not supported; send one of {supported}"
        )
    return names[0]


def check_size(size_bytes: int, limit_bytes: int) -> None:
    """Refuse a body that is larger than the limit."""
    if size_bytes > limit_bytes:
        raise BodyTooLargeError(
            f"the decoded body is larger than the limit of {limit_bytes} bytes; "
            "send it in smaller parts, or raise limits.memory_bytes"
        )


class _Unpacked:
    """The decoded bytes so far; refused as soon as they pass the limit.

    One growing buffer, and never sized by what a header promises: a list of pieces takes twice the
    memory when it is joined, and a few bytes can promise anything.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()

    def room(self) -> int:
        """How much to ask a decoder for: at most one byte past the limit; never 0, zlib's "all"."""
        return max(1, min(_PIECE_BYTES, self._limit_bytes - len(self._buffer) + 1))

    def expect(self, size_bytes: int) -> None:
        """Refuse now what is announced to pass the limit."""
        check_size(len(self._buffer) + size_bytes, self._limit_bytes)

    def add(self, piece: bytes) -> None:
        check_size(len(self._buffer) + len(piece), self._limit_bytes)
        self._buffer += piece

    def whole(self) -> memoryview:
        return memoryview(self._buffer)  # the caller's own, and so writable


def _unpack_zstd(body: memoryview, unpacked: _Unpacked) -> None:
    from tinsmith.wire.zstd_library import zstd

    try:
        for frame in _zstd_frames(body, unpacked, zstd.get_frame_size):
            # The library checks the window again, in case it reads the header otherwise than we do.
            options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG_MAX}
            decoder = zstd.ZstdDecompressor(options=options)
            feed = _slices(frame)
            while not decoder.eof:
                chunk = next(feed, None) if decoder.needs_input else b""
                if chunk is None:
                    raise DecodeError("the zstd body is cut off in the middle of a frame")
                unpacked.add(decoder.decompress(chunk, unpacked.room()))
    except zstd.ZstdError as exc:
        if _ZSTD_NO_MEMORY in str(exc):
            raise MemoryError("there is no memory to unpack a zstd body") from exc
        raise DecodeError("the zstd body is cut off or damaged") from exc


def _zstd_frames(
    body: memoryview, unpacked: _Unpacked, frame_size: Callable[[memoryview], int]
) -> Iterator[memoryview]:
    """Each frame with content whose header promises to fit; skippable frames are passed over.

    A frame is cut out by its block headers before it is decoded: a decoder that is given more than
    its frame copies the rest, which is quadratic in a body of very many frames.
    """
    if not body:
        raise DecodeError("the zstd body is empty; even no content takes a frame")
    rest = body
    for _ in range(_MAX_FRAMES):
        has_content = rest[:4] == _ZSTD_MAGIC
        if has_content:
            _check_announced_sizes(rest, unpacked)
        elif not _ZSTD_SKIPPABLE_MAGIC.match(rest):
            raise DecodeError(f"byte {len(body) - len(rest)} of the zstd body begins no frame")
        size_bytes = frame_size(rest)
        if has_content:
            yield rest[:size_bytes]
        rest = rest[size_bytes:]
        if not rest:
            return
    raise DecodeError(f"the zstd body has more than {_MAX_FRAMES} frames; compress it as one")


def _check_announced_sizes(frame: memoryview, unpacked: _Unpacked) -> None:
    if len(frame) < _SMALLEST_FRAME_BYTES:
        raise DecodeError("the zstd body is cut off in the header of a frame")
    content_bytes, window_bytes = _announced_sizes(frame)
    unpacked.expect(content_bytes or 0)
    if window_bytes > 1 << _WINDOW_LOG_MAX:
        raise BodyTooLargeError(
            f"a zstd frame looks back {window_bytes} bytes, beyond the 8 MiB that HTTP allows; "
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


def _unpack_gzip(body: memoryview, unpacked: _Unpacked) -> None:
    wbits = 16 + _MOST_WINDOW_BITS
    _unpack_zlib(body, unpacked, name="gzip", wbits=wbits, max_streams=_MAX_FRAMES)


def _unpack_deflate(body: memoryview, unpacked: _Unpacked) -> None:
    # RFC 9110 means the zlib format; some senders leave its two-byte header and checksum away.
    has_header = len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
    wbits = _MOST_WINDOW_BITS if has_header else -_MOST_WINDOW_BITS
    _unpack_zlib(body, unpacked, name="deflate", wbits=wbits, max_streams=1)


def _unpack_zlib(
    body: memoryview, unpacked: _Unpacked, *, name: str, wbits: int, max_streams: int
) -> None:
    import zlib

    start = 0
    try:
        for _ in range(max_streams):
            start += _unpack_zlib_stream(body[start:], unpacked, name, wbits)
            if start == len(body):
                return
    except zlib.error as exc:
        if str(exc).startswith(_ZLIB_NO_MEMORY):
            raise MemoryError(f"there is no memory to unpack a {name} body") from exc
        raise DecodeError(f"the body is not sound {name}: {exc}") from exc
    raise DecodeError(f"the {name} body goes on at byte {start}, after {max_streams} stream(s)")


def _unpack_zlib_stream(body: memoryview, unpacked: _Unpacked, name: str, wbits: int) -> int:
    """Decode one stream from the body's beginning; returns how many bytes it had."""
    import zlib

    decoder = zlib.decompressobj(wbits)
    feed = _slices(body)
    taken = 0
    while not decoder.eof:
        chunk: bytes | memoryview = decoder.unconsumed_tail
        if not chunk:
            chunk = next(feed, b"")
            taken += len(chunk)
        piece = decoder.decompress(chunk, unpacked.room())
        if not chunk and not piece:
            raise DecodeError(f"the {name} body is cut off")
        unpacked.add(piece)
    return taken - len(decoder.unused_data)


def _slices(body: memoryview) -> Iterator[memoryview]:
    return (body[start : start + _FEED_BYTES] for start in range(0, len(body), _FEED_BYTES))


_UNPACKERS: dict[str, Callable[[memoryview, _Unpacked], None]] = {
    "zstd": _unpack_zstd,
    "gzip": _unpack_gzip,
    "x-gzip": _unpack_gzip,
    "deflate": _unpack_deflate,
}
