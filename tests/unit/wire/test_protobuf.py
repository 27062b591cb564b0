from __future__ import annotations

import struct
from typing import Any

import pytest
from google.protobuf.internal import decoder, encoder
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.errors import BodyTooLargeError, DecodeError, ValidationError
from tinsmith.wire.decode_limits import DecodeLimits
from tinsmith.wire.protobuf import (
    ITEM_BYTES,
    Parts,
    Reader,
    merged,
    put_bytes,
    put_double,
    put_int,
    put_int32,
    put_map_entry,
    put_message,
    put_packed_ints,
    put_pieces,
    put_text,
    signed,
    signed32,
    varint,
)

LIMITS = DecodeLimits(memory_bytes=100 * ITEM_BYTES)
INT64 = st.integers(-(1 << 63), (1 << 64) - 1)


def reader_of(body: bytes, limits: DecodeLimits = LIMITS) -> Reader:
    return Reader(body, limits)


def fields_of(body: bytes) -> list[tuple[int, int, int]]:
    return list(reader_of(body).fields(0, len(body)))


# Writing


@given(INT64)
def test_varints_match_the_protobuf_library(number: int) -> None:
    write: Any = getattr(encoder, "_VarintBytes")  # noqa: B009 - private, and not in its stubs
    read: Any = getattr(decoder, "_DecodeVarint")  # noqa: B009
    official = write(number % (1 << 64))

    assert varint(number) == official
    assert read(varint(number), 0) == (number % (1 << 64), len(official))


@given(INT64)
def test_numbers_round_trip(number: int) -> None:
    out: Parts = []

    size = put_int(out, 0x08, number)

    body = b"".join(out)
    assert size == len(body)
    assert fields_of(body) == ([(0x08, number % (1 << 64), 0)] if number else [])


@pytest.mark.parametrize("number", [-(1 << 31) - 1, 1 << 31])
def test_the_error_names_a_field_above_32_bits(number: int) -> None:
    with pytest.raises(ValidationError, match="seq_id"):
        put_int32([], 0x08, number, "seq_id")


def test_zero_is_omitted_unless_its_presence_matters() -> None:
    out: Parts = []

    assert put_int32(out, 0x08, 0, "x") == put_int(out, 0x08, 0) == 0
    assert put_text(out, 0x0A, "") == put_packed_ints(out, 0x0A, []) == 0
    assert out == []
    assert put_int32(out, 0x08, 0, "x", even_if_0=True) == 2
    assert put_double(out, 0x09, 0.0) == 9
    assert put_bytes(out, 0x0A, b"") == 2


def test_unencodable_text_is_rejected() -> None:
    with pytest.raises(ValidationError, match="cannot be encoded as UTF-8"):
        put_text([], 0x0A, "a\ud800")


def test_large_buffers_are_not_copied() -> None:
    memory = memoryview(bytearray(10_000))
    pieces = [memoryview(bytearray(5_000)), memoryview(bytearray(6_000))]
    out: Parts = []

    size = put_bytes(out, 0x0A, memory) + put_pieces(out, 0x12, list(pieces))

    parts = merged(out)
    assert sum(map(len, parts)) == size == len(b"".join(parts))
    assert [part for part in parts if len(part) >= 5_000] == [memory, *pieces]
    assert any(part is memory for part in parts)


def test_small_parts_are_joined() -> None:
    big = bytes(10_000)

    parts = merged([b"a", b"b", b"", big, b"c", b"d"])

    assert parts == [b"ab", big, b"cd"]
    assert merged([]) == []


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 1 << 21])
def test_a_nested_message_has_a_size_prefix(size: int) -> None:
    out: Parts = []

    def write(out: Parts, value: bytes) -> int:
        return put_bytes(out, 0x0A, value)

    written = put_message(out, 0x12, write, bytes(size))

    body = b"".join(out)
    assert written == len(body)
    [(tag, start, stop)] = list(reader_of(body, DecodeLimits()).fields(0, len(body)))
    assert (tag, stop) == (0x12, len(body))
    assert body[start:stop].endswith(bytes(size))


def test_a_map_entry_is_a_message_of_key_and_value() -> None:
    out: Parts = []

    size = put_map_entry(out, 0x12, "key", lambda out, value: put_int(out, 0x10, value), 7)

    assert b"".join(out) == b"\x12\x07\x0a\x03key\x10\x07"
    assert size == 9


# Reading


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=20))
def test_packed_numbers_round_trip(numbers: list[int]) -> None:
    out: Parts = []
    put_packed_ints(out, 0x0A, numbers)
    body = b"".join(out)

    found = [reader_of(body).packed_ints(start, stop) for _, start, stop in fields_of(body)]

    assert found == ([numbers] if numbers else [])


def test_every_wire_type_is_read_or_skipped() -> None:
    body = b"\x08\x96\x01" + b"\x11" + bytes(8) + b"\x1a\x02hi" + b"\x25" + bytes(4)

    assert fields_of(body) == [(0x08, 150, 0), (0x11, 4, 12), (0x1A, 14, 16), (0x25, 17, 21)]


def test_a_field_number_of_several_bytes_is_read() -> None:
    assert fields_of(b"\xf8\x7f\x01") == [(0x3FF8, 1, 0)]


@pytest.mark.parametrize(
    "body",
    [
        b"\x08",
        b"\x08\x80",
        b"\x80",
        b"\x0a",
        b"\x0a\x05abc",
        b"\x0a\x80",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x09\x00\x00",
        b"\x0d\x00",
        b"\x0b",
        b"\x0c",
        b"\x0e",
        b"\x0f",
        b"\x00\x01",
        b"\x02\x00",
        b"\x08" + b"\xff" * 10,
        b"\xff" * 11,
    ],
)
def test_an_invalid_field_is_rejected(body: bytes) -> None:
    with pytest.raises(DecodeError):
        fields_of(body)


def test_a_field_may_not_extend_past_its_message() -> None:
    body = b"\x0a\x03\x0a\x05abcdef"

    with pytest.raises(DecodeError, match="exceeds its message"):
        list(reader_of(body).fields(2, 5))


def test_decoded_memory_is_a_read_only_view() -> None:
    body = bytearray(b"hello")
    reader = Reader(memoryview(body), LIMITS)

    view = reader.memory(1, 3)

    assert view.tobytes() == b"el"
    assert view.readonly
    assert view.obj is body


def test_text_that_is_not_utf8_is_rejected_with_its_position() -> None:
    with pytest.raises(DecodeError, match="byte 2"):
        reader_of(b"ab\xffd").text(0, 4)
    assert reader_of("é😀".encode()).text(0, 6) == "é😀"


def test_a_double_is_read_at_its_offset() -> None:
    assert reader_of(b"x" + struct.pack("<d", 1.5)).double(1) == 1.5


def test_a_body_above_the_limit_is_rejected() -> None:
    with pytest.raises(BodyTooLargeError, match="the limit is 10"):
        Reader(bytes(11), DecodeLimits(memory_bytes=10))
    assert len(Reader(bytes(10), DecodeLimits(memory_bytes=10)).body) == 10


def test_decoded_items_and_bytes_count_against_the_limit() -> None:
    reader = reader_of(bytes(200))

    reader.take_items(90)
    reader.take_bytes(9 * ITEM_BYTES)
    reader.copied(0, 200)

    with pytest.raises(BodyTooLargeError, match="decodes to more"):
        reader.text(0, 200)


def test_signed_numbers_are_decoded_like_the_protobuf_library_does() -> None:
    assert signed((1 << 64) - 1) == -1
    assert signed((1 << 63) - 1) == (1 << 63) - 1
    assert signed32((1 << 64) - 1) == -1
    assert signed32((1 << 32) + 5) == 5
    assert signed32(1 << 31) == -(1 << 31)
